"""Damaged published directories: their format has no checksums, but no damage is a crash."""

from __future__ import annotations

import random

import published_cases as cases
import pytest

import dlm_jax


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
