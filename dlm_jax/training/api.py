"""Training from Python: a config, and what a researcher puts in the place of its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike

import dlm_jax.config as configs
from dlm_jax.config import Config
from dlm_jax.training.heads import Head
from dlm_jax.training.loop import Outcome, ShowSample, run_loop, say
from dlm_jax.training.run import MakeNetwork, prepare
from dlm_jax.training.summary import describe
from dlm_jax.training.tasks import MakeHead, MakeObjective
from dlm_jax.types import Network


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
        need paths that `dlm_jax.distributed.sharding.RULES` knows.
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
