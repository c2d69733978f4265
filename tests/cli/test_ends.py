"""How the programs end: each kind of end has its own exit code, and no closed stream is a crash."""

import dataclasses
import errno
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import saved_model
import toy_model

from dlm_jax.cli import ends, evaluation, exporter, sample
from dlm_jax.cli.ends import End, NotFiniteError, program, refusals

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _settings_stay(monkeypatch):
    for module in (evaluation, exporter, sample):
        monkeypatch.setattr(module, "start_jax", lambda *args: None)


def _raising(error):
    @program
    def main(argv=None):
        raise error

    return main


@pytest.mark.parametrize(
    ("error", "end", "said"),
    [
        (NotFiniteError("loss nan"), End.NOT_FINITE, "error: loss nan\n"),
        (OSError(errno.ENOSPC, "No space left", "m.jsonl"), End.UNWRITTEN, "m.jsonl: No space"),
        (MemoryError("big"), End.NO_MEMORY, "error: out of memory: big; use smaller batches"),
        (RuntimeError("RESOURCE_EXHAUSTED: 9 GB"), End.NO_MEMORY, "error: out of memory: RESOURCE"),
        (KeyboardInterrupt(), End.INTERRUPTED, "stopped\n"),
    ],
)
def test_what_can_happen_ends_in_one_line_and_a_code_of_its_own(capsys, error, end, said):
    assert _raising(error)([]) == end
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(said) or said in err
    assert err.count("\n") == 1


WITHOUT = """
import sys
for name in {missing!r}:
    sys.modules[name] = None
sys.argv = ["program", *{flags!r}]
from dlm_jax.cli import programs
sys.exit(programs.{program}())
"""


@pytest.mark.parametrize(
    ("program", "flags", "missing", "said"),
    [
        ("serve", [], ["dlm_jax.serving"], "needs dlm_jax.serving"),
        ("serve", [], ["starlette"], "; install it with: pip install 'dlm_jax[serve]"),
        ("lm_eval", [], ["dlm_jax.harness"], "needs dlm_jax.harness"),
        ("lm_eval", [], ["lm_eval"], "; install it with: pip install 'dlm_jax[eval]"),
        ("sample", ["--watch"], ["dlm_jax.viewing"], "--watch or --trace needs dlm_jax.viewing"),
        ("sample", ["--trace", "a.html"], ["dlm_jax.viewing"], "--watch or --trace needs dlm_jax."),
    ],
)  # fmt: skip
def test_a_program_without_its_application_or_its_packages_names_them(
    program, flags, missing, said
):
    code = WITHOUT.format(program=program, flags=flags, missing=missing)
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert said in done.stderr and f"needs {missing[0]}" in done.stderr


def test_a_defect_shows_its_traceback_and_is_no_other_end(capsys):
    assert _raising(KeyError("oops"))([]) == End.DEFECT == 70
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("error", [ValueError("a\nb"), IsADirectoryError(21, "Is a folder", "x")])
def test_bad_input_is_refused_in_one_line(capsys, error):
    @program
    def main(argv=None):
        with refusals():
            raise error

    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == End.REFUSED == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1


def test_the_codes_differ_and_the_page_and_the_readme_list_them():
    codes = {int(end) for end in End}
    assert len(codes) == len(End)
    table = re.findall(r"(?m)^(\d+) +\S", ends.__doc__ or "")
    assert {int(code) for code in table} == {code for code in codes if code < 128}
    page = (ROOT / "docs" / "exit_codes.md").read_text()
    assert {int(code) for code in re.findall(r"(?m)^\| (\d+) \|", page)} == codes | {129, 143}


