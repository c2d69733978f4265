"""Plots of a trace: when tokens were written, and the model's confidence (with matplotlib)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dlm_jax import Trace

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot_trace(trace: Trace, row: int = 0) -> Figure:
    """Plots when each token of a row was written, coloured by log-probability under the policy.

    A position that is rewritten after remasking has several marks. The function requires the extra
    ``plots``.

    Args:
      trace: from ``generate(..., trace=True)``.
      row: index of the row.

    Returns:
      A matplotlib figure; ``figure.savefig("trace.png")`` writes it.
    """
    _check(trace, row)
    figure = _figure()
    axes = figure.subplots()
    found = trace.writings(row)
    marks = axes.scatter(
        found["step"], found["position"], c=found["logprob"], s=14, marker="s", cmap="viridis"
    )
    figure.colorbar(marks, ax=axes, label="log-probability (nats)")
    axes.set(xlabel="step", ylabel="position", title=f"row {row}: tokens written by each step")
    axes.set_ylim(int(trace.length[row]) - 0.5, -0.5)
    return figure


def plot_confidence(trace: Trace, row: int = 0) -> Figure:
    """Plots entropy and confidence at the positions of a row that each step drew.

    The upper plot shows the entropy by position and step, and is empty where no token was drawn.
    The lower plot shows the mean entropy and confidence per step. The function requires the extra
    ``plots``.

    Args:
      trace: from ``generate(..., trace=True)``.
      row: index of the row.

    Returns:
      A matplotlib figure.
    """
    _check(trace, row)
    num_steps, length = max(1, int(trace.steps[row])), int(trace.length[row])
    is_drawn = np.asarray(trace.tokens[row])[:num_steps, :length] >= 0
    entropy, confidence = (
        np.where(is_drawn, np.asarray(values[row])[:num_steps, :length], np.nan)
        for values in (trace.entropy, trace.confidence)
    )
    figure = _figure()
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    image = above.imshow(entropy.T, aspect="auto", interpolation="nearest", cmap="magma")
    figure.colorbar(image, ax=above, label="entropy (nats)")
    above.set(ylabel="position", title=f"row {row}: uncertainty of each step")
    steps = np.arange(num_steps)
    for label, values in (("entropy (nats)", entropy), ("confidence", confidence)):
        mean = np.ma.masked_invalid(values).mean(axis=1)  # masked where no token was drawn
        below.plot(steps, np.ma.filled(mean, np.nan), label=label)
    below.set(xlabel="step", ylabel="mean")
    below.legend()
    return figure


def _check(trace: Any, row: int) -> None:
    if not isinstance(trace, Trace):
        raise ValueError(f"trace={trace!r:.60} is none; pass result.trace of generate(trace=True)")
    if not 0 <= row < len(trace.steps):
        raise ValueError(f"row={row} is not in the trace; use 0 to {len(trace.steps) - 1}")


def _figure() -> Figure:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise ValueError(
            "plots require matplotlib, which is not installed; pip install 'dlm_jax[plots]'"
        ) from None
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    return figure
