"""Prints the likelihood of texts: ``python -m dlm_jax.evaluate --checkpoint runs/quickstart``.

Without texts, the program scores the held-out text of the model's corpus, and separately the EOS
tokens that fill rows after documents. The program prints one line per source: nats per token and
bits per character, each with its interval over windows or texts. The values are bounds for a
diffusion model and exact for a causal model, which can score any text (``--checkpoint runs/judge
--text samples.txt --split``).
"""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from dlm_jax.cli.common import (
    SEED,
    Parser,
    add_model_flags,
    load_model,
    read_text,
    start_jax,
    whole,
)
from dlm_jax.cli.ends import End, NotFiniteError, check_output, emit, program, refusals
from dlm_jax.config import parse_flags
from dlm_jax.data import Corpus, load_corpus, validation_windows
from dlm_jax.data.pipeline import Columns
from dlm_jax.data.text import JSON_LINES, is_json, is_json_lines, read_jsonl
from dlm_jax.inference.model import Model
from dlm_jax.inference.scoring import MOST_AT_ONCE, Score, score, score_rows
from dlm_jax.objectives.likelihood import first_scored, plus_minus
from dlm_jax.store.weights import SUFFIX


def make_parser() -> Parser:
    parser = Parser(prog="python -m dlm_jax.evaluate", description=__doc__)
    add, count = parser.add_argument, whole(1, MOST_AT_ONCE)
    add_model_flags(parser, has_dtype=False)
    forms = f"{', '.join(JSON_LINES)} and .json files contain texts, or prompts and responses"
    text_help = f"UTF-8 files to score; {forms}"
    add("--text", nargs="+", default=[], metavar="FILE", help=text_help)
    split_help = "split files into texts at this line (---, as in sample.py, if no LINE is given)"
    add("--split", nargs="?", const="---", metavar="LINE", help=split_help)
    held_out_help = "a corpus whose held-out part is scored; default: the model's own corpus"
    add("--held-out", metavar="SOURCE", help=held_out_help)
    add("--num-draws", type=count, default=1, metavar="N", help="masks per window (1)")
    add("--batch-size", type=count, default=16, metavar="B", help="windows per batch (16)")
    add("--seed", type=SEED, default=0, metavar="K", help="random seed of the masks (0)")
    add("--json", action="store_true", help="print JSON, one object per line")
    return parser


@program
def main(argv: Sequence[str] | None = None) -> int:
    start_jax()
    with refusals():
        args, _ = parse_flags(make_parser(), argv)
        check_output()
        model = load_model(args)
        drawn = {"num_draws": args.num_draws, "batch_size": args.batch_size, "seed": args.seed}
        for path in args.text:
            texts, prompts = _texts(path, args.split)
            result = score(model, texts, prompts=prompts, **drawn)
            _print_score(path, result, as_json=args.json)
        if not args.text:
            for name, result in _held_out(model, args, drawn):
                _print_score(name, result, as_json=args.json)
    return End.DONE


def _texts(path: str, split: str | None) -> tuple[list[str], list[str]]:
    """The texts of a file, and their prompts, which can be empty."""
    texts = [content := read_text(path)]
    if is_json_lines(path) or is_json(path):
        documents = list(read_jsonl(path, content))
        for document in documents:
            if document.messages:
                raise ValueError(f"{document.name} is a conversation; write prompt and response")
        return [one.text for one in documents], [one.prompt or "" for one in documents]
    if split is not None:
        parts = (text.strip("\n") for text in f"\n{content}\n".split(f"\n{split}\n"))
        texts = [text for text in parts if text]
    return texts, [""] * len(texts)


