"""Parameters as the steps beside a cache read them: laid out once for all slots of a model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from weakref import WeakValueDictionary

import jax

from dlm_jax import devices
from dlm_jax.sampling.program import Program
from dlm_jax.types import Params


class Layout:
    """Parameters, and the same as `CachedTrunk.ready` lays them out.

    Those of one network and one dict of parameters are one object, as long as somebody holds it.
    """

    def __init__(self, plain: Params, ready: Params):
        self.plain, self.ready = plain, ready


_alive: WeakValueDictionary[Hashable, Layout] = WeakValueDictionary()


def layout_of(program: Program, params: Params) -> Layout:
    """How the steps of a program beside a cache read the parameters of its network."""
    cached = program.network.cached
    assert cached is not None, "the request was checked"
    if cached.ready is None:
        return Layout(params, params)
    # The layout holds the parameters, so that no others have their place while it is there.
    key = (cached.ready, id(params))
    layout = _alive.get(key)
    if layout is None:
        with devices.used(program.rows):
            layout = Layout(params, params | _added(cached.ready)(params))
        _alive[key] = layout
    return layout


@functools.lru_cache(maxsize=64)
def _added(ready: Callable[[Params], Params]) -> Callable[[Params], Params]:
    """What `ready` adds to parameters or changes: the outputs of a program are new arrays, all."""

    def added(params: Params) -> Params:
        return {name: leaf for name, leaf in ready(params).items() if params.get(name) is not leaf}

    return jax.jit(added)
