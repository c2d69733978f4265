"""Decisions: the exact probabilities of several labels under one decoding order.

The canvas of a label has one hole per token, so labels of different lengths have different
canvases, and no end token is scored. Tokens are decoded one at a time, each from the canvas with
the previously decoded tokens. Labels share the canvases of their common prefixes, and all one-token
labels share one forward pass.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import minimize, minimize_scalar

from dlm_jax.diffusion.likelihood import half_width
from dlm_jax.diffusion.losses import unpredicted
from dlm_jax.inference.model import Model
from dlm_jax.inference.results import canvas_size
from dlm_jax.inference.scoring import check_sizes, compiled
from dlm_jax.sampling import positions
from dlm_jax.settings import UNSET, SettingError, brief
from dlm_jax.store.files import check_regular, replacing
from dlm_jax.types import Network, Params

SLOT = re.compile(r"<slot:(\w+)>")
"""The marker of a named slot in a prompt."""

ORDERS = ("left_to_right", "mean")
"""Decoding orders of the tokens of a label. ``mean`` averages the probability over all orders."""

MOST_ORDERED = 8
"""Maximum number of tokens in a combination of labels with ``order="mean"``, which takes
``2^n - 1`` forward passes."""

MOST_JOINT = 4096
"""Maximum number of combinations of labels that are enumerated. Larger sets of combinations are
sampled.
"""

_COLDEST = 1e-6
"""Lowest temperature of probabilities; quotients by lower ones overflow."""

YES_NO = ("yes", "no")

Labels = Sequence[str | int]
Choices = Labels | Mapping[str, Labels]
"""The labels of the slot after the prompt, or the labels of each named slot."""


class DecodingRow(NamedTuple):
    """A row of tokens, int32 ``[n]``, and the positions to decode, in order.

    A MASK token at any other position remains a hole.
    """

    ids: np.ndarray
    places: Sequence[int]


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
        return _softmax(self.scores(logprobs_C, num_tokens_C))


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
        return half_width(error, self.num_draws)


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
      calibration: a file from ``python -m dlm_jax.evaluate --fit``, or a mapping from tasks to
        `Scale` objects or temperatures.
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
        model, asked, order=order, scale=scale, num_draws=num_draws, batch_size=batch_size,
        seed=seed,
    )  # fmt: skip


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
                "prompt", UNSET, "has no text before the first slot, but the model predicts each "
                "token from the tokens before it, and there is no BOS", "put a text before it",
            )  # fmt: skip
        parts[0] = np.array(model.first_ids, np.int32)
    known = {name: _checked(name, labels) for name, labels in named.items()}
    ids = [_ids(model, name, labels) for name, labels in known.items()]
    made = Question(known, ids, parts)
    length = sum(map(len, parts)) + made.num_tokens
    if length > model.max_length:
        raise SettingError(
            "prompt", UNSET, f"with its labels has {length} tokens, but the canvas of the model "
            f"has {model.max_length}", "shorten it",
        )  # fmt: skip
    sees_behind = not model.is_causal and not model.network.block_length
    if not sees_behind and any(len(part) for part in parts[1:]):
        raise SettingError(
            "prompt", UNSET, "has text after a slot, which a causal or block-causal model does "
            "not attend to", "use a single slot at the end",
        )  # fmt: skip
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
    goes_on: Callable[[], bool] = lambda: True,
) -> list[Decision]:
    """Returns the decision of each question; other arguments are as for `decide`.

    `goes_on` is called before each batch. If it returns False, no further batches run, and
    `Stopped` is raised.
    """
    _check(model, asked, order, scale, num_draws)
    check_sizes(num_draws=num_draws, batch_size=batch_size, seed=seed)

    def read(rows: Sequence[DecodingRow]) -> np.ndarray:
        return logprobs(model, rows, order=order, batch_size=batch_size, goes_on=goes_on)

    mask_id = model.tokenizer.mask_id
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


def _drawn(
    asked: Question, read: Callable[[Sequence[DecodingRow]], np.ndarray], rng: np.random.Generator,
    scale: Scale, num_draws: int, mask_id: int,
) -> Decision:  # fmt: skip
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
            share = _softmax(heated)
            is_finite = bool(np.isfinite(share).all())
            drawn = rng.choice(len(share), p=share if is_finite else None)
            chosen[place, slot] = cuts[at][drawn]
            weight[place] += _logsumexp(heated)
            told[place] += scores[at][drawn]
    shares = _softmax(weight)
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


class Stopped(Exception):
    """Raised when the caller cancels the remaining batches."""


def logprobs(
    model: Model,
    rows: Sequence[DecodingRow],
    *,
    order: str = "left_to_right",
    batch_size: int = 32,
    num_rows: int | None = None,
    goes_on: Callable[[], bool] = lambda: True,
) -> np.ndarray:
    """Returns the log-probability in nats of the tokens at the `places` of each row, float64
    ``[N]``.

    ``left_to_right`` decodes the places in the given order. ``mean`` returns the log of the mean
    probability over all orders, computed from ``2^n - 1`` canvases. Identical canvases run only
    once.

    Every program has `num_rows` rows; None uses the smallest sufficient power of two, up to
    `batch_size`. `goes_on` is as in `answers`.
    """
    mask_id = model.tokenizer.mask_id
    canvases = _Canvases()
    if order == "left_to_right":
        asked = [_in_order(row, mask_id, canvases) for row in rows]
        value = canvases.run(model, batch_size, num_rows, goes_on)
        return np.array([value[own].sum() for own in asked])
    every = [_in_all_orders(row, mask_id, canvases) for row in rows]
    value = canvases.run(model, batch_size, num_rows, goes_on)
    return np.array([_mean_over_orders(value[own]) for own in every])


class TokenLogprobs(NamedTuple):
    """Log-probabilities in nats of the n tokens of a text, each given the tokens before it.

    Attributes:
      ids: int32 ``[n]``, the tokens.
      logprobs: float32 ``[n]``, NaN at the first token if the network does not predict it
        (`Network.predicts_first`).
      top_ids: int32 ``[n, K]``, the most likely ids at each position, most likely first.
      top_logprobs: float32 ``[n, K]``.
    """

    ids: np.ndarray
    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


def token_logprobs(
    model: Model,
    texts: Sequence[np.ndarray],
    *,
    num_top: int = 1,
    batch_size: int = 32,
    goes_on: Callable[[], bool] = lambda: True,
) -> list[TokenLogprobs]:
    """Returns the log-probabilities of the tokens of each text, given as ids.

    A causal model takes one forward pass per text, and the values sum to the exact likelihood
    (of the tokens after the first, if the network does not predict the first one).
    Other models decode the text from left to right, as in ``decide(order="left_to_right")``: token
    i is read from the canvas on which token i and all later tokens are MASK, so a text of n tokens
    takes n forward passes, and the values sum to the likelihood of the text under this order, given
    n. MASK is excluded, as in the losses, and no id that is never written is among the most likely
    ones. `goes_on` is as in `answers`.
    """
    _check_holes(model)
    run = compiled(
        _read_top, model.network, model.compiler_options,
        mask_id=unpredicted(model.network, model.tokenizer.mask_id), banned_ids=model.banned_ids,
        num_top=min(num_top, model.network.vocab_size - len(model.banned_ids)),
    )  # fmt: skip
    canvases: dict[int, list[tuple[int, range]]] = {}
    for number, ids in enumerate(texts):
        at = range(len(ids))
        places = [at] if model.is_causal else [at[place : place + 1] for place in at]
        size = canvas_size(len(ids), is_shared=True)
        canvases.setdefault(size, []).extend((number, some) for some in places)
    parts: list[list[Any]] = [[] for _ in texts]
    for size, own in sorted(canvases.items()):
        count = min(batch_size, _power_of_two(len(own)))
        for first in range(0, len(own), count):
            if not goes_on():
                raise Stopped
            asked = own[first : first + count]
            tokens = np.full((count, size), model.tokenizer.pad_id, np.int32)
            length = np.ones(count, np.int32)
            place, wanted = np.zeros((2, size if model.is_causal else 1, count), np.int32)
            for row, (number, some) in enumerate(asked):
                ids = texts[number]
                tokens[row, : len(ids)], length[row] = ids, len(ids)
                place[: len(some), row] = some
                wanted[: len(some), row] = ids[some.start : some.stop]
                if not model.is_causal:
                    tokens[row, some.start : len(ids)] = model.tokenizer.mask_id
            found = jax.device_get(run(model.params, tokens, length, place, wanted))
            for row, (number, some) in enumerate(asked):
                parts[number].append([values[: len(some), row] for values in found])
    made = []
    for ids, own in zip(texts, parts, strict=True):
        columns = [np.concatenate(column) for column in zip(*own, strict=True)]
        if not model.network.predicts_first:
            columns[0][:1] = np.nan
        made.append(TokenLogprobs(np.asarray(ids, np.int32), *columns))
    return made


def _in_order(row: DecodingRow, mask_id: int, canvases: _Canvases) -> list[int]:
    """Returns the indices of the log-probabilities of a row's tokens, one per place."""
    places = np.asarray(row.places)
    found = []
    for count, place in enumerate(places):
        shown = row.ids.copy()
        shown[places[count:]] = mask_id
        found.append(canvases.read(shown, int(place), int(row.ids[place])))
    return found


