"""Lists the checkpoints in a directory and finds the usable ones.

Directories with a suffix are not checkpoints. Directories with ``.writing`` and ``.deleted`` are
leftovers of a killed process, which the next save removes. Directories with ``.damaged`` are kept
until the user removes them.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax.distributed.partitions import named_leaves
from dlm_jax.store import files
from dlm_jax.store.files import AnyPath, is_remote, located, remove_tree
from dlm_jax.types import Params


def not_finite(params: Params) -> str | None:
    """Path of the first parameter that contains NaN or infinity; None if all are finite.

    Every parameter is read once, without a copy (about 1 GB/s on a CPU). Each process reads the
    shards on its own devices.
    """
    for path, leaf in named_leaves(params):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            continue
        parts = (
            {str(shard.index): shard.data for shard in leaf.addressable_shards}.values()
            if isinstance(leaf, jax.Array)
            else [leaf]
        )
        if not all(_is_finite(part) for part in parts):
            return path
    return None


def _is_finite(part: jax.Array | np.ndarray) -> bool:
    # NumPy reads a host array in place. A JAX function would be compiled for each shape.
    if isinstance(part, jax.Array) and any(d.platform != "cpu" for d in part.devices()):
        return bool(jnp.isfinite(part).all())
    return bool(np.isfinite(np.asarray(part)).all())


FORMAT = 1
Leaves = dict[str, list[Any]]
"""[dtype, shape] of each array in the saved pytree, by path."""

Place = Callable[[str, jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]
"""Maps the path and stored type of a parameter to its dtype and sharding."""

_STEP_NAME = re.compile(r"step_(\d{8,})")
_LEFTOVER_NAME = re.compile(r"step_\d{8,}\.(writing.*|deleted)")


def checkpoint_root(directory: str | os.PathLike[str]) -> Path:
    """The absolute path or URL of a directory; raises `ValueError` for a file or dangling link."""
    path = located(directory)
    if is_remote(path):
        return cast(Path, path)
    path = Path(path)
    if os.path.lexists(path) and not path.is_dir():
        what = "a link to nothing" if path.is_symlink() and not path.exists() else "a file"
        raise ValueError(f"{path} is {what}, not a checkpoint directory; pass a directory")
    return path


def step_path(root: Path, step: int) -> Path:
    return root / f"step_{step:08d}"


@contextlib.contextmanager
def failures_of_writing(path: AnyPath) -> Iterator[None]:
    """Converts the `ValueError` that tensorstore raises for a failed write to an `OSError`.

    The errno is read from the message, or `errno.EIO` if the message has none. The file name is
    `path`.
    """
    try:
        yield
    except ValueError as error:
        said = re.search(r"os_error_code='(\d+)'", str(error))
        if said is not None:
            raise OSError(int(said[1]), os.strerror(int(said[1])), str(path)) from error
        detail = " ".join(str(error).split())[:200]
        raise OSError(errno.EIO, f"cannot be written ({detail})", str(path)) from error


def facts_of(leaves: Leaves, meta: dict[str, Any]) -> dict[str, Any]:
    """The contents of a checkpoint's manifest except its files: format, library versions, identity
    of the run, and arrays.

    The identity is ``run`` in the metadata, or empty if the metadata has no ``run``.
    """
    writers = ("jax", "orbax-checkpoint", "numpy")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in writers)
    run = meta.get("run", "")
    return {"format": FORMAT, "versions": versions, "run": run, "leaves": leaves}


def complete_steps(root: Path) -> list[int]:
    """Steps of the checkpoints that have a manifest, in ascending order."""
    return [s for s in _listed_steps(root) if (step_path(root, s) / files.MANIFEST).exists()]


def make_room(root: Path, step: int, checked: dict[int, bool]) -> bool:
    """Prepares to write the checkpoint of ``step`` and returns True, or returns False if this
    checkpoint is already complete.

    The function creates ``root``, removes leftovers, and renames damaged checkpoints.
    """
    root.mkdir(parents=True, exist_ok=True)
    usable = [s for s in complete_steps(root) if checked.get(s, True)]
    if step in usable:
        return False
    if usable and step < usable[-1]:
        raise ValueError(
            f"step={step} is before step {usable[-1]} in {root}; resume from the newest "
            f"checkpoint or save to another directory"
        )
    if not is_remote(root):
        for path in list(root.iterdir()):
            if _LEFTOVER_NAME.fullmatch(path.name):
                remove_tree(path)
            elif (found := _STEP_NAME.fullmatch(path.name)) and int(found[1]) not in usable:
                aside = path.with_name(f"{path.name}.damaged")
                remove_tree(aside)
                path.rename(aside)
        return True
    for unusable in set(_listed_steps(root)) - set(usable):
        path = step_path(root, unusable)
        if (path / files.MANIFEST).exists() and unusable != step:
            (path / files.SET_ASIDE).write_text((path / files.MANIFEST).read_text())
            (path / files.MANIFEST).unlink()
        elif unusable == step or not (path / files.SET_ASIDE).exists():
            remove(path)
    return True


def remove(path: Path) -> None:
    """Deletes a checkpoint. In a bucket, the manifest is deleted first."""
    if not is_remote(path):
        remove_tree(path)
        return
    for name in (files.MANIFEST, files.SET_ASIDE):
        (path / name).unlink(missing_ok=True)
    located(path).rmtree(missing_ok=True)


def remove_from(root: Path, step: int) -> None:
    """Deletes the complete checkpoints of `step` and later steps."""
    for later in complete_steps(root):
        if later >= step:
            remove(step_path(root, later))


def prune(root: Path, *, keep: int) -> None:
    """Deletes all complete checkpoints except the ``keep`` newest."""
    for step in complete_steps(root)[:-keep]:
        if is_remote(root):
            remove(step_path(root, step))
            continue
        # Rename first, so that a killed process does not leave a checkpoint with missing files.
        path = step_path(root, step)
        doomed = path.with_name(f"{path.name}.deleted")
        remove_tree(doomed)
        path.rename(doomed)
        remove_tree(doomed)


def newest_usable(
    root: Path,
    step: int | None,
    leaves: Leaves | None,
    report: Callable[[str], None],
    checked: dict[int, bool],
) -> int:
    """The step to restore: ``step`` if given, or the newest step whose checkpoint is not damaged.

    ``checked`` caches the result per step, so that files are read once and damage is reported once.
    Raises `ValueError` if no checkpoint is usable, if a checkpoint has another format or differs
    from ``leaves`` (if given), or if the checkpoints belong to several runs.
    """
    # A checkpoint without a manifest is incomplete in a bucket, but damaged on a disk.
    listed = complete_steps(root) if is_remote(root) else _listed_steps(root)
    if not listed:
        raise ValueError(_why_empty(root))
    if step is not None and step not in listed:
        raise ValueError(f"no checkpoint of step={step} in {root}; existing steps are {listed}")
    if step is None:
        _check_one_run(root, listed)
    reasons: list[str] = []
    for candidate in reversed(listed) if step is None else [step]:
        if not checked.get(candidate, True):
            continue
        path = step_path(root, candidate)
        try:
            facts = files.read_manifest(path)
            if facts["format"] != FORMAT:
                raise ValueError(
                    f"checkpoint {path} has format {facts['format']}, but this program reads "
                    f"{FORMAT}; use the program that wrote it (with {facts['versions']})"
                )
            if leaves is not None:
                check_same_leaves(leaves, facts["leaves"], path)
            if candidate not in checked:
                files.check_manifest(path)
        except files.Damaged as error:
            checked[candidate] = False
            reasons.append(str(error))
            continue
        checked[candidate] = True
        for reason in reasons:
            report(f"damaged checkpoint: {reason}; using step {candidate} instead")
        return candidate
    why = reasons[0] if reasons else "all are damaged"
    remedy = "restart in another directory" if step is None else "try another step"
    raise ValueError(f"no usable checkpoint in {root}: {why}; {remedy}")


def _check_one_run(root: Path, steps: list[int]) -> None:
    """Raises ValueError if the checkpoints belong to several runs."""
    runs: dict[str, list[int]] = {}
    for step in steps:
        with contextlib.suppress(files.Damaged):
            runs.setdefault(files.read_manifest(step_path(root, step)).get("run", ""), []).append(
                step
            )
    if len(runs) > 1:
        found = ", ".join(f"{of} of run {run or 'unnamed'}" for run, of in runs.items())
        raise ValueError(
            f"{root} contains checkpoints of several runs (steps {found}); move the checkpoints of "
            f"all but one run elsewhere"
        )


def check_same_leaves(wanted: Leaves, saved: Leaves, path: Path) -> None:
    """Raises `ValueError` for the first array that differs."""
    for name in list(wanted) + list(saved):
        here, there = wanted.get(name), saved.get(name)
        if here != there:
            raise ValueError(
                f"{name} is {spell(here)} in this run but {spell(there)} in checkpoint {path}; "
                f"use the training config of the checkpoint, or another directory"
            )


def without_custom_heads(saved: Leaves, wanted: Leaves, meta: dict[str, Any]) -> Leaves:
    """The saved arrays without custom heads of the run that are not in `wanted`.

    Custom heads train a model but are not part of its network.
    """
    if not (meta.get("own") or {}).get("heads"):
        return saved
    known = {part for name in wanted for part in name.split("/")}

    def is_extra(name: str) -> bool:
        return any(part.endswith("_head") and part not in known for part in name.split("/"))

    return {name: leaf for name, leaf in saved.items() if not is_extra(name)}


def spell(leaf: list[Any] | None) -> str:
    """Describes an array in a message: its dtype and shape, ``float32[2,16]``, or ``absent``."""
    return "absent" if leaf is None else f"{leaf[0]}{leaf[1]}".replace(" ", "")


def _listed_steps(root: Path) -> list[int]:
    if not root.is_dir():
        return []
    remote = is_remote(root)
    matches = (
        _STEP_NAME.fullmatch(path.name) for path in root.iterdir() if remote or path.is_dir()
    )
    return sorted(int(match[1]) for match in matches if match)


def _why_empty(root: Path) -> str:
    if not root.exists():
        return f"checkpoint directory {root} does not exist; check the path"
    if _STEP_NAME.fullmatch(root.name):
        return f"{root} is a single checkpoint; pass its parent directory, {root.parent}"
    names = [path.name for path in root.iterdir()]
    if any(_LEFTOVER_NAME.fullmatch(name) for name in names):
        return f"{root} has only an unfinished checkpoint; train until a checkpoint is complete"
    if not names:
        return f"checkpoint directory {root} is empty; train until a checkpoint is written"
    return f"{root} is not a checkpoint directory (no step_* in it); check the path"


def describe(tree: Any, what: str) -> Leaves:
    """Dtype and shape of every array in a pytree, by path; `what` names the pytree in errors."""
    leaves: Leaves = {}
    for name, leaf in named_leaves(tree):
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise ValueError(f"{what} {name} is a {type(leaf).__name__}; use a JAX array")
        leaves[name] = [str(leaf.dtype), list(leaf.shape)]
    return leaves


def plain(leaf: Any) -> jax.Array:
    """The leaf as an array of numbers: the data of a typed key."""
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(leaf) if is_key else jnp.asarray(leaf)


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """The nested dict with these paths; raises ValueError for conflicting names."""
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise ValueError(f"{name} is nested in another tensor")
        if last in node:
            raise ValueError(f"other tensors are nested in {name}")
        node[last] = value
    return tree


def check_not_quantised(tree: Any) -> None:
    """Raises ValueError for an 8-bit matrix, as created by `dlm_jax.load` with ``quantize``."""
    for name, leaf in named_leaves(tree):
        if name.endswith("/kernel/values") and leaf.dtype == jnp.int8:
            raise ValueError(
                f"parameter {name.removesuffix('/values')} is quantised, but only float "
                f"parameters can be saved; load the model without quantize"
            )


def check_saveable(step: int, state: Any, meta: dict[str, Any]) -> None:
    check_not_quantised(state)
    if step < 0:
        raise ValueError(f"step={step} cannot be saved; steps start at 0")
    try:
        json.dumps(meta)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"meta is not JSON ({error}); use only dicts, lists, strings and numbers"
        ) from error
    if jax.process_count() > 1:
        for name, leaf in named_leaves(state):
            if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
                raise ValueError(
                    f"state {name} is in one process only; create the state under "
                    "jit with shardings over the whole mesh"
                )
