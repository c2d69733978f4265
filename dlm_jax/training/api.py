"""What is about to be trained, in a few lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any

import jax

import dlm_jax.config as configs
from dlm_jax.config import Config, Trait
from dlm_jax.heads import Head
from dlm_jax.training.run import MakeNetwork, Run, prepare
from dlm_jax.training.tasks import MakeHead, MakeObjective
from dlm_jax.training.train_loop import Outcome, ShowSample, run_loop, say
from dlm_jax.types import Network, Params


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
        # What the tokenizer says is told anyway.
        told = configs.keys(Trait.FOUND)
        shown = [f"{k}={_shown(v)}" for k, v in values.items() if f"{section}.{k}" not in told]
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


def train(
    config: Config | str | PathLike[str],
    *,
    network: Network | MakeNetwork | None = None,
    objective: MakeObjective | None = None,
    heads: Sequence[Head | MakeHead] = (),
    show_sample: ShowSample | None = None,
    report: Callable[[str], None] = say,
) -> Outcome:
    """Trains what `config` describes, to its last step; called again, it continues.

    The run lives in ``train.out_dir``: checkpoints, ``metrics.jsonl`` and ``loss.png``. Its own
    network, objective and heads are named in the checkpoints, and must be given again to continue.

    Args:
      config: a `Config`, or the path of a TOML file.
      network: your own model instead of the Transformer of ``[model]``: a `Network`, or a function
        of the `ModelConfig` whose ``vocab_size`` is the corpus's. On several devices its matrices
        need paths that `dlm_jax.distributed.partitions.RULES` knows.
      objective: your own instead of those of ``[objective]``: a function of the `Setup` (resolved
        config, tokenizer, mesh) that returns ``(batch, key) -> Example``, a `NetworkObjective`,
        which runs the network itself, or a `Mixture` of several.
      heads: your own beside those of the config: `Head` records, or functions of the `Setup` that
        make them.
      show_sample: called with the run, the state and the step every ``train.sample_every`` steps.
      report: takes one line of text at a time.

    Returns:
      How the run ended, with its trained parameters.

    Raises:
      ValueError: what was given does not fit together; the line names it and the remedy.
    """
    if not isinstance(config, Config):
        config = configs.load(str(config))
    run = prepare(config, network=network, objective=objective, heads=heads, report=report)
    with run.checkpoints:
        describe(run, report)
        return run_loop(run, show_sample=show_sample)
