"""python -m dlm_jax.contrib.decide as its users run it."""

import json

import pytest
import saved_model
import toy_model

from dlm_jax.contrib.decide import __main__ as program
from dlm_jax.contrib.decide import decide


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return saved_model.save(tmp_path_factory.mktemp("runs") / "toy")


def _records(run_dir, capsys, *flags):
    assert program.main(["--checkpoint", str(run_dir), "--json", *map(str, flags)]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def _labelled(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


LABELLED = [
    {"prompt": prompt, "choices": ["sat", "s", "ran"], "label": label}
    for prompt, label in (("The cat ", "sat"), ("A rat ", "ran"), ("A ", "s"), ("The ", "sat"))
]


def test_a_scale_is_fitted_to_labelled_lines_and_used_by_its_task(run_dir, tmp_path, capsys):
    lines, fitted = _labelled(tmp_path / "lines.jsonl", LABELLED), tmp_path / "fitted.json"
    ask = [run_dir, capsys, "--labelled", lines, "--batch-size", 8]
    (plain,) = _records(*ask)
    (made,) = _records(*ask, "--fit", fitted, "--task", "mood")
    (used,) = _records(*ask, "--calibration", fitted, "--task", "mood")
    assert plain["temperature"] == 1.0 and plain["lines"] == 4
    assert made["nats_per_line"] <= plain["nats_per_line"]
    assert used == pytest.approx(made)
    told = json.loads(fitted.read_text())["tasks"]["mood"]
    (one,) = decide(
        toy_model.MODEL, "A ", ["sat", "s"], task="mood", calibration=fitted, batch_size=8
    )
    scale = {name: told[name] for name in ("temperature", "length_penalty")}
    (same,) = decide(toy_model.MODEL, "A ", ["sat", "s"], batch_size=8, **scale)
    assert one.of() == same.of()


@pytest.mark.parametrize(
    ("flags", "lines", "word"),
    [
        (["--fit", "x"], LABELLED, "--task requires"),
        (["--task", "x"], LABELLED, "--task requires"),
        (["--order", "best"], LABELLED, "order='best'"),
        ([], [LABELLED[0] | {"label": "cat"}], "line 1: label='cat' is not one"),
        ([], [LABELLED[0] | {"choices": ["sat", ""]}], "contains an empty label"),
        ([], [LABELLED[0] | {"choices": ["sat", "sat"]}], "twice"),
        ([], [LABELLED[0] | {"more": 1}], "unexpected fields"),
        ([], [], "has no lines"),
    ],
)
def test_bad_labelled_lines_are_refused(run_dir, tmp_path, capsys, flags, lines, word):
    path = _labelled(tmp_path / "lines.jsonl", lines)
    asked = ["--checkpoint", str(run_dir), "--labelled", str(path), *flags]
    assert program.main(asked) == 2
    error = capsys.readouterr().err
    assert word in error and error.startswith("error: ") and error.count("\n") == 1
