"""Models on the Hugging Face Hub: downloads into the Hub cache.

`huggingface_hub` (the extra ``hub``) downloads, with its own cache, offline mode, endpoint and
token. Only data is downloaded: JSON, safetensors, merges and chat templates.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from dlm_jax.hf import gguf
from dlm_jax.hf.directory import is_published
from dlm_jax.settings import SettingError
from dlm_jax.store.files import is_full
from dlm_jax.store.weights import SUFFIX

_NAME = r"[A-Za-z0-9][\w.-]{0,95}"
_HUB_ID = re.compile(rf"({_NAME}/{_NAME})(?:@([\w./-]+))?")
_FILES = ["*.json", f"*{SUFFIX}", "*.jinja", "merges.txt"]


def hub_id(path: str | os.PathLike[str] | None) -> tuple[str, str | None] | None:
    """Parses the repository and revision of ``org/name`` or ``org/name@revision``.

    Returns None for other paths, including existing paths, paths inside an existing directory, and
    names of weights files.
    """
    match = _HUB_ID.fullmatch(path) if isinstance(path, str) else None
    if match is None or str(path).endswith((SUFFIX, gguf.SUFFIX)) or Path(match[1]).parent.exists():
        return None
    return None if Path(str(path)).exists() else (match[1], match[2])


def fetched(path: str | os.PathLike[str], setting: str = "checkpoint") -> str | os.PathLike[str]:
    """The local path of a model: `path` itself, or the path of a copy in the Hub cache.

    Raises:
      SettingError: ``huggingface_hub`` is not installed, the model or its revision does not exist,
        or the Hub cannot be reached and the model is not in the cache.
    """
    repository = hub_id(path)
    if repository is None:
        return path
    try:
        import huggingface_hub as hub
    except ImportError:
        raise SettingError(
            setting,
            path,
            "is not a local path, and the Hub requires huggingface_hub",
            "check the path, or install it: pip install 'dlm_jax[hub]'",
        ) from None
    name, revision = repository
    try:
        copy = hub.snapshot_download(
            name,
            revision=revision,
            allow_patterns=_FILES,
            ignore_patterns=["*/*"],
            library_name="dlm_jax",
        )
    except Exception as error:
        if is_full(error):
            raise
        if isinstance(error, hub.errors.GatedRepoError):
            why, remedy = "is gated", "accept its terms on the Hub, and log in: hf auth login"
        elif isinstance(error, hub.errors.RevisionNotFoundError):
            why, remedy = "is not an existing revision", f"name another, or {name} alone"
        elif isinstance(error, hub.errors.RepositoryNotFoundError):
            why = "is neither a local path nor a model on the Hub that you can access"
            remedy = "check the name; if the model is private, log in: hf auth login"
        else:
            why = "is not a local path, the Hub cannot be reached, and there is no cached copy"
            remedy = "check the path, the network, HF_ENDPOINT and HF_HUB_OFFLINE"
        raise SettingError(setting, path, why, remedy) from error
    directory = Path(copy)
    if is_published(directory):
        return copy
    weights = sorted(directory.glob(f"*{SUFFIX}"))
    if len(weights) == 1:
        return weights[0]
    raise SettingError(
        setting,
        path,
        f"has neither a config.json nor a single {SUFFIX} file",
        "use a repository of a family that docs/published.md lists",
    )
