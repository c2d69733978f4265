"""Losses, batches and parameters for the tests of training steps and their stages."""

from __future__ import annotations

import functools
from typing import Any, cast

import jax
import numpy as np
import toy
from jax.sharding import Mesh

from dlm_jax.config import (
    Config,
    HeadsConfig,
    MeshConfig,
    ObjectiveConfig,
    SamplingParams,
    TrainConfig,
)
from dlm_jax.data import Setup
from dlm_jax.distributed.partitions import make_mesh, path_name
from dlm_jax.heads import HEADS, MAIN, Head
from dlm_jax.model.transformer import build
from dlm_jax.objectives.corruption import LINEAR
from dlm_jax.objectives.objective import Batch, Mixture, denoising, elbo
from dlm_jax.training.train_step import Stage, StageLoss
from dlm_jax.types import Network

ROWS, POSITIONS = 8, 8
ADDED = HEADS
"""The built-in heads that a flag adds to a model."""
WITH_HEADS: dict[str, Any] = {head.switch: True for head in ADDED}
MESHES = {
    "one": (MeshConfig(), 1),
    "data": (MeshConfig(data=8), 8),
    "cube": (MeshConfig(data=2, fsdp=2, tensor=2), 8),
}


def staged(
    network: Network,
    mixture: Mixture,
    mesh: Mesh,
    groups: tuple[str, ...] = (MAIN,),
    heads: HeadsConfig | None = None,
) -> StageLoss:
    """The loss of the stage in which these groups train; the model alone by default."""
    return StageLoss(
        network=network,
        mixture=mixture,
        heads=records(heads or HeadsConfig(), mesh),
        stage=Stage(groups),
        mask_id=toy.MASK,
    )


class Tokenizer:
    """The special ids of the toy vocabulary."""

    mask_id, pad_id, eos_id = toy.MASK, toy.PAD, toy.EOS
    banned_ids, vocab_size = toy.BANNED, toy.VOCAB_SIZE


def records(
    heads: HeadsConfig,
    place: Mesh | None = None,
    sample: SamplingParams | None = None,
    **model: Any,
) -> tuple[Head, ...]:
    """The records of the heads of a model, by default of all that a flag adds."""
    config = Config(
        model=toy.config(**(model or WITH_HEADS)),
        heads=heads,
        sample=sample or SamplingParams(),
        train=TrainConfig(init_from="another run"),
    )
    setup = Setup(config, cast(Any, Tokenizer()), place or mesh())
    return tuple(head for make in HEADS if (head := make(setup)) is not None)


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
    return {name: leaf for name, leaf in tree.items() if name not in {head.name for head in HEADS}}


def batch(seed: int) -> Batch:
    """Rows with given tokens, and one that is shorter."""
    rng = np.random.default_rng(seed)
    tokens_BL = rng.integers(0, toy.MASK, (ROWS, POSITIONS)).astype(np.int32)
    length_B = np.array([8, 8, 8, 5, 8, 8, 8, 8], np.int32)
    return Batch(tokens_BL, length_B, np.array([0, 0, 2, 0, 0, 3, 0, 0], np.int32))


def mixture(denoising_share: float = 0.0) -> Mixture:
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
    used = [name for name, share in shares.items() if share > 0]
    return Mixture({name: parts[name] for name in used}, {name: shares[name] for name in used})


def by_path(tree: Any) -> dict[str, np.ndarray]:
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {path_name(path): np.asarray(leaf) for path, leaf in flat}
