"""Own network, objective and heads, none of them in the package, go through `train`."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run

import dlm_jax
import dlm_jax.config as configs
from dlm_jax.cli import exporter, sample
from dlm_jax.objectives.losses import cross_entropy
from dlm_jax.objectives.objective import draw_all
from dlm_jax.training import (
    Batch,
    Drawn,
    Head,
    Loss,
    Objective,
    describe,
    problem,
    train,
)  # fmt: skip
from dlm_jax.types import Network, live_positions

WIDTH = 8
FLAGS = {
    "optim__name": "adamw", "optim__ema_decay": 0.5, "heads__warmup_steps": 0, "train__steps": 6,
    "train__log_every": 1, "train__eval_every": 6, "train__checkpoint_every": 2,
    "train__accumulate": 2,
}  # fmt: skip


def network(model: configs.ModelConfig) -> Network:
    """Each position sees its own token and, through one matrix, its neighbours."""

    def init(key):
        keys = jax.random.split(key, 3)
        shapes = {"table": (model.vocab_size, WIDTH), "mix": (WIDTH, WIDTH)}
        shapes["out"] = (WIDTH, model.vocab_size)
        return {n: jax.random.normal(k, shapes[n]) for n, k in zip(shapes, keys, strict=True)}

    def trunk(params, tokens_BL, length_B, cache):
        x_BLD = params["table"][tokens_BL]
        live_BL1 = live_positions(length_B, tokens_BL.shape[1])[:, :, None]
        seen_BLD = jnp.pad(jnp.where(live_BL1, x_BLD, 0.0), ((0, 0), (1, 1), (0, 0)))
        return x_BLD + jnp.tanh((seen_BLD[:, :-2] + seen_BLD[:, 2:]) @ params["mix"]), cache

    return Network(
        init,
        trunk,
        embed=lambda params, ids: params["table"][ids],
        readout=lambda params, hidden_ND: hidden_ND @ params["out"],
        vocab_size=model.vocab_size,
    )


def plain_objective(config: configs.Config, tokenizer: Any):
    """Half of the tokens are hidden."""

    def objective(batch: Batch, key: jax.Array) -> Drawn:
        is_hidden_BL = jax.random.bernoulli(key, 0.5, batch.tokens_BL.shape) & batch.is_free_BL()
        weight_BL = is_hidden_BL.astype(jnp.float32)
        shown_BL = jnp.where(is_hidden_BL, tokenizer.mask_id, batch.tokens_BL)
        return Drawn(batch, shown_BL, weight_BL, weight_BL.sum())

    return objective


def two_passes(config: configs.Config, tokenizer: Any) -> Objective:
    """Predicts the hidden tokens a second time, beside what it predicted at first."""

    def loss(network: Network, params: Any, drawn: Drawn) -> Loss:
        batch, shown_BL = drawn.batch, drawn.shown_BL
        passes = []
        for _ in range(2):
            hidden_BLD, _ = network.trunk(params, shown_BL, batch.length_B, None)
            nll_BL = cross_entropy(
                network, params, hidden_BLD, batch.tokens_BL, mask_id=tokenizer.mask_id
            )
            passes.append(jnp.sum(drawn.weight_BL * nll_BL))
            first_BL = network.readout(params, hidden_BLD.reshape(-1, WIDTH)).argmax(1)
            is_even_BL = (jnp.arange(shown_BL.shape[1]) % 2 == 0)[None]
            shown_BL = jnp.where(
                is_even_BL & (drawn.weight_BL > 0), first_BL.reshape(shown_BL.shape), shown_BL
            )
        return Loss(passes[0] + passes[1], drawn.total)

    return Objective(plain_objective(config, tokenizer), loss)


def left_head(*, trains_trunk: bool = False, **changes: Any) -> Head:
    """Which token stands left of each position."""

    def draw(drawn, key):
        is_used_BL = jax.random.bernoulli(key, 0.5, drawn.shown_BL.shape)
        return is_used_BL, jnp.sum(is_used_BL).astype(jnp.float32)

    def loss(network: Network, params: Any, drawn: Drawn) -> tuple[jax.Array, jax.Array]:
        is_used_BL, total = drawn.noise
        logits_BLV = drawn.hidden_BLD @ params["left_head"]["kernel"]
        left_BL = jnp.roll(drawn.batch.tokens_BL, 1, axis=1)
        log_p_BLV = jax.nn.log_softmax(logits_BLV)
        nll_BL = -jnp.take_along_axis(log_p_BLV, left_BL[:, :, None], axis=2)[:, :, 0]
        return jnp.sum(jnp.where(is_used_BL, nll_BL, 0.0)), total

    return Head(
        loss=loss, draw=draw,
        init=lambda key: {"kernel": jax.random.normal(key, (WIDTH, 64)) / 9},
        trains_trunk=trains_trunk, **changes,
    )  # fmt: skip


def _train(out_dir: Path, **parts: Any):
    parts = {"network": network, "objective": plain_objective} | parts
    flags = FLAGS | parts.pop("flags", {})
    with tiny_run.on_devices(1):
        config = configs.load(None, tiny_run.flags(out_dir, **flags))
        return train(config, report=lambda line: None, **parts)


@functools.cache
def _whole(folder: Path):
    return _train(folder / "whole", objective=two_passes, heads={"left_head": left_head(start=2)})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("own")


def test_a_run_says_which_of_its_parts_are_custom(folder):
    lines: list[str] = []
    describe(_whole(folder).run, lines.append)
    assert "custom: network network; objective two_passes; heads left_head" in lines


def test_own_parts_train_and_are_sampled(folder):
    outcome = _whole(folder)
    run = outcome.run
    assert outcome.reason == "finished"
    assert (run.task.stage(0), run.task.stage(2)) == (("main",), ("main", "left_head"))
    fresh = run.network.init(jax.random.key(0))
    assert fresh.keys() == outcome.params.keys() == {"table", "mix", "out", "left_head"}
    lines = [r for r in tiny_run.records(folder / "whole") if r["kind"] == "train"]
    assert ["left" in line for line in lines] == [False] * 2 + [True] * 4
    assert lines[-1]["left"] < lines[2]["left"] and np.isfinite(outcome.bound)
    for line in lines[2:]:
        assert line["loss"] == pytest.approx(line["objective"] + line["left"], rel=1e-5)
    model = dlm_jax.Model(
        run.network, outcome.params, run.corpus.tokenizer, max_length=16, sample=run.config.sample
    )
    (text,) = dlm_jax.generate(model, num_samples=1, seed=1).texts
    assert len(text) == 16


def test_a_head_of_ones_own_reads_the_hidden_vectors_and_leaves_the_model_as_it_is(tmp_path):
    alone = _train(tmp_path / "alone").params
    beside, through = (
        _train(tmp_path / str(trains), heads={"left_head": left_head(trains_trunk=trains)}).params
        for trains in (False, True)
    )
    tiny_run.assert_same({name: beside[name] for name in alone}, alone)
    assert not np.array_equal(through["table"], alone["table"])


def test_a_head_trains_from_the_first_step_on_at_which_its_weight_is_not_zero(tmp_path):
    head = left_head(start=1, weight=lambda step: jnp.where(step > 3, 0.25 * (step - 2), 0.0))
    run = _train(tmp_path, heads={"left_head": head}).run
    assert [len(run.task.stage(step)) for step in range(6)] == [1, 1, 1, 1, 2, 2]
    lines = [r for r in tiny_run.records(tmp_path) if r["kind"] == "train"]
    assert [line.get("left_alpha") for line in lines] == [None] * 4 + [0.5, 0.75]
    for line in lines[4:]:
        weighted = line["objective"] + line["left_alpha"] * line["left"]
        assert line["loss"] == pytest.approx(weighted, rel=1e-5)
    never = dataclasses.replace(run.task, heads={"left_head": left_head(weight=0.0)})
    assert never.last_stage == ("main",)


def test_a_run_of_own_parts_and_its_file_are_loaded_whole_with_their_network(folder, capsys):
    outcome = _whole(folder)
    run, file = folder / "whole", folder / "own.safetensors"
    assert exporter.main(["--checkpoint", str(run), "--out", str(file)]) == 0
    assert "custom network network; load the file in Python" in capsys.readouterr().err
    for path in (run, file):
        model = dlm_jax.load(path, network=network)
        tiny_run.assert_same(model.params, outcome.params)
        (text,) = dlm_jax.generate(model, num_samples=1, steps=2).texts
        assert len(text) == 16
        split = dlm_jax.load(path, network=network, mesh=configs.MeshConfig(data=8))
        tiny_run.assert_same(split.params, outcome.params)
        assert model.is_custom and model.config is not None
        with pytest.raises(ValueError, match="^the model is a custom network, which no"):
            dlm_jax.export(model, folder / "published")
        line = f"^{path} was trained with the custom network network; pass it in Python: "
        with pytest.raises(ValueError, match=line):
            dlm_jax.load(path)
        with pytest.raises(SystemExit) as ended:
            sample.main(["--checkpoint", str(path)])
        assert ended.value.code == 2
        err = capsys.readouterr().err
        assert "was trained with the custom network" in err and err.count("\n") == 1


def test_over_devices_a_network_without_sharding_rules_trains_as_on_one(tmp_path):
    said: list[str] = []
    flags = FLAGS | {
        "optim__name": "muon", "optim__warmup_steps": 0, "train__steps": 2, "train__eval_every": 0,
    }  # fmt: skip
    for count in (1, 2):
        config = configs.load(None, tiny_run.flags(tmp_path / str(count), **flags))
        with tiny_run.on_devices(count):
            outcome = train(config, network=network, objective=plain_objective, report=said.append)
        if count == 1:
            alone = outcome.params
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), outcome.params, alone)
    alone, both = [line for line in said if line.startswith("without Network.axes, matrices by ")]
    assert both == f"{alone}; parameters without axes are whole on each of 2 devices"


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"heads": None}, "heads"),
        ({"network": None}, "network"),
        ({"objective": None}, "objective"),
    ],
)
def test_continuing_with_other_parts_is_refused_by_name(folder, changes, part):
    _whole(folder)
    given = {"objective": two_passes, "heads": {"left_head": left_head(start=2)}} | changes
    with pytest.raises(ValueError, match=f"has a run whose {part} is .*, but here it is"):
        _train(folder / "whole", **given)


def test_a_loss_that_is_no_pair_of_scalars_is_refused_with_its_name(tmp_path):
    def of_each_row(network, params, drawn):
        return Loss(jnp.zeros(drawn.shown_BL.shape[0]), jnp.ones(()))

    head = dataclasses.replace(left_head(), loss=of_each_row)
    with pytest.raises(
        ValueError, match=r"left_head\.loss\(\.\.\.\)\.sum returned float32 \[\d+\]"
    ):
        _train(tmp_path, heads={"left_head": head})


@pytest.mark.parametrize("pair", [jnp.ones(2), jnp.ones(())])
def test_a_loss_that_is_no_pair_is_refused_with_its_name(tmp_path, pair):
    head = dataclasses.replace(left_head(), loss=lambda network, params, drawn: pair)
    with pytest.raises(ValueError, match=r"^left_head\.loss returned a .*; return \(sum, weight\)"):
        _train(tmp_path, heads={"left_head": head})

    def of_own(config: configs.Config, tokenizer: Any) -> Objective:
        return dataclasses.replace(two_passes(config, tokenizer), loss=head.loss)

    with pytest.raises(ValueError, match=r"^objective\.loss returned a .*; return \(sum, weight\)"):
        _train(tmp_path, objective=of_own)


def test_a_part_with_an_unknown_name_is_refused_with_the_nearest():
    for begin in (train, problem):
        with pytest.raises(TypeError, match="^optimiser is not a part .* mean 'optimizer'"):
            begin(configs.Config(), optimiser=None)  # type: ignore[call-arg]


def _named_left(config: configs.Config, tokenizer: Any) -> dict[str, Objective]:
    return {"left_head": Objective(plain_objective(config, tokenizer))}


def test_heads_whose_names_clash_or_do_not_end_in_head_are_refused(tmp_path):
    with pytest.raises(ValueError, match="the name of head 'left' does not end in '_head'; rename"):
        _train(tmp_path, heads={"left": left_head()})
    with pytest.raises(ValueError, match="have the same name: left_head; rename one"):
        _train(tmp_path, objective=_named_left, heads={"left_head": left_head()})
    with pytest.raises(TypeError, match="heads is a list; pass a dict"):
        _train(tmp_path, heads=[left_head()])
    with pytest.raises(TypeError, match="head left_head is a int; pass a Head"):
        _train(tmp_path, heads={"left_head": 3})
    with pytest.raises(ValueError, match="leaves nothing to train; set model.add_sampler_head"):
        _train(tmp_path, flags={"heads__train_main": "false", "train__init_from": "other"})


def _means_of(tmp_path: Path, heads: dict[str, Head]):
    """The metrics of the losses of a step in which all heads train, and the gradient."""
    flags = tiny_run.flags(tmp_path / "none", **FLAGS)
    with tiny_run.on_devices(1):
        made = problem(configs.load(None, flags), network=network, heads=heads)
    batch, step, stage = next(made.batches()), jnp.int32(6), made.stage(6)

    def total(params: Any) -> Any:
        drawn = made.draw(batch, jax.random.key(1), step, stage)
        return made.losses(params, {}, drawn, step, stage)

    return jax.jit(jax.value_and_grad(total, has_aux=True))(made.init(jax.random.key(0)))


def _sized_head(name: str, weight: float, **figures: tuple[float, float]) -> Head:
    def loss(network: Network, params: Any, drawn: Drawn) -> Loss:
        pairs = {key: tuple(map(jnp.float32, pair)) for key, pair in figures.items()}
        return Loss(3 * params[name]["x"].sum(), jnp.float32(weight), pairs)

    return Head(loss=loss, init=lambda key: {"x": jnp.ones(2)})


def test_a_loss_is_its_sum_over_its_weight_and_nothing_where_the_weight_is_nothing(tmp_path):
    weights = {"half_head": 0.5, "empty_head": 0.0, "double_head": 2.0}
    heads = {name: _sized_head(name, weight) for name, weight in weights.items()}
    (_, means), grads = _means_of(tmp_path, heads)
    assert [float(means[name]) for name in ("half", "empty", "double")] == [12.0, 0.0, 3.0]
    assert [float(grads[name]["x"][0]) for name in weights] == [6.0, 0.0, 1.5]


def test_the_figures_of_a_head_are_metrics_beside_its_loss(tmp_path):
    (_, means), _ = _means_of(
        tmp_path, {"half_head": _sized_head("half_head", 0.5, hits=(3.0, 4.0))}
    )
    assert float(means["hits"]) == 0.75 and float(means["half"]) == 12.0
    for name in ("loss", "half"):
        with pytest.raises(ValueError, match=f"'{name}' names two metrics"):
            _means_of(tmp_path, {"half_head": _sized_head("half_head", 0.5, **{name: (3.0, 4.0)})})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"weight_BL": jnp.ones(4)}, r"spans.draw\(...\).weight_BL returned float32 \[4\]"),
        ({"shown_BL": jnp.ones((2, 4))}, r"spans.draw\(...\).shown_BL returned float32 \[2, 4\]"),
        ({"total": jnp.ones(2)}, r"spans.draw\(...\).total returned float32 \[2\]"),
        (None, "spans.draw returned a tuple; return a Drawn"),
    ],
)
def test_what_an_objective_draws_has_the_shapes_of_the_batch(change, told):
    batch = Batch(jnp.ones((2, 4), jnp.int32), jnp.full(2, 4), jnp.zeros(2, jnp.int32))

    def draw(batch, key):
        drawn = Drawn(batch, batch.tokens_BL, jnp.ones((2, 4)), 8.0)
        return (1, 2) if change is None else drawn._replace(**change)

    with pytest.raises(ValueError, match=told):
        draw_all({"spans": Objective(draw)}, batch, jax.random.key(0))


def test_the_shares_of_objectives_add_up_to_one(tmp_path):
    def half(config, tokenizer):
        return {"half": Objective(plain_objective(config, tokenizer), share=0.5)}

    with pytest.raises(ValueError, match="the shares of the objectives are {'half': 0.5}; let"):
        _train(tmp_path, objective=half)
