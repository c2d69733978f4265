"""Decisions: the exact probabilities of several labels under one decoding order.

The canvas of a label has one hole per token, so labels of different lengths have different
canvases, and no end token is scored. Tokens are decoded one at a time, each from the canvas with
the previously decoded tokens. Labels share the canvases of their common prefixes, and all one-token
labels share one forward pass.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.special import stdtrit

from dlm_jax import DecodingRow, Model, order_logprobs
from dlm_jax.contrib.decide.calibration import (
    ORDERS,
    Scale,
    check_scale,
    logsumexp,
    read_calibration,
    scale_of,
    softmax,
)
from dlm_jax.settings import UNSET, SettingError, brief

SLOT = re.compile(r"<slot:(\w+)>")
"""The marker of a named slot in a prompt."""

MOST_ORDERED = 8
"""Maximum number of tokens in a combination of labels with ``order="mean"``, which takes
``2^n - 1`` forward passes."""

MOST_JOINT = 4096
"""Maximum number of combinations of labels that are enumerated. Larger sets of combinations are
sampled.
"""

YES_NO = ("yes", "no")

Labels = Sequence[str | int]
Choices = Labels | Mapping[str, Labels]
"""The labels of the slot after the prompt, or the labels of each named slot."""


@dataclass(frozen=True)
class Decision:
    """The probabilities of the labels of one prompt.

    Attributes:
      choices: labels by slot name; ``""`` is the slot after the prompt.
      combinations: the ``C`` enumerated or drawn combinations of one label per slot.
      logprobs: float64 ``[C]``, log-probability of each combination in nats under the decoding
        order. The probabilities can sum to less than 1, because other texts are possible.
      probabilities: float64 ``[C]``, normalised over the combinations. NaN where the logits of the
        model are not finite.
      num_draws: number of combinations drawn, including repeats; 0 if all are enumerated.
      squares: float64 ``[C]``, sum of the squared weights of all draws of each combination; 0 if
        all combinations are enumerated.
      num_tokens: int ``[C]``, number of tokens in each combination.
    """

    choices: Mapping[str, tuple[str, ...]]
    combinations: tuple[tuple[str, ...], ...]
    logprobs: np.ndarray
    probabilities: np.ndarray
    num_draws: int
    squares: np.ndarray
    num_tokens: np.ndarray

    @property
    def is_exact(self) -> bool:
        return not self.num_draws

    @property
    def best(self) -> dict[str, str]:
        """The label of each slot in the most likely combination; in a tie, in the first one."""
        return dict(
            zip(self.choices, self.combinations[np.argmax(self.probabilities)], strict=True)
        )

    def of(self, slot: str = "") -> dict[str, float]:
        """Returns the marginal probability of each label of a slot."""
        labels = self._labels(slot)
        found = [self.probabilities[self._holds(slot, label)].sum() for label in labels]
        return dict(zip(labels, map(float, found), strict=True))

    def interval(self, slot: str = "") -> dict[str, float]:
        """Returns the half-width of the 95% confidence interval of each probability in `of`; 0 if
        exact.
        """
        return {
            label: self._half(self._holds(slot, label).astype(float))
            for label in self._labels(slot)
        }

    def mean(self, slot: str = "", values: Sequence[float] | None = None) -> tuple[float, float]:
        """Returns the mean label on a numeric scale and the half-width of its 95% confidence
        interval.

        Args:
          slot: name of the slot.
          values: value of each label; if None, the labels are parsed as numbers.
        """
        labels = self._labels(slot)
        if values is None:
            values = [_number(label) for label in labels]
        if len(values) != len(labels):
            raise SettingError(
                "values", list(values), f"does not have {len(labels)} numbers, one per label"
            )
        value_of = dict(zip(labels, values, strict=True))
        place = list(self.choices).index(slot)
        each = np.array([value_of[one[place]] for one in self.combinations], np.float64)
        return float(self.probabilities @ each), self._half(each)

    def _labels(self, slot: str) -> tuple[str, ...]:
        if slot not in self.choices:
            raise SettingError(
                "slot", slot, "is not a slot", f"use one of {', '.join(self.choices)}"
            )
        return self.choices[slot]

    def _holds(self, slot: str, label: str) -> np.ndarray:
        place = list(self.choices).index(slot)
        return np.array([one[place] == label for one in self.combinations])

    def _half(self, values_C: np.ndarray) -> float:
        """Returns the half-width of the confidence interval of a mean of weighted draws (Owen 2013,
        9.2).
        """
        if not self.num_draws:
            return 0.0
        error = math.sqrt(float(self.squares @ (values_C - self.probabilities @ values_C) ** 2))
        return error * float(stdtrit(self.num_draws - 1, 0.975))  # Student's t


def decide(
    model: Model,
    prompts: str | Sequence[str],
    choices: Choices | Sequence[Choices] = YES_NO,
    *,
    order: str = "left_to_right",
    temperature: float = 1.0,
    length_penalty: float = 0.0,
    task: str | None = None,
    calibration: str | os.PathLike[str] | Mapping[str, float | Scale] | None = None,
    num_draws: int = 256,
    batch_size: int = 32,
    seed: int = 0,
) -> list[Decision]:
    """Computes the probabilities of the labels for each prompt.

    The score of a label is ``log p = sum_i log p(token_i | prompt, the label's tokens before it,
    holes elsewhere)``, from the LM head at temperature 1 without bans. Probabilities are the
    softmax of ``log p / (temperature n ** length_penalty)`` over the choices, where n is the number
    of tokens in a label. All label lengths have the same prior probability, as in infilling with a
    given length. Each label is tokenised separately.

    With named slots, a prompt contains ``<slot:NAME>`` once per slot, with any text between and
    after the slots. The tokens of all slots are decoded as one label. Up to 4096 combinations of
    labels are enumerated. Otherwise, `num_draws` combinations are drawn slot by slot from the
    scores of each slot and reweighted (self-normalised importance sampling: Owen 2013, Monte Carlo
    theory, methods and examples, 9.2).

    The result of a prompt does not depend on the other prompts. Programs with the same number of
    rows produce bitwise equal results; other programs agree within floating-point tolerance.

    Args:
      model: a model from `dlm_jax.load`, or a custom one.
      prompts: one or more texts.
      choices: at least two labels, or a mapping from slot names to labels, shared by all prompts or
        one per prompt. Integers are written as digits.
      order: ``left_to_right``, or ``mean`` for the log of the mean probability over all orders of
        at most 8 tokens.
      temperature: a number in [1e-6, 1e9); 1 uses the probabilities of the model.
      length_penalty: a number in [0, 2]; 0 uses the probabilities of the model.
      task: name of a task in `calibration`, whose temperature and length penalty are used.
      calibration: a file from ``python -m dlm_jax.contrib.decide --fit``, or a mapping from tasks
        to `Scale` objects or temperatures.
      num_draws: number of combinations drawn per prompt if they are not enumerated.
      batch_size: maximum number of rows per forward pass. The number of rows of a program is a
        power of two.
      seed: random seed of the draws.

    Raises:
      ValueError: labels are empty or equal, a prompt with its labels exceeds the canvas, or a
        setting is out of range.
    """
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    if not texts:
        raise SettingError("prompts", UNSET, "are empty", "pass at least one")
    several = _each(choices, len(texts))
    scale = _scale(model, Scale(temperature, length_penalty), task, calibration, order)
    asked = []
    for place, (text, own) in enumerate(zip(texts, several, strict=True)):
        try:
            asked.append(question(model, text, own))
        except SettingError as error:
            where = f"prompt {place}: " if len(texts) > 1 else ""
            raise SettingError(
                error.name, error.value, error.why, f"{where}{error.remedy}", error.others
            ) from None
    return answers(
        model,
        asked,
        order=order,
        scale=scale,
        num_draws=num_draws,
        batch_size=batch_size,
        seed=seed,
    )


class Question(NamedTuple):
    """A tokenised prompt with slots and their tokenised labels.

    Attributes:
      choices: labels by slot name, in the order of the prompt.
      labels: ids of the labels of each slot.
      parts: given ids before, between and after the slots.
    """

    choices: Mapping[str, tuple[str, ...]]
    labels: Sequence[Sequence[np.ndarray]]
    parts: Sequence[np.ndarray]

    @property
    def num_joint(self) -> int:
        return math.prod(map(len, self.labels))

    @property
    def num_tokens(self) -> int:
        """The total length of the longest labels of all slots."""
        return sum(max(map(len, own)) for own in self.labels)

    def row(self, tokens: Sequence[np.ndarray], slot: int | None = None) -> DecodingRow:
        """Returns the row with these tokens in the slots.

        `DecodingRow.places` are the positions of the tokens of one slot, or of all slots if `slot`
        is None.
        """
        pieces, places, at = [self.parts[0]], [], len(self.parts[0])
        for number, (own, part) in enumerate(zip(tokens, self.parts[1:], strict=True)):
            if slot in (None, number):
                places += range(at, at + len(own))
            pieces += [own, part]
            at += len(own) + len(part)
        return DecodingRow(np.concatenate(pieces).astype(np.int32), places)


def question(model: Model, prompt: str | np.ndarray, choices: Choices) -> Question:
    """Tokenises and validates a prompt (text, or ids before a single slot) and its choices, which
    are as in `decide`.
    """
    encode, prefix = model.tokenizer.encode, np.array(model.prefix_ids, np.int32)
    if not isinstance(choices, Mapping):
        given = prompt if isinstance(prompt, np.ndarray) else encode(_text("prompt", prompt))
        parts, named = [given, encode("")], {"": choices}
    elif isinstance(prompt, np.ndarray):
        raise SettingError(
            "choices",
            UNSET,
            "have slot names, but a prompt of ids has a single slot",
            "pass a list",
        )
    else:
        parts, named = _slots(model, _text("prompt", prompt), choices)
    if isinstance(prompt, str):
        parts[0] = np.concatenate([prefix, parts[0]])
    if not len(parts[0]) and not model.network.predicts_first:
        if not model.first_ids:
            raise SettingError(
                "prompt",
                UNSET,
                "has no text before the first slot, but the model predicts each "
                "token from the tokens before it, and there is no BOS",
                "put a text before it",
            )
        parts[0] = np.array(model.first_ids, np.int32)
    known = {name: _checked(name, labels) for name, labels in named.items()}
    ids = [_ids(model, name, labels) for name, labels in known.items()]
    made = Question(known, ids, parts)
    length = sum(map(len, parts)) + made.num_tokens
    if length > model.max_length:
        raise SettingError(
            "prompt",
            UNSET,
            f"with its labels has {length} tokens, but the canvas of the model "
            f"has {model.max_length}",
            "shorten it",
        )
    sees_behind = not model.is_causal and not model.network.block_length
    if not sees_behind and any(len(part) for part in parts[1:]):
        raise SettingError(
            "prompt",
            UNSET,
            "has text after a slot, which a causal or block-causal model does not attend to",
            "use a single slot at the end",
        )
    return made


def answers(
    model: Model,
    asked: Sequence[Question],
    *,
    order: str = "left_to_right",
    scale: Scale = Scale(),  # noqa: B008
    num_draws: int = 256,
    batch_size: int = 32,
    seed: int = 0,
) -> list[Decision]:
    """Returns the decision of each question; other arguments are as for `decide`."""
    _check(model, asked, order, scale, num_draws)
    for name, value, least in (("batch_size", batch_size, 1), ("seed", seed, 0)):
        if value < least:
            raise SettingError(name, value, f"must be at least {least}")

    mask_id = model.tokenizer.mask_id

    def read(rows: Sequence[DecodingRow]) -> np.ndarray:
        if order == "left_to_right":
            return order_logprobs(model, rows, batch_size=batch_size)
        sets = (one for row in rows for one in decoded_sets(row, mask_id))
        values = iter(order_logprobs(model, sets, batch_size=batch_size))
        return np.array([_mean_over_orders(len(row.places), values) for row in rows])

    combined = [
        list(itertools.product(*one.labels)) if one.num_joint <= MOST_JOINT else [] for one in asked
    ]
    rows = [one.row(tokens) for one, all_ in zip(asked, combined, strict=True) for tokens in all_]
    found = read(rows) if rows else np.zeros(0)
    ends = np.cumsum(list(map(len, combined)))
    made = []
    for place, (one, own) in enumerate(zip(asked, np.split(found, ends[:-1]), strict=True)):
        if not own.size:
            rng = np.random.default_rng((seed, place))
            made.append(_drawn(one, read, rng, scale, num_draws, mask_id))
            continue
        names = tuple(itertools.product(*one.choices.values()))
        sizes = np.array([sum(map(len, tokens)) for tokens in combined[place]])
        shares = scale.shares(own, sizes)
        made.append(Decision(one.choices, names, own, shares, 0, np.zeros(len(own)), sizes))
    return made


def decoded_sets(row: DecodingRow, mask_id: int) -> Iterator[DecodingRow]:
    """Yields a row for each hole of each set of decoded places: the hole is decoded next.

    Bit i of the number of a set is 1 if place i is decoded. Sets and holes are in ascending order.
    """
    places = np.asarray(row.places)
    for number in range(2 ** len(places) - 1):
        is_hole = (number >> np.arange(len(places))) % 2 == 0
        for i in np.flatnonzero(is_hole):
            ids = row.ids.copy()
            ids[places[is_hole]] = mask_id
            ids[places[i]] = row.ids[places[i]]
            yield DecodingRow(ids, [int(places[i])])


def _mean_over_orders(num: int, values: Iterator[float]) -> float:
    """Returns the log of the mean probability over all orders of `num` places, given the
    log-probabilities of the rows of `decoded_sets`.
    """
    reached = np.full(2**num, -np.inf)
    reached[0] = 0.0
    for written in range(2**num - 1):
        holes = [i for i in range(num) if not written >> i & 1]
        for i in holes:
            step = reached[written] + next(values) - math.log(len(holes))
            reached[written | 1 << i] = np.logaddexp(reached[written | 1 << i], step)
    return float(reached[-1])


def _drawn(
    asked: Question,
    read: Callable[[Sequence[DecodingRow]], np.ndarray],
    rng: np.random.Generator,
    scale: Scale,
    num_draws: int,
    mask_id: int,
) -> Decision:
    """Returns a decision from randomly drawn combinations. The lengths of all labels are drawn
    first, and then the labels, slot by slot.
    """
    chosen = np.zeros((num_draws, len(asked.labels)), int)
    weight, told = np.zeros(num_draws), np.zeros(num_draws)
    sizes = [np.array(list(map(len, own))) for own in asked.labels]
    # Lengths are drawn in proportion to their number of labels. The weights correct for this.
    length = np.stack([rng.choice(size, num_draws) for size in sizes], axis=1)
    for slot, size in enumerate(sizes):
        weight -= np.log((size[None] == length[:, slot, None]).mean(axis=1))
    for slot, own in enumerate(asked.labels):
        keys = np.concatenate([length, chosen[:, :slot]], axis=1)
        states, state = np.unique(keys, axis=0, return_inverse=True)
        rows, cuts = [], []
        for key in states:
            before = [asked.labels[i][int(key[len(sizes) + i])] for i in range(slot)]
            after = [np.full(n, mask_id) for n in key[slot + 1 : len(sizes)]]
            fits = np.flatnonzero(sizes[slot] == key[slot])
            rows += [asked.row([*before, own[int(k)], *after], slot) for k in fits]
            cuts.append(fits)
        ends = np.cumsum(list(map(len, cuts)))
        scores = np.split(read(rows), ends[:-1])
        for place, at in enumerate(state.reshape(-1)):
            heated = scale.scores(scores[at], states[at, : len(sizes)].sum())
            share = softmax(heated)
            is_finite = bool(np.isfinite(share).all())
            drawn = rng.choice(len(share), p=share if is_finite else None)
            chosen[place, slot] = cuts[at][drawn]
            weight[place] += logsumexp(heated)
            told[place] += scores[at][drawn]
    shares = softmax(weight)
    unique, first, which = np.unique(chosen, axis=0, return_index=True, return_inverse=True)
    names = list(asked.choices.values())
    return Decision(
        asked.choices,
        tuple(tuple(own[k] for own, k in zip(names, one, strict=True)) for one in unique),
        told[first],
        np.bincount(which.reshape(-1), shares),
        num_draws,
        np.bincount(which.reshape(-1), shares**2),
        length[first].sum(axis=1),
    )


def _scale(
    model: Model,
    scale: Scale,
    task: str | None,
    calibration: str | os.PathLike[str] | Mapping[str, float | Scale] | None,
    order: str,
) -> Scale:
    if (task is None) != (calibration is None):
        raise SettingError(
            "task", task, "and calibration must be passed together", "pass both or neither"
        )
    if task is None or calibration is None:
        return scale
    for name, own, neutral in zip(Scale._fields, scale, Scale(), strict=True):
        if own != neutral:
            raise SettingError(name, own, "is set by the task", "remove one of them")
    if not isinstance(calibration, Mapping):
        calibration = read_calibration(calibration, model, order=order)
    return scale_of(task, calibration)


def _check(
    model: Model, asked: Sequence[Question], order: str, scale: Scale, num_draws: int
) -> None:
    check_scale(scale)
    if order not in ORDERS:
        raise SettingError("order", order, "is unknown", f"use {' or '.join(ORDERS)}")
    if num_draws < 2:
        raise SettingError("num_draws", num_draws, "must be at least 2")
    if order == "left_to_right":
        return
    if model.is_causal:
        raise SettingError(
            "order", order, "is not supported by a causal model", "use left_to_right"
        )
    for one in asked:
        if one.num_tokens > MOST_ORDERED or one.num_joint > MOST_JOINT:
            raise SettingError(
                "order",
                order,
                f"is limited to {MOST_ORDERED} tokens and {MOST_JOINT} "
                f"combinations, but the labels have {one.num_tokens} and {one.num_joint}",
                "use left_to_right",
            )


def _each(choices: Choices | Sequence[Choices], count: int) -> list[Choices]:
    """Returns the choices for each prompt."""
    if isinstance(choices, str) or not isinstance(choices, Mapping | Sequence):
        raise SettingError("choices", choices, "are not a list of labels", "pass at least two")
    are_several = not isinstance(choices, Mapping) and any(
        isinstance(one, Sequence | Mapping) and not isinstance(one, str) for one in choices
    )
    if not are_several:
        return [choices] * count  # type: ignore[list-item]
    if len(choices) != count:
        raise SettingError("choices", UNSET, f"are {len(choices)} lists for {count} prompts")
    return list(choices)  # type: ignore[arg-type]


def _text(name: str, text: Any) -> str:
    if not isinstance(text, str):
        raise SettingError(name, text, "is not a string", "use a string")
    return text


def _slots(
    model: Model, prompt: str, choices: Mapping[str, Labels]
) -> tuple[list[np.ndarray], dict[str, Labels]]:
    """Returns the given ids around the slots and the choices in the order of the prompt."""
    names = [marker[1] for marker in SLOT.finditer(prompt)]
    for name in (*names, *choices):
        if names.count(name) != 1 or name not in choices:
            raise SettingError(
                "choices",
                UNSET,
                f"and prompt do not agree on the slot {name!r}",
                f"write <slot:{name}> once, and pass its labels",
            )
    if not names:
        raise SettingError(
            "choices",
            UNSET,
            "have slot names, but the prompt has no slots",
            "pass a list of labels",
        )
    pieces = SLOT.split(prompt)[::2]
    return [model.tokenizer.encode(text) for text in pieces], {n: choices[n] for n in names}


def _checked(slot: str, labels: Any) -> tuple[str, ...]:
    where = f" of {slot!r}" if slot else ""
    if isinstance(labels, str) or not isinstance(labels, Sequence):
        raise SettingError("choices", labels, f"{where[1:]} is not a list of labels".lstrip())
    found = []
    for label in labels:
        is_int = isinstance(label, int) and not isinstance(label, bool)
        if not is_int and (not isinstance(label, str) or not label):
            why = "contains an empty label" if label == "" else "has a label that is not a string"
            raise SettingError("choices", list(labels), f"{where[1:]} {why}".lstrip(), "remove it")
        if str(label) in found:
            why = f"{where[1:]} contains {brief(str(label))} twice".lstrip()
            raise SettingError("choices", list(labels), why, "keep one")
        found.append(str(label))
    if len(found) < 2:
        raise SettingError(
            "choices", found, f"{where[1:]} has fewer than two labels".lstrip(), "add some"
        )
    return tuple(found)


def _ids(model: Model, slot: str, labels: Sequence[str]) -> list[np.ndarray]:
    known: dict[bytes, str] = {}
    made = []
    for label in labels:
        try:
            ids = model.tokenizer.encode(label)
        except ValueError as error:
            raise SettingError("choices", label, f"cannot be written: {error}") from None
        other = known.setdefault(ids.tobytes(), label)
        if other != label or not ids.size:
            why = f"has the same tokens as {brief(other)}" if ids.size else "has no tokens"
            raise SettingError("choices", label, why, "remove it")
        made.append(ids)
    return made


def _number(label: str) -> float:
    try:
        return float(label)
    except ValueError:
        raise SettingError(
            "choices", label, "is not a number, which a mean requires", "pass values"
        ) from None
