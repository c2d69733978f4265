"""The optimiser of a run: clipping, then Muon or AdamW under a warm-up and cosine schedule."""

from __future__ import annotations

from typing import Any

import jax
import optax
from optax import contrib

from dlm_jax.config import OptimConfig
from dlm_jax.sharding import path_name


def learning_rate(peak: float, config: OptimConfig, *, num_steps: int) -> optax.Schedule:
    """Learning rate by step: linear up to `peak`, then a cosine to ``final_ratio * peak``.

    Step ``warmup_steps`` is the first at the peak. Neither end is reached in the run, so that no
    step is wasted on a rate of 0: the first has ``peak / (warmup_steps + 1)``, and the cosine ends
    where the step after the last would be.
    """
    return optax.warmup_cosine_decay_schedule(
        init_value=peak / (config.warmup_steps + 1),
        peak_value=peak,
        warmup_steps=config.warmup_steps,
        decay_steps=max(num_steps, config.warmup_steps + 1),
        end_value=config.final_ratio * peak,
    )


def is_matrix(path: str) -> bool:
    """Whether the parameter at `path` is a matrix inside a block: what Muon orthogonalises."""
    return "blocks/" in path and path.endswith("/kernel")


def _over_paths(params: Any, value: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: value(path_name(path)), params)


def _muon_dimensions(params: Any) -> Any:
    # Kernels are stacked [depth, fan_in, fan_out]; the depth axis is a batch of matrices.
    stacked = contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
    return _over_paths(params, lambda path: stacked if is_matrix(path) else None)


def make_optimizer(config: OptimConfig, *, num_steps: int) -> optax.GradientTransformation:
    """Gradient transformation of a run of `num_steps` steps.

    Gradients are scaled down to a global norm of ``clip``. ``muon`` (Jordan et al. 2024) updates
    the matrices of the blocks, and Adam the embeddings, the head and the norms, each with its own
    peak learning rate; ``adamw`` (Loshchilov and Hutter 2019) updates everything. Weight decay is
    decoupled and applies to the matrices of the blocks alone.
    """
    rate = learning_rate(config.learning_rate, config, num_steps=num_steps)

    def decays(params: Any) -> Any:
        return _over_paths(params, is_matrix)

    if config.name == "adamw":
        update = optax.adamw(
            rate, b1=config.b1, b2=config.b2, weight_decay=config.weight_decay, mask=decays
        )
    else:
        update = contrib.muon(
            rate,
            beta=config.muon_momentum,
            weight_decay=config.weight_decay,
            adam_b1=config.b1,
            adam_b2=config.b2,
            adam_learning_rate=learning_rate(
                config.adam_learning_rate, config, num_steps=num_steps
            ),
            muon_weight_dimension_numbers=_muon_dimensions,
        )
    return optax.chain(optax.clip_by_global_norm(config.clip), update)
