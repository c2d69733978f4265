"""Models on the Hugging Face Hub: downloads into the Hub cache, and uploads.

`huggingface_hub` (the extra ``hub``) performs the downloads and uploads, with its own cache,
offline mode (``HF_HUB_OFFLINE``), endpoint (``HF_ENDPOINT``) and token (``hf auth login`` or
``HF_TOKEN``). Only data is downloaded: JSON, safetensors, merges and chat templates. Code in a
repository is neither downloaded nor executed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from dlm_jax.hf import gguf
from dlm_jax.hf.directory import is_published
from dlm_jax.settings import SettingError
from dlm_jax.store.files import is_full
from dlm_jax.store.weights import SUFFIX, read_meta

_NAME = r"[A-Za-z0-9][\w.-]{0,95}"
_HUB_ID = re.compile(rf"({_NAME}/{_NAME})(?:@([\w./-]+))?")
_FILES = ["*.json", f"*{SUFFIX}", "*.jinja", "merges.txt"]
_CARD = "README.md"
WEIGHTS = "dlm_jax.safetensors"
"""The file name under which `push_to_hub` uploads a weights file."""


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
    name, revision = repository
    hub = _hub(path, setting)
    try:
        copy = hub.snapshot_download(
            name,
            revision=revision,
            allow_patterns=_FILES,
            ignore_patterns=["*/*"],
            library_name="dlm_jax",
        )
    except Exception as error:
        raise _refusal(hub, str(path), setting, error) from error
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


def push_to_hub(
    path: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    license: str | None = None,
    message: str = "Upload a model",
) -> str:
    """Uploads a published directory or a weights file in one commit, and returns its URL.

    The repository is created if it does not exist. A model card (`model_card`) is added if neither
    the directory nor the repository has one.

    Args:
      path: a directory written by `dlm_jax.export`, or a file written by ``python -m
          dlm_jax.export``.
      repo_id: ``org/name``.
      private: whether a new repository is private; None means the account's default.
      revision: branch, created if it does not exist; None means ``main``.
      license: Hub license id for a new model card, such as ``apache-2.0``.
      message: commit message.

    Raises:
      SettingError: the path has no model, or the Hub rejects the upload.
    """
    source = Path(path)
    if source.is_dir() and is_published(source):
        names = (file for file in sorted(source.iterdir()) if file.is_file())
        files = {file.name: file for file in names}
    elif source.suffix == SUFFIX:
        read_meta(source)
        files = {WEIGHTS: source}
    else:
        raise SettingError(
            "path",
            str(path),
            "is neither a published directory nor a weights file",
            "write one: dlm_jax.export, or python -m dlm_jax.export",
        )
    hub = _hub(repo_id, "repo_id")
    api = hub.HfApi(library_name="dlm_jax")
    try:
        api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        content: dict[str, Any] = {name: str(file) for name, file in files.items()}
        if _CARD not in files and not api.file_exists(repo_id, _CARD, revision=revision):
            content[_CARD] = model_card(source, repo_id, license=license).encode()
        parts = [hub.CommitOperationAdd(name, one) for name, one in content.items()]
        commit = api.create_commit(repo_id, parts, commit_message=message, revision=revision)
    except Exception as error:
        raise _refusal(hub, repo_id, "repo_id", error) from error
    return str(commit.commit_url)


def model_card(path: str | os.PathLike[str], repo_id: str, *, license: str | None = None) -> str:
    """The model card for a published directory or weights file: Markdown with front matter.

    The card describes how to load the model and has sections for the author to fill in.
    """
    tags = ["diffusion", "masked-diffusion", "jax"]
    head = ["---", "library_name: dlm_jax", "pipeline_tag: text-generation"]
    head += [f"license: {license}"] if license else []
    head += ["tags:", *(f"- {tag}" for tag in tags), "---"]
    kind = "a published family's layout (config.json)" if is_published(path) else "one weights file"
    return (
        "\n".join(head)
        + f"""

# {repo_id.rpartition("/")[2]}

A masked diffusion language model for dlm_jax, in {kind}. It generates text by filling
holes in any order, several per step.

## Use

```python
import dlm_jax

model = dlm_jax.load("{repo_id}")
print(dlm_jax.generate(model, ["Once upon a time"], seed=0).texts[0])
```

```sh
dlm-sample --checkpoint {repo_id} --prompt "Once upon a time"
dlm-serve --checkpoint {repo_id}
```

## Training data

Not described yet.

## Evaluation

Not described yet.

## Limits

Not described yet.
"""
    )


def _hub(path: object, setting: str = "checkpoint") -> ModuleType:
    try:
        import huggingface_hub
    except ImportError:
        raise SettingError(
            setting,
            path,
            "is not a local path, and the Hub requires huggingface_hub",
            "check the path, or install it: pip install 'dlm_jax[hub]'",
        ) from None
    return huggingface_hub


def _refusal(hub: ModuleType, path: str, setting: str, error: Exception) -> Exception:
    """The SettingError for a Hub error; a disk-full error is returned unchanged."""
    if is_full(error):
        return error
    errors = hub.errors
    name = path.partition("@")[0]
    if isinstance(error, errors.GatedRepoError):
        why, remedy = "is gated", "accept its terms on the Hub, and log in: hf auth login"
    elif isinstance(error, errors.RevisionNotFoundError):
        why, remedy = "is not an existing revision", f"name another, or {name} alone"
    elif isinstance(error, errors.RepositoryNotFoundError):
        why = "is neither a local path nor a model on the Hub that you can access"
        remedy = "check the name; if the model is private, log in: hf auth login"
    elif isinstance(error, errors.HFValidationError):
        why, remedy = "is neither a local path nor a Hub id", "write org/name"
    elif getattr(error, "response", None) is not None:
        status = error.response.status_code  # type: ignore[attr-defined]
        why, remedy = f"is rejected by the Hub with status {status}", "log in, or try again later"
    else:
        why = "is not a local path, the Hub cannot be reached, and there is no cached copy"
        remedy = "check the path, the network, HF_ENDPOINT and HF_HUB_OFFLINE"
    return SettingError(setting, path, why, remedy)
