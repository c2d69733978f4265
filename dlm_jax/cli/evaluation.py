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
import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from dlm_jax.cli.common import (
    CHECKPOINT,
    IGNORE_CONFIG,
    QUANTIZE,
    SEED,
    Parser,
    load_model,
    start_jax,
    whole,
)
from dlm_jax.cli.ends import End, NotFiniteError, check_output, emit, program, refusals
from dlm_jax.config import parse_flags
from dlm_jax.data import Corpus, load_corpus, validation_windows
from dlm_jax.data.pipeline import Columns
from dlm_jax.data.text import JSON_LINES, NAMED, Document, is_json, is_json_lines, read_jsonl
from dlm_jax.inference.model import Model
from dlm_jax.inference.scoring import (
    MOST_AT_ONCE,
    Score,
    score,
    score_rows,
)
from dlm_jax.objectives.likelihood import first_scored, plus_minus
from dlm_jax.store.files import check_regular
from dlm_jax.store.weights import SUFFIX

Source = tuple[str, list[str], list[str] | None]
"""A set of texts to score: name, texts, and one prompt per text (or None)."""


def make_parser() -> Parser:
    parser = Parser(prog="python -m dlm_jax.evaluate", description=__doc__)
    add = parser.add_argument
    add("--checkpoint", metavar="PATH", help=CHECKPOINT)
    text_help = f"UTF-8 files to score; {', '.join(JSON_LINES)} and .json files contain texts"
    add("--text", nargs="+", default=[], metavar="FILE", help=text_help)
    split_help = "split files into texts at this line (---, as in sample.py, if no LINE is given)"
    add("--split", nargs="?", const="---", metavar="LINE", help=split_help)
    pairs_help = 'JSONL of {"prompt": ..., "response": ...}, to score responses given their prompts'
    add("--pairs", nargs="+", default=[], metavar="FILE", help=pairs_help)
    add("--continuation", metavar="TEXT", help="a text to score")
    add("--prompt", metavar="TEXT", help="text before --continuation")
    add(
        "--held-out",
        metavar="SOURCE",
        help="a corpus whose held-out part is scored; default: the model's own corpus",
    )
    add(
        "--num-draws",
        type=whole(1, MOST_AT_ONCE),
        default=1,
        metavar="N",
        help="masks per window (1)",
    )
    add(
        "--batch-size",
        type=whole(1, MOST_AT_ONCE),
        default=16,
        metavar="B",
        help="windows per batch (16)",
    )
    add("--seed", type=SEED, default=0, metavar="K", help="random seed of the masks (0)")
    add("--quantize", metavar="KIND", help=QUANTIZE)
    add("--ignore-config", action="append", default=[], metavar="KEY", help=IGNORE_CONFIG)
    add("--json", action="store_true", help="print JSON, one object per line")
    return parser


@program
def main(argv: Sequence[str] | None = None) -> int:
    start_jax()
    with refusals():
        args, _ = parse_flags(make_parser(), argv)
        if args.prompt is not None and args.continuation is None:
            raise ValueError(
                "--prompt has no effect without --continuation; add it or remove --prompt"
            )
        check_output()
        model = load_model(
            args.checkpoint, quantize=args.quantize, ignore_config=args.ignore_config
        )
        drawn = {"num_draws": args.num_draws, "batch_size": args.batch_size, "seed": args.seed}
        sources = list(_sources(args))
        for name, texts, prompts in sources:
            result = score(model, texts, prompts=prompts, **drawn)
            _print_score(name, result, as_json=args.json)
        if not sources:
            for name, result in _held_out(model, args, drawn):
                _print_score(name, result, as_json=args.json)
    return End.DONE


def _sources(args) -> Iterator[Source]:
    for path in args.text:
        text = _read(path)
        if is_json_lines(path) or is_json(path):
            yield path, _records(path, text, args.split), None
            continue
        texts = [text]
        if args.split is not None:
            texts = [t for t in f"\n{text}\n".split(f"\n{args.split}\n") if t.strip("\n")]
            texts = [t.strip("\n") for t in texts]
        yield path, texts, None
    for path in args.pairs:
        pairs = list(read_jsonl(path, _read(path)))
        _check_no_conversation(pairs)
        yield path, [pair.text for pair in pairs], [pair.prompt or "" for pair in pairs]
    if args.continuation is not None:
        prompts = None if args.prompt is None else [args.prompt]
        yield "continuation", [args.continuation], prompts


