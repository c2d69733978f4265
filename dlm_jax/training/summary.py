"""What is about to be trained, in a few lines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

import dlm_jax.config as configs
from dlm_jax.training.loop import say
from dlm_jax.training.run import Run
from dlm_jax.types import Params

# Set from the tokenizer, whose vocabulary is told anyway.
_RESOLVED = ("vocab_size", "start_id")


def describe(run: Run, report: Callable[[str], None] = say) -> None:
    """Reports what is about to be trained, on what, and where."""
    corpus, mesh = run.corpus, dict(run.mesh.shape)
    report(
        f"{corpus.name}: {corpus.num_train_tokens:,} tokens to train on, "
        f"{corpus.num_val_tokens:,} held out, vocabulary {corpus.tokenizer.vocab_size}"
    )
    kind = run.mesh.devices.flat[0].platform
    parts = parameters_by_part(run.state.params)
    report(
        f"model of {sum(parts.values()):,} parameters on {kind}, mesh {mesh}: "
        + ", ".join(f"{name} {size:,}" for name, size in parts.items())
    )
    for section, values in configs.differing(run.config).items():
        shown = [f"{k}={_shown(v)}" for k, v in values.items() if k not in _RESOLVED]
        if shown:
            report(f"not the default: [{section}] {' '.join(shown)}")
    steps = run.config.train.steps
    if run.first_step == steps:
        report(f"{run.out_dir} has taken all its {steps} steps already; nothing is left to train")
    elif run.first_step:
        report(f"continuing {run.out_dir} from step {run.first_step} of {steps}")


def parameters_by_part(params: Params) -> dict[str, int]:
    """Numbers of parameters by part, the parts of all blocks together: ``blocks/mlp``."""
    sizes: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        names = [str(getattr(key, "key", key)) for key in path]
        part = "/".join(names[:2] if names[0] == "blocks" else names[:1])
        sizes[part] = sizes.get(part, 0) + leaf.size
    return sizes


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
