"""The page that ``sample.py --trace`` writes."""

import errno

import saved_model

from dlm_jax.cli import sample
from dlm_jax.cli.ends import End


def test_a_page_that_cannot_be_written_costs_no_text(tmp_path, capsys, monkeypatch):
    run = ["--checkpoint", str(saved_model.save(tmp_path / "run"))]
    short = ["--gen-length", "4", "--steps", "2"]
    assert sample.main([*run, *short]) == 0
    text = capsys.readouterr().out

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("dlm_jax.viewing.show.write_trace", full)
    page = str(tmp_path / "page.html")
    assert sample.main([*run, *short, "--trace", page]) == End.NO_PAGE
    out, err = capsys.readouterr()
    assert out == text
    assert f"error: --trace {page} cannot be written: No space left on device" in err