def _held_out(model: Model, args: Namespace, drawn: dict[str, int]) -> Iterator[tuple[str, Score]]:
    """Scores of the windows of the held-out text, separately for the text and the EOS tails."""
    corpus, rows = _held_out_rows(model, args)
    cost = score_rows(model, rows, **drawn)
    place_L = np.arange(rows["tokens"].shape[1])[None]
    first_N = first_scored(model.network, rows["given"])
    is_free_NL = (place_L >= first_N[:, None]) & (place_L < rows["length"][:, None])
    is_tail_NL = is_free_NL & (rows["tokens"] == model.tokenizer.eos_id)
    tail_N, free_N = is_tail_NL.sum(axis=1), is_free_NL.sum(axis=1)
    tokens_N = free_N - tail_N
    # The number of characters is known only for the whole text; it is divided among the windows in
    # proportion to their numbers of tokens.
    characters_N = tokens_N * (corpus.num_val_characters / tokens_N.sum())
    name = f"held-out text of {corpus.name}"
    error_N = cost.text_variance_B**0.5
    yield name, Score(cost.text_nats_B, tokens_N, characters_N, error_N, model.is_causal)
    if tail_N.any():
        nats_N = cost.nats_B - cost.text_nats_B
        unknown_N = np.full(len(nats_N), 0.0 if model.is_causal else np.nan)
        none_N = np.zeros_like(characters_N)
        yield f"EOS behind the {name}", Score(nats_N, tail_N, none_N, unknown_N, model.is_causal)


def _held_out_rows(model: Model, args: Namespace) -> tuple[Corpus, Columns]:
    """The held-out part of the requested corpus, or of the model's own corpus.

    A weights file may be untrusted, so it cannot determine which files are read. The location of
    written files depends only on the environment (`dlm_jax.data.text.default_cache_dir`).
    """
    assert model.config is not None, "a loaded model has a config"
    data, is_own = model.config.data, args.held_out is None
    is_file = args.checkpoint is not None and Path(args.checkpoint).suffix == SUFFIX
    if is_own and (is_file or not model.corpus_sha256):
        raise ValueError(
            f"{args.checkpoint} cannot select the text to read; name the text: --held-out SOURCE "
            "or --text"
        )
    corpus = load_corpus(
        data.source if is_own else args.held_out,
        tokenizer=model.tokenizer,
        held_out=data.held_out,
        layout=data.layout,
        tail=data.tail,
        seq_len=data.seq_len,
        weights=data.weights if is_own else (),
        start_id=model.start_id,
        chat=model.chat,
    )
    if is_own and corpus.sha256 != model.corpus_sha256:
        raise ValueError(
            f"{corpus.name} is not the text that the model was trained on (its sha256 differs), so "
            f"its end may not have been held out; restore it, or pass it as --held-out"
        )
    return corpus, validation_windows(
        corpus.val_rows, seq_len=data.seq_len, pad_id=model.tokenizer.pad_id
    )


def _print_score(name: str, result: Score, *, as_json: bool) -> None:
    tokens, characters = int(result.tokens.sum()), round(float(result.characters.sum()))
    nats, nats_error = result.nats_per_token
    bits, bits_error = result.bits_per_character if characters else (math.nan, math.nan)
    if not math.isfinite(nats):
        raise NotFiniteError(f"{name}: the score is not finite")
    kind = "exact" if result.is_exact else "upper bound"
    if as_json:
        figures = {
            "nats_per_token": nats,
            "nats_per_token_error": nats_error,
            "bits_per_character": bits,
            "bits_per_character_error": bits_error,
        }
        # JSON has no NaN.
        figures = {key: None if math.isnan(at) else at for key, at in figures.items()}
        counts = {"texts": len(result.nats), "tokens": tokens, "characters": characters}
        emit(json.dumps({"source": name, "kind": kind} | figures | counts))
        return
    line = f"{name}: {nats:.4f}{plus_minus(result.interval(nats_error))} nats/token"
    counts = f"{len(result.nats)} rows, {tokens:,} tokens"
    if characters:
        line += f", {bits:.4f}{plus_minus(result.interval(bits_error))} bits/character"
        counts += f", {characters:,} characters"
    emit(f"{line} ({kind}; {counts})")


if __name__ == "__main__":
    raise SystemExit(main())
