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
import contextlib
import errno
import glob
import hashlib
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import numpy as np
from array_record.python import array_record_module  # pyright: ignore

from dlm_jax.data.pipeline import id_dtype
from dlm_jax.data.shards import INDEX_NAME, PARTS, Index, Shard, fingerprint
from dlm_jax.data.text import Document, is_json, is_json_lines, parse_line, read_jsonl
from dlm_jax.data.tokenizers import Tokenizer, make_tokenizer
from dlm_jax.store.files import (
    check_bucket,
    check_regular,
    copy_whole,
    is_remote,
    located,
    reachable,
    size_and_crc,
)


class _ArgumentParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"command line: {message}; --help explains every flag")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The flags after checking; ``files`` contains paths and sizes."""
    parser = _ArgumentParser(
        prog="python -m dlm_jax.data.shard",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="paths or globs, in any order")
    parser.add_argument("--out", required=True, metavar="DIR", help="directory or URL to write to")
    parser.add_argument("--tokenizer", default="byte", help="byte, bpe:N or a tokenizer.json")
    parser.add_argument("--shards", type=int, default=16, help="number of shards (default: 16)")
    parser.add_argument(
        "--workers",
        type=int,
        default=os.cpu_count() or 1,
        help="number of processes (default: one per core)",
    )
    parser.add_argument(
        "--held-out",
        type=float,
        default=0.01,
        help="fraction of documents to hold out (default: 0.01)",
    )
    parser.add_argument(
        "--sample-mb",
        type=int,
        default=64,
        help="size of the text that bpe:N is trained on (default: 64 MiB)",
    )
    args = parser.parse_args(argv)
    for name in ("shards", "workers", "sample_mb"):
        if not 1 <= getattr(args, name) <= 100_000:
            flag = f"--{name.replace('_', '-')}"
            raise ValueError(f"{flag}={getattr(args, name)} is outside [1, 100000]")
    if not 0 < args.held_out < 1:
        raise ValueError(f"--held-out={args.held_out} is outside (0, 1); 0.01 holds out 1%")
    paths: set[str] = set()
    for pattern in args.files:
        check_regular(pattern)
        if os.path.isdir(pattern):
            raise ValueError(f"{pattern} is a directory; pass its files, such as {pattern}/*.jsonl")
        matches = [pattern] if os.path.isfile(pattern) else glob.glob(pattern, recursive=True)
        files = [path for path in matches if os.path.isfile(path)]
        if not files:
            raise ValueError(f"{pattern} matches no file; pass a path or a glob")
        paths.update(os.path.abspath(path) for path in files)
    args.files = tuple((path, os.path.getsize(path)) for path in sorted(paths))
    return args


RECORD_TOKENS = 16_384
"""Number of ids per record. Smaller records take more time per id. Larger records contain more ids
that are read but not used at row boundaries.
"""

_WRITER = "group_size:1,uncompressed"


@dataclass(frozen=True)
class ShardingJob:
    """The inputs that all workers share."""

    files: tuple[tuple[str, int], ...]
    tokenizer: Tokenizer
    num_shards: int
    held_out: float
    out: str

    def name(self, part: str, number: int) -> str:
        return f"{part}-{number:05d}-of-{self.num_shards:05d}.array_record"


def documents_of(
    files: Sequence[tuple[str, int]], number: int, num_spans: int
) -> Iterator[tuple[str, str]]:
    """Yields ``(name, text)`` of each document that begins in span `number` of `num_spans` equal
    spans.
    """
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
                    line = _text(where, file.readline()).rstrip("\n")
                    if line.strip():
                        yield where, _plain(parse_line(where, line))
        elif first == 0 < last:
            text = _text(path, Path(path).read_bytes())
            documents = read_jsonl(path, text) if is_json(path) else [Document(path, text)]
            yield from ((document.name, _plain(document)) for document in documents)


def _plain(line: Document) -> str:
    if line.prompt is not None or line.messages:
        has = "is a conversation" if line.messages else "has a prompt"
        raise ValueError(
            f"{line.name} {has}, which packed rows would separate from its response; train on the "
            "file directly with data.layout=documents"
        )
    return line.text


def _text(where: str, data: bytes) -> str:
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where} is not UTF-8 at offset {error.start}; convert or remove it"
        ) from None


def _is_held_out(text: str, share: float) -> bool:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") < share * 2**64


class _Writer:
    """Writes the documents of one shard as records. The file appears only when it is complete."""

    def __init__(self, path: Path, tokenizer: Tokenizer):
        self._path, self._coder = path, tokenizer
        self._temporary = path.with_name(f"{path.name}.tmp")
        self._dtype = id_dtype(tokenizer.vocab_size).newbyteorder("<")
        self._rest = np.zeros(0, self._dtype)
        with self._failures():
            self._file = array_record_module.ArrayRecordWriter(str(self._temporary), _WRITER)
            self._file.write(json.dumps({"tokenizer": fingerprint(tokenizer)}).encode())
        self._tokens = self._documents = self._characters = 0

    def add(self, name: str, text: str) -> None:
        try:
            ids = self._coder.encode(text)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        self._tokens += len(ids) + 1
        self._documents += 1
        self._characters += len(text)
        ids = np.concatenate([self._rest, ids.astype(self._dtype), [self._coder.eos_id]])
        whole = len(ids) - len(ids) % RECORD_TOKENS
        for first in range(0, whole, RECORD_TOKENS):
            self._record(ids[first : first + RECORD_TOKENS])
        self._rest = ids[whole:].astype(self._dtype)

    def _record(self, ids: np.ndarray) -> None:
        with self._failures():
            self._file.write(ids.astype(self._dtype).tobytes())

    @contextlib.contextmanager
    def _failures(self) -> Iterator[None]:
        """Converts the `RuntimeError` of a failed write in ArrayRecord to `OSError`."""
        try:
            yield
        except RuntimeError as error:
            said = next((n for n in errno.errorcode if os.strerror(n) in str(error)), errno.EIO)
            raise OSError(said, os.strerror(said), str(self._path)) from error

    def close(self) -> Shard | None:
        """Returns the finished shard, or None if there are no documents and thus no file."""
        if len(self._rest):
            self._record(self._rest)
        with self._failures():
            self._file.close()
        if not self._documents:
            self._temporary.unlink()
            return None
        os.replace(self._temporary, self._path)
        size, crc = size_and_crc(located(self._path))
        return Shard(self._path.name, size, crc, self._tokens, self._documents, self._characters)


def write_shard(job: ShardingJob, number: int) -> dict[str, Shard | None]:
    """Writes and returns the training shard and the held-out shard of one span of the files."""
    with tempfile.TemporaryDirectory() as temporary:
        remote = is_remote(job.out)
        folder = Path(temporary) if remote else Path(job.out)
        writers = {part: _Writer(folder / job.name(part, number), job.tokenizer) for part in PARTS}
        for name, text in documents_of(job.files, number, job.num_shards):
            writers["val" if _is_held_out(text, job.held_out) else "train"].add(name, text)
        shards = {part: writer.close() for part, writer in writers.items()}
        for shard in shards.values():
            if shard is not None and remote:
                with reachable("--out", job.out):
                    copy_whole(located(folder / shard.name), located(job.out) / shard.name)
    return shards


def make_shards(job: ShardingJob, *, workers: int) -> Index:
    """Writes the corpus with `workers` processes, then writes and returns its index."""
    tasks = [(job, number) for number in range(job.num_shards)]
    if workers == 1:
        made = [write_shard(*task) for task in tasks]
    else:
        with multiprocessing.get_context("spawn").Pool(min(workers, job.num_shards)) as pool:
            made = pool.starmap(write_shard, tasks, chunksize=1)
    train, val = (tuple(s for one in made if (s := one[part]) is not None) for part in PARTS)
    for part, shards in (("to train on", train), ("held out", val)):
        if not shards:
            raise ValueError(f"no documents are {part}; use more documents or change --held-out")
    dtype = id_dtype(job.tokenizer.vocab_size).newbyteorder("<").str
    index = Index(job.tokenizer, dtype, RECORD_TOKENS, train, val)
    index.write(located(job.out))
    return index


def choose_tokenizer(
    kind: str, files: Sequence[tuple[str, int]], *, held_out: float, sample_bytes: int
) -> Tokenizer:
    """Returns the tokenizer for `kind`: ``byte``, a ``tokenizer.json``, or ``bpe:N``.

    A BPE is trained on the first documents of 64 equal spans of the files, without held-out
    documents and up to about `sample_bytes` bytes in total.
    """
    if kind == "character":
        raise ValueError(
            "--tokenizer character requires the whole text in memory; use byte or bpe:N"
        )
    if not kind.startswith("bpe:"):
        return make_tokenizer(kind, "")
    texts: list[str] = []
    for number in range(64):
        taken = 0
        for _, text in documents_of(files, number, 64):
            if taken >= sample_bytes // 64:
                break
            if not _is_held_out(text, held_out):
                texts.append(text)
                taken += len(text.encode())
    return make_tokenizer(kind, "\n".join(texts))


def prepare_out(out: str) -> None:
    """Creates the output directory. Raises an error for an unreachable bucket, and for a directory
    that already contains a corpus.
    """
    check_bucket("--out", out)
    path = located(out)
    with reachable("--out", out):
        if (path / INDEX_NAME).exists():
            raise ValueError(f"--out={out} already contains a corpus; choose another directory")
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if is_remote(out):
                raise
            raise ValueError(
                f"--out={out} cannot be created ({error.strerror}); choose another directory"
            ) from None


def main(argv: Sequence[str] | None = None) -> int:
    """Builds the corpus and returns the exit code (docs/exit_codes.md)."""
    try:
        args = _parse(argv)
        coder = choose_tokenizer(
            args.tokenizer, args.files, held_out=args.held_out, sample_bytes=args.sample_mb << 20
        )
        prepare_out(args.out)
        job = ShardingJob(args.files, coder, args.shards, args.held_out, args.out)
        index = make_shards(job, workers=args.workers)
    except ValueError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        print(
            f"error: {where}{error.strerror or error}; free some space and restart",
            file=sys.stderr,
        )
        return 5
    tokens = {part: sum(s.tokens for s in getattr(index, part)) for part in PARTS}
    print(
        f"{args.out}: {len(index.train)} shards of {tokens['train']:,} training tokens, "
        f"{tokens['val']:,} held out, vocabulary {coder.vocab_size}",
        file=sys.stderr,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
