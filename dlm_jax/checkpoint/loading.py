"""Parameters from wherever a trained model is kept: a run, a file, or the package."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dlm_jax.checkpoint.files import Place, checkpoint_root
from dlm_jax.checkpoint.shipped import located
from dlm_jax.checkpoint.store import Checkpoints, load_params
from dlm_jax.checkpoint.weights import SUFFIX, load_weights, read_meta


def load_any(
    path: str | os.PathLike[str] | None,
    make_abstract: Callable[[dict[str, Any]], Any] | None = None,
    *,
    place: Place | None = None,
    report: Callable[[str], None] | None = None,
) -> tuple[Any, dict[str, Any]]:
    """(parameters, JSON beside them) of a run, a weights file, or a model that ships.

    Args:
      path: what ``train.out_dir`` was, or the directory of its checkpoints; or a file that
        ``python -m dlm_jax.export`` wrote; or a name, see `dlm_jax.checkpoint.shipped`.
      make_abstract: from the JSON to the parameters' shapes, as of `load_params`.
      place: where each parameter goes, and as what; by default whole onto the first local device,
        as it is stored, those of a file as float32.
      report: takes one line if a damaged checkpoint was passed over, or the file is an old one.

    Raises:
      ValueError: nothing usable is there; the line says what and the remedy.
    """
    found = located(path)

    def abstract(meta: dict[str, Any]) -> Any:
        assert make_abstract is not None
        return make_abstract(_checked(meta, found))

    wanted = None if make_abstract is None else abstract
    if Path(found).suffix == SUFFIX:
        params, meta = load_weights(found, wanted, place=place, report=report)
    else:
        params, meta = load_params(found, wanted, place=place, report=report)
    return params, _checked(meta, found)


def load_meta(
    path: str | os.PathLike[str], *, report: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """The JSON beside the parameters that `load_any` would give of a path; the same errors."""
    if Path(path).suffix == SUFFIX:
        return _checked(read_meta(path), path)
    root = checkpoint_root(path)
    root = root / "checkpoints" if (root / "checkpoints").is_dir() else root
    with Checkpoints(root, keep=1) as checkpoints:
        return _checked(checkpoints.read_meta(report=report), path)


def _checked(meta: dict[str, Any], path: str | os.PathLike[str]) -> dict[str, Any]:
    """The JSON, which must say what model it is of."""
    for name in ("config", "tokenizer"):
        if not isinstance(meta.get(name), dict):
            raise ValueError(f"{path} says nothing of its {name}; load a model that train.py made")
    if not isinstance(meta["config"].get("model"), dict):
        raise ValueError(f"{path} has a config without [model]; load a model that train.py made")
    return meta
