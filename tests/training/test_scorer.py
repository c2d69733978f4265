"""Runs of a sequence scorer: its loss in the training step, its evaluation, and how it begins."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import stage_cases as cases
import tiny_run
import toy

import dlm_jax
from dlm_jax.cli import evaluation, train
from dlm_jax.config import HeadsConfig, MeshConfig, ModelConfig
from dlm_jax.data import CharacterTokenizer
from dlm_jax.diffusion.objectives import Batch, Mixture
from dlm_jax.distributed.partitions import make_mesh
from dlm_jax.store import Checkpoints
from dlm_jax.training.run import begin_with
from dlm_jax.training.train_step import Stage, StageLoss, TrainState, make_train_step
from dlm_jax.types import live_positions

ROWS, POSITIONS = 8, 8
# A bag of words, which compiles fast.
SCORER = dataclasses.replace(
    toy.network(),
    trunk=lambda params, tokens_BL, length_B, cache: (params["embedding"][tokens_BL], cache),
    heads={
        "scorer": lambda params, hidden_BLD, length_B: (
            jnp.where(live_positions(length_B, POSITIONS)[:, :, None], hidden_BLD, 0.0).sum(1)
            @ params["scorer_head"]["out"]
        )
    },
)
PARAMS = {
    "embedding": np.random.default_rng(1).standard_normal((toy.VOCAB_SIZE, 4), np.float32),
    "scorer_head": {"out": np.array([0.3, -0.2, 0.1, 0.4], np.float32)},
}
LOSS = StageLoss(
    SCORER,
    Mixture(random_length_share=0.5),
    cases.records(HeadsConfig(), mode="sequence_scorer"),
    Stage(("main",)),
    toy.MASK,
)
BATCH = Batch(
    np.random.default_rng(0).integers(0, 8, (ROWS, POSITIONS)).astype(np.int32),
    np.array([8, 8, 0, 8, 5, 8, 8, 2], np.int32),
    np.array([0, 3, 0, 0, 0, 8, 0, 0], np.int32),
)

_draw = jax.jit(LOSS.draw)


@functools.cache
def _descended(parts: int, devices: int = 1):
    """One step of plain gradient descent, the batch cut into parts."""
    params = jax.tree.map(jnp.asarray, PARAMS)
    state = TrainState(params, optax.sgd(0.1).init(params), jnp.int32(3))
    mesh = make_mesh(MeshConfig(), jax.devices()[:devices])
    config = {"batch_size": ROWS, "accumulate": parts}
    step = make_train_step(LOSS, optax.sgd(0.1), state, mesh=mesh, **config)
    return jax.device_get(step(state, BATCH, jax.random.key(5)))


@pytest.mark.slow
def test_neither_parts_nor_devices_change_the_step():
    state, metrics = _descended(2, devices=4)
    expected, expected_metrics = _descended(1)
    groups = {f"grad_norm_{name}" for name in state.params}
    assert metrics.keys() == {"loss", "grad_norm", "param_norm"} | groups
    for name, figure in metrics.items():
        np.testing.assert_allclose(figure, expected_metrics[name], rtol=3e-5, err_msg=name)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), state.params, expected.params
    )
    moved = np.abs(state.params["scorer_head"]["out"] - PARAMS["scorer_head"]["out"])
    assert moved.min() > 1e-4


def test_the_loss_is_the_mean_over_the_rows_that_have_a_free_token():
    rows = jax.device_get(_draw(BATCH, jax.random.key(5), jnp.int32(3))[1]["scorer_head"][0])
    logit = np.asarray(SCORER.heads["scorer"](PARAMS, PARAMS["embedding"][rows.shown_BL],
                                     rows.length_B))  # fmt: skip
    share = np.asarray(rows.share_B)
    entropy = np.log1p(np.exp(logit)) - share * logit
    counts = BATCH.length_B > BATCH.given_B
    assert rows.length_B.max() == 8 and counts.sum() == 6
    assert _descended(1)[1]["loss"] == pytest.approx(entropy[counts].mean(), rel=1e-5)


def test_the_noise_of_a_step_is_that_of_the_key_and_the_step_and_some_batches_are_cut():
    def drawn(seed, step):
        rows = _draw(BATCH, jax.random.key(seed), jnp.int32(step))[1]["scorer_head"][0]
        return np.asarray(rows.shown_BL), int(rows.length_B.max())

    np.testing.assert_array_equal(drawn(1, 3)[0], drawn(1, 3)[0])
    assert (drawn(1, 3)[0] != drawn(1, 4)[0]).any()
    assert (drawn(1, 3)[0] != drawn(2, 3)[0]).any()
    longest = [drawn(1, step)[1] for step in range(20)]
    assert 8 in longest and min(longest) < 8


_HEADS = {"scorer": "scorer_head", "writer": "critic_head"}


def _state(kind: str, value: float) -> TrainState:
    """A scorer, or a language model with a critic."""
    params = {"embedding": jnp.full((3, 2), value), _HEADS[kind]: {"out": jnp.full(2, value)}}
    return TrainState(params, (), jnp.int32(0))


@pytest.mark.parametrize(("kind", "source"), [("scorer", "writer"), ("writer", "scorer")])
def test_a_scorer_begins_with_the_trunk_of_a_language_model_and_the_other_way(
    tmp_path, kind, source
):
    fresh, trained = _state(kind, 0.0), _state(source, 1.0)
    tokenizer = CharacterTokenizer.of("abcdefgh")
    with Checkpoints(tmp_path / "checkpoints", keep=1) as checkpoints:
        checkpoints.save(1, trained, {"tokenizer": tokenizer.to_json(), "config": {"model": {}}})
    lines = []
    begun = begin_with(str(tmp_path), fresh, tokenizer, model=ModelConfig(), report=lines.append)
    head = _HEADS[kind]
    expected = {"embedding": trained.params["embedding"], head: fresh.params[head]}
    tiny_run.assert_same(begun.params, expected)
    assert f"lacks {head}, which are freshly initialised" in lines[0]
    assert f"has {_HEADS[source]}, which are ignored" in lines[1]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(directory of a tiny run of train.py, its standard output, its standard error)."""
    out_dir = tmp_path_factory.mktemp("scorer") / "run"
    flags = tiny_run.flags(
        out_dir, model__mode="sequence_scorer", objective__patterns="random", data__held_out=0.3,
        train__steps=200, train__batch_size=16, train__eval_every=100, train__eval_windows=64,
        train__log_every=50, train__sample_every=50, train__checkpoint_every=0,
    )  # fmt: skip
    out, err = io.StringIO(), io.StringIO()
    with tiny_run.on_devices(1), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = train.main([part for name, value in flags.items() for part in (f"--{name}", value)])
    assert code == 0
    return out_dir, out.getvalue(), err.getvalue()


