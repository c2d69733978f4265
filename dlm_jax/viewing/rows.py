"""Rows of the denoising loop as the views show them."""

from __future__ import annotations

from dlm_jax.data import Tokenizer
from dlm_jax.inference.results import Row
from dlm_jax.viewing.frames import Frame


def frame_of(number: int, row: Row, *, mask_id: int, steps: int | None = None) -> Frame:
    """The row as it stands; `steps` is how many it may take in all."""
    return Frame(
        row=number,
        step=row.steps,
        tokens=row.tokens,
        is_frozen=row.is_frozen,
        is_hole=(row.tokens == mask_id) & ~row.is_frozen,
        committed=row.committed,
        logprobs=row.logprobs,
        status=row.status.name.lower(),
        steps=steps,
        origin=row.origin,
    )


def special_names(tokenizer: Tokenizer) -> dict[int, str]:
    """What to show for the ids that stand for no text."""
    names = {
        tokenizer.mask_id: "⟨mask⟩",
        tokenizer.pad_id: "⟨pad⟩",
        tokenizer.bos_id: "⟨bos⟩",
        tokenizer.eos_id: "⟨eos⟩",
    }
    return {token: name for token, name in names.items() if token is not None}
