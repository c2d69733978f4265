from __future__ import annotations

import json

import pytest

from dlm_jax.training.metrics import MetricsLog, read_records

RECORDS = [
    {"kind": "train", "step": 5, "loss": 4.0, "elbo": 4.0, "grad_norm": 1.0, "param_norm": 2.0,
     "tokens_per_second": 9.0, "learning_rate": 0.1, "time": 7.0},
    {"kind": "evaluation", "step": 5, "bound": 3.5, "standard_error": 0.1, "windows": 4},
    {"kind": "train", "step": 10, "loss": 6.0, "elbo": 3.0, "sampler": 2.5, "critic": 1.0,
     "critic_alpha": 0.5, "sampler_learning_rate": 0.2,
     "grad_norm": 1.0, "param_norm": 2.0, "tokens_per_second": 9.0},
]  # fmt: skip


@pytest.fixture
def path(tmp_path):
    return tmp_path / "metrics.jsonl"


def _write(path, records, step=100):
    log = MetricsLog(path, step=step)
    for record in records:
        log.write(**record)
    log.close()


def test_every_line_is_the_json_of_its_record(path):
    _write(path, RECORDS)
    assert [json.loads(line) for line in path.read_bytes().splitlines()] == RECORDS
    assert read_records(path) == RECORDS


def test_what_a_kill_left_of_a_line_is_passed_over(path):
    _write(path, RECORDS)
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        ends = [n + 1 for n, byte in enumerate(whole) if byte == ord("\n")]
        kept = sum(cut >= end for end in ends)
        assert read_records(path) == RECORDS[:kept]
