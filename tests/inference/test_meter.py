"""The lines of an engine: what was done since the last one, by the clock."""

import io
import json

import pytest
from engine_cases import MODEL, SLOTS, request

from dlm_jax.cli.sample_file import ProgressMeter
from dlm_jax.inference.engine import Engine


def test_lines_tell_rates_since_the_last_one_and_what_runs_and_waits():
    now, lines, objects = [0.0], [], io.StringIO()
    with Engine(MODEL, sizes=(SLOTS,)) as engine:
        meter = ProgressMeter(
            engine, every=2.0, write=lines.append, records=objects, clock=lambda: now[0]
        )
        numbers = (0, 2, 4, 6, 8)
        for number in numbers:
            engine.submit(request(number))
        engine.step(1)
        for now[0] in (1.9, 2.0, 3.9):
            meter.tick()
        rows = list(engine.run())
        now[0] = 6.0
        meter.tick()
    first, second = map(json.loads, objects.getvalue().splitlines())
    # One of the first two requests wants a single step, and makes room for another.
    assert first["seconds"] == 2.0 and second["seconds"] == 6.0
    assert (first["rows"], first["running"], first["slots"], first["waiting"]) == (1, 1, 2, 3)
    assert first["forwards_per_second"] == 1.0
    tokens = sum(row.num_generated for row in rows) + 1
    assert second["rows"] == 5 and second["tokens"] == tokens
    assert second["tokens_per_second"] == (tokens - 1) / 4
    assert second["forwards_per_second"] == (sum(row.steps for row in rows) + 1 - 2) / 4
    assert (second["running"], second["waiting"], second["programs"]) == (0, 0, 1)
    assert lines[0] == (
        "engine: 0.5 rows/s, 0.5 tokens/s, 1.0 forwards/s; 1 of 2 slots busy, 3 waiting, 1 programs"
    )


def test_no_time_between_lines_is_refused():
    with (
        Engine(MODEL, sizes=(SLOTS,)) as engine,
        pytest.raises(ValueError, match="every=0 seconds"),
    ):
        ProgressMeter(engine, every=0)
