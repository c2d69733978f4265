"""sample.py as its users run it: texts on standard output, everything else elsewhere."""

import json
import re
import sys
import warnings

import jax
import pytest
import saved_model

import dlm_jax
from dlm_jax.cli import sample, sample_file
from dlm_jax.cli.common import start_jax
from dlm_jax.cli.ends import End
from dlm_jax.config import sample_settings


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return saved_model.save(tmp_path_factory.mktemp("runs") / "toy")


@pytest.fixture(autouse=True)
def _settings_stay(monkeypatch):
    """The program sets up JAX for its process; here that process goes on."""
    monkeypatch.setattr(sample, "start_jax", lambda *args: None)


@pytest.fixture
def nothing_compiled():
    """As in a process of its own: programs that earlier tests compiled are compiled again."""
    jax.clear_caches()


def _run(run_dir, *flags):
    return sample.main(["--checkpoint", str(run_dir), *flags])


@pytest.mark.usefixtures("nothing_compiled")
def test_standard_output_holds_the_texts_alone(run_dir, capsys):
    flags = ["--prompt", "The ", "--num-samples", "3", "--gen-length", "5", "--steps", "3"]
    assert _run(run_dir, *flags) == 0
    out, err = capsys.readouterr()
    texts = out.removesuffix("\n").split("\n---\n")
    assert len(texts) == 3
    assert all(text.startswith("The ") and len(text) <= 9 for text in texts)
    for part in (r"\b9 steps\b", r"\b15 tokens\b", r"tokens/s", r"\d compilation", r"canvas=64"):
        assert re.search(part, err), part


@pytest.mark.parametrize(
    ("flags", "value"),
    [
        (["--ignore-eos"], True),
        (["--ignore-eos", "true"], True),
        (["--no-ignore-eos"], False),
        (["--ignore-eos=false"], False),
        (["--ignore-eos", "--no-ignore-eos"], False),
        (["--no-ignore-eos", "--ignore-eos", "--steps", "3"], True),
    ],
)
def test_a_setting_that_is_true_or_false_is_a_flag_without_a_value(monkeypatch, flags, value):
    seen = []

    def load(*_, **__):
        raise ValueError("not loaded here")

    def settings(texts, kind):
        seen.append(sample_settings(texts, kind))
        return seen[-1]

    monkeypatch.setattr(sample, "load_model", load)
    monkeypatch.setattr(sample, "sample_settings", settings)
    with pytest.raises(SystemExit):
        sample.main(flags)
    assert seen[0]["ignore_eos"] is value


def test_the_speed_is_told_with_and_without_compilation(run_dir, capsys):
    assert _run(run_dir, "--gen-length", "5", "--steps", "5", "--ignore-eos") == 0
    told = re.search(
        r"5 tokens in ([\d.]+) s \(([\d,]+) tokens/s with ([\d.]+) s of compilation, ([\d,]+) "
        r"without\)",
        capsys.readouterr().err,
    )
    assert told
    seconds, compiling = float(told[1]), float(told[3])
    speed, without = (int(told[n].replace(",", "")) for n in (2, 4))
    assert compiling <= seconds and speed <= without
    assert speed == pytest.approx(5 / seconds, abs=1)


def test_every_flag_is_optional_and_seeds_repeat(run_dir, capsys):
    outputs = []
    for flags in ([], [], ["--seed", "1"], ["--num-samples", "2"]):
        assert _run(run_dir, *flags) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]
    assert outputs[3] == outputs[0] + "---\n" + outputs[2]


# The chain is short, so that it compiles fast.
SHORT = ["--chain", "temperature", "--gen-length", "4", "--steps", "4", "--order", "left_to_right"]
SAMPLER = "from dlm_jax.inference.candidates import Candidates\nlikeliest = lambda c: c.ids[0]\n"


