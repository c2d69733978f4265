"""Reads and writes models from other projects; presets reproduce their sampling loops."""

from dlm_jax.hf.chat import ChatTemplate, check_template, saved_chat
from dlm_jax.hf.directory import (
    KEPT,
    UNPUBLISHED,
    Published,
    is_published,
    read_chat,
    read_kept,
    read_model,
    read_published,
    read_shape,
    restored,
    write_published,
)
from dlm_jax.hf.hub import fetched, hub_id

__all__ = [
    "KEPT",
    "ChatTemplate",
    "Published",
    "UNPUBLISHED",
    "check_template",
    "fetched",
    "hub_id",
    "is_published",
    "read_chat",
    "read_kept",
    "read_model",
    "read_published",
    "read_shape",
    "restored",
    "saved_chat",
    "write_published",
]
