"""What the backward pass keeps of a block, and what it computes again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from dlm_jax.model.forms import SAVED

_INPUT = "block_input"

_POLICIES = jax.checkpoint_policies

POLICIES: dict[str, Callable[..., Any]] = {
    "block": _POLICIES.nothing_saveable,
    "attention": _POLICIES.save_only_these_names(SAVED),
    "dots": _POLICIES.save_from_both_policies(
        _POLICIES.dots_with_no_batch_dims_saveable, _POLICIES.save_only_these_names(SAVED)
    ),
    "offload": _POLICIES.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=[_INPUT],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}
"""What is kept beside the input of each block, by ``model.remat``; ``none`` keeps everything.

``block``: nothing, which costs a second forward. ``attention``: what attention returns, so that
its kernel runs once. ``dots``: that and every product with parameters, so that only what lies
between them is computed again. ``offload``: nothing, and the inputs lie in the host's memory.
"""


def rematerialised(block: Callable[..., jax.Array], policy: str) -> Callable[..., jax.Array]:
    """``block(x, parameters, context)`` whose backward pass follows that policy."""
    if policy == "none":
        return block

    def named(x: jax.Array, parameters: Any, context: Any) -> jax.Array:
        return block(checkpoint_name(x, _INPUT), parameters, context)

    return jax.checkpoint(
        named if policy == "offload" else block, prevent_cse=False, policy=POLICIES[policy]
    )
