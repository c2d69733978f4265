"""A model in one file: what comes back is what went in, or a refusal."""

import dataclasses
import json
import zlib

import jax
import numpy as np
import pytest
import safetensors.numpy
import toy

from dlm_jax.model.transformer import build
from dlm_jax.store import load_meta, load_params, save_weights
from dlm_jax.store.weights import new_manifest

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
    params, meta = load_params(saved)
    assert meta == META
    expected, found = dict(_leaves(toy.params())), dict(_leaves(params))
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)
        assert found[name].dtype == np.float32


def test_a_scalar_stays_a_scalar(tmp_path):
    save_weights(tmp_path / "s.safetensors", {"own_head": {"bias": np.float32(0.5)}}, META)
    params, _ = load_params(tmp_path / "s.safetensors")
    assert np.shape(params["own_head"]["bias"]) == ()


def test_float16_halves_the_file_and_rounds_to_the_nearest(saved, tmp_path):
    path = tmp_path / "half.safetensors"
    tensor_bytes = sum(value.nbytes for _, value in _leaves(toy.params()))
    saving = saved.stat().st_size - save_weights(path, toy.params(), META, dtype="float16")
    assert saving >= 0.45 * tensor_bytes
    found = dict(_leaves(load_params(path)[0]))
    for name, value in _leaves(toy.params()):
        np.testing.assert_array_equal(found[name], value.astype(np.float16))
        assert found[name].dtype == np.float16


@pytest.mark.parametrize(
    "meta",
    [
        {"tokenizer": {}},
        {"config": {"model": {}}, "tokenizer": 3},
        {"config": {"model": 3}, "tokenizer": {}},
    ],
)
def test_a_file_that_does_not_say_what_it_holds_is_refused(tmp_path, meta):
    save_weights(tmp_path / "odd.safetensors", toy.params(), meta)
    for load in (load_params, load_meta):
        with pytest.raises(ValueError, match="does not describe its .model. and tokenizer"):
            load(tmp_path / "odd.safetensors")


def _header_bytes(data):
    return 8 + int.from_bytes(data[:8], "little")


def _bits(data):
    """All bits of the header, and some of the tensors."""
    header = _header_bytes(data)
    rest = np.random.default_rng(0).integers(8 * header, 8 * len(data), 200)
    return [*range(8 * header), *rest.tolist()]


def test_every_flipped_bit_is_found(tmp_path):
    path = tmp_path / "small.safetensors"
    params = {"embed": {"table": np.arange(40.0)}, "scale": np.ones(3)}
    save_weights(path, params, META)
    whole = path.read_bytes()
    for bit in _bits(whole):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"(?s)cannot be read .*copy it again") as error:
            load_params(path)
        assert str(path) in str(error.value)


@pytest.mark.parametrize(
    ("value", "manifest", "said"),
    [
        (np.zeros(3, np.int8), None, "its tensors are not those of its manifest"),
        (np.zeros(3, np.float32), "[]", "it has a wrong checksum"),
        (np.zeros(3, np.float32), "{", "it has a wrong checksum"),
        (np.zeros(3, np.float32), "[" * 10_000, "it has a wrong checksum"),
    ],
)
def test_what_is_no_model_is_refused_in_one_line(tmp_path, value, manifest, said):
    path = tmp_path / "odd.safetensors"
    manifest = manifest or json.dumps(new_manifest({"a": value}, META))
    safetensors.numpy.save_file({"a": value}, path, {"dlm_jax": manifest})
    with pytest.raises(ValueError, match=f"cannot be read .{said}.; copy it again") as error:
        load_params(path)
    assert "\n" not in str(error.value)


def test_numbers_that_are_not_those_of_the_manifest_are_refused(tmp_path):
    path, manifest = tmp_path / "x.safetensors", new_manifest({"a": np.arange(3.0)}, META)
    values = np.array([0, 2, 1], np.float32)
    for leaves in ({"a": ["float32", [3]]}, manifest["leaves"]):
        text = json.dumps(_signed(manifest | {"leaves": leaves}))
        safetensors.numpy.save_file({"a": values}, path, {"dlm_jax": text})
        with pytest.raises(ValueError, match="a has a wrong checksum|not those of its manifest"):
            load_params(path)


def _signed(manifest):
    facts = {name: value for name, value in manifest.items() if name != "crc"}
    return facts | {"crc": zlib.crc32(json.dumps(facts, sort_keys=True).encode())}


def test_a_file_of_another_format_is_refused_by_its_writers(tmp_path):
    path, manifest = tmp_path / "x.safetensors", new_manifest({"a": np.zeros(3)}, META)
    text = json.dumps(_signed(manifest | {"format": 99}))
    safetensors.numpy.save_file({"a": np.zeros(3, np.float32)}, path, {"dlm_jax": text})
    with pytest.raises(ValueError, match="has format 99, but this program reads 2; use the .*jax"):
        load_params(path)


def test_parameters_must_be_those_of_the_config(saved):
    def abstract(**changes):
        network = build(dataclasses.replace(toy.config(), **changes))
        return lambda meta: jax.eval_shape(network.init, jax.random.key(0))

    load_params(saved, abstract())
    for changes in ({"depth": 1}, {"width": 32}, {"qkv_bias": True}, {"tied_head": False}):
        with pytest.raises(ValueError, match="in this run but .* in weights file") as error:
            load_params(saved, abstract(**changes))
        assert "\n" not in str(error.value)


def test_a_shortened_a_missing_and_a_foreign_file_are_refused_in_one_line(saved, tmp_path):
    short = tmp_path / "short.safetensors"
    short.write_bytes(saved.read_bytes()[:-7])
    foreign = tmp_path / "foreign.safetensors"
    safetensors.numpy.save_file({"x": np.zeros(3, np.float32)}, foreign)
    missing = tmp_path / "missing.safetensors"
    for path, said in ((short, "cannot be read"), (foreign, "not written by dlm_jax"),
                       (missing, "does not exist")):  # fmt: skip
        with pytest.raises(ValueError, match=said) as error:
            load_params(path)
        assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "dtype", "said"),
    [
        ("model.bin", "float32", "use a name with .safetensors"),
        ("model.safetensors", "int8", "in int8 cannot be written; .* one of float32, float16"),
        ("file/model.safetensors", "float32", "cannot be read or written"),
    ],
)
def test_what_cannot_be_written_is_refused_and_leaves_nothing(tmp_path, name, dtype, said):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match=said):
        save_weights(tmp_path / name, toy.params(), META, dtype=dtype)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_parameter_that_float16_cannot_hold_is_named(tmp_path):
    params = {"norm": {"scale": np.array([1.0, 7e4], np.float32)}}
    with pytest.raises(ValueError, match="norm/scale does not fit in float16"):
        save_weights(tmp_path / "x.safetensors", params, META, dtype="float16")
