"""The state of a commit, remask or noise rule between steps.

The state is any pytree that the rule's ``init(num_rows, num_positions)`` returns. A leaf whose
second axis follows the number of positions belongs to the positions: `score` reads and updates it
where logits are read, edits move it, and remasking resets it. Every other leaf belongs to the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dlm_jax.sampling.edits.moves import PositionMap, moved
from dlm_jax.sampling.positions import at_places, returned


def follows_positions(rule: Any, num_rows: int, num_positions: int) -> tuple[bool, ...]:
    """For each leaf of the rule's state, True if it belongs to the positions; static."""
    some, more = (
        jax.tree.leaves(jax.eval_shape(lambda size=size: rule.init(num_rows, size)))
        for size in (num_positions, num_positions + 1)
    )
    for leaf in some:
        if leaf.shape[:1] != (num_rows,):
            raise ValueError(
                f"{type(rule).__name__}.init returned an array of shape {leaf.shape}; its first "
                f"axis must have the {num_rows} rows"
            )
    follows = tuple(one.shape != other.shape for one, other in zip(some, more, strict=True))
    for leaf, is_by_position in zip(some, follows, strict=True):
        if is_by_position and leaf.shape[1] != num_positions:
            raise ValueError(
                f"{type(rule).__name__}.init returned an array of shape {leaf.shape}; its second "
                f"axis must have the {num_positions} positions"
            )
    return follows


def position_leaves(rule: Any, state: Any, num_positions: int) -> tuple[jax.Array, ...]:
    """The leaves that belong to the positions."""
    leaves = jax.tree.leaves(state)
    if not leaves:
        return ()
    follows = follows_positions(rule, leaves[0].shape[0], num_positions)
    return tuple(
        leaf for leaf, is_by_position in zip(leaves, follows, strict=True) if is_by_position
    )


def with_position_leaves(rule: Any, state: Any, new: tuple[jax.Array, ...], num_positions: int):
    """The state with other leaves of the positions."""
    leaves, tree = jax.tree.flatten(state)
    if not leaves:
        return state
    follows, rest = follows_positions(rule, leaves[0].shape[0], num_positions), iter(new)
    if len(new) != sum(follows):
        raise ValueError(
            f"the fill returned {len(new)} arrays of the state of {type(rule).__name__}, which has "
            f"{sum(follows)}; return the rule_state of FillInput.draw"
        )
    leaves = [
        next(rest) if is_by_position else leaf
        for leaf, is_by_position in zip(leaves, follows, strict=True)
    ]
    return jax.tree.unflatten(tree, leaves)


def gather_state(rule: Any, state: Any, places_N: jax.Array, num_positions: int) -> Any:
    """The state of N positions, ``[N, ...]``, at places ``row * L + index``. Leaves that belong to
    the rows are those of the positions' rows.
    """
    leaves, tree = jax.tree.flatten(state)
    if not leaves:
        return state
    row_N = places_N // num_positions
    follows = follows_positions(rule, leaves[0].shape[0], num_positions)
    gathered = [
        at_places(leaf, places_N) if is_by_position else leaf[row_N]
        for leaf, is_by_position in zip(leaves, follows, strict=True)
    ]
    return jax.tree.unflatten(tree, gathered)


def score_positions(
    rule: Any,
    state: Any,
    places_N: jax.Array,
    num_positions: int,
    score: Callable[[Any], tuple[jax.Array, Any]],
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Calls ``score(state_N) -> (score_N, state_N)`` with the state of N positions. Returns the
    scores, and the new leaves ``[N, ...]`` that belong to the positions.
    """
    result = score(gather_state(rule, state, places_N, num_positions))
    score_N, state_N = check_pair(result, rule, "score")
    returned(score_N, rule, "score", "N", places_N.shape, jnp.float32)
    check_state(state_N, state, rule, "score")
    leaves = jax.tree.leaves(state)
    if not leaves:
        return score_N, ()
    follows = follows_positions(rule, leaves[0].shape[0], num_positions)
    pairs = zip(jax.tree.leaves(state_N), follows, strict=True)
    return score_N, tuple(leaf for leaf, is_by_position in pairs if is_by_position)


def choose_rows(is_new_B: jax.Array, new: Any, old: Any) -> Any:
    """The state `new` in some rows, and `old` in the others."""

    def one(x: jax.Array, y: jax.Array) -> jax.Array:
        return x if x is y else jnp.where(is_new_B.reshape(-1, *[1] * (x.ndim - 1)), x, y)

    return jax.tree.map(one, new, old)


def move_state(rule: Any, state: Any, position_map: PositionMap, num_positions: int) -> Any:
    """The state after edits: moved with the positions, and as in `init` at inserted positions."""

    def move(leaf: jax.Array, fresh: jax.Array) -> jax.Array:
        shape = (*leaf.shape[:2], -1)
        one = jax.vmap(moved, in_axes=(None, 2, 2), out_axes=2)
        return one(position_map, leaf.reshape(shape), fresh.reshape(shape)).reshape(leaf.shape)

    return _map_positions(rule, state, move, num_positions)


def reset_state(rule: Any, state: Any, is_at_BL: jax.Array) -> Any:
    """The state as in `init` at some positions."""

    def reset(leaf: jax.Array, fresh: jax.Array) -> jax.Array:
        is_fresh = is_at_BL.reshape(*is_at_BL.shape, *[1] * (leaf.ndim - 2))
        return jnp.where(is_fresh, fresh, leaf)

    return _map_positions(rule, state, reset, is_at_BL.shape[1])


def _map_positions(rule: Any, state: Any, change: Any, num_positions: int) -> Any:
    old = position_leaves(rule, state, num_positions)
    if not old:
        return state
    fresh = position_leaves(rule, rule.init(old[0].shape[0], num_positions), num_positions)
    new = tuple(change(leaf, start) for leaf, start in zip(old, fresh, strict=True))
    return with_position_leaves(rule, state, new, num_positions)


def check_pair(result: Any, rule: Any, method: str) -> tuple[Any, Any]:
    """Returns the pair that a method of a rule returned.

    Raises:
      ValueError: the result is not a pair. The message names the rule and the method.
    """
    if not (isinstance(result, tuple) and len(result) == 2):
        raise ValueError(
            f"{type(rule).__name__}.{method} returned a {type(result).__name__}; return a pair of "
            f"the result and the state"
        )
    return result


def check_state(new: Any, before: Any, rule: Any, method: str) -> None:
    """Raises ValueError if a method returned a state of another structure or dtype than `init`."""
    structure, expected = jax.tree.structure(new), jax.tree.structure(before)
    if structure != expected:
        raise ValueError(
            f"{type(rule).__name__}.{method} returned a state {structure}; return the arrays of "
            f"init, {expected}"
        )
    for leaf, start in zip(jax.tree.leaves(new), jax.tree.leaves(before), strict=True):
        if jnp.result_type(leaf) != start.dtype:
            raise ValueError(
                f"{type(rule).__name__}.{method} returned a state with {jnp.result_type(leaf)} "
                f"where init has {start.dtype}; return the dtypes of init"
            )
