"""Builds a sharded corpus from text or JSON lines in parallel.

    python -m dlm_jax.data.shard --out DIR --tokenizer tokenizer.json --shards 100 FILES

A ``.jsonl``, ``.jsonlines``, ``.jl``, ``.ndjson`` or ``.ldjson`` file contains one document
``{"text": ...}`` per line, and a ``.json`` file a list of documents. Any other file is one document
in UTF-8. DIR may be a URL (``gs://``, ``s3://``). The shards depend on the files, their order, the
tokenizer, the number of shards and the held-out fraction, but not on the number of workers. Pass
``--data.source DIR`` to the training program.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
from array_record.python import array_record_module  # pyright: ignore

from dlm_jax.data.shards import INDEX_NAME, PARTS, Index, Shard, fingerprint, id_dtype
from dlm_jax.data.text import (
    Document,
    decode,
    documents_in,
    is_json_lines,
    match_files,
    parse_line,
)
from dlm_jax.data.tokenizers import Tokenizer, make_tokenizer
from dlm_jax.store.files import (
    check_bucket,
    copy_whole,
    crc_of,
    is_remote,
    located,
    refuse_failures,
)

RECORD_TOKENS = 16_384
"""Number of ids per record. Smaller records take more time per id. Larger records contain more ids
that are read but not used at row boundaries.
"""

_REMEDY = "check the path, the permissions and the network"

Files = Sequence[tuple[str, int]]
"""Paths of files and their sizes in bytes."""


class _ArgumentParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"command line: {message}; --help explains every flag")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _ArgumentParser(
        prog="python -m dlm_jax.data.shard",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="paths or globs, in any order")
    add("--out", required=True, metavar="DIR", help="directory or URL to write to")
    add("--tokenizer", default="byte", help="byte or the path of a tokenizer.json")
    add("--shards", type=int, default=16, help="number of shards (16)")
    add("--workers", type=int, default=os.cpu_count() or 1, help="processes (one per core)")
    add("--held-out", type=float, default=0.01, help="fraction of documents to hold out (0.01)")
    args = parser.parse_args(argv)
    for name in ("shards", "workers"):
        if not 1 <= getattr(args, name) <= 100_000:
            raise ValueError(f"--{name}={getattr(args, name)} is outside [1, 100000]")
    if not 0 < args.held_out < 1:
        raise ValueError(f"--held-out={args.held_out} is outside (0, 1); 0.01 holds out 1%")
    if args.tokenizer == "character" or args.tokenizer.startswith("bpe:"):
        raise ValueError(
            f"--tokenizer={args.tokenizer} reads the whole text; use byte or a tokenizer.json"
        )
    return args


def documents_of(files: Files, number: int, num_spans: int) -> Iterator[Document]:
    """Yields each document that begins in span `number` of `num_spans` equal spans of bytes."""
    total = sum(size for _, size in files)
    begin, end = (total * n // num_spans for n in (number, number + 1))
    offset = 0
    for path, size in files:
        first, last = max(0, begin - offset), min(size, end - offset)
        offset += size
        if first < last and is_json_lines(path):
            with open(path, "rb") as file:
                if first:
                    file.seek(first - 1)
                    file.readline()
                while (start := file.tell()) < last:
                    where = f"{path} at byte {start}"
                    line = decode(where, file.readline())
                    if line.strip():
                        yield parse_line(where, line)
        elif first == 0 < last:
            yield from documents_in(path, decode(path, Path(path).read_bytes()))


def _write_shard(
    files: Files, tokenizer: Tokenizer, num_shards: int, held_out: float, out: str, number: int
) -> dict[str, Shard | None]:
    """Writes and returns the training shard and the held-out shard of one span of the files; None
    instead of a shard without documents.
    """
    dtype = id_dtype(tokenizer.vocab_size).newbyteorder("<")
    ids: dict[str, list[np.ndarray]] = {part: [] for part in PARTS}
    characters = dict.fromkeys(PARTS, 0)
    for document in documents_of(files, number, num_shards):
        document.check_plain("train on the file directly with data.layout=documents")
        digest = hashlib.sha256(document.text.encode()).digest()
        part = "val" if int.from_bytes(digest[:8], "big") < held_out * 2**64 else "train"
        try:
            of_text = tokenizer.encode(document.text)
        except ValueError as error:
            raise ValueError(f"{document.name}: {error}") from None
        ids[part].append(np.append(of_text, tokenizer.eos_id).astype(dtype))
        characters[part] += len(document.text)

    shards: dict[str, Shard | None] = dict.fromkeys(PARTS)
    # A file appears when it is complete.
    with tempfile.TemporaryDirectory(dir=None if is_remote(out) else out) as folder:
        for part in PARTS:
            if not ids[part]:
                continue
            path = Path(folder) / f"{part}-{number:05d}-of-{num_shards:05d}.array_record"
            whole = np.concatenate(ids[part])
            file = array_record_module.ArrayRecordWriter(str(path), "group_size:1,uncompressed")
            file.write(json.dumps({"tokenizer": fingerprint(tokenizer)}).encode())
            for first in range(0, len(whole), RECORD_TOKENS):
                file.write(whole[first : first + RECORD_TOKENS].tobytes())
            file.close()
            with path.open("rb") as written:
                crc = crc_of(written)
            shards[part] = Shard(
                name=path.name,
                num_bytes=path.stat().st_size,
                crc32=crc,
                tokens=len(whole),
                documents=len(ids[part]),
                characters=characters[part],
            )
            if is_remote(out):
                with refuse_failures(f"--out={out}", _REMEDY):
                    copy_whole(located(path), located(out) / path.name)
            else:
                os.replace(path, Path(out) / path.name)
    return shards


def make_shards(
    files: Files, tokenizer: Tokenizer, *, shards: int, held_out: float, out: str, workers: int
) -> Index:
    """Writes the corpus with `workers` processes, then writes and returns its index."""
    write = functools.partial(_write_shard, files, tokenizer, shards, held_out, out)
    if workers == 1:
        written = [*map(write, range(shards))]
    else:
        with multiprocessing.get_context("spawn").Pool(min(workers, shards)) as pool:
            written = pool.map(write, range(shards), chunksize=1)
    train, val = (tuple(s for one in written if (s := one[part]) is not None) for part in PARTS)
    if not (train and val):
        raise ValueError("no documents are held out or left; use more documents or --held-out")
    dtype = id_dtype(tokenizer.vocab_size).newbyteorder("<").str
    index = Index(tokenizer, dtype, RECORD_TOKENS, train, val)
    index.write(located(out))
    return index


def main(argv: Sequence[str] | None = None) -> int:
    """Builds the corpus and returns the exit code (docs/exit_codes.md)."""
    try:
        args = _parse(argv)
        paths = sorted({path.absolute() for pattern in args.files for path in match_files(pattern)})
        tokenizer = make_tokenizer(args.tokenizer, "")
        check_bucket("--out", args.out)
        with refuse_failures(f"--out={args.out}", _REMEDY):
            if (located(args.out) / INDEX_NAME).exists():
                raise ValueError(
                    f"--out={args.out} already contains a corpus; choose another directory"
                )
            located(args.out).mkdir(parents=True, exist_ok=True)
        index = make_shards(
            [(str(path), path.stat().st_size) for path in paths],
            tokenizer,
            shards=args.shards,
            held_out=args.held_out,
            out=args.out,
            workers=args.workers,
        )
    except ValueError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except (OSError, RuntimeError) as error:  # ArrayRecord raises RuntimeError for a full disk
        line = " ".join(str(error).split())
        print(f"error: {line}; free some space and restart", file=sys.stderr)
        return 5
    tokens = {part: sum(s.tokens for s in getattr(index, part)) for part in PARTS}
    print(
        f"{args.out}: {len(index.train)} shards of {tokens['train']:,} training tokens, "
        f"{tokens['val']:,} held out, vocabulary {tokenizer.vocab_size}",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
