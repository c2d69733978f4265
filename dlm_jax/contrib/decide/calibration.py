"""Temperatures and length penalties of decisions, fitted to labelled examples."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import minimize, minimize_scalar

from dlm_jax import Model
from dlm_jax.settings import SettingError, brief

ORDERS = ("left_to_right", "mean")
"""Decoding orders of the tokens of a label. ``mean`` averages the probability over all orders."""

_COLDEST = 1e-6
"""Lowest temperature of probabilities; quotients by lower ones overflow."""


class Scale(NamedTuple):
    """The divisor ``temperature * n ** length_penalty`` of the log-probability of n tokens.

    Attributes:
      temperature: a number in [1e-6, 1e9).
      length_penalty: the exponent of n. With 0, the divisor does not depend on n. With 1 and a
        temperature of 1, the quotient is the mean log-probability per token.
    """

    temperature: float = 1.0
    length_penalty: float = 0.0

    def scores(self, logprobs_C: np.ndarray, num_tokens_C: Any) -> np.ndarray:
        """Returns the log-probabilities ``[C]`` of labels, divided by this scale."""
        return logprobs_C / (self.temperature * np.power(num_tokens_C, self.length_penalty))

    def shares(self, logprobs_C: np.ndarray, num_tokens_C: Any) -> np.ndarray:
        """Returns the probabilities ``[C]`` of labels, the softmax of `scores`."""
        return softmax(self.scores(logprobs_C, num_tokens_C))


def calibrate(logprobs: Sequence[np.ndarray], right: Sequence[int]) -> float:
    """Returns the temperature in [0.01, 100] with the lowest negative log-likelihood of the correct
    labels.

    The cost is convex in the inverse temperature (Guo et al. 2017, On calibration of modern neural
    networks, 4.2). Each example has its `Decision.logprobs` and the index of its correct label.
    """

    def cost(log_temperature: float) -> float:
        heat = math.exp(log_temperature)
        return nll([softmax(own / heat) for own in logprobs], right)

    bounds = (math.log(0.01), math.log(100.0))
    found: Any = minimize_scalar(cost, bounds=bounds, method="bounded", options={"xatol": 1e-6})
    return math.exp(found.x)


def calibrate_lengths(
    logprobs: Sequence[np.ndarray], num_tokens: Sequence[np.ndarray], right: Sequence[int]
) -> Scale:
    """Returns the scale with the lowest negative log-likelihood of the correct labels.

    The length penalty is in [0, 2], as in beam search (Wu et al. 2016, Google's neural machine
    translation system, section 7). It is 0 if all labels have the same number of tokens. Each
    example has its `Decision.logprobs`, its `Decision.num_tokens`, and the index of its correct
    label.
    """
    heat = calibrate(logprobs, right)
    if len(np.unique(np.concatenate(num_tokens))) == 1:
        return Scale(heat)

    def cost(x: np.ndarray) -> float:
        scale = Scale(math.exp(x[0]), x[1])
        return nll([scale.shares(*own) for own in zip(logprobs, num_tokens, strict=True)], right)

    bounds = [(math.log(0.01), math.log(100.0)), (0.0, 2.0)]
    start = np.array([math.log(heat), 0.0])
    found: Any = minimize(cost, start, bounds=bounds, method="Powell", options={"xtol": 1e-4})
    return min(
        (Scale(math.exp(x[0]), float(x[1])) for x in (found.x, start)),
        key=lambda one: cost(np.array([math.log(one[0]), one[1]])),
    )


def nll(probabilities: Sequence[np.ndarray], right: Sequence[int]) -> float:
    """Returns the mean negative log-probability of the correct labels, in nats per example."""
    chosen = np.array([own[k] for own, k in zip(probabilities, right, strict=True)])
    return float(-np.log(np.maximum(chosen, np.finfo(np.float64).tiny)).mean())


def expected_calibration_error(
    probabilities: Sequence[np.ndarray], right: Sequence[int], *, num_bins: int = 15
) -> float:
    """Returns the mean gap between the confidence in the most likely label and its accuracy, in [0,
    1].

    Examples are grouped by confidence into n bins of equal width, ``((b - 1) / n, b / n]``. The
    result is the mean absolute difference over all bins, weighted by their number of examples (Guo
    et al. 2017, equation 3).
    """
    sure = np.array([own.max() for own in probabilities])
    hit = np.array([own.argmax() == k for own, k in zip(probabilities, right, strict=True)])
    which = np.ceil(sure * num_bins).astype(int)
    gaps = [abs((hit[which == b] - sure[which == b]).sum()) for b in np.unique(which)]
    return float(sum(gaps) / len(sure))


def write_calibration(
    path: str | os.PathLike[str], model: Model, task: str, **facts: str | float
) -> None:
    """Writes the scale of a task to a calibration file (JSON), which is created if it does not
    exist. Other tasks in the file are kept.

    `facts` has ``temperature``, ``length_penalty`` (0 if missing), ``order``, and any others, which
    `read_calibration` ignores.
    """
    tasks = _calibrated(path, model) if Path(path).exists() else {}
    told = {"vocabulary": model.vocabulary, "tasks": {**tasks, task: facts}}
    temporary = Path(f"{path}.tmp")
    temporary.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def read_calibration(
    path: str | os.PathLike[str], model: Model, *, order: str | None = None
) -> dict[str, Scale]:
    """Returns the scales in a file from `write_calibration` by task: those for this decoding order,
    or all if `order` is None.
    """
    tasks = _calibrated(path, model)
    return {
        name: Scale(float(facts["temperature"]), float(facts.get("length_penalty", 0.0)))
        for name, facts in tasks.items()
        if order in (None, facts["order"])
    }


def _calibrated(path: str | os.PathLike[str], model: Model) -> dict[str, dict[str, Any]]:
    try:
        told = json.loads(Path(path).read_text(encoding="utf-8"))
        vocabulary, tasks = told["vocabulary"], dict(told["tasks"])
        for facts in tasks.values():
            check_scale(Scale(facts["temperature"], facts.get("length_penalty", 0.0)))
            if facts["order"] not in ORDERS:
                raise ValueError(f"order={brief(facts['order'])} is unknown")
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = (
            error.strerror if isinstance(error, OSError) else f"is not a calibration file ({error})"
        )
        raise SettingError("calibration", str(path), str(why), "create it with --fit") from None
    if vocabulary != model.vocabulary:
        raise SettingError(
            "calibration", str(path), "was fitted to a different model", "fit it again"
        )
    return tasks


def scale_of(task: str, calibration: Mapping[str, Any]) -> Scale:
    """Returns the scale of a task. Numbers in `calibration` are temperatures."""
    if task not in calibration:
        known = ", ".join(sorted(calibration)) or "none"
        raise SettingError("task", task, "has no temperature for this order", f"known: {known}")
    found = calibration[task]
    return found if isinstance(found, Scale) else Scale(found)


def check_scale(scale: Scale) -> None:
    temperature, penalty = scale
    if not _is_number(temperature) or not _COLDEST <= temperature < 1e9:
        raise SettingError(
            "temperature", temperature, f"is not a number in [{_COLDEST:g}, 1e9)", "use 1.0"
        )
    if not _is_number(penalty) or not 0 <= penalty <= 2:
        raise SettingError("length_penalty", penalty, "is not a number in [0, 2]", "use 0.0")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def softmax(x: np.ndarray) -> np.ndarray:
    return np.exp(x - logsumexp(x))


def logsumexp(x: np.ndarray) -> float:
    top = x.max()
    return float(top + np.log(np.exp(x - top).sum()))
