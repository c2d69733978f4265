r"""Runs lm-evaluation-harness with the model ``dlm_jax`` and the task that ships with the package.

The program accepts the flags of ``lm_eval`` and adds a model and, without --include_path, the task:

    dlm-lm-eval --model dlm_jax --model_args checkpoint=DIR,draws=32 --batch_size 32 \
        --tasks dlm_jax_shakespeare_cloze

The extra ``eval`` is required: ``pip install dlm_jax[eval]``. Custom programs call `register`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib import resources
from typing import Any

from dlm_jax.cli.common import start_jax
from dlm_jax.cli.ends import End, program, refusals
from dlm_jax.cli.programs import needed


@program
def main(argv: Sequence[str] | None = None) -> int:
    start_jax()
    with refusals():
        harness = needed("lm_eval.__main__", "the program", "eval")
        register()
        argv = list(sys.argv[1:] if argv is None else argv)
        if not any(flag.startswith("--include_path") for flag in argv):
            argv += ["--include_path", str(resources.files("dlm_jax.harness").joinpath("tasks"))]
        sys.argv = ["dlm-lm-eval", *argv]
        # The harness checks tasks, arguments and requests only while it runs.
        harness.cli_evaluate()
    return End.DONE


def register() -> None:
    """Registers the model ``dlm_jax`` with lm-evaluation-harness."""
    registry: Any = importlib.import_module("lm_eval.api.registry").model_registry
    importlib.import_module("lm_eval.models")
    if "dlm_jax" not in registry:  # without installation, a checkout has no entry points
        registry.register("dlm_jax", target="dlm_jax.harness.lm:DlmJax")
