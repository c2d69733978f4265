"""Damaged published directories: their format has no checksums, but no damage is a crash."""

from __future__ import annotations

import json
import random

import published_cases as cases
import pytest

import dlm_jax
from dlm_jax.hf.tensors import Shards
from dlm_jax.sampling.rules import BUILT_IN


def _bits(path, rng, count):
    """Some bits of a file; of tensors those of the header, as any others are just other numbers."""
    whole = path.read_bytes()
    is_weights = path.suffix == ".safetensors"
    end = 8 + int.from_bytes(whole[:8], "little") if is_weights else len(whole)
    first = range(64) if is_weights else range(0)
    return [*first[::5], *(rng.randrange(8 * end) for _ in range(count))]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llada", "sdar"])
def test_a_flipped_bit_is_one_line_or_another_model_and_never_a_crash(tmp_path, name):
    directory = cases.write(tmp_path / "model", name)
    rng, told = random.Random(0), []
    for path in sorted(directory.iterdir()):
        whole = path.read_bytes()
        for bit in _bits(path, rng, 100):
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            try:
                dlm_jax.load(directory)
            except ValueError as error:
                told.append((path.name, bit, str(error)))
        path.write_bytes(whole)
    assert [what for what in told if not what[2] or "\n" in what[2]] == []
    assert len(told) > 100


def _header(change):
    """A safetensors file of two tensors of four bytes, whose header was changed."""
    said = {name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]}
            for i, name in enumerate("ab")}  # fmt: skip
    text = change(said)
    text = (json.dumps(said) if text is None else text).encode()
    return len(text).to_bytes(8, "little") + text + bytes(8)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda said: "[" * 100_000, "not a safetensors file"),
        (lambda said: "null", "not a safetensors file"),
        (lambda said: "[]", "not a safetensors file"),
        (lambda said: json.dumps(said)[:-1] + ', "a": {}}', "not a safetensors file"),
        (lambda said: said["a"].update(dtype=[]), "not a safetensors file"),
        (lambda said: said["a"].update(dtype="I64", shape=[]), "not a safetensors file"),
        (lambda said: said["a"].update(dtype="I32"), "has dtype I32; only F32"),
        (lambda said: said["a"].update(shape=[1.0]), "not a safetensors file"),
        (lambda said: said["a"].update(shape=[True]), "not a safetensors file"),
        (lambda said: said["a"].update(shape=[2]), "not a safetensors file"),
        (lambda said: said["a"].update(shape=[-1, -1]), "not a safetensors file"),
        (lambda said: said["a"].update(shape=[2**40, 2**40]), "not a safetensors file"),
        (lambda said: said["a"].update(data_offsets=[0.0, 4]), "not a safetensors file"),
        (lambda said: said["b"].update(data_offsets=[0, 4]), "not a safetensors file"),
        (lambda said: said["b"].update(data_offsets=[4, 9]), "not a safetensors file"),
        (lambda said: said.update(b={"dtype": "F32", "shape": [0], "data_offsets": [6, 6]}),
         "not a safetensors file"),
    ],
)  # fmt: skip
def test_a_header_that_lies_is_refused_in_a_line(tmp_path, change, told):
    (tmp_path / "model.safetensors").write_bytes(_header(change))
    with pytest.raises(ValueError, match=told) as refused:
        Shards(tmp_path)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 500


@pytest.mark.parametrize(
    "content",
    [b"[" * 100_000, b'{"a":' * 50_000, b'{"architectures": 3}', b'{"architectures": [[]]}',
     b'{"architectures": {"a": 1}}', b'{"architectures": NaN}', b'{"a": 1, "a": 2}'],
)  # fmt: skip
def test_a_config_made_to_hurt_is_refused_in_a_line(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ValueError, match="config.json") as refused:
        dlm_jax.load(tmp_path)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 500


@pytest.mark.slow
def test_errors_of_long_values_are_short():
    for name, setting in BUILT_IN.settings.items():
        for value in ("x" * 10**5, [["x" * 10**5]], ["x"] * 10**5, {"x" * 10**5: 1}):
            if name == "structure" and isinstance(value, str):
                continue  # a text of any length is one
            with pytest.raises(ValueError, match=name) as refused:
                setting.checked(value)
            assert len(str(refused.value)) < 1000, name
