"""Prints what texts cost: ``python -m dlm_jax.evaluate --checkpoint runs/quickstart``.

Without texts it scores the held-out text of the model's own corpus. One line per source goes to
standard output: nats per token and bits per character, each with its standard error over the
windows or texts. A diffusion model's figures are bounds, an autoregressive model's exact, so that
it can judge any text (``--checkpoint runs/judge --text samples.txt --split``).

A sequence scorer says which share of the texts is corrupted; without texts, how far off it is on
held-out text that was corrupted as in its training.
"""

from __future__ import annotations

import json
import math
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import dlm_jax
from dlm_jax.cli.common import CHECKPOINT, Parser, refusals, start_jax
from dlm_jax.data import Corpus, load_corpus, validation_windows
from dlm_jax.data.jsonl import read_jsonl
from dlm_jax.data.rows import Columns
from dlm_jax.diffusion.scoring import error_line, summary
from dlm_jax.inference.likelihood import Score, score, score_rows
from dlm_jax.inference.model import Model
from dlm_jax.inference.scorer import corrupted_share, held_out_errors


class Source(NamedTuple):
    """Texts to score together: their name, the texts, and a prompt for each or None."""

    name: str
    texts: list[str]
    prompts: list[str] | None


def make_parser() -> Parser:
    """The flags of this program."""
    parser = Parser(prog="python -m dlm_jax.evaluate", description=__doc__)
    add = parser.add_argument
    add("--checkpoint", metavar="PATH", help=CHECKPOINT)
    add("--text", nargs="+", default=[], metavar="FILE", help="UTF-8 files to score")
    split_help = "files hold several texts, with this line between them (---, as sample.py does)"
    add("--split", nargs="?", const="---", metavar="LINE", help=split_help)
    pairs_help = 'JSONL of {"prompt": ..., "response": ...}: responses given their prompts'
    add("--pairs", nargs="+", default=[], metavar="FILE", help=pairs_help)
    add("--continuation", metavar="TEXT", help="a text to score")
    add("--prompt", metavar="TEXT", help="what --continuation continues")
    add("--held-out", metavar="SOURCE", help="a corpus whose held-out part is scored; default: own")
    add("--num-draws", type=int, default=1, metavar="N", help="masks per window (1)")
    add("--batch-size", type=int, default=16, metavar="B", help="windows that run at once (16)")
    add("--seed", type=int, default=0, metavar="K", help="of the masks (0)")
    add("--json", action="store_true", help="one JSON object a line instead of a sentence")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 2 refused."""
    start_jax()
    with refusals():
        args = make_parser().parse_args(argv)
        if args.prompt is not None and args.continuation is None:
            raise ValueError("--prompt means nothing without --continuation; add that or drop it")
        if args.split is not None and not args.text:
            raise ValueError("--split means nothing without --text; add that or drop it")
        model = dlm_jax.load(args.checkpoint, report=lambda line: print(line, file=sys.stderr))
        drawn = {"num_draws": args.num_draws, "batch_size": args.batch_size, "seed": args.seed}
        sources = list(_sources(args))
        if model.network.scorer is not None:
            _judge(model, args, sources)
            return 0
        for source in sources:
            result = score(model, source.texts, prompts=source.prompts, **drawn)
            print(_line(source.name, result, as_json=args.json), flush=True)
        if not sources:
            name, result = _held_out(model, args.held_out, drawn)
            print(_line(name, result, as_json=args.json))
    return 0


def _sources(args) -> Iterator[Source]:
    for path in args.text:
        text = _read(path)
        texts = [text]
        if args.split is not None:
            texts = [t for t in f"\n{text}\n".split(f"\n{args.split}\n") if t.strip("\n")]
            texts = [t.strip("\n") for t in texts]
        yield Source(path, texts, None)
    for path in args.pairs:
        pairs = list(_pairs(path))
        yield Source(path, [response for _, response in pairs], [prompt for prompt, _ in pairs])
    if args.continuation is not None:
        prompts = None if args.prompt is None else [args.prompt]
        yield Source("continuation", [args.continuation], prompts)


def _held_out(model: Model, source: str | None, drawn: dict[str, int]) -> tuple[str, Score]:
    """Score of the windows of the held-out text that training never saw."""
    corpus, rows = _held_out_rows(model, source)
    cost = score_rows(model, rows, **drawn)
    tokens = rows["length"] - rows["given"]
    # Characters are known for the whole text alone: each window gets its share by tokens.
    characters = tokens * (corpus.num_val_characters / tokens.sum())
    result = Score(cost.nats_N, tokens, characters, cost.variance_N**0.5, model.is_causal)
    return f"held-out text of {corpus.name}", result


def _held_out_rows(model: Model, source: str | None, **how: int) -> tuple[Corpus, Columns]:
    assert model.config is not None, "a loaded model has its config"
    data = model.config.data
    corpus = load_corpus(
        data.source if source is None else source,
        tokenizer=model.tokenizer,
        held_out=data.held_out,
        cache_dir=data.cache_dir or None,
        layout=data.layout,
        tail=data.tail,
        seq_len=data.seq_len,
        weights=data.weights if source is None else (),
    )
    return corpus, validation_windows(
        corpus.val_rows, seq_len=data.seq_len, pad_id=model.tokenizer.pad_id, **how
    )


def _judge(model: Model, args: Namespace, sources: Sequence[Source]) -> None:
    """Prints which share of each source a sequence scorer takes to be corrupted, or its error."""
    if args.num_draws != 1:
        raise ValueError(
            f"--num-draws={args.num_draws} means nothing for a sequence scorer; drop it"
        )
    if args.batch_size < 1:
        raise ValueError(f"batch_size={args.batch_size} must be at least 1")
    for name, texts, prompts in sources:
        if prompts is not None:
            raise ValueError(f"{name}: a sequence scorer judges whole texts; leave out the prompts")
        share_N = corrupted_share(model, texts, batch_size=args.batch_size)
        share, count = float(share_N.mean()), len(share_N)
        error = float(share_N.std(ddof=1)) / count**0.5 if count > 1 else None
        record = {"corrupted_share": share, "corrupted_share_error": error, "texts": count}
        line = f"corrupted share {share:.4f}"
        line += "" if error is None else f" +- {error:.4f} ({count} texts)"
        _print(name, "judged", record, line, as_json=args.json)
    if not sources:
        corpus, rows = _held_out_rows(model, args.held_out, multiple_of=args.batch_size)
        found = held_out_errors(model, rows, batch_size=args.batch_size, seed=args.seed)
        record = summary(found, rows["length"] - rows["given"])
        name = f"held-out text of {corpus.name}"
        _print(name, "error", record, error_line(record), as_json=args.json)


def _print(name: str, kind: str, record: dict[str, Any], line: str, *, as_json: bool) -> None:
    print(json.dumps({"source": name, "kind": kind} | record) if as_json else f"{name}: {line}")


def _line(name: str, result: Score, *, as_json: bool) -> str:
    nats, nats_error = result.nats_per_token
    bits, bits_error = result.bits_per_character
    tokens, characters = int(result.tokens.sum()), round(float(result.characters.sum()))
    kind = "exact" if result.is_exact else "upper bound"
    if as_json:
        return json.dumps(
            {
                "source": name,
                "kind": kind,
                "nats_per_token": nats,
                "nats_per_token_error": _or_none(nats_error),
                "bits_per_character": bits,
                "bits_per_character_error": _or_none(bits_error),
                "texts": len(result.nats),
                "tokens": tokens,
                "characters": characters,
            }
        )
    return (
        f"{name}: {nats:.4f} +- {nats_error:.4f} nats/token, {bits:.4f} +- {bits_error:.4f} "
        f"bits/character ({kind}; {len(result.nats)} rows, {tokens:,} tokens, "
        f"{characters:,} characters)"
    )


def _or_none(number: float) -> float | None:
    """JSON has no NaN."""
    return None if math.isnan(number) else number


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; name a text file") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 at byte {error.start}; convert it") from None


def _pairs(path: str) -> Iterator[tuple[str, str]]:
    for line in read_jsonl(path, _read(path)):
        yield line.prompt or "", line.text


if __name__ == "__main__":
    raise SystemExit(main())
