"""Tokenizers, corpora, token files, and the training pipeline."""

from dlm_jax.data.corpus import LAYOUTS, Corpus, load_corpus
from dlm_jax.data.pipeline import train_batches, validation_windows
from dlm_jax.data.shards import DamagedShard, TokenShards
from dlm_jax.data.text import BUILTIN_CORPUS, join_documents, read_documents, split_text
from dlm_jax.data.tokenizers import (
    NO_MASK,
    ByteTokenizer,
    CharacterTokenizer,
    HubTokenizer,
    SubwordTokenizer,
    Tokenizer,
    check_fits,
    from_json,
    make_tokenizer,
    noise_ids,
    prefix_of,
    text_ids,
    train_bpe,
)

__all__ = [
    "BUILTIN_CORPUS",
    "ByteTokenizer",
    "CharacterTokenizer",
    "Corpus",
    "DamagedShard",
    "HubTokenizer",
    "LAYOUTS",
    "NO_MASK",
    "SubwordTokenizer",
    "TokenShards",
    "Tokenizer",
    "check_fits",
    "from_json",
    "join_documents",
    "load_corpus",
    "make_tokenizer",
    "noise_ids",
    "prefix_of",
    "read_documents",
    "split_text",
    "text_ids",
    "train_batches",
    "train_bpe",
    "validation_windows",
]
