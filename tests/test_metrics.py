from __future__ import annotations

import json
import zlib

import pytest

from dlm_jax.training.metrics import MetricsLog, loss_curves, read_records

RECORDS = [
    {"kind": "train", "step": 5, "loss": 4.0, "elbo": 4.0, "grad_norm": 1.0, "param_norm": 2.0,
     "tokens_per_second": 9.0, "learning_rate": 0.1, "time": 7.0},
    {"kind": "evaluation", "step": 5, "bound": 3.5, "standard_error": 0.1, "windows": 4},
    {"kind": "train", "step": 10, "loss": 6.0, "elbo": 3.0, "sampler": 2.5, "critic": 1.0,
     "critic_alpha": 0.5, "sampler_learning_rate": 0.2,
     "grad_norm": 1.0, "param_norm": 2.0, "tokens_per_second": 9.0},
]  # fmt: skip


def test_every_part_of_the_loss_has_a_curve_from_where_it_begins():
    assert loss_curves(RECORDS, "bound") == {
        "training loss": ([5, 10], [4.0, 6.0]),
        "critic": ([10], [1.0]),
        "elbo": ([5, 10], [4.0, 3.0]),
        "held-out bound": ([5], [3.5]),
        "sampler": ([10], [2.5]),
    }


def test_without_training_there_is_nothing_to_draw():
    assert loss_curves(RECORDS[1:2], "bound") == {}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def _write(path, records, step=100):
    log = MetricsLog(path, step=step)
    for record in records:
        log.write(**record)
    log.close()


def test_every_line_ends_in_the_checksum_of_its_json(path):
    _write(path, RECORDS)
    for line, record in zip(path.read_bytes().splitlines(), RECORDS, strict=True):
        crc = json.loads(line)["crc"]
        assert crc == f"{zlib.crc32(json.dumps(record).encode()):08x}"
    assert read_records(path) == RECORDS


@pytest.mark.parametrize("count", [1, 3])
def test_every_flipped_bit_is_found(path, count):
    _write(path, RECORDS[:count])
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"line \d is (damaged|not a record of metrics)"):
            read_records(path)


def test_what_a_kill_left_of_a_line_is_passed_over(path):
    _write(path, RECORDS)
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        ends = [n + 1 for n, byte in enumerate(whole) if byte == ord("\n")]
        # A line is whole without its end, as nothing of it is missing.
        kept = sum(cut >= end - 1 for end in ends)
        assert read_records(path) == RECORDS[:kept]


def test_a_line_without_a_checksum_is_refused(path):
    _write(path, RECORDS[:2])
    path.write_text(path.read_text() + json.dumps(RECORDS[2]) + "\n")
    with pytest.raises(ValueError, match="line 3 is damaged: it has no checksum; remove that"):
        read_records(path)
