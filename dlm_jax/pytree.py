"""Frozen dataclasses that are pytrees, with a unique structure for each class."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

import jax

T = TypeVar("T", bound=type)


@dataclass_transform(frozen_default=True)
def pytree(cls: T) -> T:
    """Makes a class a frozen dataclass and a pytree with a unique tree structure.

    jaxlib treats the structures of two `register_dataclass` classes as equal if they have the same
    number of data fields and no metadata, so `jax.jit` can run the wrong program. Every class
    therefore has a metadata field ``identity``, which contains the class itself.

    Fields are leaves, except static fields: those made by `static` and `fact`, and others with
    ``"static": True`` in their metadata.
    """
    # Python 3.14 makes the annotations of a class on access, so they may not be in its `vars`.
    cls.__annotations__ = {**cls.__annotations__, "identity": type}
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
