"""Laws of ``train.py --sweep``."""

from __future__ import annotations

import pytest
import tiny_run

from dlm_jax.cli import train
from dlm_jax.training import run as run_module
from dlm_jax.training.metrics import read_records


def _arguments(out_dir, *settings, **changes):
    given = tiny_run.flags(out_dir, **changes)
    flags = [part for name, value in given.items() for part in (f"--{name}", value)]
    return [*flags, "--sweep", *settings]


def test_a_grid_has_every_combination_once_and_the_last_key_varies_fastest():
    points = train.grid(["optim.learning_rate=1e-3,3e-3", "train.seed=0,1,2"])
    assert len({tuple(point.values()) for point in points}) == 6
    assert [point["train.seed"] for point in points] == ["0", "1", "2"] * 2


@pytest.mark.parametrize(
    ("settings", "more", "message"),
    [
        (["train.seed"], [], "--sweep train.seed is not KEY=VALUE,VALUE"),
        (["train.seed=0,,1"], [], "is not KEY=VALUE,VALUE"),
        (["train.seed=0,0"], [], "repeats a key or a value"),
        (["train.seed=0", "train.seed=1"], [], "repeats a key or a value"),
        (["train.seeed=0,1"], [], "did you mean 'train.seed'?"),
        (["train.seed=0,x"], [], "--train.seed='x' is not an integer"),
        (["train.steps=10,0"], [], "--train.steps 0"),
        (["train.out_dir=a,b"], [], "every run has its own train.out_dir"),
        (["train.steps=10,20"], [], "--train.steps and --sweep train.steps both set it"),
        (["optim.name=muon"], ["--resume", "x"], "--resume and --sweep cannot be combined"),
        (["optim.name=muon"], ["--dry-run"], "--dry-run and --sweep cannot be combined"),
    ],
)  # fmt: skip
def test_bad_sweeps_are_refused_in_one_line_before_any_run(
    tmp_path, capsys, settings, more, message
):
    arguments = _arguments(tmp_path / "run", *settings)
    if settings == ["train.steps=10,0"]:
        at = arguments.index("--train.steps")
        del arguments[at : at + 2]
    with pytest.raises(SystemExit) as exit_:
        train.main([*arguments, *more])
    out, err = capsys.readouterr()
    assert (exit_.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: ") and message in err
    assert list(tmp_path.iterdir()) == []


def test_values_that_name_one_directory_are_refused():
    load = lambda point: train.configs.load(None, point)  # noqa: E731
    with pytest.raises(ValueError, match="name one directory"):
        train.runs(["train.init_from=a/b,a_b"], {}, load)
    pairs = train.runs(["train.seed=0,1"], {}, lambda p: load(p | {"train.checkpoint_dir": "x/"}))
    places = [config.train.checkpoint_dir for _, config in pairs]
    assert places == ["x/train.seed=0", "x/train.seed=1"]


@pytest.mark.slow
def test_a_stopped_sweep_resumes_and_its_table_shows_the_results_of_runs_alone(tmp_path, capsys):
    changes = {"train__steps": 6, "train__checkpoint_every": 2, "train__seed": 3}
    arguments = _arguments(tmp_path / "all", "train.seed=0,1", **changes)
    at = arguments.index("--train.seed")
    del arguments[at : at + 2]
    began = []
    usual = run_module._begun
    with tiny_run.on_devices(1), pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "_begun", lambda *a, **k: began.append(1) or usual(*a, **k))
        with pytest.MonkeyPatch.context() as stop:
            tiny_run.stop_after(4, stop)
            assert train.main(arguments) == 143
        assert capsys.readouterr().out == ""
        assert train.main(arguments) == 0
        first = capsys.readouterr().out
        assert train.main(arguments) == 0
        assert capsys.readouterr().out == first
    assert len(began) == 2
    header, _, *rows = [line.split("|")[1:-1] for line in first.splitlines()]
    assert [cell.strip() for cell in header] == ["train.seed", "steps", "bound", "seconds"]
    for seed, row in enumerate(rows):
        out_dir = tmp_path / "all" / f"train.seed={seed}"
        bound = read_records(out_dir / "metrics.jsonl")[-1]["bound"]
        assert [cell.strip() for cell in row[:3]] == [str(seed), "6", f"{bound:.4f}"]
    alone = tiny_run.run(tmp_path / "alone", **changes | {"train__seed": 1})
    assert f"{alone.bound:.4f}" in first
