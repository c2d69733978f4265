"""Modules of the user's own: what ``--rules`` and host samplers name."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Collection
from types import ModuleType

from dlm_jax.inference.candidates import HostSampler, shown
from dlm_jax.settings import nearest


def import_module(module: str, where: str) -> ModuleType:
    """The module of that name, which may lie in the working directory.

    Raises:
      ValueError: it cannot be imported; the line says why.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:  # whatever a module of the user's may raise
        raise ValueError(f"{where}: {module} fails: {type(error).__name__}: {error}") from None


def allowed_samplers(modules: Collection[str]) -> Callable[[str], HostSampler]:
    """What finds ``MODULE:FUNCTION`` in these modules, and refuses any other with a ValueError."""

    @functools.cache
    def find(name: str) -> HostSampler:
        module, where = name.partition(":")[0], f"host_sampler={name!r}"
        if ":" in name and module not in modules:
            raise ValueError(
                f"{where} is of a module that is not allowed; add --allow-host-sampler {module}"
            )
        return import_sampler(name, where)

    return find


def import_sampler(name: str, where: str) -> HostSampler:
    """What ``MODULE:FUNCTION`` names.

    Raises:
      ValueError: it cannot be imported or called; the line says why, after `where`.
    """
    module, _, function = name.partition(":")
    if not module or not function:
        raise ValueError(f"{where} is not MODULE:FUNCTION; write rules:only_digits, say")
    found = import_module(module, where)
    if not hasattr(found, function):
        known = [known for known in vars(found) if not known.startswith("_")]
        raise ValueError(f"{where}: {module} has no {function!r}; {nearest(function, known)}")
    sampler: HostSampler = getattr(found, function)
    if not callable(sampler):
        raise ValueError(f"{where} is {shown(sampler)}, which cannot be called; name a function")
    return sampler
