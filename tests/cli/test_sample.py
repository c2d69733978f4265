"""sample.py as its users run it: texts on standard output, everything else elsewhere."""

import json
import pickle
import re
import sys

import pytest
import saved_model

from dlm_jax.batch.json_lines import RequestFile, Results
from dlm_jax.cli import sample
from dlm_jax.cli.ends import End


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return saved_model.save(tmp_path_factory.mktemp("runs") / "toy")


@pytest.fixture(autouse=True)
def _settings_stay(monkeypatch):
    """The program sets up JAX for its process; here that process goes on."""
    monkeypatch.setattr(sample, "start_jax", lambda *args: None)


def _run(run_dir, *flags):
    return sample.main(["--checkpoint", str(run_dir), *flags])


def test_standard_output_holds_the_texts_alone(run_dir, capsys):
    flags = ["--prompt", "The ", "--num-samples", "3", "--gen-length", "5", "--steps", "3"]
    assert _run(run_dir, *flags) == 0
    out, err = capsys.readouterr()
    texts = out.removesuffix("\n").split("\n---\n")
    assert len(texts) == 3
    assert all(text.startswith("The ") and len(text) <= 9 for text in texts)
    for part in (r"\b9 steps\b", r"\b15 tokens\b", r"tokens/s", r"canvas=64"):
        assert re.search(part, err), part


# The chain is short, so that it compiles fast.
SHORT = ["--chain", "temperature", "--gen-length", "4", "--steps", "4", "--order", "left_to_right"]
SAMPLER = "from dlm_jax.inference.host import Candidates\nlikeliest = lambda c: c.ids[0]\n"


def test_a_host_sampler_is_imported_from_the_working_directory(
    run_dir, tmp_path, capsys, monkeypatch
):
    (tmp_path / "my_rules.py").write_text(SAMPLER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    flags = [*SHORT, "--num-samples", "2", "--host-sampler", "my_rules:likeliest"]
    assert _run(run_dir, *flags, "--report-chain") == 0
    hosted, err = capsys.readouterr()
    lines = err.splitlines()[:3]
    assert lines == [
        "bans: device",
        "temperature: device",
        "choice among the remaining candidates: host (<lambda>)",
    ]
    assert _run(run_dir, *SHORT, "--num-samples", "2", "--temperature", "0") == 0
    assert capsys.readouterr().out == hosted


EXTENSION = """
import dataclasses

def colder(model, text):
    sample = dataclasses.replace(model.sample, temperature=float(text))
    return dataclasses.replace(model, sample=sample)

def nothing(model, text):
    return None
"""


def test_a_model_is_extended_by_functions_of_modules(run_dir, tmp_path, capsys, monkeypatch):
    (tmp_path / "my_extension.py").write_text(EXTENSION)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    hot, cold = ["--extend", "my_extension:colder=2"], ["--extend", "my_extension:colder=0"]
    assert _run(run_dir, *SHORT, *hot, *cold) == 0
    extended = capsys.readouterr().out
    assert _run(run_dir, *SHORT, "--temperature", "0") == 0
    assert capsys.readouterr().out == extended
    with pytest.raises(SystemExit, match="2"):
        _run(run_dir, *SHORT, "--extend", "my_extension:nothing")
    assert "--extend my_extension:nothing returned None; return a Model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--extend", "drafter"], "--extend drafter is not MODULE:FUNCTION; for example, write"),
        (["--host-sampler", "nowhere"], "--host-sampler nowhere is not MODULE:FUNCTION"),
        (["--host-sampler", "no_where:f"], "no_where fails: ModuleNotFoundError: No module"),
        (["--host-sampler", "json:dumpz"], "json has no 'dumpz'; did you mean 'dump'?"),
        (["--read-back", "9"], "it was removed; pass read_back=True in Python"),
        (["--steps", "0"], "error: --steps=0 is outside [1, "),
        (["--steps", "many"], "error: --steps='many' is not an integer"),
        (["--num-samples", "0"], "argument --num-samples: 0 is not in [1, "),
        (["--max-length", str(2**20 + 1)], "--max-length: 1048577 is not in [1, 1048576]"),
        (["--seed", "-1"], "argument --seed: -1 is not in [0, 4294967295]"),
        (
            ["--host-sampler", "os:environ"],
            "--host-sampler os:environ is a _Environ, which is not callable",
        ),
        (["--gen-length", "99"], "error: --gen-length=99 and a prompt"),
        (["--tempreature", "1"], "did you mean '--temperature'?"),
        (["--mesh.data", "3"], "mesh.tensor=1 do not multiply to 8"),
        (["--mesh.data", "many"], "mesh.data='many' is not an integer"),
        (["--mesh.data", "8", "--batch-size", "6"], "--batch-size 6 is not divisible by the 8"),
        (["--dtype", "float16"], "--dtype='float16' is not one of float32, bfloat16, stored"),
        (["--coordinator", "here:1"], "--coordinator has no effect without --distributed"),
        (["--no-temperature"], "unknown argument '--no-temperature'"),
        (["--edit", "maybe"], "error: --edit='maybe' is not true or false"),
        (["--no-edit", "true"], "unknown argument 'true'"),
        (["--prompts", "in.jsonl"], "--prompts and --output require each other"),
        (["--prompts", "i", "--output", "o", "--prompt", "A"], "--prompt has no effect with"),
        (["--prompts", "i", "--output", "o", "--num-samples", "2"], "--num-samples has no effect"),
        (["--prompts", "i", "--output", "o"], "i cannot be read"),
        (["--num-processes", "2"], "--num-processes and --process-id require --prompts"),
        (
            ["--prompts", "i", "--output", "o", "--order", "randon"],
            "--order='randon' is not one of",
        ),
        (["--prompts", "i", "--output", "o", "--top-p", "2"], "error: --top-p=2.0 is outside"),
        (["--template", "A"], "template has no <hole>"),
        (["--trace", "nowhere/page.html"], "the directory does not exist; create it first"),
        (["--trace", "."], "--trace . is a directory; pass a file"),
    ],
)
def test_bad_flag_ends_with_code_2_and_one_line(run_dir, capsys, flags, said):
    with pytest.raises(SystemExit) as ended:
        _run(run_dir, *flags)
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (2, "")
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert said in line


