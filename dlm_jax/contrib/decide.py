"""Decisions: the exact probabilities of several labels under one decoding order.

The canvas of a label has one hole per token, so labels of different lengths have different
canvases, and no end token is scored. Tokens are decoded one at a time, each from the canvas with
the previously decoded tokens. Labels share the canvases of their common prefixes, and all one-token
labels share one forward pass.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax import Model, Network
from dlm_jax.inference.results import canvas_size
from dlm_jax.inference.scoring import compiled
from dlm_jax.objectives.losses import unpredicted
from dlm_jax.settings import UNSET, SettingError, brief, require

SLOT = re.compile(r"<slot:(\w+)>")
"""The marker of a named slot in a prompt."""

ORDERS = ("left_to_right", "mean")
"""Decoding orders of the tokens of a label. ``mean`` averages the probability over all orders."""

MOST_ORDERED = 8
"""Maximum number of tokens in a combination of labels with ``order="mean"``, which takes
``2^n - 1`` forward passes."""

MOST_JOINT = 4096
"""Maximum number of combinations of labels, all of which are enumerated."""

YES_NO = ("yes", "no")

Labels = Sequence[str | int]
Choices = Labels | Mapping[str, Labels]
"""The labels of the slot after the prompt, or the labels of each named slot."""


@dataclass(frozen=True)
class Decision:
    """The probabilities of the labels of one prompt.

    Attributes:
      choices: labels by slot name; ``""`` is the slot after the prompt.
      combinations: the ``C`` combinations of one label per slot.
      logprobs: float64 ``[C]``, log-probability of each combination in nats under the decoding
        order. The probabilities can sum to less than 1, because other texts are possible.
      probabilities: float64 ``[C]``, normalised over the combinations. NaN where the logits of the
        model are not finite.
      num_tokens: int ``[C]``, number of tokens in each combination.
    """

    choices: Mapping[str, tuple[str, ...]]
    combinations: tuple[tuple[str, ...], ...]
    logprobs: np.ndarray
    probabilities: np.ndarray
    num_tokens: np.ndarray

    @property
    def best(self) -> dict[str, str]:
        """The label of each slot in the most likely combination; in a tie, in the first one."""
        return dict(
            zip(self.choices, self.combinations[np.argmax(self.probabilities)], strict=True)
        )

    def of(self, slot: str = "") -> dict[str, float]:
        """Returns the marginal probability of each label of a slot."""
        known = list(self.choices)
        require(slot in known, "slot", slot, "is not a slot", f"use one of {', '.join(known)}")
        place, shares = known.index(slot), dict.fromkeys(self.choices[slot], 0.0)
        for labels, share in zip(self.combinations, self.probabilities, strict=True):
            shares[labels[place]] += float(share)
        return shares


def decide(
    model: Model,
    prompts: str | Sequence[str],
    choices: Choices | Sequence[Choices] = YES_NO,
    *,
    order: str = "left_to_right",
    temperature: float = 1.0,
    length_penalty: float = 0.0,
    batch_size: int = 32,
) -> list[Decision]:
    """Computes the probabilities of the labels for each prompt.

    The score of a label is ``log p = sum_i log p(token_i | prompt, the label's tokens before it,
    holes elsewhere)``, from the LM head at temperature 1 without bans. Probabilities are the
    softmax of ``log p / (temperature n ** length_penalty)`` over the choices, where n is the number
    of tokens in a label. All label lengths have the same prior probability, as in infilling with a
    given length. Each label is tokenised separately.

    With named slots, a prompt contains ``<slot:NAME>`` once per slot, with any text between and
    after the slots. The tokens of all slots are decoded as one label.

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
      batch_size: maximum number of rows per forward pass. The number of rows of a program is a
        power of two.

    Raises:
      ValueError: labels are empty or equal, a prompt with its labels exceeds the canvas, or a
        setting is out of range.
    """
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    require(bool(texts), "prompts", UNSET, "are empty", "pass at least one")
    require(order in ORDERS, "order", order, "is unknown", f"use {' or '.join(ORDERS)}")
    is_causal = order == "mean" and model.is_causal
    require(not is_causal, "order", order, "needs another model", "use left_to_right")
    is_right = 1e-6 <= temperature < 1e9
    require(is_right, "temperature", temperature, "is not in [1e-6, 1e9)", "use 1.0")
    is_right = 0 <= length_penalty <= 2
    require(is_right, "length_penalty", length_penalty, "is not in [0, 2]", "use 0.0")
    require(batch_size >= 1, "batch_size", batch_size, "must be at least 1")
    asked = []
    for place, (text, own) in enumerate(zip(texts, _each(choices, len(texts)), strict=True)):
        try:
            asked.append(question(model, text, own))
            _check_size(asked[-1], order)
        except SettingError as error:
            where = f"prompt {place}: " if len(texts) > 1 else ""
            raise SettingError(
                error.name, error.value, error.why, f"{where}{error.remedy}", error.others
            ) from None
    tokens = [list(itertools.product(*one.labels)) for one in asked]
    rows = [one.row(own) for one, some in zip(asked, tokens, strict=True) for own in some]
    if order == "left_to_right":
        scores = order_logprobs(model, rows, batch_size=batch_size)
    else:
        sets = (one for row in rows for one in decoded_sets(row, model.tokenizer.mask_id))
        values = iter(order_logprobs(model, sets, batch_size=batch_size))
        scores = np.array([_mean_over_orders(len(row.places), values) for row in rows])
    ends = np.cumsum([len(some) for some in tokens])
    made = []
    for one, some, own in zip(asked, tokens, np.split(scores, ends[:-1]), strict=True):
        sizes = np.array([sum(map(len, ids)) for ids in some])
        heated = own / (temperature * np.power(sizes, length_penalty))
        shares = np.exp(heated - np.logaddexp.reduce(heated))
        names = tuple(itertools.product(*one.choices.values()))
        made.append(Decision(one.choices, names, own, shares, sizes))
    return made


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
    def num_tokens(self) -> int:
        """The total length of the longest labels of all slots."""
        return sum(max(map(len, own)) for own in self.labels)

    def row(self, tokens: Sequence[np.ndarray]) -> DecodingRow:
        """Returns the row with these tokens in the slots."""
        pieces, places, at = [self.parts[0]], [], len(self.parts[0])
        for own, part in zip(tokens, self.parts[1:], strict=True):
            places += range(at, at + len(own))
            pieces += [own, part]
            at += len(own) + len(part)
        return DecodingRow(np.concatenate(pieces).astype(np.int32), places)


def question(model: Model, prompt: str, choices: Choices) -> Question:
    """Tokenises and validates a prompt and its choices, which are as in `decide`."""
    encode = model.tokenizer.encode
    require(isinstance(prompt, str), "prompt", prompt, "is not a string", "use a string")
    if isinstance(choices, Mapping):
        names = [marker[1] for marker in SLOT.finditer(prompt)]
        for name in (*names, *choices):
            if names.count(name) != 1 or name not in choices:
                raise SettingError(
                    "choices",
                    UNSET,
                    f"and prompt do not agree on the slot {name!r}",
                    f"write <slot:{name}> once, and pass its labels",
                )
        parts = [encode(text) for text in SLOT.split(prompt)[::2]]
        choices = {name: choices[name] for name in names}
    else:
        parts, choices = [encode(prompt), encode("")], {"": choices}
    parts[0] = np.concatenate([np.array(model.prefix_ids, np.int32), parts[0]])
    if not len(parts[0]) and not model.network.predicts_first:
        is_there = bool(model.first_ids)
        why = "has no text before the first slot, but the model predicts tokens from earlier ones"
        require(is_there, "prompt", UNSET, why, "put a text before it")
        parts[0] = np.array(model.first_ids, np.int32)
    known = {name: _checked(name, labels) for name, labels in choices.items()}
    made = Question(known, [_ids(model, labels) for labels in known.values()], parts)
    length, most = sum(map(len, parts)) + made.num_tokens, model.max_length
    why = f"with its labels has {length} tokens, but the canvas of the model has {most}"
    require(length <= most, "prompt", UNSET, why, "shorten it")
    sees_behind = not model.is_causal and not model.network.block_length
    is_seen = sees_behind or not any(len(part) for part in parts[1:])
    why = "has text after a slot, which a causal or block-causal model does not attend to"
    require(is_seen, "prompt", UNSET, why, "use a single slot at the end")
    return made


def _check_size(asked: Question, order: str) -> None:
    count, size = math.prod(map(len, asked.labels)), asked.num_tokens
    why = f"have {count} combinations, more than {MOST_JOINT}"
    require(count <= MOST_JOINT, "choices", UNSET, why, "use fewer labels or slots")
    is_small = order == "left_to_right" or size <= MOST_ORDERED
    why = f"is limited to {MOST_ORDERED} tokens, but the labels have {size}"
    require(is_small, "order", order, why, "use left_to_right")


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


def _each(choices: Choices | Sequence[Choices], count: int) -> list[Any]:
    """Returns the choices for each prompt."""
    is_list = not isinstance(choices, str) and isinstance(choices, Mapping | Sequence)
    require(is_list, "choices", choices, "are not a list of labels", "pass at least two")
    if isinstance(choices, Mapping) or all(isinstance(one, str | int) for one in choices):
        return [choices] * count
    require(len(choices) == count, "choices", UNSET, f"are {len(choices)} for {count} prompts")
    return list(choices)


def _checked(slot: str, labels: Any) -> tuple[str, ...]:
    where = f"of {slot!r} " if slot else ""
    is_list = not isinstance(labels, str) and isinstance(labels, Sequence)
    require(is_list, "choices", labels, f"{where}are not a list of labels")
    found = [str(label) for label in labels]
    are_texts = all(isinstance(label, str | int) and label != "" for label in labels)
    why = f"{where}contains an empty label, or one that is not a string"
    require(are_texts, "choices", found, why, "remove it")
    require(len(set(found)) == len(found), "choices", found, f"{where}contains a label twice")
    require(len(found) >= 2, "choices", found, f"{where}has fewer than two labels", "add some")
    return tuple(found)


def _ids(model: Model, labels: Sequence[str]) -> list[np.ndarray]:
    known: dict[bytes, str] = {}
    made = []
    for label in labels:
        try:
            ids = model.tokenizer.encode(label)
        except ValueError as error:
            raise SettingError("choices", label, f"cannot be written: {error}") from None
        require(ids.size > 0, "choices", label, "has no tokens", "remove it")
        other = known.setdefault(ids.tobytes(), label)
        why = f"has the same tokens as {brief(other)}"
        require(other == label, "choices", label, why, "remove it")
        made.append(ids)
    return made


class DecodingRow(NamedTuple):
    """A row of tokens, int32 ``[n]``, and the positions to decode, in order.

    A MASK token at any other position remains a hole.
    """

    ids: np.ndarray
    places: Sequence[int]


def order_logprobs(
    model: Model,
    rows: Iterable[DecodingRow],
    *,
    batch_size: int = 32,
    num_rows: int | None = None,
) -> np.ndarray:
    """Returns the log-probability in nats of the tokens at the `places` of each row, decoded in
    this order, float64 ``[N]``.

    Each token is read from the canvas with the previously decoded tokens. Identical canvases run
    only once, so rows that differ in their last token alone share all forward passes. Every program
    has `num_rows` rows; None uses the smallest sufficient power of two, up to `batch_size`.
    """
    reads, sizes = [], []
    for row in rows:
        places = np.asarray(row.places)
        for count, place in enumerate(places.tolist()):
            shown = row.ids.copy()
            shown[places[count:]] = model.tokenizer.mask_id
            reads.append((shown, place, int(row.ids[place])))
        sizes.append(places.size)
    values = _read_logprobs(model, reads, batch_size, num_rows).astype(np.float64)
    return np.array([part.sum() for part in np.split(values, np.cumsum(sizes))[:-1]])


def _read_logprobs(
    model: Model,
    reads: Sequence[tuple[np.ndarray, int, int]],
    batch_size: int,
    num_rows: int | None,
) -> np.ndarray:
    """Returns the log-probability of each read (canvas, position, id), float32 ``[N]``."""
    if not model.process.is_masked:
        raise ValueError(
            "tokens are scored in holes, but the model was trained with objective.process="
            f"{model.process.name!r}; load a model that fills MASK"
        )
    # The numbers of the reads of each position and id of each canvas.
    canvases: dict[bytes, tuple[np.ndarray, dict[tuple[int, int], list[int]]]] = {}
    for number, (shown, place, id_) in enumerate(reads):
        _, known = canvases.setdefault(shown.tobytes(), (shown, {}))
        known.setdefault((place, id_), []).append(number)
    sizes: dict[int, list[Any]] = {}
    for canvas in canvases.values():
        sizes.setdefault(canvas_size(canvas[0].size, is_shared=True), []).append(canvas)
    most = max((len(known) for _, known in canvases.values()), default=1)
    result, num_reads = np.zeros(len(reads), np.float32), _power_of_two(most)
    run = compiled(
        _logprobs_at,
        model.network,
        model.compiler_options,
        mask_id=unpredicted(model.network, model.tokenizer.mask_id),
    )
    for size, rows in sorted(sizes.items()):
        count = num_rows or min(batch_size, _power_of_two(len(rows)))
        for first in range(0, len(rows), count):
            some = rows[first : first + count]
            tokens = np.full((count, size), model.tokenizer.pad_id, np.int32)
            length, place, ids = (np.zeros((n, count), np.int32) for n in (1, num_reads, num_reads))
            for row, (shown, known) in enumerate(some):
                tokens[row, : shown.size], length[0, row] = shown, shown.size
                place[: len(known), row], ids[: len(known), row] = np.array([*known]).T
            values = run(model.params, tokens, np.maximum(length[0], 1), place, ids)
            value_PB = np.asarray(values)
            for row, (_, known) in enumerate(some):
                for index, numbers in enumerate(known.values()):
                    result[numbers] = value_PB[index, row]
    return result


def _logprobs_at(
    network: Network,
    params: Any,
    tokens_BL: jax.Array,
    length_B: jax.Array,
    place_PB: jax.Array,
    ids_PB: jax.Array,
    *,
    mask_id: int,
) -> jax.Array:
    """Returns the log-probabilities in nats of ids at positions, ``[P, B]``. MASK is excluded, as
    in the losses.
    """
    hidden_BLD = network.trunk(params, tokens_BL, length_B, None)[0]

    def at(read: tuple[jax.Array, jax.Array]) -> jax.Array:
        place_B, ids_B = read
        hidden_BD = jnp.take_along_axis(hidden_BLD, place_B[:, None, None], axis=1)[:, 0]
        logits_BV = network.readout(params, hidden_BD)
        is_mask_1V = jnp.arange(logits_BV.shape[1])[None] == mask_id
        logits_BV = jnp.where(is_mask_1V, -jnp.inf, logits_BV)
        norm_B1 = jax.nn.logsumexp(logits_BV, axis=1, keepdims=True)
        return (jnp.take_along_axis(logits_BV, ids_B[:, None], axis=1) - norm_B1)[:, 0]

    return jax.lax.map(at, (place_PB, ids_PB))


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()
