"""An S3 on loopback, which tests of buckets share; they skip where its packages are absent."""

from __future__ import annotations

import contextlib
import functools
import os
import uuid
from collections.abc import Iterator

import pytest
from etils import epath

_MISSING = "needs moto with its server, s3fs and boto3 (the extra `test`)"


@functools.cache
def _server() -> str:
    """The URL of a server that ends with the process."""
    pytest.importorskip("s3fs", reason=_MISSING)
    pytest.importorskip("flask_cors", reason=_MISSING)
    pytest.importorskip("moto", reason=_MISSING)
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    with contextlib.redirect_stdout(None), contextlib.redirect_stderr(None):
        server.start()
    host, port = server.get_host_and_port()
    return f"http://{host}:{port}"


def environment() -> dict[str, str]:
    """What a program needs to reach the server."""
    return {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": _server(),
        "AWS_EC2_METADATA_DISABLED": "true",
    }


@functools.cache
def let_orbax_reach_s3() -> None:
    """Adds ``s3://`` to the schemes of checkpoints: no local server speaks ``gs://``."""
    from orbax.checkpoint._src.path import gcs_utils
    from orbax.checkpoint._src.serialization import tensorstore_utils

    from dlm_jax.store import checkpoints

    def spec_of(url: str) -> dict:
        bucket, _, path = url.removeprefix("s3://").partition("/")
        return {
            "driver": "s3", "bucket": bucket, "path": path, "aws_region": "us-east-1",
            "endpoint": os.environ["AWS_ENDPOINT_URL"],
            "aws_credentials": {"type": "environment"},
        }  # fmt: skip

    normal = tensorstore_utils._normalize_path
    tensorstore_utils._normalize_path = lambda path: normal(path).replace("s3:/", "s3://")
    tensorstore_utils._use_gcs_driver = lambda path: path.startswith("s3://")
    gcs_utils.get_kvstore_for_gcs = spec_of
    checkpoints._BUCKETS = ("gs://", "s3://")


@contextlib.contextmanager
def bucket() -> Iterator[str]:
    """The URL of a fresh bucket; the process can reach it inside."""
    given = environment()
    let_orbax_reach_s3()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in given.items():
            patch.setenv(name, value)
        import boto3

        name = f"pail-{uuid.uuid4().hex[:12]}"
        boto3.client("s3").create_bucket(Bucket=name)
        yield f"s3://{name}"


def files_under(directory: epath.Path) -> list[epath.Path]:
    """All files under a directory or a prefix, sorted."""
    import boto3

    bucket, _, prefix = str(directory).removeprefix("s3://").partition("/")
    pages = (
        boto3.client("s3").get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    )
    objects = (one["Key"] for page in pages for one in page.get("Contents", []))
    return sorted(epath.Path(f"s3://{bucket}/{key}") for key in objects)
