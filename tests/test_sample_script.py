"""sample.py as its users run it: texts on standard output, everything else elsewhere."""

import re

import jax
import pytest
import saved_model

import sample


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
    for part in (r"\b9 steps\b", r"\b15 tokens\b", r"tokens/s", r"\d compilation", r"canvas=64"):
        assert re.search(part, err), part


def test_every_flag_is_optional_and_seeds_repeat(run_dir, capsys):
    outputs = []
    for flags in ([], [], ["--seed", "1"], ["--num-samples", "2"]):
        assert _run(run_dir, *flags) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]
    assert outputs[3] == outputs[0] + "---\n" + outputs[2]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--prompt", "Zebra"], "'Z' (U+005A)"),
        (["--prompt", "The " * 8], "leaves no room on the canvas of 32"),
        (["--steps", "0"], "steps=0 must be at least 1"),
        (["--steps", "many"], "many"),
        (["--temperature", "-1"], "temperature=-1.0 is outside [0, "),
        (["--num-samples", "0"], "num_samples=0"),
        (["--seed", "-1"], "seed=-1"),
        (["--batch-size", "0"], "batch_size=0"),
        (["--gen-length", "99"], "use gen_length=32 at most"),
        (["--order", "randon"], "'random'"),
        (["--tempreature", "1"], "did you mean '--temperature'?"),
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