def _in_all_orders(row: DecodingRow, mask_id: int, canvases: _Canvases) -> np.ndarray:
    """Returns the indices ``[2^n - 1, n]`` of the log-probability at each place for each set of
    decoded places.

    Bit i of a set is 1 if place i is decoded. Entries of decoded places are 0 and unused.
    """
    places = np.asarray(row.places)
    found = np.zeros((2 ** len(places) - 1, len(places)), int)
    for number in range(len(found)):
        is_hole = (number >> np.arange(len(places))) % 2 == 0
        shown = row.ids.copy()
        shown[places[is_hole]] = mask_id
        for i in np.flatnonzero(is_hole):
            found[number, i] = canvases.read(shown, int(places[i]), int(row.ids[places[i]]))
    return found


def _mean_over_orders(values_SN: np.ndarray) -> float:
    """Returns the log of the mean probability over all orders, given the log-probabilities at the
    indices of `_in_all_orders`.
    """
    num = values_SN.shape[1]
    reached = np.full(2**num, -np.inf)
    reached[0] = 0.0
    for written in range(2**num - 1):
        holes = [i for i in range(num) if not written >> i & 1]
        for i in holes:
            step = reached[written] + values_SN[written, i] - math.log(len(holes))
            reached[written | 1 << i] = np.logaddexp(reached[written | 1 << i], step)
    return float(reached[-1])


