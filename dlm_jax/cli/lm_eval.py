r"""Runs lm-evaluation-harness with the model ``dlm_jax`` and the tasks that ship with the package.

The program accepts the flags of ``lm_eval`` and adds a model and tasks:

    dlm-lm-eval --model dlm_jax --model_args checkpoint=DIR,draws=32 --batch_size 32 \
        --tasks dlm_jax_shakespeare_cloze

The extra ``eval`` is required: ``pip install dlm_jax[eval]``. Custom programs call `register`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Sequence
from importlib import metadata, resources
from typing import Any

from dlm_jax.cli.common import start_jax
from dlm_jax.cli.ends import End, program, refusals

GROUP = "lm_eval.models"
"""The entry-point group of model classes for lm-evaluation-harness."""


@program
def main(argv: Sequence[str] | None = None) -> int:
    start_jax()
    with refusals():
        try:
            harness: Any = importlib.import_module("lm_eval.__main__")
        except ModuleNotFoundError as error:
            raise ValueError(
                f"evaluation needs {error.name}; install it with: pip install 'dlm_jax[eval]'"
            ) from None
        register()
        sys.argv = ["dlm-lm-eval", *(sys.argv[1:] if argv is None else argv)]
        # The harness checks tasks, arguments and requests only while it runs.
        harness.cli_evaluate()
    return End.DONE


def register() -> None:
    """Registers the models in `GROUP` and the shipped tasks with lm-evaluation-harness."""
    registry: Any = importlib.import_module("lm_eval.api.registry").model_registry
    importlib.import_module("lm_eval.models")
    if "dlm_jax" not in registry:  # without installation, a checkout has no entry points
        registry.register("dlm_jax", target="dlm_jax.harness.lm:DlmJax")
    for entry in metadata.entry_points(group=GROUP):
        if entry.name not in registry:
            registry.register(entry.name, target=entry)
    _add_own_tasks(importlib.import_module("lm_eval.tasks").TaskManager)


@functools.cache
def _add_own_tasks(manager: Any) -> None:
    """Adds the shipped tasks to the search path of every task manager.

    ``--include_path`` accepts one directory, whose tasks override shipped tasks of the same name.
    """
    plain = manager.__init__
    own = str(resources.files("dlm_jax.harness").joinpath("tasks"))

    @functools.wraps(plain)
    def with_own_tasks(self: Any, *arguments: Any, **more: Any) -> None:
        given = inspect.signature(plain).bind(self, *arguments, **more)
        paths = given.arguments.get("include_path") or []
        paths = paths if isinstance(paths, list | tuple) else [paths]
        for path in paths:
            if not os.path.isdir(path):
                raise ValueError(
                    f"--include_path {path} is not a directory; pass a directory with tasks"
                )
        given.arguments["include_path"] = [own, *paths]
        plain(*given.args, **given.kwargs)

    manager.__init__ = with_own_tasks
