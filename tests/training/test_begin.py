"""A run may begin with a trained model: what it takes, what it says, and what it refuses."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tiny_run
import toy
import toy_model

import dlm_jax
import dlm_jax.config as configs
from dlm_jax.config import Config, DataConfig, MeshConfig, TrainConfig
from dlm_jax.data import CharacterTokenizer
from dlm_jax.distributed.partitions import axes_of, make_mesh, shardings
from dlm_jax.model.transformer import build
from dlm_jax.store import load_params, save_weights
from dlm_jax.training.init_from import check_same_run, load_initial_params
from dlm_jax.training.train_step import TrainState
from dlm_jax.training.trainer import prepare

TOKENIZER = toy_model.TOKENIZER
HEADS = {"add_sampler_head": True, "sampler_context": 2, "add_critic_head": True}


def _model(**changes: Any):
    return toy.config(**({"vocab_size": TOKENIZER.vocab_size} | changes))


@functools.cache
def _params(seed: int, **changes: Any) -> Any:
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(build(_model(**changes)).init, jax.random.key(0))
    return jax.tree.map(lambda leaf: np.float32(rng.standard_normal(leaf.shape)), shapes)


def _fresh(**changes: Any) -> TrainState:
    """A new state, spread over eight devices."""
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    params = _params(1, **changes)
    state = TrainState(params, {"moment": np.ones(3)}, np.int32(0), jax.tree.map(np.copy, params))
    return jax.device_put(state, shardings(state, axes_of(build(_model(**changes))), mesh))


def _begun(
    source: str, fresh: TrainState, tokenizer: Any, *, model: Any, report: Any
) -> TrainState:
    """The state of a run that begins with a model."""
    config = Config(model=model, train=TrainConfig(init_from=source))
    return fresh.start_from(load_initial_params(config, fresh.params, tokenizer, report=report))


def _trained(path: Path, **changes: Any) -> str:
    """A weights file of another model."""
    meta = {
        "config": configs.to_dict(
            Config(model=_model(**changes), data=DataConfig(seq_len=toy_model.MODEL.max_length))
        ),
        "tokenizer": TOKENIZER.to_json(),
    }
    save_weights(path / "model.safetensors", _params(2, **changes), meta)
    return str(path / "model.safetensors")


@pytest.mark.parametrize("heads", [{}, HEADS])
def test_a_run_takes_all_parameters_of_the_same_model_and_nothing_else(tmp_path, heads):
    lines: list[str] = []
    fresh = _fresh(**heads)
    state = _begun(
        _trained(tmp_path, **heads), fresh, TOKENIZER, model=_model(**heads), report=lines.append
    )
    tiny_run.assert_same(state.params, _params(2, **heads))
    tiny_run.assert_same(state.ema, state.params)
    assert (state.opt_state, state.step) == (fresh.opt_state, fresh.step)
    # The step donates both, so they must not be the same memory.
    assert state.ema["embedding"] is not state.params["embedding"]
    place = jax.tree.map(lambda leaf: leaf.sharding, fresh)
    assert jax.tree.map(lambda leaf: leaf.sharding, state) == place
    assert lines == []


def test_heads_that_the_model_lacks_begin_fresh_and_it_says_so(tmp_path):
    lines: list[str] = []
    source = _trained(tmp_path)
    state = _begun(source, _fresh(**HEADS), TOKENIZER, model=_model(**HEADS), report=lines.append)
    heads = {name: _params(1, **HEADS)[name] for name in ("sampler_head", "critic_head")}
    tiny_run.assert_same(state.params, _params(2) | heads)
    tiny_run.assert_same(state.ema, state.params)
    (line,) = lines
    assert line.startswith(f"train.init_from={source} lacks ")
    assert line.endswith(", which are freshly initialised")
    assert "sampler_head" in line and "critic_head" in line


def test_heads_that_the_run_does_not_have_are_left_out_and_it_says_so(tmp_path):
    lines: list[str] = []
    source = _trained(tmp_path, **HEADS)
    state = _begun(source, _fresh(), TOKENIZER, model=_model(), report=lines.append)
    expected = _params(2, **HEADS)
    tiny_run.assert_same(state.params, {name: expected[name] for name in state.params})
    assert state.params.keys() == _params(1).keys()
    (line,) = lines
    assert line.startswith(f"train.init_from={source} has ")
    assert line.endswith(", which are ignored")
    assert "sampler_head" in line and "critic_head" in line


@pytest.mark.parametrize(
    ("theirs", "ours", "message"),
    [
        ({"width": 32}, {}, "has model.width=32, but the config has 16; use the"),
        ({"vocab_size": TOKENIZER.vocab_size + 4}, {}, "has embedding of shape"),
        ({"tied_head": False}, {}, "has model.tied_head=False, but the config has True; use"),
        ({"mlp_width": 8}, {}, "of shape (2, 8, 16), but the config requires (2, 64, 16)"),
        ({"rope_theta": 100.0}, {}, "has model.rope_theta=100.0, but the config has 10000.0"),
        (HEADS | {"sampler_context": 1}, HEADS, "sampler_head/inner/kernel of shape (48, 16)"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_in_one_line(tmp_path, theirs, ours, message):
    source = _trained(tmp_path, **theirs)
    with pytest.raises(ValueError, match=r"^train\.init_from=.*\.safetensors .*$") as error:
        _begun(source, _fresh(**ours), TOKENIZER, model=_model(**ours), report=pytest.fail)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("version", [None, "0.2.0"])
def test_each_door_of_a_saved_model_names_all_keys_that_another_version_saved(tmp_path, version):
    source = _trained(tmp_path)
    params, meta = load_params(source)
    meta["config"]["model"]["mode"] = "language_model"
    meta["config"]["rl"] = {"reward": ""}
    if version:
        meta["program"] = {"version of dlm_jax": version}
    save_weights(source, params, meta)
    now = {"config": configs.to_dict(Config())}
    for where, door in {
        source: lambda: dlm_jax.load(source),
        f"train.init_from={source}": lambda: _begun(
            source, _fresh(), TOKENIZER, model=_model(), report=pytest.fail
        ),
        "the run in train.out_dir=": lambda: check_same_run(now, meta),
    }.items():
        with pytest.raises(ValueError) as error:
            door()
        assert str(error.value).startswith(where)
        assert str(error.value).endswith(
            f": unknown '[rl]', 'model.mode', saved by dlm_jax {version or 'of another version'}"
            "; use that version, or remove them from the saved config (docs/training.md)"
        )


def test_a_model_of_another_text_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has a different tokenizer; use data.tokenizer=init"):
        _begun(
            _trained(tmp_path),
            _fresh(),
            CharacterTokenizer.of("Other text"),
            model=_model(),
            report=pytest.fail,
        )


def test_a_source_that_is_not_there_is_refused():
    with pytest.raises(ValueError, match=r"nowhere\.safetensors does not exist"):
        _begun("nowhere.safetensors", _fresh(), TOKENIZER, model=_model(), report=pytest.fail)


def test_a_run_of_the_heads_alone_begins_with_the_model_that_it_names(tmp_path):
    def prepared(name: str, report=pytest.fail, **changes: Any):
        with tiny_run.on_devices(1):
            flags = tiny_run.flags(tmp_path / name, model__depth=1, **changes)
            run = prepare(configs.load(None, flags), report=report)
        run.checkpoints.close()
        return run

    other = prepared("other", train__seed=1)
    source = tmp_path / "other.safetensors"
    save_weights(source, other.state.params, other.meta)
    lines: list[str] = []
    run = prepared(
        "heads",
        report=lines.append,
        model__add_sampler_head="true",
        heads__train_main="false",
        train__init_from=source,
    )
    heads = {"sampler_head": run.state.params["sampler_head"]}
    tiny_run.assert_same(run.state.params, other.state.params | heads)
    assert len(lines) == 1 and "lacks sampler_head" in lines[0]
    assert run.task.stage(0) == ("sampler_head",)


def test_a_run_takes_the_tokenizer_of_its_model_and_continues_without_it(tmp_path):
    changes = {"train__steps": 4, "train__eval_every": 0, "data__tokenizer": "init"}
    (tmp_path / "text.txt").write_text(tiny_run.TEXT.replace("q", "z"))
    source = tiny_run.run(tmp_path / "source", **changes | {"data__tokenizer": "character"})
    given = changes | {"data__source": tmp_path / "text.txt"}
    first = tiny_run.run(tmp_path / "run", train__init_from=tmp_path / "source", **given)
    assert first.run.corpus.tokenizer == source.run.corpus.tokenizer
    again = tiny_run.run(tmp_path / "run", train__init_from=tmp_path / "gone", **given)
    assert again.run.first_step == 4
    assert again.run.corpus.tokenizer == source.run.corpus.tokenizer
    tiny_run.assert_same(again.state.params, first.state.params)