class _Canvases:
    """Canvases to run, and the ids whose log-probabilities are read from each canvas."""

    def __init__(self) -> None:
        self._tokens: list[np.ndarray] = []
        self._wanted: list[dict[int, dict[int, int]]] = []
        self._known: dict[bytes, int] = {}
        self._reads: dict[tuple[int, int, int], int] = {}

    def read(self, shown: np.ndarray, place: int, id_: int) -> int:
        """Returns the index of the log-probability of an id at a position on a canvas."""
        number = self._known.setdefault(shown.tobytes(), len(self._tokens))
        if number == len(self._tokens):
            self._tokens.append(shown)
            self._wanted.append({})
        ids = self._wanted[number].setdefault(place, {})
        column = ids.setdefault(id_, len(ids))
        at = number, list(self._wanted[number]).index(place), column
        return self._reads.setdefault(at, len(self._reads))

    def run(
        self, model: Model, batch_size: int, num_rows: int | None, goes_on: Callable[[], bool]
    ) -> np.ndarray:
        """Runs the canvases and returns all log-probabilities by index, float64 ``[N]``."""
        num_places = _power_of_two(max(map(len, self._wanted)))
        num_ids = _power_of_two(max(len(ids) for own in self._wanted for ids in own.values()), 4)
        found = np.zeros((len(self._tokens), num_places, num_ids))
        run = compiled(
            _read, model.network, model.compiler_options, mask_id=model.tokenizer.mask_id
        )
        for places, size, count in self._batches(batch_size, num_rows):
            if not goes_on():
                raise Stopped
            arrays = self._arrays(places, (count, size, num_places, num_ids), model)
            made = jax.device_get(run(model.params, *arrays))
            found[places] = np.moveaxis(made, 0, 1)[: len(places)]
        return found[tuple(np.array(list(self._reads)).T)]

    def _batches(
        self, batch_size: int, num_rows: int | None
    ) -> Iterator[tuple[list[int], int, int]]:
        """Yields the canvases of each batch, their padded length, and the number of rows of the
        program.
        """
        sizes: dict[int, list[int]] = {}
        for number, tokens in enumerate(self._tokens):
            sizes.setdefault(canvas_size(tokens.size, is_shared=True), []).append(number)
        for size, numbers in sorted(sizes.items()):
            count = num_rows or min(batch_size, _power_of_two(len(numbers)))
            for first in range(0, len(numbers), count):
                yield numbers[first : first + count], size, count

    def _arrays(
        self, numbers: Sequence[int], shape: tuple[int, int, int, int], model: Model
    ) -> tuple[np.ndarray, ...]:
        count, size, num_places, num_ids = shape
        tokens = np.full((count, size), model.tokenizer.pad_id, np.int32)
        length, place = np.ones(count, np.int32), np.zeros((num_places, count), np.int32)
        ids = np.zeros((num_places, count, num_ids), np.int32)
        for row, number in enumerate(numbers):
            own = self._tokens[number]
            tokens[row, : own.size], length[row] = own, own.size
            for p, (at, wanted) in enumerate(self._wanted[number].items()):
                place[p, row], ids[p, row, : len(wanted)] = at, list(wanted)
        return tokens, length, place, ids


