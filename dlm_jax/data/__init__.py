"""Text in, batches out: tokenizers, corpora, token files, and the training pipeline."""

from dlm_jax.data.corpora import (
    BUILTIN_CORPUS,
    Document,
    Source,
    join_documents,
    read_documents,
    split_text,
)
from dlm_jax.data.loading import Corpus, load_corpus
from dlm_jax.data.pipeline import train_batches, train_dataset, validation_windows
from dlm_jax.data.tokenizers import (
    TOKENIZERS,
    ByteTokenizer,
    CharacterTokenizer,
    Tokenizer,
    from_json,
    make_tokenizer,
)

__all__ = [
    "BUILTIN_CORPUS",
    "TOKENIZERS",
    "ByteTokenizer",
    "CharacterTokenizer",
    "Corpus",
    "Document",
    "Source",
    "Tokenizer",
    "from_json",
    "join_documents",
    "load_corpus",
    "make_tokenizer",
    "read_documents",
    "split_text",
    "train_batches",
    "train_dataset",
    "validation_windows",
]
