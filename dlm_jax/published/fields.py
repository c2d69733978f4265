"""A JSON object of a model's directory whose every field is used, known to be idle, or refused."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

_MISSING = object()

IDLE = frozenset({
    "_name_or_path", "architectures", "attention_dropout", "auto_map", "bos_token_id",
    "bos_token", "chunk_size_feed_forward", "dtype", "embedding_dropout", "eos_token_id",
    "eos_token", "flash_attention", "id2label", "init_cutoff_factor", "init_device", "init_fn",
    "init_std", "initializer_range", "label2id", "mask_token_id", "max_window_layers",
    "mlp_ratio", "model_type", "name_or_path", "output_attentions", "output_dropout",
    "output_hidden_states", "output_router_logits", "pad_token_id", "precision",
    "pretraining_tp", "problem_type", "residual_dropout", "return_dict", "router_aux_loss_coef",
    "rope_full_precision", "sliding_window", "torch_dtype", "transformers_version", "use_cache",
})  # fmt: skip
"""Fields that change nothing of what a model computes, or that are read elsewhere."""


class Fields:
    """The fields of one file, taken one by one; `finish` refuses what nobody took.

    Args:
      values: the JSON object.
      where: its file, for errors.
    """

    def __init__(self, values: Mapping[str, Any], where: str):
        self._left = dict(values)
        self.where = where

    def refuse(self, name: str, value: Any, reason: str) -> ValueError:
        """The error of a field; raise it."""
        return ValueError(f"{self.where}: {name}={value!r} {reason}")

    def take(self, name: str, kind: type, default: Any = _MISSING) -> Any:
        """The value of a field, of that type; a null is its default.

        Raises:
          ValueError: it is absent and has no default, or is of another type.
        """
        value = self._left.pop(name, None)
        if value is None:
            if default is _MISSING:
                raise ValueError(f"{self.where} has no field {name!r}, which this model needs")
            return default
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.refuse(name, value, f"is no {kind.__name__}; the file is damaged")
        return value

    def must(self, **wanted: Any) -> None:
        """Raises ValueError for a field whose value is none of those that are implemented.

        An absent or null field passes. A tuple holds several values that are.
        """
        for name, values in wanted.items():
            value = self._left.pop(name, None)
            known = values if isinstance(values, tuple) else (values,)
            if value is not None and value not in known:
                raise self.refuse(
                    name, value, f"is not implemented; only {' or '.join(map(repr, known))} is"
                )

    def finish(self, idle: Iterable[str] = ()) -> None:
        """Raises ValueError for a field that nobody took, is not idle, and says something."""
        for name, value in self._left.items():
            if name in IDLE or name in idle or value in (None, False, 0, "", [], {}):
                continue
            raise self.refuse(
                name, value,
                "is unknown to dlm_jax and may matter; take it out of a copy of the file if it "
                "changes nothing of what the model computes",
            )  # fmt: skip


def without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The JSON object of these pairs; ValueError where Python would keep the last of two."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice[:100]!r} is given twice")
    return found


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
      ValueError: the file is missing or holds no object.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=without_twins)
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; download the whole directory") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read ({error}); download it again") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds no JSON object; download it again")
    return found