def _records(path: str, content: str, split: str | None) -> list[str]:
    """The texts of a JSON file."""
    if split is not None:
        raise ValueError(f"--split has no effect on {path}, whose lines are texts; remove it")
    found = list(read_jsonl(path, content))
    _check_no_conversation(found)
    for record in found:
        if record.prompt is not None:
            raise ValueError(f"{record.name} has a prompt; pass the file as --pairs")
    if not found:
        raise ValueError(f"{path} has no lines; add some")
    return [record.text for record in found]


def _check_no_conversation(documents: Sequence[Document]) -> None:
    for document in documents:
        if document.messages:
            raise ValueError(f"{document.name} is a conversation; pass the file as --held-out")


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
    written files depends only on the environment (`dlm_jax.data.pipeline.default_cache_dir`).
    """
    assert model.config is not None, "a loaded model has a config"
    data, is_own = model.config.data, args.held_out is None
    if is_own and args.checkpoint is not None and Path(args.checkpoint).suffix == SUFFIX:
        raise ValueError(
            f"{args.checkpoint} is a file and cannot select the text to read; name the text: "
            "--held-out SOURCE, or --text or --pairs"
        )
    if is_own and not model.corpus_sha256:
        raise ValueError(
            f"{args.checkpoint} does not name its training text; pass one: "
            "--held-out SOURCE, or --text or --pairs"
        )
    where = ""
    if is_own and (relative := [s for s in data.source if not _is_placed(s)]):
        where = f"data.source={','.join(relative)} of the run, in {Path.cwd()}"
    try:
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
    except ValueError as error:
        hint = f" ({where}; --held-out selects another corpus)" if where else ""
        raise ValueError(f"{error}{hint}") from None
    if where:
        print(where, file=sys.stderr)
    if is_own and corpus.sha256 != model.corpus_sha256:
        raise ValueError(
            f"{corpus.name} is not the text that the model was trained on (its sha256 differs), so "
            f"its end may not have been held out; restore it, or pass it as --held-out"
        )
    return corpus, validation_windows(
        corpus.val_rows, seq_len=data.seq_len, pad_id=model.tokenizer.pad_id
    )


def _is_placed(source: str) -> bool:
    """Returns whether the meaning of a source is independent of the working directory."""
    return source in NAMED or "://" in source or Path(os.path.expanduser(source)).is_absolute()


def _print_score(name: str, result: Score, *, as_json: bool) -> None:
    nats, nats_error = result.nats_per_token
    tokens, characters = int(result.tokens.sum()), round(float(result.characters.sum()))
    bits, bits_error = result.bits_per_character if characters else (math.nan, math.nan)
    _require_finite(name, nats)
    kind = "exact" if result.is_exact else "upper bound"
    record = {
        "nats_per_token": nats,
        "nats_per_token_error": _or_none(nats_error),
        "bits_per_character": _or_none(bits),
        "bits_per_character_error": _or_none(bits_error),
        "texts": len(result.nats),
        "tokens": tokens,
        "characters": characters,
    }
    nats_interval, bits_interval = result.interval(nats_error), result.interval(bits_error)
    per_character = f", {bits:.4f}{plus_minus(bits_interval)} bits/character" if characters else ""
    counts = f"{len(result.nats)} rows, {tokens:,} tokens"
    counts += f", {characters:,} characters" if characters else ""
    per_token = f"{nats:.4f}{plus_minus(nats_interval)} nats/token"
    line = f"{name}: {per_token}{per_character} ({kind}; {counts})"
    emit(json.dumps({"source": name, "kind": kind} | record) if as_json else line)


def _require_finite(name: str, *figures: float) -> None:
    if not all(map(math.isfinite, figures)):
        raise NotFiniteError(f"{name}: the score is not finite")


def _or_none(number: float) -> float | None:
    """The number, or None for NaN, because JSON has no NaN."""
    return None if math.isnan(number) else number


def _read(path: str) -> str:
    check_regular(path)
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; pass a text file") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 at byte {error.start}; convert it") from None


if __name__ == "__main__":
    raise SystemExit(main())
