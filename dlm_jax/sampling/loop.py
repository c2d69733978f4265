"""The compiled sampling loop: up to n steps of every row."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax import devices
from dlm_jax.sampling import mask_step, noise_step
from dlm_jax.sampling.edits.edit_rule import places
from dlm_jax.sampling.forward import ready
from dlm_jax.sampling.noise import NoiseRule
from dlm_jax.sampling.program import Program
from dlm_jax.sampling.state import State
from dlm_jax.sampling.state import start as start
from dlm_jax.types import Params

_NEVER = 2**31 - 1


class Advance:
    """Compiled ``(params, state, num_steps) -> state``: up to `num_steps` steps of each row.

    The loop ends early when no row is running or `num_ends` rows have ended. Both numbers are
    traced, and `state` is donated. One program is compiled per shape, chain and set of rules.
    ``compiled`` lists the compiled shapes, ``program`` is the static part that they share, and
    ``has_run`` is True after a call has returned.
    """

    def __init__(self, program: Program, *, compiler_options: Mapping[str, Any] | None = None):
        self.compiled: list[str] = []
        self.has_run = False
        self.program = program
        self._jitted = jax.jit(
            self._advance,
            donate_argnums=1,
            compiler_options=dict(compiler_options) if compiler_options else None,
        )

    def __call__(
        self,
        params: Params,
        state: State,
        num_steps: int | np.int32 | jax.Array,
        num_ends: int | np.int32 | jax.Array = _NEVER,
    ) -> State:
        """The state after up to `num_steps` more steps, or after `num_ends` rows have ended."""
        # An explicit transfer, which `jax.transfer_guard("disallow")` allows.
        steps, ends = (
            jax.device_put(np.int32(limit)) if isinstance(limit, int) else limit
            for limit in (num_steps, num_ends)
        )
        state = self._jitted(params, state, steps, ends)
        self.has_run = True
        return state

    def _advance(
        self, params: Params, state: State, num_steps: jax.Array, num_ends: jax.Array
    ) -> State:
        rows, positions = state.canvas.tokens_BL.shape
        # This line runs only when a new program is traced.
        self.compiled.append(f"rows={rows} canvas={positions}")
        with devices.exact(self.program.rows):
            params = ready(self.program, params, state)
            return run_steps(self.program, params, state, num_steps, num_ends)


def advance(
    step: Callable[[Params, Any], Any],
    params: Params,
    state: Any,
    num_steps: jax.Array | int,
    num_ends: jax.Array | int = _NEVER,
) -> Any:
    """The state after up to `num_steps` more steps, or after `num_ends` of the rows have ended.

    Args:
      step: ``(params, state) -> state``, one step of every running row, which leaves the others.
      params: parameters, which `step` receives.
      state: any pytree with an attribute ``is_running_B``, True for the rows that have not ended.
        Its shapes do not change from step to step.
      num_steps: maximum number of steps; can be traced.
      num_ends: number of rows whose end stops the loop; can be traced.
    """
    ran_B = state.is_running_B

    def goes_on(carry: tuple[jax.Array, Any]) -> jax.Array:
        taken, state = carry
        ended = jnp.sum(ran_B & ~state.is_running_B)
        return (taken < num_steps) & (ended < num_ends) & jnp.any(state.is_running_B)

    def one_more(carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        taken, state = carry
        return taken + 1, step(params, state)

    return jax.lax.while_loop(goes_on, one_more, (jnp.zeros((), jnp.int32), state))[1]


def step(program: Program, params: Params, state: State) -> State:
    """One step: the rule's own, if it has one, that of noise for a noise rule, and otherwise that
    of MASK. The parameters must be in the layout that `dlm_jax.sampling.forward.ready` returns.
    """
    rule = state.rules.commit
    if own_step := getattr(rule, "step", None):
        return own_step(program, params, state)
    is_noise = isinstance(rule, NoiseRule)
    return (noise_step if is_noise else mask_step).step(program, params, state)


def run_steps(
    program: Program,
    params: Params,
    state: State,
    num_steps: jax.Array | int,
    num_ends: jax.Array | int = _NEVER,
) -> State:
    """`advance` with `step`."""
    if state.edits is not None:
        origin_BL = places(state.edits.origin_BL)
        state = state._replace(edits=state.edits._replace(origin_BL=origin_BL))
    return advance(functools.partial(step, program), params, state, num_steps, num_ends)