def test_finite_parameters_whose_logits_overflow_end_with_1_too(tmp_path, capsys, monkeypatch):
    norm = {"scale": np.full_like(toy_model.MODEL.params["norm"]["scale"], 3e38)}
    huge = toy_model.MODEL.params | {"norm": norm}
    monkeypatch.setattr(toy_model, "MODEL", dataclasses.replace(toy_model.MODEL, params=huge))
    run = ["--checkpoint", str(saved_model.save(tmp_path / "run"))]
    assert sample.main([*run, "--gen-length", "4", "--steps", "2"]) == End.NOT_FINITE
    assert "the model's logits are not finite: texts 0 are unfinished" in capsys.readouterr().err
    (tmp_path / "in.jsonl").write_text('{"prompt": "A ", "gen_length": 4}\n')
    files = ["--prompts", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    assert sample.main([*run, *files]) == End.NOT_FINITE
    assert '"status": "non_finite"' in (tmp_path / "out.jsonl").read_text()
    capsys.readouterr()
    (tmp_path / "text.txt").write_text("The cat sat.")
    assert evaluation.main([*run, "--text", str(tmp_path / "text.txt")]) == End.NOT_FINITE
    assert "the score is not finite" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("run", "flags"),
    [(exporter.main, ["--out", "OUT"]), (sample.main, ["--prompts", "IN", "--output", "OUT"])],
)
def test_a_full_disk_ends_with_5_and_is_no_refusal(tmp_path, capsys, monkeypatch, run, flags):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    model = str(saved_model.save(tmp_path / "run"))
    (tmp_path / "in.jsonl").write_text('{"prompt": "A "}\n')
    files = {"IN": str(tmp_path / "in.jsonl"), "OUT": str(tmp_path / "out.safetensors")}
    monkeypatch.setattr(os, "fsync", full)
    capsys.readouterr()
    given = [files.get(flag, flag) for flag in flags]
    assert run(["--checkpoint", model, *given]) == End.UNWRITTEN == 5
    err = capsys.readouterr().err
    assert "out.safetensors: No space left on device; " in err
    assert err.count("\n") == 1


PRINTER = """
import sys
from dlm_jax.cli.ends import check_output, emit, program, refusals
@program
def main(argv=None):
    with refusals():
        check_output()
    print("messages", file=sys.stderr)
    for _ in range(int(sys.argv[1])):
        emit("\\u00e4\\ud800 \\u2028 text")
    print("more", file=sys.stderr)
    return 0
raise SystemExit(main())
"""


def _shell(redirected, *, lines=3, **environment):
    environment.setdefault("PYTHONUNBUFFERED", "")
    command = f'"{sys.executable}" -c "$PRINTER" {lines} {redirected}; echo "code $?"'
    given = os.environ | {"PRINTER": PRINTER} | environment
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, env=given)
    return done.stdout.decode(), done.stderr.decode()


@pytest.mark.parametrize("redirected", ["2>&-", ""])
def test_texts_are_printed_whatever_becomes_of_the_messages(redirected):
    out, err = _shell(redirected, PYTHONIOENCODING="utf-8")
    assert out == "\u00e4\\ud800 \u2028 text\n" * 3 + "code 0\n"
    assert err == ("" if "2>" in redirected else "messages\nmore\n")


@pytest.mark.parametrize(
    ("redirected", "code", "said"),
    [
        (">/dev/full", End.UNWRITTEN, "error: standard output: No space left on device"),
        (">&-", End.REFUSED, "error: standard output is closed"),
    ],
)
def test_texts_that_cannot_be_printed_are_told_of(redirected, code, said):
    out, err = _shell(redirected)
    assert out == f"code {int(code)}\n"
    assert said in err
    assert "Traceback" not in err and "Exception" not in err


def test_a_reader_that_has_enough_is_no_error():
    out, err = _shell("| head -1", lines=100_000, PYTHONIOENCODING="utf-8")
    assert out.startswith("\u00e4\\ud800 \u2028 text\n")
    assert "Traceback" not in err and "Exception" not in err and "Broken" not in err


CHATTER = """
import os
from dlm_jax.cli.ends import keep_output_for_texts, program, emit
@program
def main(argv=None):
    emit("before")
    keep_output_for_texts()
    os.write(1, b"a library greets\\n")
    emit("a text")
    return 0
raise SystemExit(main())
"""


@pytest.mark.parametrize(
    ("redirected", "out", "err"),
    [
        ("", "before\na text\ncode 0\n", "a library greets\n"),
        ("2>&-", "before\na text\ncode 0\n", ""),
    ],
)
def test_what_libraries_print_does_not_mix_with_texts(redirected, out, err):
    assert _shell(redirected, PRINTER=CHATTER) == (out, err)
