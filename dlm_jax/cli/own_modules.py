"""Modules of the user's own: what ``--rules`` and ``--host-sampler`` name."""

from __future__ import annotations

import importlib
import os
import sys
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


def import_sampler(name: str) -> HostSampler:
    """What ``MODULE:FUNCTION`` names.

    Raises:
      ValueError: it cannot be imported or called; the line says why.
    """
    module, _, function = name.partition(":")
    where = f"--host-sampler {name}"
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
