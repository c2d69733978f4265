"""A run on sharded corpora is a run like any other."""

from __future__ import annotations

import json

import pytest
import tiny_run

from dlm_jax.cli import evaluation
from dlm_jax.data import shard


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Two sharded corpora, as ``data.source`` names them."""
    folder = tmp_path_factory.mktemp("corpora")
    roots = []
    for name, text in (("one", tiny_run.TEXT), ("two", tiny_run.TEXT[::-1])):
        lines = [json.dumps({"text": f"{number} {line}"})
                 for number, line in enumerate(text.split("\n")) if line]  # fmt: skip
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
        roots.append(str(folder / name))
        flags = ["--out", roots[-1], "--shards", "3", "--workers", "1", "--held-out", "0.2"]
        assert shard.main([str(folder / f"{name}.jsonl"), *flags]) == 0
    return ",".join(roots)


@pytest.mark.slow
def test_a_run_on_mixed_shards_continues_and_is_evaluated(corpora, tmp_path, capsys):
    given = {
        "data__source": corpora,
        "data__weights": "3,1",
        "data__tokenizer": "corpus",
        "train__steps": 6,
        "train__eval_every": 0,
        "train__checkpoint_every": 0,
    }
    expected = tiny_run.run(tmp_path / "whole", **given)
    with pytest.MonkeyPatch.context() as patch:
        tiny_run.stop_after(3, patch)
        tiny_run.run(tmp_path / "run", **given)
    outcome = tiny_run.run(tmp_path / "run", **given)
    tiny_run.assert_same(outcome.state, expected.state)
    assert tiny_run.records(tmp_path / "run") == tiny_run.records(tmp_path / "whole")
    with pytest.raises(ValueError, match=r"has a run with data.weights=\[3.0, 1.0\]"):
        tiny_run.run(tmp_path / "run", **(given | {"data__weights": "1,1"}))
    with pytest.raises(ValueError, match="has a run that was trained on a different text"):
        tiny_run.run(
            tmp_path / "run", **(given | {"data__source": ",".join(corpora.split(",")[::-1])})
        )
    capsys.readouterr()
    assert evaluation.main(["--checkpoint", str(tmp_path / "run")]) == 0
    assert "held-out text of" in capsys.readouterr().out
