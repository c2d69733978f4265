"""Tokenizers, corpora, token files, and the training pipeline."""

from dlm_jax.data.corpus import LAYOUTS, Corpus, Setup, load_corpus
from dlm_jax.data.pipeline import RowSource, train_batches, train_dataset, validation_windows
from dlm_jax.data.rows import TAILS, DocumentRows
from dlm_jax.data.shards import DamagedShard, ShardMixture, TokenShards
from dlm_jax.data.text import (
    BUILTIN_CORPUS,
    PYTHON_SOURCE,
    Document,
    Source,
    join_documents,
    read_documents,
    split_text,
)
from dlm_jax.data.tokenizers import (
    TOKENIZERS,
    ByteTokenizer,
    CharacterTokenizer,
    HubTokenizer,
    SubwordTokenizer,
    Tokenizer,
    check_fits,
    from_json,
    make_tokenizer,
    noise_ids,
    qwen_json,
    text_ids,
    train_bpe,
)

__all__ = [
    "BUILTIN_CORPUS",
    "LAYOUTS",
    "PYTHON_SOURCE",
    "TAILS",
    "TOKENIZERS",
    "ByteTokenizer",
    "CharacterTokenizer",
    "Corpus",
    "DamagedShard",
    "Document",
    "DocumentRows",
    "HubTokenizer",
    "ShardMixture",
    "RowSource",
    "Setup",
    "Source",
    "SubwordTokenizer",
    "TokenShards",
    "Tokenizer",
    "check_fits",
    "from_json",
    "join_documents",
    "load_corpus",
    "make_tokenizer",
    "qwen_json",
    "read_documents",
    "split_text",
    "noise_ids",
    "text_ids",
    "train_batches",
    "train_bpe",
    "train_dataset",
    "validation_windows",
]
