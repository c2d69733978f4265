r"""Runs lm-evaluation-harness with the model ``dlm_jax`` and the tasks that ship with the package.

The program accepts the flags of ``lm_eval`` and adds a model and tasks:

    dlm-lm-eval --model dlm_jax --model_args checkpoint=DIR,draws=32 --batch_size 32 \
        --tasks dlm_jax_shakespeare_cloze

The extra ``eval`` is required: ``pip install dlm_jax[eval]``. Custom programs call `register`.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Sequence
from importlib import resources
from typing import Any

from dlm_jax.cli.common import start_jax
from dlm_jax.cli.ends import End, program, refusals


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


@functools.cache
def register() -> None:
    """Registers the model ``dlm_jax`` and the shipped tasks with lm-evaluation-harness."""
    registry: Any = importlib.import_module("lm_eval.api.registry").model_registry
    importlib.import_module("lm_eval.models")
    if "dlm_jax" not in registry:
        registry.register("dlm_jax", target="dlm_jax.harness.lm:DlmJax")
    manager: Any = importlib.import_module("lm_eval.tasks").TaskManager
    plain = manager.__init__
    shipped = str(resources.files("dlm_jax.harness").joinpath("tasks"))

    @functools.wraps(plain)
    def with_shipped_tasks(self: Any, *given: Any, include_path: Any = None, **more: Any) -> None:
        paths = [include_path] if isinstance(include_path, str | os.PathLike) else include_path
        for path in paths or ():
            if not os.path.isdir(path):
                raise ValueError(f"--include_path {path} is not a directory; name one with tasks")
        plain(self, *given, include_path=[shipped, *(paths or ())], **more)

    manager.__init__ = with_shipped_tasks
