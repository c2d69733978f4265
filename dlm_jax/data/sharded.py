"""Sharded corpora ready to train on: opened, checked, and mixed by weight."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from dlm_jax.data.corpora import Source
from dlm_jax.data.corpus import Corpus
from dlm_jax.data.mixing import Mixture, quotas_of
from dlm_jax.data.shard_index import INDEX_NAME, Index, fingerprint, read_index
from dlm_jax.data.shards import TokenShards, joined
from dlm_jax.data.tokenizer_kinds import make_tokenizer
from dlm_jax.data.tokenizers import Tokenizer
from dlm_jax.storage import is_remote

# Shards have a tokenizer of their own: what asks for that one, the last being a config's default.
_OWN = ("corpus", "character")


def roots_of(source: Source) -> list[str]:
    """The directories and URLs of sharded corpora that `source` names; none for text.

    Raises:
      ValueError: `source` names sharded corpora and other things.
    """
    several = [source] if isinstance(source, str | os.PathLike) else list(source)
    names = [os.fspath(one) for one in several]
    found = [name for name in names if _is_sharded(name)]
    if found and len(found) < len(names):
        other = next(name for name in names if name not in found)
        raise ValueError(
            f"data.source={other} is no sharded corpus, and {found[0]} is one; "
            "make shards of it with python -m dlm_jax.data.shard"
        )
    return found


def _is_sharded(name: str) -> bool:
    return is_remote(name) or (Path(os.path.expanduser(name)) / INDEX_NAME).is_file()


def load_sharded(
    roots: Sequence[str],
    *,
    tokenizer: str | Tokenizer | Callable[[str], Tokenizer],
    seq_len: int,
    weights: Sequence[float],
    cache_dir: Path,
) -> Corpus:
    """The corpus that the shards under `roots` make up; nothing of them is held in memory.

    Args:
      roots: directories or URLs.
      tokenizer: a kind or tokenizer, or a function that makes one for a text, that the shards must
        have been made with; ``corpus``, or ``character``, a config's default: that of the shards.
      seq_len: tokens of a row.
      weights: share of rows of each, or none: as many as they have tokens.
      cache_dir: local folder for shards of buckets.

    Raises:
      ValueError: a corpus or bucket that is not there, damage, another tokenizer, weights that do
        not fit, or fewer tokens than a row has.
    """
    indices = [read_index(root) for root in roots]
    if callable(tokenizer):
        tokenizer = tokenizer("")
    _check_tokenizers(roots, indices, tokenizer)
    parts = {
        part: [
            TokenShards.of(root, index, part, cache_dir)
            for root, index in zip(roots, indices, strict=True)
        ]
        for part in ("train", "val")
    }
    quotas = quotas_of(_shares(roots, parts["train"], weights))
    used = [number for number, quota in enumerate(quotas) if quota]
    for number in used:
        _check_fills_a_row(roots[number], parts["train"][number], seq_len)
    for one in (*parts["train"], *parts["val"]):
        one.check()
    train = Mixture(
        tuple(parts["train"][number] for number in used), tuple(quotas[n] for n in used)
    )
    return Corpus(
        name=", ".join(roots),
        tokenizer=indices[0].tokenizer,
        train_rows=train.sources[0] if len(used) == 1 else train,
        val_rows=joined([parts["val"][number] for number in used]),
        sha256=_sha256(indices, used),
        num_train_characters=_sum(indices, used, "train", "characters"),
        num_val_characters=_sum(indices, used, "val", "characters"),
        num_train_tokens=_sum(indices, used, "train", "tokens"),
        num_val_tokens=_sum(indices, used, "val", "tokens"),
    )


def _check_tokenizers(
    roots: Sequence[str], indices: Sequence[Index], tokenizer: str | Tokenizer
) -> None:
    first = indices[0]
    for root, index in zip(roots, indices, strict=True):
        if fingerprint(index.tokenizer) != fingerprint(first.tokenizer):
            raise ValueError(
                f"data.source: {root} was made with another tokenizer than {roots[0]}; "
                "make both with the same one"
            )
        if (index.dtype, index.record_tokens) != (first.dtype, first.record_tokens):
            raise ValueError(
                f"data.source: {root} has other records than {roots[0]}; make it again"
            )
    if isinstance(tokenizer, str):
        if tokenizer in _OWN:
            return
        if tokenizer.startswith("bpe:"):
            raise ValueError(
                f"data.tokenizer={tokenizer!r} would train one, and {roots[0]} has its own; "
                "use data.tokenizer=corpus"
            )
        tokenizer = make_tokenizer(tokenizer, "")
    if fingerprint(tokenizer) != fingerprint(first.tokenizer):
        raise ValueError(
            f"data.source: {roots[0]} was made with another tokenizer than data.tokenizer; make it "
            "again with that one, or use data.tokenizer=corpus"
        )


def _shares(
    roots: Sequence[str], train: Sequence[TokenShards], weights: Sequence[float]
) -> tuple[float, ...]:
    """Shares of the rows of each corpus: the weights, or else its number of training tokens."""
    if weights and len(weights) != len(roots):
        raise ValueError(
            f"data.weights has {len(weights)} numbers for {len(roots)} corpora; give one for each"
        )
    return tuple(map(float, weights)) or tuple(float(len(one)) for one in train)


def _check_fills_a_row(root: str, train: TokenShards, seq_len: int) -> None:
    if len(train) < seq_len:
        raise ValueError(
            f"{root} has {len(train)} training tokens, fewer than one "
            f"window of seq_len={seq_len}; give more text or a smaller seq_len"
        )


def _sha256(indices: Sequence[Index], used: Sequence[int]) -> str:
    if len(used) == 1:
        return indices[used[0]].sha256
    names = " ".join(indices[number].sha256 for number in used)
    return hashlib.sha256(names.encode("ascii")).hexdigest()


def _sum(indices: Sequence[Index], used: Sequence[int], part: str, fact: str) -> int:
    return sum(getattr(shard, fact) for n in used for shard in getattr(indices[n], part))
