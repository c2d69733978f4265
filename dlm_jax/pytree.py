"""Frozen dataclasses that are pytrees, each with a structure that no other class shares."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

import jax

T = TypeVar("T", bound=type)


@dataclass_transform(frozen_default=True)
def pytree(cls: T) -> T:
    """Makes a class a frozen dataclass and a pytree whose structure no other class shares.

    jaxlib compares the structures of two `register_dataclass` classes as equal when they have as
    many data fields and no metadata, and `jax.jit` then may run one's program for the other. So
    every class carries itself as metadata, in a field ``identity``.

    Fields are leaves, but for those of `static` and `fact`, and others with ``"static": True`` in
    their metadata, which are compiled in.
    """
    cls.__annotations__ = {**vars(cls).get("__annotations__", {}), "identity": type}
    cls.identity = dataclasses.field(
        default=cls, kw_only=True, repr=False, metadata={"static": True}
    )
    made = dataclass(frozen=True)(cls)
    fields = dataclasses.fields(made)
    return jax.tree_util.register_dataclass(
        made,
        data_fields=[field.name for field in fields if not field.metadata.get("static")],
        meta_fields=[field.name for field in fields if field.metadata.get("static")],
    )
