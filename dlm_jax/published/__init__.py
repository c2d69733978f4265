"""Models of other projects: their directories read and written, and their loops as settings."""

from dlm_jax.published.chat import ChatTemplate
from dlm_jax.published.loading import Published, is_published, read_published, read_shape
from dlm_jax.published.writing import write_published

__all__ = [
    "ChatTemplate",
    "Published",
    "is_published",
    "read_published",
    "read_shape",
    "write_published",
]
