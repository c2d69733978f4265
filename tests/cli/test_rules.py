"""Rules of one's own in sample.py: a module's settings are flags and keys of requests."""

import json
import sys

import pytest
import saved_model

from dlm_jax.cli import sample
from dlm_jax.cli.ends import End

MODULE = '''
from dlm_jax import CommitRule, LogitTransform, Setting, per_row, rule
import jax.numpy as jnp

@rule
class EveryOther(CommitRule):
    """Commits the leftmost holes."""
    pace_B: object = per_row(Setting("my_pace", 2, "how many", low=1, high=99))

    def select(self, state, context, proposal):
        place_BL = jnp.cumsum(context.is_hole_BL, axis=1)
        return context.is_hole_BL & (place_BL <= self.pace_B[:, None]), state

@rule
class Shift(LogitTransform):
    """Adds to one logit."""
    shift_B: object = per_row(Setting("my_setting", 0.0, "added to the logit of id 3"))

    def apply(self, state, logits_NV, at):
        return logits_NV.at[:, 3].add(1e6 * self.shift_B[at.row_N])
'''
TINY = ["--chain", "temperature,shift", "--gen-length", "6", "--steps", "6", "--ignore-eos"]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return saved_model.save(tmp_path_factory.mktemp("runs") / "toy")


@pytest.fixture(autouse=True)
def _modules(monkeypatch, tmp_path):
    """Modules that lie in the working directory, each test's own."""
    monkeypatch.setattr(sample, "start_jax", lambda *args: None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    known = set(sys.modules)
    (tmp_path / "own_rules_here.py").write_text(MODULE)
    (tmp_path / "raises_here.py").write_text("raise RuntimeError('two\\nlines')\n")
    (tmp_path / "exits_here.py").write_text("raise SystemExit(0)\n")
    (tmp_path / "empty_here.py").write_text("from dlm_jax import Threshold\n")
    (tmp_path / "lacks_here.py").write_text(MODULE.replace("    def select", "    def chooses"))
    (tmp_path / "denies_here.py").write_text(MODULE.replace("my_setting", "no_edit"))
    (tmp_path / "taken_here.py").write_text(MODULE.replace("class Shift", "class TopK"))
    yield
    for name in set(sys.modules) - known:
        if name.endswith("_here"):
            del sys.modules[name]


def _run(run_dir, *flags):
    return sample.main(["--checkpoint", str(run_dir), *flags])


def test_settings_of_ones_own_rules_are_flags(run_dir, capsys):
    flags = [*TINY, "--prompt", "A ", "--rules", "own_rules_here", "--order", "every_other"]
    assert _run(run_dir, *flags, "--my-setting", "0.3", "--my-pace", "4") == 0
    out, err = capsys.readouterr()
    assert out == "A " + 6 * out[2] + "\n"
    assert "1 texts, 2 steps" in err
    assert _run(run_dir, *flags, "--my-pace", "4") == 0
    assert capsys.readouterr().out != out


def test_help_tells_of_them(run_dir, capsys):
    with pytest.raises(SystemExit):
        _run(run_dir, "--rules", "own_rules_here", "--help")
    out = " ".join(capsys.readouterr().out.split())
    assert "--my-setting" in out and "added to the logit of id 3" in out
    assert "--temperature" in out


def test_settings_of_ones_own_rules_are_keys_of_requests(run_dir, capsys, tmp_path):
    requests = [
        {"prompt": "A ", "order": "every_other", "my_pace": 3, "my_setting": 1.0},
        {"prompt": "A ", "my_setting": "much"},
        {"prompt": "A ", "my_settin": 1.0},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(r) + "\n" for r in requests))
    flags = ["--prompts", "in.jsonl", "--output", "out.jsonl", *TINY]
    assert _run(run_dir, *flags, "--rules", "own_rules_here") == End.PARTLY
    done, ill, unknown = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    assert done["text"] == "A " + 6 * done["text"][2]
    assert done["steps"] == 2
    assert "my_setting='much' is not a number" in ill["error"]
    assert "did you mean 'my_setting'?" in unknown["error"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--rules", "no_where"], "--rules no_where: no_where fails: ModuleNotFoundError"),
        (["--rules", "raises_here"], "raises_here fails: RuntimeError: two lines"),
        (["--rules", "exits_here"], "exits_here fails: SystemExit: 0"),
        (["--rules", "empty_here"], "empty_here defines no rule"),
        (["--rules", "lacks_here"], "rule EveryOther lacks select(), which CommitRule requires"),
        (["--rules", "taken_here"], "'top_k'"),
        (["--rules", "denies_here"], "a setting cannot have the name 'no_edit'"),
        (["--rules"], "--rules: expected one argument"),
        (["--rules", "own_rules_here", "--my-settin", "1"], "did you mean '--my-setting'?"),
        (["--rules", "own_rules_here", "--my-pace", "0"], "error: --my-pace=0 is outside [1, 99]"),
        (["--rules", "own_rules_here", "--my-pace", "half"], "--my-pace='half' is not an integer"),
        (["--my-setting", "1"], "unknown argument '--my-setting'"),
    ],
)  # fmt: skip
def test_rules_that_cannot_be_used_end_with_code_2_and_one_line(run_dir, capsys, flags, said):
    with pytest.raises(SystemExit) as ended:
        _run(run_dir, *flags)
    out, err = capsys.readouterr()
    assert ended.value.code == 2
    assert out == ""
    assert err.count("\n") == 1 and err.startswith("error: ")
    assert said in err
