"""Configuration of the data."""

from __future__ import annotations

import dataclasses
from typing import Literal

from dlm_jax.config.fields import field, require, require_fit

INIT = "init"
"""The ``data.tokenizer`` that is the tokenizer of ``train.init_from``."""


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What is trained on, and how text becomes tokens."""

    source: tuple[str, ...] = field(
        ("python-reference",),
        "UTF-8 or JSONL files or globs, or python-reference (the language reference inside "
        "CPython), python-source (its standard library) or tinyshakespeare; or sharded corpora, "
        "directories or URLs (gs://, s3://)",
    )
    weights: tuple[float, ...] = field(
        (), "sharded corpora: share of rows of each; empty: as many as they have tokens"
    )
    tokenizer: str = field(
        "character",
        "character: those of the corpus; byte: the 256 of UTF-8; bpe:N: trained on the corpus; "
        "init: that of train.init_from; corpus: that of shards; or the path of a tokenizer.json",
    )
    new_characters: Literal["add", "refuse"] = field(
        "add",
        "tokenizer=init: characters of the corpus that a character model lacks are added, with "
        "fresh embeddings, and reported (add), or refused",
    )
    layout: Literal["windows", "documents"] = field(
        "windows", "rows are windows of the packed text, or documents"
    )
    tail: Literal["eos", "pad"] = field(
        "eos", "documents: what fills a row; eos is trained, so that a model learns where to stop"
    )
    seq_len: int = field(128, "tokens of one training row (L)")
    held_out: float = field(0.05, "fraction of the corpus kept for evaluation")
    cache_dir: str = field("", "where token files are kept; empty: $DLM_JAX_CACHE or ~/.cache")

    def __post_init__(self) -> None:
        require_fit("data", self)
        require(
            len(self.source) > 0, "data.source is empty; name a file, a glob or python-reference"
        )
        require(self.seq_len >= 2, f"data.seq_len={self.seq_len} must be at least 2")
        require(0 < self.held_out < 1, f"data.held_out={self.held_out} must be between 0 and 1")