@pytest.mark.usefixtures("nothing_compiled")
def test_read_back_tells_of_each_token_on_standard_error(run_dir, capsys):
    flags = [*SHORT, "--prompt", "A ", "--num-samples", "2", "--ignore-eos"]
    assert _run(run_dir, *flags) == 0
    plain = capsys.readouterr().out
    assert _run(run_dir, *flags, "--read-back", "3") == 0
    out, err = capsys.readouterr()
    assert out == plain
    lines = [line for line in err.splitlines() if line.startswith("row ")]
    assert len(lines) == 8
    texts = [list(text) for text in out.removesuffix("\n").split("\n---\n")]
    for number, line in enumerate(lines):
        row, step = divmod(number, 4)
        found = re.fullmatch(
            rf"row {row} step {step} position {step + 2}: (\S+|' ') p=(\S+) of (\d+) candidates: "
            r"(.+? -?[\d.e+-]+), (.+? -?[\d.e+-]+), (.+? -?[\d.e+-]+)",
            line,
        )
        assert found, line
        assert 0 < float(found[2]) <= 1
        if found[1].startswith("'"):
            assert found[1].strip("'") == texts[row][step + 2]
    assert "rows=2 canvas=64 host" in err


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


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--host-sampler", "nowhere"], "--host-sampler nowhere is not MODULE:FUNCTION"),
        (["--host-sampler", "no_where:f"], "no_where fails: ModuleNotFoundError: No module"),
        (["--host-sampler", "json:dumpz"], "json has no 'dumpz'; did you mean 'dump'?"),
        (["--host-sampler", "math:pi"], "--host-sampler math:pi is 3.14"),
        (["--read-back", "0"], "argument --read-back: 0 is not in [1, "),
        (["--read-back", "99"], "--read-back 99 is more than --max-candidates 64; raise the limit"),
        (["--max-candidates", "0"], "argument --max-candidates: 0 is not in [1, "),
        (["--draw", "gumbel"], "unknown argument '--draw'; a preset sets it"),
        (["--prompt", "Zebra"], "'Z' (U+005A)"),
        (["--prompt", "The " * 8], "leaves no space on the canvas of 32"),
        (["--steps", "0"], "error: --steps=0 is outside [1, "),
        (["--steps", "many"], "error: --steps='many' is not an integer"),
        (["--temperature", "-1"], "error: --temperature=-1.0 is outside [0, "),
        (["--num-samples", "0"], "argument --num-samples: 0 is not in [1, "),
        (["--seed", "-1"], "argument --seed: -1 is not in [0, 4294967295]"),
        (["--seed", str(10**30)], "argument --seed: 1000000"),
        (
            ["--host-sampler", "os:environ"],
            "--host-sampler os:environ is a _Environ, which is not callable",
        ),
        (["--batch-size", "0"], "argument --batch-size: 0 is not in [1, "),
        (["--batch-size", str(2**70)], "argument --batch-size: 118059"),
        (["--gen-length", "99"], "error: --gen-length=99 and a prompt"),
        (["--order", "randon"], "'random'"),
        (["--tempreature", "1"], "did you mean '--temperature'?"),
        (["--mesh.data", "3"], "mesh.data=3, mesh.fsdp=1, mesh.tensor=1 do not multiply to 8"),
        (["--mesh.data", "many"], "mesh.data='many' is not an integer"),
        (["--mesh.data", "8", "--batch-size", "6"], "--batch-size 6 is not divisible by the 8"),
        (["--dtype", "float8"], "float8"),
        (["--dtype", "float16"], "--dtype='float16' is not one of float32, bfloat16, stored; its"),
        (["--coordinator", "here:1"], "--coordinator has no effect without --distributed"),
        (["--report-every", "-1"], "--report-every -1.0 must be at least 0"),
        (["--report-json", "x"], "--report-json requires --prompts and --report-every"),
        (["--no-temperature"], "unknown argument '--no-temperature'"),
        (["--edit", "maybe"], "error: --edit='maybe' is not true or false"),
        (["--no-edit", "true"], "unknown argument 'true'"),
    ],
)
def test_bad_flag_ends_with_code_2_and_one_line(run_dir, capsys, flags, said):
    with pytest.raises(SystemExit) as ended:
        _run(run_dir, *flags)
    out, err = capsys.readouterr()
    assert ended.value.code == 2
    assert out == ""
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
    figures = tmp_path / "figures.jsonl"
    asked = ["--prompts", str(source), "--output", str(target), "--report-json", str(figures),
             "--report-every", "1000"]  # fmt: skip
    assert _run(run_dir, *TINY, *asked, *mesh) == 0
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert "\n---\n".join(row["text"] for row in rows) + "\n" == plain
    assert all(row["seconds"] > 0 and row["waves"] == 0 for row in rows)
    (last,) = map(json.loads, figures.read_text().splitlines())
    assert (last["rows"], last["tokens"], last["programs"]) == (3, 12, 1)
    assert "engine: " in capsys.readouterr().err


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


@pytest.mark.slow
def test_a_draft_is_edited_and_its_page_plays_the_edits(run_dir, capsys, tmp_path):
    flags = ["--prompt", "The ", "--draft", "cat sat", "--preset", "variable_length",
             "--insert-ratio-start", "0.4", "--ignore-eos",
             "--chain", "temperature", "--num-samples", "2"]  # fmt: skip
    assert _run(run_dir, *flags) == 0
    plain, err = capsys.readouterr()
    assert "heads: none; fill=parallel, order=random" in err.splitlines()
    texts = plain.removesuffix("\n").split("\n---\n")
    assert len(texts) == 2 and all(text.startswith("The ") for text in texts)
    # A count of zero is not told.
    inserted, deleted = (
        int(found[1]) if (found := re.search(rf"\b(\d+) {name}, ", err)) else 0
        for name in ("insertions", "deletions")
    )
    assert inserted > 0 and sum(map(len, texts)) == 2 * len("The cat sat") + inserted - deleted
    page = tmp_path / "page.html"
    assert _run(run_dir, *flags, "--trace", str(page)) == 0
    out, err = capsys.readouterr()
    assert out == plain and f"wrote {page}" in err
    # Runs of positions that were not there before begin with -1.
    origins = re.findall(r'"o":\[([-\d,]+)\]', page.read_text())
    runs = [list(map(int, found.split(","))) for found in origins]
    new = [count for run in runs for first, count in zip(run[::2], run[1::2], strict=True)
           if first == -1]  # fmt: skip
    assert sum(new) == inserted


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


