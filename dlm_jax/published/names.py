"""Which tensors of a published model make up which parameter of the Transformer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from dlm_jax.types import Params


@dataclass(frozen=True)
class Source:
    """The tensor that a parameter comes from.

    Attributes:
      name: of the tensor; ``{i}`` is the number of the block, ``{e}`` that of the expert.
      rows: first row and one behind the last, where the tensor holds several parameters; None: all.
    """

    name: str
    rows: tuple[int, int] | None = None


@dataclass(frozen=True)
class Piece:
    """One tensor's part of one parameter.

    Attributes:
      tensor: name of the tensor.
      rows: of it that are meant; None: all.
      place: index of the layer, or of layer and expert, in the parameter; () for all of it.
      is_transposed: whether the tensor's two axes change places; linear maps are stored
        ``[out, in]`` and kept ``[in, out]``.
    """

    tensor: str
    rows: tuple[int, int] | None
    place: tuple[int, ...]
    is_transposed: bool


def pieces_of(
    sources: Mapping[str, Source], abstract: Params, *, dense_layers: int
) -> dict[str, list[Piece]]:
    """The pieces of every parameter by its path (``blocks/mlp/up/kernel``).

    Args:
      sources: by path; those of the first, dense blocks are under ``dense_blocks``.
      abstract: the parameters' shapes.
      dense_layers: blocks that are not in ``blocks``.

    Raises:
      ValueError: a parameter has no source.
    """
    found: dict[str, list[Piece]] = {}
    for path, leaf in leaves(abstract):
        if path not in sources:
            raise ValueError(f"no tensor of this family holds {path}; leave out what needs it")
        source = sources[path]
        is_transposed = path.endswith("/kernel") or bool(re.search(r"/expert_\w+$", path))
        first = dense_layers if path.startswith("blocks/") else 0
        found[path] = [
            Piece(source.name.format(i=first + place[0] if place else 0,
                                     e=place[1] if len(place) > 1 else 0),
                  source.rows, place, is_transposed)
            for place in _places(source.name, leaf.shape)
        ]  # fmt: skip
    return found


def shape_of(piece: Piece, leaf_shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a piece as it is stored, from that of its parameter."""
    shape = leaf_shape[len(piece.place) :]
    return shape[::-1] if piece.is_transposed else shape


def leaves(tree: Params) -> list[tuple[str, Any]]:
    """Leaves of nested dicts with their paths ``a/b/c``."""
    return [
        (jax.tree_util.keystr(keys, simple=True, separator="/"), leaf)
        for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    ]


def _places(name: str, shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if "{i}" not in name:
        yield ()
        return
    for layer in range(shape[0]):
        if "{e}" not in name:
            yield (layer,)
            continue
        for expert in range(shape[1]):
            yield (layer, expert)
