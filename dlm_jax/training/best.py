"""The best model of a run so far, by its figure on held-out text, kept beside the newest ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from dlm_jax.checkpoint import Checkpoints
from dlm_jax.checkpoint.files import complete_steps, remove, step_path
from dlm_jax.config import Config
from dlm_jax.distributed.processes import on_first_process
from dlm_jax.storage import located
from dlm_jax.training.checks import check_same_run
from dlm_jax.types import Params

FOLDER = "best"
"""Where in the run's directory (``train.out_dir``, or ``train.checkpoint_dir`` if that is set) it
lies: a directory of checkpoints with one in it."""


class Best:
    """The parameters of the evaluation with the lowest figure, in ``best`` of a run's directory.

    What is there was found by an earlier part of the run, and counts as long as the evaluations
    are over the same windows; a run that is continued from before it takes the same steps again.
    What a run of the same config left that saved nothing else goes when this run has a best model.
    Every process of a run makes one and calls the same methods in the same order.

    Args:
      config: of the run.
      meta: what the run saves beside its states, see `Run.meta`.
      is_new: whether the run begins here.
      check: see `Checkpoints`.

    Raises:
      ValueError: what is there is no directory, or the best model of another run.
    """

    def __init__(
        self,
        config: Config,
        meta: dict[str, Any],
        *,
        is_new: bool,
        check: Callable[[], None] = lambda: None,
    ):
        root = located(config.train.checkpoint_dir or config.train.out_dir) / FOLDER
        self._checkpoints = Checkpoints(root, keep=1, check=check)
        self._measured_on = [config.train.eval_windows, config.train.batch_size]
        self._is_ours = True
        try:
            self.figure = self._read(meta, is_new)
        except BaseException:
            self.close()
            raise

    def offer(self, step: int, figure: float, params: Params, meta: dict[str, Any]) -> bool:
        """Whether the figure of that step is the lowest; its parameters are then being written.

        Args:
          step: of the evaluation.
          figure: lower is better; one that is not finite is never the best.
          params: that were evaluated.
          meta: what is saved beside them.
        """
        if not math.isfinite(figure) or (self.figure is not None and figure >= self.figure):
            return False
        self._checkpoints.wait()
        on_first_process(lambda: self._remove_from(step if self._is_ours else 0))
        self._is_ours = True
        best = {"best": {"figure": figure, "measured_on": self._measured_on}}
        self._checkpoints.save(step, {"params": params}, meta | best)
        self.figure = figure
        return True

    def wait(self) -> None:
        """Nothing, once what is being written is complete."""
        self._checkpoints.wait()

    def close(self) -> None:
        """Nothing, after all threads have ended; what `wait` was not called for may be lost."""
        self._checkpoints.abandon()

    def _read(self, meta: dict[str, Any], is_new: bool) -> float | None:
        """The figure of what is there; None if nothing is, or another measure was taken."""
        # Every process reads: Orbax lets none go on before all have.
        if not on_first_process(self._checkpoints.steps):
            return None
        try:
            found = self._checkpoints.read_meta(report=lambda line: None)
        except ValueError:
            return None  # damaged: the next evaluation replaces it
        self._is_ours = found.get("run", "") == meta["run"]
        if not self._is_ours:
            self._check_may_go(meta, found, is_new)
            return None
        best = found.get("best", {})
        return best.get("figure") if best.get("measured_on") == self._measured_on else None

    def _check_may_go(self, meta: dict[str, Any], found: dict[str, Any], is_new: bool) -> None:
        """Raises ValueError for another run's best model that this run would not find again."""
        try:
            if not is_new:
                raise ValueError(f"it is of run {found.get('run')}, and this is {meta['run']}")
            check_same_run(meta, found)
        except ValueError as error:
            raise ValueError(
                f"{self._checkpoints.directory} holds the best model of another run ({error}); "
                "move it elsewhere, or use another train.out_dir"
            ) from None

    def _remove_from(self, step: int) -> None:
        """Removes what a run left that went further than this one has come."""
        for later in complete_steps(self._checkpoints.directory):
            if later >= step:
                remove(step_path(self._checkpoints.directory, later))
