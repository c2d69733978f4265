"""Trains a model on rewards for its own samples:

python -m dlm_jax.contrib.rl --config FILE --reward MODULE:FUNCTION --updates 4 train.steps=800
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence

from dlm_jax.contrib import loops
from dlm_jax.contrib.rl import PolicySettings, train_policy


def reward_function(name: str) -> Callable[..., Sequence[float]]:
    """The function ``MODULE:FUNCTION``; ValueError if it does not exist."""
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"--reward {name!r} does not exist ({error}); write module:function, such as "
            "dlm_jax.contrib.arithmetic:rewards"
        ) from None


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the program and returns its exit code: 2 for input that it refuses."""
    parser = argparse.ArgumentParser(prog="python -m dlm_jax.contrib.rl", description=__doc__)
    parser.add_argument("--reward", required=True, metavar="MODULE:FUNCTION")
    loops.add_settings(parser, PolicySettings)
    args = parser.parse_args(argv)
    try:
        config, settings = loops.settings_of(args, PolicySettings)
        train_policy(config, reward_function(args.reward), settings)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
