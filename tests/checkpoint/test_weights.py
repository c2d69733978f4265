"""A model in one file: what comes back is what went in, or a refusal."""

import numpy as np
import pytest
import safetensors.numpy
import toy

from dlm_jax.checkpoint import load_weights, save_weights

META = {"config": {"model": {"depth": 2}}, "tokenizer": {"type": "byte"}, "note": "ä"}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "toy.safetensors"
    size = save_weights(path, toy.params(), META)
    assert size == path.stat().st_size
    return path


def _leaves(tree, prefix=""):
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}/")
        else:
            yield prefix + name, np.asarray(value)


def test_parameters_and_description_come_back_bit_for_bit(saved):
    params, meta = load_weights(saved)
    assert meta == META
    expected, found = dict(_leaves(toy.params())), dict(_leaves(params))
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)
        assert found[name].dtype == np.float32


def test_float16_halves_the_file_and_rounds_to_the_nearest(saved, tmp_path):
    path = tmp_path / "half.safetensors"
    tensor_bytes = sum(value.nbytes for _, value in _leaves(toy.params()))
    saving = saved.stat().st_size - save_weights(path, toy.params(), META, dtype="float16")
    assert saving >= 0.45 * tensor_bytes
    found = dict(_leaves(load_weights(path)[0]))
    for name, value in _leaves(toy.params()):
        np.testing.assert_array_equal(found[name], value.astype(np.float16).astype(np.float32))
        assert found[name].dtype == np.float32


@pytest.mark.parametrize("place", [0.3, 0.6, 0.95])
def test_a_flipped_bit_is_noticed(saved, tmp_path, place):
    data = bytearray(saved.read_bytes())
    data[int(len(data) * place)] ^= 4
    path = tmp_path / "flipped.safetensors"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"damaged|cannot be read") as error:
        load_weights(path)
    assert str(path) in str(error.value)


def test_a_shortened_a_missing_and_a_foreign_file_are_refused_in_one_line(saved, tmp_path):
    short = tmp_path / "short.safetensors"
    short.write_bytes(saved.read_bytes()[:-7])
    foreign = tmp_path / "foreign.safetensors"
    safetensors.numpy.save_file({"x": np.zeros(3, np.float32)}, foreign)
    missing = tmp_path / "missing.safetensors"
    for path, said in ((short, "cannot be read"), (foreign, "not written by dlm_jax"),
                       (missing, "does not exist")):  # fmt: skip
        with pytest.raises(ValueError, match=said) as error:
            load_weights(path)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "dtype", "said"),
    [
        ("model.bin", "float32", "does not end in .safetensors"),
        ("model.safetensors", "int8", "dtype='int8' is not one of float32, float16"),
        ("file/model.safetensors", "float32", "cannot be written"),
    ],
)
def test_what_cannot_be_written_is_refused_and_leaves_nothing(tmp_path, name, dtype, said):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match=said):
        save_weights(tmp_path / name, toy.params(), META, dtype=dtype)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_parameter_that_float16_cannot_hold_is_named(tmp_path):
    params = {"norm": {"scale": np.array([1.0, 7e4], np.float32)}}
    with pytest.raises(ValueError, match="norm/scale does not fit float16"):
        save_weights(tmp_path / "x.safetensors", params, META, dtype="float16")
