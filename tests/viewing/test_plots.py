"""Pictures of a trace."""

import importlib

import numpy as np
import pytest

from dlm_jax.sampling.replay import Trace
from dlm_jax.sampling.state import start_records
from dlm_jax.viewing import plot_confidence, plot_trace

pytest.importorskip("matplotlib")


def _trace() -> Trace:
    """Two rows of three positions; the first writes position 1, then 0, then 1 again."""
    records = start_records(np.zeros((2, 3), np.int32), 4)
    tokens, is_written = np.array(records["tokens"]), np.array(records["is_written"])
    logprobs, entropy = np.zeros(tokens.shape, np.float32), np.zeros(tokens.shape, np.float32)
    for step, place in ((0, 1), (1, 0), (2, 1)):
        tokens[0, step, place], is_written[0, step, place] = 5, True
        logprobs[0, step, place], entropy[0, step, place] = -1.0 - step, 0.5 * (step + 1)
    tokens[0, 0, 2], entropy[0, 0, 2] = 7, 1.5
    return Trace(
        np.zeros((2, 4, 3), np.int32), tokens, is_written, logprobs, np.zeros((2, 4)), entropy,
        2.0 * entropy, tokens, np.array([3, 3]), np.zeros((2, 3), bool), np.array([3, 0]),
        row=None, rules=None, width=1, mask_id=8, chunk=4, is_guided=False, vocab_size=12,
        vocabulary="",
    )  # fmt: skip


def test_writings_come_in_order_with_their_tokens():
    found = _trace().writings(0)
    assert found.tolist() == [(0, 1, 5, -1.0), (1, 0, 5, -2.0), (2, 1, 5, -3.0)]
    assert not _trace().writings(1).size


def test_a_plot_has_a_mark_for_every_writing(tmp_path):
    figure = plot_trace(_trace())
    (marks,) = figure.axes[0].collections
    assert np.asarray(marks.get_offsets()).tolist() == [[0, 1], [1, 0], [2, 1]]
    assert np.asarray(marks.get_array()).tolist() == [-1.0, -2.0, -3.0]
    figure.savefig(tmp_path / "trace.png")
    assert (tmp_path / "trace.png").stat().st_size > 1000


def test_a_plot_of_confidence_shows_the_means_of_each_step():
    above, below, *_ = plot_confidence(_trace()).axes
    shown = np.ma.filled(above.images[0].get_array(), np.nan)
    assert shown.shape == (3, 3) and np.isnan(shown[0, 0]) and shown[2, 0] == 1.5
    entropy, confidence = (line.get_ydata() for line in below.lines)
    assert np.asarray(entropy).tolist() == [1.0, 1.0, 1.5]
    assert np.asarray(confidence).tolist() == [2.0, 2.0, 3.0]
    assert plot_confidence(_trace(), row=1).axes


def test_what_is_no_trace_or_no_row_is_refused():
    with pytest.raises(ValueError, match="trace=None is none"):
        plot_trace(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="row=2 is not in the trace; use 0 to 1"):
        plot_confidence(_trace(), row=2)


def test_a_missing_matplotlib_is_named(monkeypatch):
    def missing(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ModuleNotFoundError(name)
        return found(name, *args, **kwargs)

    found = importlib.__import__
    monkeypatch.setattr("builtins.__import__", missing)
    with pytest.raises(ValueError, match=r"pip install 'dlm_jax\[plots\]'"):
        plot_trace(_trace())
