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
    arguments = list(sys.argv[1:] if argv is None else argv)
    own = str(resources.files("dlm_jax.harness").joinpath("tasks"))
    if "--tasks" in arguments and "--include_path" not in arguments:
        arguments += ["--include_path", own]
    sys.argv = ["dlm-lm-eval", *arguments]
    harness.cli_evaluate()
    return End.DONE


def register() -> None:
    """Lets lm-evaluation-harness know the model classes of all entry points of `GROUP`."""
    registry: Any = importlib.import_module("lm_eval.api.registry").model_registry
    importlib.import_module("lm_eval.models")
    if "dlm_jax" not in registry:  # a checkout that is not installed has no entry points
        registry.register("dlm_jax", target="dlm_jax.harness.lm:DlmJax")
    for entry in metadata.entry_points(group=GROUP):
        if entry.name not in registry:
            registry.register(entry.name, target=entry)
