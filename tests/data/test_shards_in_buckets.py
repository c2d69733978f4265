"""Sharded corpora in buckets are read like those on disks, from copies that were checked."""

from __future__ import annotations

import itertools
import json

import buckets
import numpy as np
import pytest
import tiny_run

from dlm_jax.cli import train
from dlm_jax.data import shard
from dlm_jax.data.corpus import load_corpus
from dlm_jax.data.pipeline import train_batches
from dlm_jax.data.shards import DamagedShard
from dlm_jax.store.files import located

pytestmark = pytest.mark.filterwarnings("default")

SIZES = {"seq_len": 16, "batch_size": 8}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The same corpus in a bucket and on the disk."""
    folder = tmp_path_factory.mktemp("shards")
    source = folder / "in.jsonl"
    lines = [json.dumps({"text": f"document {i} of many"}) for i in range(60)]
    source.write_text("\n".join(lines))
    with buckets.bucket() as url:
        for out in (f"{url}/web", str(folder / "web")):
            flags = ["--out", out, "--shards", "3", "--workers", "1", "--held-out", "0.2"]
            assert shard.main([str(source), *flags]) == 0
        yield f"{url}/web", folder / "web", source


def _batches(root, cache):
    corpus = load_corpus(str(root), seq_len=16, cache_dir=cache)
    return list(itertools.islice(train_batches(corpus.train_rows, **SIZES, seed=0), 9)), corpus


def test_rows_from_a_bucket_are_those_from_the_disk_and_files_are_copied_once(made, tmp_path):
    url, disk, _ = made
    remote, corpus = _batches(url, tmp_path / "cache")
    local, _ = _batches(disk, tmp_path / "cache")
    for a, b in zip(remote, local, strict=True):
        np.testing.assert_array_equal(a["tokens"], b["tokens"])
    copies = sorted((tmp_path / "cache" / "shards").iterdir())
    assert len(copies) == len(corpus.train_rows.shards)
    before = [path.stat().st_mtime_ns for path in copies]
    _batches(url, tmp_path / "cache")
    assert [path.stat().st_mtime_ns for path in copies] == before


def test_a_damaged_shard_of_a_bucket_is_refused_and_its_copy_is_not_kept(made, tmp_path):
    url, _, source = made
    other = f"{url}-damaged"
    flags = ["--out", other, "--shards", "1", "--workers", "1", "--held-out", "0.2"]
    assert shard.main([str(source), *flags]) == 0
    path = next(path for path in buckets.files_under(located(other)) if "train-" in path.name)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedShard, match=r"train-.* has a wrong checksum; copy the shard again"):
        _batches(other, tmp_path / "cache")
    assert list((tmp_path / "cache" / "shards").iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"data__source": "s3://no-such-pail/web"},
            "data.source=s3://no-such-pail/web cannot be read",
        ),
        ({"data__source": "{pail}/nothing"}, "/nothing cannot be read"),
        ({"train__checkpoint_dir": "s3://no-such-pail/x"}, "train.checkpoint_dir=s3://no-such"),
        ({"train__checkpoint_dir": "http://host/x"}, "URL of an unknown kind; use gs://, s3://"),
    ],
)
def test_a_bucket_that_is_not_there_is_refused_in_one_line(
    made, tmp_path, capsys, changes, message
):
    pail = made[0].removesuffix("/web")
    changes = {name: value.format(pail=pail) for name, value in changes.items()}
    given = tiny_run.flags(tmp_path / "run", **changes)
    capsys.readouterr()
    with pytest.raises(SystemExit) as caught, tiny_run.on_devices(1):
        train.main([part for name, value in given.items() for part in (f"--{name}", value)])
    assert caught.value.code == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if "HTTP/1.1" not in line]
    assert len(lines) == 1
    assert message in lines[0]
    assert list(tmp_path.iterdir()) == []