@pytest.mark.slow
def test_a_trained_scorer_is_far_better_than_the_best_constant(finished):
    *_, last = tiny_run.records(finished[0])
    assert last["kind"] == "evaluation"
    assert last["windows"] == 34
    assert 0.03 < last["constant_squared_error"] < 0.15
    assert last["squared_error"] + 3 * last["standard_error"] < last["constant_squared_error"]
    assert last["squared_error"] < 0.6 * last["constant_squared_error"]


def test_metrics_name_what_they_are_and_there_is_no_bound(finished):
    lines = tiny_run.records(finished[0])
    assert [line["step"] for line in lines if line["kind"] == "evaluation"] == [100, 200]
    for line in lines:
        names = {name for name in line if not name.startswith("grad_norm_")}
        figures = {"loss", "grad_norm", "param_norm", *tiny_run.RATES}
        if line["kind"] == "evaluation":
            figures = {"squared_error", "standard_error", "constant_squared_error",
                       "cross_entropy", "windows"}  # fmt: skip
        assert figures | {"kind", "step"} == names
    assert (finished[0] / "loss.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_program_says_what_it_measures_and_how_to_judge_and_samples_nothing(finished):
    out_dir, out, err = finished
    assert out == ""
    assert "sample.py" not in err
    last = tiny_run.records(out_dir)[-1]
    assert f"step 200: held-out squared error {last['squared_error']:.5f} +- " in err
    assert "bound" not in err
    assert f"score texts with: python -m dlm_jax.evaluate --checkpoint {out_dir} --text" in err


def test_evaluating_the_run_gives_the_error_of_its_last_evaluation(finished, capsys, monkeypatch):
    monkeypatch.setattr(evaluation, "start_jax", lambda *args: None)
    assert evaluation.main(["--checkpoint", str(finished[0]), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    last = tiny_run.records(finished[0])[-1]
    for name in ("squared_error", "constant_squared_error", "cross_entropy", "windows"):
        assert record[name] == pytest.approx(last[name], rel=1e-4)


def test_it_tells_true_text_from_letters_in_any_order(finished):
    model = dlm_jax.load(finished[0])
    true = tiny_run.TEXT[:160]
    wrong = "".join(np.random.default_rng(0).permutation(list(true)))
    half = true[:80] + wrong[80:]
    shares = dlm_jax.corrupted_share(model, [true, half, wrong])
    assert shares[0] < 0.3 < shares[1] + 0.1
    assert shares[0] < shares[1] < shares[2]
    with pytest.raises(ValueError, match="is a sequence scorer, which does not generate"):
        dlm_jax.generate(model)
