"""The models that come with the package, by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from dlm_jax.checkpoint.weights import SUFFIX

SHIPPED: Mapping[str, Path] = {
    path.stem: path
    for path in sorted((Path(__file__).parent.parent / "shipped").glob(f"*{SUFFIX}"))
}
"""Their files by name: what ``--checkpoint NAME`` takes beside paths."""

DEFAULT = "shakespeare"
"""What is used where no model is named: a small Shakespeare in byte-pair tokens."""


def located(path: str | os.PathLike[str] | None) -> str | os.PathLike[str]:
    """The path itself, or that of the model of this name; None is `DEFAULT`.

    What stands at a path is meant before a name; a name alone can be neither.

    Raises:
      ValueError: nothing is there under this name, and no model that ships has it; the line lists
        those that do.
    """
    if path is None:
        return SHIPPED[DEFAULT]
    if not isinstance(path, str) or Path(path).name != path or Path(path).exists():
        return path
    if path in SHIPPED:
        return SHIPPED[path]
    if Path(path).suffix == SUFFIX:
        return path
    raise ValueError(
        f"checkpoint directory {path} does not exist; check the path, or name a model that ships "
        f"with the package: {', '.join(SHIPPED)}"
    )
