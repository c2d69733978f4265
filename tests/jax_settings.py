"""Settings of JAX that hold for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax


@contextlib.contextmanager
def jax_setting(name: str, value: Any) -> Iterator[None]:
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        yield
    finally:
        jax.config.update(name, before)
