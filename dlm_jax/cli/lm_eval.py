r"""Runs lm-evaluation-harness with the model ``dlm_jax`` and the tasks that ship with the package.

It takes the flags of ``lm_eval`` and changes nothing but what may be named:

    dlm-lm-eval --model dlm_jax --model_args checkpoint=DIR,draws=32 --batch_size 32 \
        --tasks dlm_jax_shakespeare_cloze

Needs the extra ``eval``: ``pip install dlm_jax[eval]``. A program of your own calls `register`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib import metadata, resources
from typing import Any

from dlm_jax.cli.common import start_jax
from dlm_jax.cli.ends import End, program, refusals

GROUP = "lm_eval.models"
"""Entry points of this group name model classes of lm-evaluation-harness."""


@program
def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: one of `End`."""
    start_jax()
    with refusals():
        try:
            harness: Any = importlib.import_module("lm_eval.__main__")
        except ModuleNotFoundError as error:
            raise ValueError(
                f"evaluation needs {error.name}; install it with: pip install 'dlm_jax[eval]'"
            ) from None
        register()
    arguments = sys.argv[1:] if argv is None else argv
    sys.argv = ["dlm-lm-eval", *with_own_tasks(arguments)]
    harness.cli_evaluate()
    return End.DONE


def with_own_tasks(arguments: Sequence[str]) -> list[str]:
    """The arguments, with the folder of the shipped tasks where tasks are named or listed.

    An ``--include_path`` of the caller's stays the only one, as the harness takes no second.
    """
    flags = {argument.split("=")[0] for argument in arguments}
    has_tasks = flags & {"--tasks", "-t"} or [*arguments[:1]] in (["ls"], ["validate"])
    if not has_tasks or "--include_path" in flags:
        return list(arguments)
    own = resources.files("dlm_jax.harness").joinpath("tasks")
    return [*arguments, "--include_path", str(own)]


def register() -> None:
    """Lets lm-evaluation-harness know the model classes of all entry points of `GROUP`."""
    registry: Any = importlib.import_module("lm_eval.api.registry").model_registry
    importlib.import_module("lm_eval.models")
    if "dlm_jax" not in registry:  # a checkout that is not installed has no entry points
        registry.register("dlm_jax", target="dlm_jax.harness.lm:DlmJax")
    for entry in metadata.entry_points(group=GROUP):
        if entry.name not in registry:
            registry.register(entry.name, target=entry)
