"""``train.py --dry-run``: what it prints, and what it refuses before anything is written."""

from __future__ import annotations

import importlib.util

import pytest
import tiny_run

from dlm_jax import progress
from dlm_jax.cli import train
from dlm_jax.distributed import mesh

needs_tpu_compiler = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="the TPU compiler is not installed: pip install 'dlm_jax[tpu]'",
)


def _arguments(out_dir, *more: str, **changes: object) -> list[str]:
    given = tiny_run.flags(out_dir, **changes)
    return [*(part for name, value in given.items() for part in (f"--{name}", value)), *more]


def test_a_dry_run_prints_the_plan_and_writes_nothing(tmp_path, capsys):
    assert train.main(_arguments(tmp_path / "run", "--dry-run", mesh__fsdp=4)) == 0
    out = capsys.readouterr().out
    assert "mesh         data=2 fsdp=4 tensor=1 on 8 devices" in out
    assert "sharding     6,688 over fsdp, 112 on every device" in out
    assert "GiB a device: state" in out
    assert "TFLOP per device and step; the compiler counts" in out
    assert "compiler     xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_REDUCE" in out
    assert not (tmp_path / "run").exists()


def test_a_dry_run_without_the_options_of_the_compiler_says_so(tmp_path, capsys):
    options = {"mesh__compiler_options": "none"}
    assert train.main(_arguments(tmp_path / "run", "--dry-run", **options)) == 0
    assert "compiler     without options" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "changes", "message"),
    [
        (["--dry-run", "--topology", "pod"], {}, "--topology=pod is not a topology; use"),
        (["--dry-run"], {"mesh__fsdp": 3}, "do not multiply to 8, the number of devices"),
        (["--dry-run"], {"mesh__tensor": 4}, "mesh.tensor=4 does not divide model.heads=2, which"),
        (["--dry-run"], {"mesh__expert": 2}, "mesh.expert=2 does not divide model.experts=0"),
        (["--dry-run"], {"train__batch_size": 6}, "train.batch_size=6"),
        (["--dry-run"], {"mesh__compiler_options": "xla_a=1"}, "No such compile option: 'xla_a'"),
        ([], {"mesh__compiler_options": "xla_a=1"}, "mesh.compiler_options='xla_a=1' is rejected"),
        ([], {"mesh__compiler_options": "xla_a"}, "'xla_a', which is not name=value; write"),
    ],
)
def test_bad_plans_are_refused_in_one_line(tmp_path, capsys, more, changes, message):
    with pytest.raises(SystemExit) as exit_:
        train.main(_arguments(tmp_path / "run", *more, **changes))
    err = capsys.readouterr().err
    assert exit_.value.code == 2
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_topology_without_its_compiler_names_the_extra(monkeypatch):
    monkeypatch.setattr(mesh.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'dlm_jax\[tpu\]'"):
        mesh.topology_devices("v5e:4x4")


@needs_tpu_compiler
@pytest.mark.parametrize("name", ["v9:2x2", "v5e:3x3"])
def test_a_topology_that_the_compiler_does_not_know_is_refused_in_one_line(name, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_:
        train.main(_arguments(tmp_path / "run", "--dry-run", "--topology", name))
    err = capsys.readouterr().err
    assert exit_.value.code == 2
    assert f"--topology={name} is not supported by the TPU compiler" in err
    assert err.count("\n") == 1


def test_a_dry_run_says_what_is_compiled_while_it_waits(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.001)
    assert train.main(_arguments(tmp_path / "run", "--dry-run")) == 0
    err = capsys.readouterr().err
    assert "compiling the training step for 8 devices (cpu): " in err
