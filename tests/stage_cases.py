"""Losses, batches and parameters for the tests of training steps and their stages."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import toy
from jax.sharding import Mesh

from dlm_jax.config import Config, HeadsConfig, MeshConfig, ObjectiveConfig, TrainConfig
from dlm_jax.distributed.partitions import make_mesh, path_name
from dlm_jax.heads import HEADS, Head
from dlm_jax.model.transformer import build
from dlm_jax.objectives.corruption import LINEAR
from dlm_jax.objectives.objective import Batch, Objective, denoising, elbo
from dlm_jax.training.tasks import Task, make_task
from dlm_jax.types import Network

ROWS, POSITIONS = 8, 8
WITH_HEADS: dict[str, Any] = {f"add_{name}_head": True for name in HEADS}
MESHES = {
    "one": (MeshConfig(), 1),
    "data": (MeshConfig(data=8), 8),
    "cube": (MeshConfig(data=2, fsdp=2, tensor=2), 8),
}


class Tokenizer:
    """The special ids of the toy vocabulary."""

    mask_id, pad_id, eos_id = toy.MASK, toy.PAD, toy.EOS
    banned_ids, vocab_size = toy.BANNED, toy.VOCAB_SIZE


TOKENIZER: Any = Tokenizer()


def config(train: Mapping[str, Any] | None = None, **sections: Any) -> Config:
    """The config of the toy model with some sections replaced."""
    given = {"batch_size": ROWS, "init_from": "another run"} | dict(train or {})
    parts: dict[str, Any] = {"model": toy.config()} | sections
    return Config(**parts, train=TrainConfig(**given))


def task(
    network: Network | None = None,
    objectives: dict[str, Objective] | None = None,
    place: Mesh | None = None,
    *,
    optimizer: Any = None,
    **changes: Any,
) -> Task:
    """The task of these parts and of a config, without heads by default."""
    given = objectives or mixture()
    return make_task(
        config(**changes),
        TOKENIZER,
        place or mesh(),
        network=network or toy.network(),
        objective=lambda config, tokenizer: given,
        optimizer=optimizer,
    )


def with_heads(network: Network | None = None, **changes: Any) -> Task:
    """The task of a model of one layer with both heads."""
    given = {"model": toy.config(depth=1, **WITH_HEADS), "objectives": mixture()} | changes
    return task(network or model(**WITH_HEADS), **given)


def records(heads: HeadsConfig, **model: Any) -> Mapping[str, Head]:
    """The records of the heads of a model by name, by default of all that a flag adds."""
    return with_heads(heads=heads, model=toy.config(**(model or WITH_HEADS))).heads


def mesh(name: str = "one") -> Mesh:
    config, devices = MESHES[name]
    return make_mesh(config, jax.devices()[:devices])


def model(**changes: Any) -> Network:
    """A model of one layer, which compiles fast."""
    return build(toy.config(**({"depth": 1} | changes)))


@functools.cache
def params(**changes: Any) -> Any:
    """Parameters of `model` with both heads as after training, none of them zero."""
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(model(**WITH_HEADS, **changes).init, jax.random.key(0))
    return jax.tree.map(lambda leaf: np.float32(0.3 * rng.standard_normal(leaf.shape)), shapes)


def main_of(tree: Any) -> Any:
    """Parameters without those of the heads."""
    return {name: leaf for name, leaf in tree.items() if not name.endswith("_head")}


def batch(seed: int) -> Batch:
    """Rows with given tokens, and one that is shorter."""
    rng = np.random.default_rng(seed)
    tokens_BL = rng.integers(0, toy.MASK, (ROWS, POSITIONS)).astype(np.int32)
    length_B = np.array([8, 8, 8, 5, 8, 8, 8, 8], np.int32)
    return Batch(tokens_BL, length_B, np.array([0, 0, 2, 0, 0, 3, 0, 0], np.int32))


def mixture(denoising_share: float = 0.0) -> dict[str, Objective]:
    """The ELBO; with denoising, some supervised tokens are shown, and some of those wrongly."""
    parts = {
        "elbo": functools.partial(elbo, schedule=LINEAR, mask_id=toy.MASK),
        "denoising": functools.partial(
            denoising,
            settings=ObjectiveConfig(patterns=("random",), mask_share=0.5, random_share=0.3),
            mask_id=toy.MASK,
            random_ids=(0, 1, 2),
        ),
    }
    shares = {"elbo": 1.0 - denoising_share, "denoising": denoising_share}
    return {name: Objective(parts[name], share=share) for name, share in shares.items() if share}


def by_path(tree: Any) -> dict[str, np.ndarray]:
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {path_name(path): np.asarray(leaf) for path, leaf in flat}
