"""Tokens of a sharded corpus, read by index: one long row of ids that no memory holds.

The ids of all shards stand one behind the other. What a reader needs of them it reads from the
records it needs, which ArrayRecord checks by their own checksums; files in buckets are copied into
the cache, checked, when they are first read. Open files, and with them memory, are bounded.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import shutil
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python import array_record_module  # pyright: ignore

from dlm_jax.data.rows import Columns, Place, _Mapped
from dlm_jax.data.shard_index import Index, Shard, fingerprint
from dlm_jax.storage import copy_whole, is_remote, located, reachable, size_and_crc

# Corpora up to this size are read whole before a run begins (a second or two), larger ones
# are checked by their sizes and headers, and by ArrayRecord's checksums wherever they are read.
CHECK_BYTES = 2 << 30

_MAX_OPEN = 128
_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"


class DamagedShard(ValueError):
    """A shard is not what its index says."""


@dataclass(frozen=True)
class TokenShards(_Mapped):
    """The ids of the shards, one behind the other.

    Attributes:
      paths: where each shard lies, a local path or a URL.
      shards: what the index says of each.
      dtype: of the ids.
      record_tokens: ids of a record.
      tokenizer_sha256: see `fingerprint`.
      cache_dir: local folder for shards of buckets.
    """

    paths: tuple[str, ...]
    shards: tuple[Shard, ...]
    dtype: str
    record_tokens: int
    tokenizer_sha256: str
    cache_dir: str

    @classmethod
    def of(cls, directory: str, index: Index, part: str, cache_dir: Path) -> TokenShards:
        """The shards of a part, ``train`` or ``val``, of the corpus in `directory`."""
        shards: tuple[Shard, ...] = getattr(index, part)
        root = located(directory)
        return cls(
            paths=tuple(str(root / shard.name) for shard in shards),
            shards=shards,
            dtype=index.dtype,
            record_tokens=index.record_tokens,
            tokenizer_sha256=fingerprint(index.tokenizer),
            cache_dir=str(cache_dir / "shards"),
        )

    def __len__(self) -> int:
        return self._starts[-1]

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *itertools.accumulate(shard.tokens for shard in self.shards)]

    @cached_property
    def _open(self) -> OrderedDict[int, Any]:
        return OrderedDict()

    def read_into(self, ids: np.ndarray, start: int) -> None:
        """Fills `ids` `[n]` with the ids `[start, start + n)`.

        Raises:
          DamagedShard: a record is not as it was written; the message names file and record.
        """
        done, shard = 0, bisect.bisect_right(self._starts, start) - 1
        while done < len(ids):
            first = start + done - self._starts[shard]
            stop = min(first + len(ids) - done, self.shards[shard].tokens)
            if stop > first:
                ids[done : done + stop - first] = self._stretch(shard, first, stop)
                done += stop - first
            shard += 1

    def _stretch(self, shard: int, first: int, stop: int) -> np.ndarray:
        """The ids `[first, stop)` of one shard."""
        record, last = first // self.record_tokens, (stop - 1) // self.record_tokens
        try:
            # The first record is the header.
            parts = self._reader(shard).read(record + 1, last + 2)
        except (RuntimeError, IndexError, OSError) as error:
            raise DamagedShard(
                f"{self.paths[shard]} is damaged at record {record + 1} "
                f"({' '.join(str(error).split())[:150]}); copy the shard again"
            ) from None
        ids = np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), self.dtype)
        skipped = first - record * self.record_tokens
        if len(ids) < skipped + stop - first:
            raise DamagedShard(f"{self.paths[shard]} holds fewer tokens than its index says")
        return ids[skipped : skipped + stop - first]

    def _reader(self, shard: int) -> Any:
        reader = self._open.get(shard)
        if reader is None:
            if len(self._open) >= _MAX_OPEN:
                self._open.popitem(last=False)[1].close()
            reader = array_record_module.ArrayRecordReader(
                self._local(shard), _OPTIONS, file_reader_buffer_size=1 << 12
            )
            self._open[shard] = reader
            self._check_header(shard, reader)
        else:
            self._open.move_to_end(shard)
        return reader

    def _check_header(self, shard: int, reader: Any) -> None:
        path = self.paths[shard]
        try:
            header = json.loads(reader.read(0, 1)[0])
        except (RuntimeError, IndexError, ValueError):
            raise DamagedShard(f"{path} is no shard of a corpus; copy it again") from None
        if header.get("tokenizer") != self.tokenizer_sha256:
            raise DamagedShard(
                f"{path} is a shard of another tokenizer than its index names; "
                "put the shard of this corpus back"
            )

    def _local(self, shard: int) -> str:
        """Where the shard can be read: itself, or its copy, which is made and checked here."""
        path, facts = self.paths[shard], self.shards[shard]
        if not is_remote(path):
            return path
        origin = hashlib.sha256(f"{path} {facts.crc32}".encode()).hexdigest()[:16]
        copy = Path(self.cache_dir) / f"{origin}-{facts.name}"
        if not copy.exists() or copy.stat().st_size != facts.num_bytes:
            copy.parent.mkdir(parents=True, exist_ok=True)
            if shutil.disk_usage(copy.parent).free < facts.num_bytes:
                raise ValueError(
                    f"data.cache_dir={copy.parent} has no room for {path} ({facts.num_bytes} "
                    "bytes); name a larger disk, or mount the bucket and give the mounted path"
                )
            with reachable("data.source", path):
                copy_whole(located(path), located(copy))
            try:
                self._check_bytes(shard, str(copy))
            except DamagedShard:
                copy.unlink()
                raise
        return str(copy)

    def _check_bytes(self, shard: int, local: str) -> None:
        facts = self.shards[shard]
        if size_and_crc(located(local)) != (facts.num_bytes, facts.crc32):
            raise DamagedShard(f"{self.paths[shard]} has a wrong checksum; copy the shard again")

    def check(self) -> None:
        """Refuses shards that are missing, of another size or tokenizer, or (if small) damaged.

        See `CHECK_BYTES`. Shards of buckets are checked when they are copied.

        Raises:
          DamagedShard: the first that is not as the index says.
        """
        reads_all = sum(shard.num_bytes for shard in self.shards) <= CHECK_BYTES
        for number, (path, facts) in enumerate(zip(self.paths, self.shards, strict=True)):
            if is_remote(path):
                continue
            try:
                size = Path(path).stat().st_size
            except OSError as error:
                raise DamagedShard(
                    f"{path} cannot be read ({error.strerror}); copy the shard again"
                ) from None
            if size == facts.num_bytes:
                self._reader(number)
            if size != facts.num_bytes:
                raise DamagedShard(
                    f"{path} has {size} bytes instead of {facts.num_bytes}; copy the shard again"
                )
            if reads_all:
                self._check_bytes(number, path)


def joined(parts: Sequence[TokenShards]) -> TokenShards:
    """All shards of several corpora of one tokenizer, one behind the other."""
    first = parts[0]
    return TokenShards(
        paths=tuple(path for part in parts for path in part.paths),
        shards=tuple(shard for part in parts for shard in part.shards),
        dtype=first.dtype,
        record_tokens=first.record_tokens,
        tokenizer_sha256=first.tokenizer_sha256,
        cache_dir=first.cache_dir,
    )


@dataclass(frozen=True)
class ShardWindows(_Mapped):
    """Windows of `seq_len` tokens side by side, from an offset that an epoch's bits choose.

    They are those that `Windows` cuts from one token file with the same ids.
    """

    tokens: TokenShards
    seq_len: int

    @cached_property
    def _num_starts(self) -> int:
        return len(self.tokens) - self.seq_len + 1

    @cached_property
    def _size(self) -> int:
        return max(1, self._num_starts // self.seq_len)

    @cached_property
    def _num_offsets(self) -> int:
        return self._num_starts - (self._size - 1) * self.seq_len

    def __len__(self) -> int:
        return self._size

    def read(self, places: Sequence[Place]) -> Columns:
        """The windows at `places`."""
        tokens = np.empty((len(places), self.seq_len), np.int32)
        for row, place in zip(tokens, places, strict=True):
            offset = place.epoch_bits % self._num_offsets
            self.tokens.read_into(row, offset + place.index * self.seq_len)
        length = np.full(len(places), self.seq_len, np.int32)
        return {"tokens": tokens, "length": length, "given": np.zeros_like(length)}
