"""The corpus of 40,000 lines of Shakespeare, from disk or from the network, and no other text.

Its bytes are checked wherever they come from, so that figures taken on this name compare.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import os
import urllib.error
import urllib.request
from pathlib import Path

from dlm_jax.data.token_files import default_cache_dir
from dlm_jax.storage import replacing

NAME = "tinyshakespeare"
URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
ENVIRONMENT = "DLM_JAX_TINYSHAKESPEARE"

_NUM_BYTES = 1_115_394
_TIMEOUT_SECONDS = 30.0
_BY_PATH = "name the file by path instead: --data.source path/to/input.txt"


def read() -> str:
    """The text: the file that `$DLM_JAX_TINYSHAKESPEARE` names, else the cached, else downloaded.

    A download is kept in the cache folder (`token_files.default_cache_dir`), where it appears
    whole or not at all; a damaged copy there is loaded again.

    Raises:
      ValueError: the file named cannot be read, the network fails, or what came has another
        checksum.
    """
    named = os.environ.get(ENVIRONMENT)
    if named:
        try:
            return _checked(Path(os.path.expanduser(named)).read_bytes(), f"{ENVIRONMENT}={named}")
        except OSError as error:
            raise ValueError(
                f"{ENVIRONMENT}={named} cannot be read: {error.strerror}; correct or unset it"
            ) from None
    cached = default_cache_dir() / f"{NAME}.txt"
    with contextlib.suppress(OSError, ValueError):
        return _checked(cached.read_bytes(), str(cached))
    data = _download()
    text = _checked(data, URL)
    _keep(cached, data)
    return text


def _checked(data: bytes, where: str) -> str:
    found = hashlib.sha256(data).hexdigest()
    if found != SHA256:
        raise ValueError(
            f"{where}: {len(data)} bytes with the sha256 {found[:12]}..., where {NAME} has "
            f"{SHA256[:12]}...; {_BY_PATH}"
        )
    return data.decode("utf-8")


def _download() -> bytes:
    try:
        with urllib.request.urlopen(URL, timeout=_TIMEOUT_SECONDS) as response:
            # One byte more shows that there is too much, however much there is.
            return response.read(_NUM_BYTES + 1)
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise ValueError(f"{NAME} cannot be loaded from {URL} ({reason}); {_BY_PATH}") from None


def _keep(path: Path, data: bytes) -> None:
    """Puts `data` at `path`, or does without where that cannot be written."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(data)