def _read(
    network: Network, params: Params, tokens_BL: jax.Array, length_B: jax.Array,
    place_PB: jax.Array, ids_PBK: jax.Array, *, mask_id: int,
) -> jax.Array:  # fmt: skip
    """Returns the log-probabilities in nats of ids at positions, ``[P, B, K]``. MASK is excluded,
    as in the losses.
    """
    hidden_BLD = positions.hidden(network, params, tokens_BL, length_B)

    def at(asked: tuple[jax.Array, jax.Array]) -> jax.Array:
        place_B, ids_BK = asked
        hidden_BD = jnp.take_along_axis(hidden_BLD, place_B[:, None, None], axis=1)[:, 0]
        logits_BV = positions.logits(network, params, hidden_BD)
        is_mask_1V = jnp.arange(logits_BV.shape[1])[None] == unpredicted(network, mask_id)
        logits_BV = jnp.where(is_mask_1V, -jnp.inf, logits_BV)
        norm_B1 = jax.nn.logsumexp(logits_BV, axis=1, keepdims=True)
        return jnp.take_along_axis(logits_BV, ids_BK, axis=1) - norm_B1

    return jax.lax.map(at, (place_PB, ids_PBK))


def _read_top(
    network: Network, params: Params, tokens_BL: jax.Array, length_B: jax.Array,
    place_PB: jax.Array, id_PB: jax.Array, *, mask_id: int, banned_ids: tuple[int, ...],
    num_top: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Returns the log-probabilities ``[P, B]`` of one id per position, and the `num_top` most
    likely ids with their log-probabilities, ``[P, B, K]``.
    """
    hidden_BLD = positions.hidden(network, params, tokens_BL, length_B)

    def at(asked: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        place_B, id_B = asked
        hidden_BD = jnp.take_along_axis(hidden_BLD, place_B[:, None, None], axis=1)[:, 0]
        logits_BV = positions.logits(network, params, hidden_BD)
        is_mask_1V = jnp.arange(logits_BV.shape[1])[None] == mask_id
        logprobs_BV = jax.nn.log_softmax(jnp.where(is_mask_1V, -jnp.inf, logits_BV))
        written_BV = logprobs_BV.at[:, np.array(banned_ids)].set(-jnp.inf)
        top_BK, ids_BK = jax.lax.top_k(written_BV, num_top)
        own_B = jnp.take_along_axis(logprobs_BV, id_B[:, None], axis=1)[:, 0]
        return own_B, ids_BK, top_BK

    return jax.lax.map(at, (place_PB, id_PB))


def calibrate(logprobs: Sequence[np.ndarray], right: Sequence[int]) -> float:
    """Returns the temperature in [0.01, 100] with the lowest negative log-likelihood of the correct
    labels.

    The cost is convex in the inverse temperature (Guo et al. 2017, On calibration of modern neural
    networks, 4.2). Each example has its `Decision.logprobs` and the index of its correct label.
    """

    def cost(log_temperature: float) -> float:
        heat = math.exp(log_temperature)
        return nll([_softmax(own / heat) for own in logprobs], right)

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
    return min((Scale(math.exp(x[0]), float(x[1])) for x in (found.x, start)),
               key=lambda one: cost(np.array([math.log(one[0]), one[1]])))  # fmt: skip


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
    with replacing(path) as file:
        file.write((json.dumps(told, indent=1) + "\n").encode())


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
        check_regular(path)
        told = json.loads(Path(path).read_text(encoding="utf-8"))
        vocabulary, tasks = told["vocabulary"], dict(told["tasks"])
        for facts in tasks.values():
            _check_scale(Scale(facts["temperature"], facts.get("length_penalty", 0.0)))
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


def _scale(
    model: Model, scale: Scale, task: str | None,
    calibration: str | os.PathLike[str] | Mapping[str, float | Scale] | None, order: str,
) -> Scale:  # fmt: skip
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


def scale_of(task: str, calibration: Mapping[str, Any]) -> Scale:
    """Returns the scale of a task. Numbers in `calibration` are temperatures."""
    if task not in calibration:
        known = ", ".join(sorted(calibration)) or "none"
        raise SettingError("task", task, "has no temperature for this order", f"known: {known}")
    found = calibration[task]
    return found if isinstance(found, Scale) else Scale(found)


def _check_scale(scale: Scale) -> None:
    temperature, penalty = scale
    if not _is_number(temperature) or not _COLDEST <= temperature < 1e9:
        raise SettingError(
            "temperature", temperature, f"is not a number in [{_COLDEST:g}, 1e9)", "use 1.0"
        )
    if not _is_number(penalty) or not 0 <= penalty <= 2:
        raise SettingError("length_penalty", penalty, "is not a number in [0, 2]", "use 0.0")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _check(
    model: Model, asked: Sequence[Question], order: str, scale: Scale, num_draws: int
) -> None:
    _check_holes(model)
    _check_scale(scale)
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
                "order", order, f"is limited to {MOST_ORDERED} tokens and {MOST_JOINT} "
                f"combinations, but the labels have {one.num_tokens} and {one.num_joint}",
                "use left_to_right",
            )  # fmt: skip


def _check_holes(model: Model) -> None:
    if "scorer" in model.network.heads:
        raise ValueError(
            "the model is a sequence scorer, which has no likelihood; load a language model"
        )
    if not model.process.is_masked:
        raise ValueError(
            "labels are scored in holes, but the model was trained with objective.process="
            f"{model.process.name!r}; load a model that fills MASK"
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
                "choices", UNSET, f"and prompt do not agree on the slot {name!r}",
                f"write <slot:{name}> once, and pass its labels",
            )  # fmt: skip
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


def _softmax(x: np.ndarray) -> np.ndarray:
    return np.exp(x - _logsumexp(x))


def _logsumexp(x: np.ndarray) -> float:
    top = x.max()
    return float(top + np.log(np.exp(x - top).sum()))


def _power_of_two(count: int, least: int = 1) -> int:
    return max(least, 1 << (count - 1).bit_length())