@pytest.mark.slow
def test_a_file_takes_host_samplers_of_allowed_modules_samples_and_read_back(
    run_dir, tmp_path, capsys, monkeypatch
):
    for name in ("file_rules", "other_rules"):
        (tmp_path / f"{name}.py").write_text(SAMPLER)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    flags = [*TINY, "--prompts", "in.jsonl", "--output", "out.jsonl"]
    requests = [
        {"id": "own", "host_sampler": "file_rules:likeliest"},
        {"id": "default", "n": 1},
        {"id": "none", "host_sampler": None, "read_back": False},
        {"id": "closed", "host_sampler": "json:dumps", "n": 1},
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(r) + "\n" for r in requests))
    flags += ["--allow-host-sampler", "file_rules", "--host-sampler", "other_rules:likeliest",
              "--num-samples", "2", "--read-back", "3"]  # fmt: skip
    assert _run(run_dir, *flags) == End.PARTLY
    written = (tmp_path / "out.jsonl").read_bytes()
    rows = [json.loads(line) for line in written.splitlines()]
    assert [(row["id"], row.get("sample")) for row in rows] == [
        ("own", 0), ("own", 1), ("default", None), ("none", 0), ("none", 1), ("closed", None),
    ]  # fmt: skip
    assert "json is of a module" not in rows[5]["error"]
    assert "'json:dumps' is in a module that is not allowed; add --allow-host-s" in rows[5]["error"]
    assert [len(row.get("read_back", ())) for row in rows[:5]] == [4, 4, 4, 0, 0]
    assert all(len(told["ids"]) == 3 for row in rows[:3] for told in row["read_back"])
    capsys.readouterr()
    # Rows alone: the likeliest tokens, and the draws of the seeds of the third line's samples.
    assert _run(run_dir, *TINY, "--host-sampler", "file_rules:likeliest") == 0
    assert capsys.readouterr().out == rows[0]["text"] + "\n" == rows[2]["text"] + "\n"
    assert _run(run_dir, *TINY, "--num-samples", "2", "--seed", "3") == 0
    assert capsys.readouterr().out == rows[3]["text"] + "\n---\n" + rows[4]["text"] + "\n"
    assert _run(run_dir, *flags) == End.PARTLY
    assert (tmp_path / "out.jsonl").read_bytes() == written
    # What a module does belongs to the run, as the settings do.
    for changed in (["--num-samples", "1"], ["--max-candidates", "5"]):
        with pytest.raises(SystemExit):
            _run(run_dir, *flags, *changed)
    (tmp_path / "file_rules.py").write_text(SAMPLER + "# changed\n")
    with pytest.raises(SystemExit):
        _run(run_dir, *flags)
    assert capsys.readouterr().err.count("out.jsonl belongs to another run") == 3
    assert (tmp_path / "out.jsonl").read_bytes() == written


