"""What ``sample.py`` shows beside the texts: what was read back, and the page of a denoising."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import dlm_jax
from dlm_jax.cli.ends import say_error
from dlm_jax.config import RowSettings
from dlm_jax.data import Tokenizer
from dlm_jax.inference.candidates import Written
from dlm_jax.viewing.frames import Frame
from dlm_jax.viewing.rows import special_names
from dlm_jax.viewing.trace import write_trace


def heads_line(model: dlm_jax.Model, sample: RowSettings) -> str:
    """Which heads a model has, and the fill and order of a row with these settings."""
    names = [f"{n} (not trained yet)" if n in model.untrained else n for n in model.heads]
    return f"heads: {', '.join(names) or 'none'}; fill={sample.fill}, order={sample.order}"


def read_back_line(record: Written, tokenizer: Tokenizer, size: int) -> str:
    """One committed token as text: place, probability, and the `size` likeliest candidates."""

    def piece(token: int) -> str:
        text = tokenizer.decode([token])
        return repr(text) if text else f"<{token}>"

    seen = record.candidates
    best = zip(seen.ids[:size].tolist(), seen.logits[:size].tolist(), strict=True)
    rivals = ", ".join(f"{piece(token)} {logit:.4g}" for token, logit in best)
    return (
        f"row {seen.row} step {seen.step} position {seen.index}: {piece(record.token)} "
        f"p={record.probability:.4g} of {seen.num_survivors} candidates: {rivals}"
    )


def print_read_back(result: dlm_jax.Texts, tokenizer: Tokenizer, size: int) -> None:
    """Prints a line for each token that was read back, on standard error."""
    for record in (record for records in result.read_back for record in records):
        print(read_back_line(record, tokenizer, size), file=sys.stderr)


def check_page(name: str) -> None:
    """Raises ValueError for a page that could not be written once the work is done."""
    path = Path(name)
    if not path.parent.is_dir():
        raise ValueError(f"--trace {name}: there is no such folder; make it first")
    if path.is_dir():
        raise ValueError(f"--trace {name} is a folder; name a file in it")
    try:
        # Permissions do not tell of everything, such as a file system that is read only.
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ValueError(
            f"--trace {name} cannot be written: {error.strerror}; name another"
        ) from None


def write_page(
    model: dlm_jax.Model, prompt: dict[str, Any], frames: dict[int, list[Frame]], path: str
) -> bool:
    """Whether the page that plays the denoising could be written; says so either way."""
    title = prompt.get("prompt") or prompt.get("template") or "unprompted"
    decode, names = model.tokenizer.decode, special_names(model.tokenizer)
    try:
        write_trace(
            path, [frames[i] for i in sorted(frames)], decode, title=title[:80], names=names
        )
    except OSError as error:
        say_error(f"--trace {path} cannot be written: {error.strerror}; the texts are complete")
        return False
    print(f"wrote {path}", file=sys.stderr)
    return True