TINY = [*SHORT, "--ignore-eos"]


@pytest.mark.slow
def test_texts_and_files_on_a_mesh_are_those_of_one_device(run_dir, capsys, tmp_path):
    flags = [*TINY, "--prompt", "The ", "--num-samples", "3"]
    mesh = ["--mesh.data", "4", "--mesh.tensor", "2", "--batch-size", "8"]
    assert _run(run_dir, *flags) == 0
    plain = capsys.readouterr().out
    assert _run(run_dir, *flags, *mesh) == 0
    assert capsys.readouterr().out == plain
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps({"prompt": "The ", "seed": k}) + "\n" for k in range(3)))
    asked = ["--prompts", str(source), "--output", str(target)]
    assert _run(run_dir, *TINY, *asked, *mesh) == 0
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert "\n---\n".join(row["text"] for row in rows) + "\n" == plain
    assert all(row["seconds"] > 0 and row["waves"] == 0 for row in rows)


def test_a_template_is_filled_watched_and_kept_on_a_page(run_dir, capsys, tmp_path):
    flags = [*TINY, "--template", "A <hole:2>t ran<hole>"]
    assert _run(run_dir, *flags) == 0
    plain = capsys.readouterr().out
    assert re.fullmatch(r"A ..t ran....\n", plain, flags=re.DOTALL)
    page = tmp_path / "page.html"
    assert _run(run_dir, *flags, "--watch", "--trace", str(page)) == 0
    out, err = capsys.readouterr()
    assert out == plain
    assert "row 0" in err and "step 4/4" in err and f"wrote {page}" in err
    assert "<html" in page.read_text()


def test_a_file_of_requests_becomes_a_file_of_results_and_is_not_run_twice(
    run_dir, capsys, tmp_path
):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests = [{"id": "a", "prompt": "A "}, {"id": "b", "gen_length": 7}, {"id": "c", "stepz": 1}]
    source.write_text("".join(json.dumps(request) + "\n" for request in requests))
    flags = ["--prompts", str(source), "--output", str(target), *TINY]
    assert _run(run_dir, *flags) == End.PARTLY == 3
    first = target.read_text()
    rows = [json.loads(line) for line in first.splitlines()]
    assert [row["id"] for row in rows] == ["a", "b", "c"]
    assert [row.get("length") for row in rows] == [6, 7, None]
    assert "did you mean 'steps'" in rows[2]["error"]
    err = capsys.readouterr().err
    assert "2 rows, 1 refused, 11 tokens" in err and "canvas=64" in err
    assert "heads: none; fill=parallel, order=left_to_right" in err.splitlines()
    assert _run(run_dir, *flags) == End.PARTLY
    assert "3 of 3 requests are done" in capsys.readouterr().err
    assert target.read_text() == first
    with pytest.raises(SystemExit) as ended:
        _run(run_dir, *flags, "--seed", "1")
    assert ended.value.code == 2
    assert "another run" in capsys.readouterr().err
    assert target.read_text() == first


def test_processes_are_sent_the_finished_lines_of_a_file_as_bits(tmp_path, monkeypatch):
    source = tmp_path / "in.jsonl"
    source.write_text("\n{}\n{}\n" * 2000)
    own = RequestFile(source, index=1, count=2)
    numbers = [line.number for line in own]
    done = {number for number in numbers if number % 7 < 4}
    sent = []

    def gathered(value):
        sent.append(value)
        return [(0, ({}, ())), *sent]

    monkeypatch.setattr(sample.jax, "process_count", lambda: 3)
    monkeypatch.setattr(sample, "gathered", gathered)
    plan = {"batch_size": 3}
    with Results(tmp_path / "out", fingerprint="f", index=1, count=2, plan=plan) as results:
        for number in sorted(done):
            results.write({"line": number})
        assert sample._same_in_all(results, own, 1) == (results.done, plan)
    assert len(pickle.dumps(sent)) < len(numbers) / 8 + 400
    theirs, told = sample._same_in_all(None, own, 1)
    assert {number for number in range(1, 6001) if number in theirs} == done and told == plan


def test_ctrl_c_in_a_file_of_requests_loses_nothing(run_dir, capsys, tmp_path, monkeypatch):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(f'{{"gen_length": {n}, "steps": {n}}}\n' for n in (2, 20)))
    flags = ["--prompts", str(source), "--output", str(target), *TINY[:2], *TINY[6:]]
    progress = sample.Progress

    class Interrupted(progress):
        def update(self, pieces=1, *, work=None, note=None):
            raise KeyboardInterrupt

    monkeypatch.setattr(sample, "Progress", Interrupted)
    assert _run(run_dir, *flags) == 130
    assert "resumes from here" in capsys.readouterr().err
    assert [json.loads(line)["line"] for line in target.read_text().splitlines()] == [1]
    monkeypatch.setattr(sample, "Progress", progress)
    # Another number of slots makes it no other run.
    assert _run(run_dir, *flags, "--batch-size", "3") == 0
    assert "1 of 2 requests are done" in capsys.readouterr().err
    assert len(target.read_text().splitlines()) == 2