@pytest.mark.slow
def test_results_that_hold_every_kind_of_line_end_as_text_are_read_back(run_dir, tmp_path):
    """JSON lines end at a line feed alone; Python's own `splitlines` knows ten more ends."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    names = [f"{end}b" for end in "\x0b\x0c\r\x1c\x1d\x1e\x85\u2028\u2029"]
    lines = [json.dumps({"id": name}, ensure_ascii=False) for name in names]
    source.write_bytes("".join(f"{line}\n" for line in lines).encode())
    assert _run(run_dir, "--prompts", str(source), "--output", str(target), *TINY) == End.DONE
    rows = [json.loads(line) for line in target.read_bytes().decode().split("\n")[:-1]]
    assert [row["id"] for row in rows] == names


def test_a_canvas_of_more_than_a_million_positions_is_refused(run_dir, capsys):
    with pytest.raises(SystemExit) as ended:
        _run(run_dir, "--max-length", str(2**20 + 1))
    assert ended.value.code == End.REFUSED
    assert "--max-length: 1048577 is not in [1, 1048576]" in capsys.readouterr().err


def test_ctrl_c_in_a_file_of_requests_loses_nothing(run_dir, capsys, tmp_path, monkeypatch):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(f'{{"gen_length": {n}, "steps": {n}}}\n' for n in (2, 20)))
    flags = ["--prompts", str(source), "--output", str(target), *TINY[:2], *TINY[6:]]
    progress = sample_file.Progress

    class Interrupted(progress):
        def update(self, pieces=1, *, work=None, note=None):
            raise KeyboardInterrupt

    monkeypatch.setattr(sample_file, "Progress", Interrupted)
    assert _run(run_dir, *flags) == 130
    assert "resumes from here" in capsys.readouterr().err
    assert [json.loads(line)["id"] for line in target.read_text().splitlines()] == ["line 1"]
    monkeypatch.setattr(sample_file, "Progress", progress)
    # Another number of slots makes it no other run.
    assert _run(run_dir, *flags, "--batch-size", "3") == 0
    assert "1 of 2 requests are done" in capsys.readouterr().err
    assert len(target.read_text().splitlines()) == 2


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--prompts", "in.jsonl"], "--prompts and --output require each other"),
        (["--output", "out.jsonl"], "--prompts and --output require each other"),
        (["--prompts", "i", "--output", "o", "--prompt", "A"], "--prompt has no effect with"),
        (["--prompts", "i", "--output", "o", "--watch"], "--watch shows a single text"),
        (["--prompts", "i", "--output", "o", "--trace", "t"], "run one request with its --prompt"),
        (
            ["--allow-host-sampler", "json"],
            "applies only to requests of --prompts; use --host-sampler",
        ),
        (
            ["--prompts", "i", "--output", "o", "--allow-host-sampler", "no_where"],
            "--allow-host-sampler no_where: no_where fails: ModuleNotFoundError",
        ),
        (
            ["--prompts", "i", "--output", "o", "--read-back", "2", "--fill", "wavefront"],
            "use --fill='parallel'",
        ),
        (["--prompts", "i", "--output", "o"], "i cannot be read"),
        (["--num-processes", "2"], "--num-processes and --process-id require --prompts"),
        (["--prompts", "i", "--output", "o", "--batch-size", "0"], "argument --batch-size: 0 is"),
        (["--trace", "nowhere/page.html"], "the directory does not exist"),
        (["--watch", "--read-back", "2"], "cannot be combined"),
        (
            ["--prompts", "i", "--output", "o", "--order", "randon"],
            "--order='randon' is not one of",
        ),
        (["--prompts", "i", "--output", "o", "--top-p", "2"], "error: --top-p=2.0 is outside"),
        (["--template", "A"], "template has no <hole>"),
        (["--template", "A<hole:0>"], "gap of 0 tokens"),
        (["--draft", "cat"], "draft requires remasking"),
        (["--block-length", "-1"], "error: --block-length=-1 is outside [0, "),
        (["--block-length", "1", "--gen-length", "9", "--steps", "4"], "9 blocks"),
        (["--order", "lowconfidence"], "did you mean 'low_confidence'"),
        (["--remask", "remdm"], "did you mean 'remdm_"),
    ],
)
def test_flags_that_mean_nothing_end_with_code_2_and_one_line(run_dir, capsys, flags, said):
    with pytest.raises(SystemExit) as ended:
        _run(run_dir, *flags)
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1


def test_missing_checkpoint_ends_with_code_2_and_names_it(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        _run(tmp_path / "nowhere")
    out, err = capsys.readouterr()
    assert ended.value.code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert str(tmp_path / "nowhere") in err
    assert err.count("\n") == 1
    assert jax.config.jax_debug_key_reuse


def test_the_program_compiles_less_than_the_library_and_writes_the_same(run_dir, capsys):
    assert _run(run_dir, *SHORT[2:], "--prompt", "A ", "--top-p", "0.9", "--seed", "5") == 0
    settings = {"gen_length": 4, "steps": 4, "order": "left_to_right", "top_p": 0.9, "seed": 5}
    (text,) = dlm_jax.generate(dlm_jax.load(run_dir), ["A "], **settings).texts
    assert capsys.readouterr().out == text + "\n"


def test_a_warning_of_the_library_is_one_plain_line(capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        start_jax()
        warnings.warn("what\nthere is", UserWarning, stacklevel=1)
        warnings.warn("of others", DeprecationWarning, stacklevel=1)
    own, *others = capsys.readouterr().err.splitlines()
    assert own == "warning: what there is"
    assert "DeprecationWarning: of others" in others[0]


@pytest.mark.slow
def test_read_back_of_a_model_that_recommends_waves_reads_them(capsys):
    flags = ["--gen-length", "6", "--steps", "3", "--read-back", "2"]
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        start_jax()
        assert sample.main(flags) == 0
    out, err = capsys.readouterr()
    assert "warning" not in err.lower()
    assert sum(line.startswith("row 0 step ") for line in err.splitlines()) == 6
    assert sample.main(flags[:4]) == 0
    assert capsys.readouterr().out == out
