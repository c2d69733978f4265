"""Decisions: the exact probabilities of several labels.

The canvas of a label has one hole per token, so labels of different lengths have different
canvases, and no end token is scored. Tokens are decoded from left to right, each from the canvas
with the previously decoded tokens. Labels share the canvases of their common prefixes, and all
one-token labels share one forward pass.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
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

MOST_JOINT = 4096
"""Maximum number of combinations of labels, all of which are enumerated."""

Choices = Sequence[str] | Mapping[str, Sequence[str]]
"""The labels of the slot after the prompt, or the labels of each named slot."""


@dataclass(frozen=True)
class Decision:
    """The probabilities of the labels of one prompt.

    Attributes:
      choices: labels by slot name; ``""`` is the slot after the prompt.
      combinations: the ``C`` combinations of one label per slot.
      logprobs: float64 ``[C]``, log-probability of each combination in nats. The probabilities can
        sum to less than 1, because other texts are possible.
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
    choices: Choices | Sequence[Choices],
    *,
    temperature: float = 1.0,
    length_penalty: float = 0.0,
    batch_size: int = 32,
) -> list[Decision]:
    """Computes the probabilities of the labels for each prompt.

    The score of a label is ``log p = sum_i log p(token_i | prompt, the label's tokens before it,
    one hole per remaining token)``, and its probability is the softmax of ``log p / (temperature n
    ** length_penalty)`` over the choices, where n is the number of tokens in a label. All label
    lengths have the same prior probability, as in infilling with a given length. Each label is
    tokenised separately.

    With named slots, a prompt contains ``<slot:NAME>`` once per slot, with any text between and
    after the slots. The tokens of all slots are decoded as one label.

    The result of a prompt does not depend on the other prompts. Programs with the same number of
    rows produce bitwise equal results; other programs agree within floating-point tolerance.

    Args:
      model: a model from `dlm_jax.load`, or a custom one.
      prompts: one or more texts.
      choices: at least two labels, or a mapping from slot names to labels, shared by all prompts or
        one per prompt.
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
    is_right = 1e-6 <= temperature < 1e9
    require(is_right, "temperature", temperature, "is not in [1e-6, 1e9)", "use 1.0")
    is_right = 0 <= length_penalty <= 2
    require(is_right, "length_penalty", length_penalty, "is not in [0, 2]", "use 0.0")
    require(batch_size >= 1, "batch_size", batch_size, "must be at least 1")
    if not model.process.is_masked:
        raise ValueError(
            "tokens are scored in holes, but the model was trained with objective.process="
            f"{model.process.name!r}; load a model that fills MASK"
        )
    is_shared = isinstance(choices, str | Mapping) or all(isinstance(x, str) for x in choices)
    each: Any = [choices] * len(texts) if is_shared else choices
    require(len(each) == len(texts), "choices", UNSET, f"are {len(each)} for {len(texts)} prompts")
    asked = []
    for place, (text, own) in enumerate(zip(texts, each, strict=True)):
        try:
            asked.append(_question(model, text, own))
        except SettingError as error:
            where = f"prompt {place}: " if len(texts) > 1 else ""
            raise SettingError(
                error.name, error.value, error.why, f"{where}{error.remedy}", error.others
            ) from None
    labels = [list(itertools.product(*one.labels)) for one in asked]
    rows = [_row(one.parts, own) for one, some in zip(asked, labels, strict=True) for own in some]
    ends = np.cumsum([len(some) for some in labels])[:-1]
    scores = np.split(_logprobs(model, rows, batch_size), ends)
    made = []
    for one, some, own in zip(asked, labels, scores, strict=True):
        sizes = np.array([sum(map(len, ids)) for ids in some])
        heated = own / (temperature * np.power(sizes, length_penalty))
        shares = np.exp(heated - np.logaddexp.reduce(heated))
        names = tuple(itertools.product(*one.choices.values()))
        made.append(Decision(one.choices, names, own, shares, sizes))
    return made


class _Question(NamedTuple):
    """The labels of each slot, in the order of the prompt, their ids, and the given ids before,
    between and after the slots.
    """

    choices: Mapping[str, tuple[str, ...]]
    labels: Sequence[Sequence[np.ndarray]]
    parts: Sequence[np.ndarray]


def _question(model: Model, prompt: str, choices: Choices) -> _Question:
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
    labels = [_label_ids(model, name, own) for name, own in choices.items()]
    count = math.prod(map(len, labels))
    why = f"have {count} combinations, more than {MOST_JOINT}"
    require(count <= MOST_JOINT, "choices", UNSET, why, "use fewer labels or slots")
    length = sum(map(len, parts)) + sum(max(map(len, own)) for own in labels)
    why = f"with its labels has {length} tokens, but the canvas of the model has {model.max_length}"
    require(length <= model.max_length, "prompt", UNSET, why, "shorten it")
    sees_behind = not model.is_causal and not model.network.block_length
    is_seen = sees_behind or not any(len(part) for part in parts[1:])
    why = "has text after a slot, which a causal or block-causal model does not attend to"
    require(is_seen, "prompt", UNSET, why, "use a single slot at the end")
    return _Question({name: tuple(own) for name, own in choices.items()}, labels, parts)


def _label_ids(model: Model, slot: str, labels: Any) -> list[np.ndarray]:
    """The ids of the labels of a slot, at least two different ones."""
    where = f"of {slot!r} " if slot else ""
    is_list = not isinstance(labels, str) and isinstance(labels, Sequence)
    require(is_list, "choices", labels, f"{where}are not a list of labels")
    found: dict[bytes, tuple[str, np.ndarray]] = {}
    for label in labels:
        is_text = isinstance(label, str) and label != ""
        why = f"{where}contains an empty label, or one that is not a string"
        require(is_text, "choices", labels, why, "remove it")
        try:
            ids = model.tokenizer.encode(label)
        except ValueError as error:
            raise SettingError("choices", label, f"cannot be written: {error}") from None
        require(ids.size > 0, "choices", label, "has no tokens", "remove it")
        if other := found.get(ids.tobytes()):
            why = f"{where}has the same tokens as {brief(other[0])}"
            raise SettingError("choices", label, why, "remove it")
        found[ids.tobytes()] = label, ids
    require(len(found) >= 2, "choices", labels, f"{where}has fewer than two labels", "add some")
    return [ids for _, ids in found.values()]


def _row(
    parts: Sequence[np.ndarray], labels: Sequence[np.ndarray]
) -> tuple[np.ndarray, Sequence[int]]:
    """The ids of a text with these labels between its parts, and the positions of the labels."""
    pieces, places, at = [parts[0]], [], len(parts[0])
    for own, part in zip(labels, parts[1:], strict=True):
        places += range(at, at + len(own))
        pieces += [own, part]
        at += len(own) + len(part)
    return np.concatenate(pieces).astype(np.int32), places


def _logprobs(
    model: Model, rows: Sequence[tuple[np.ndarray, Sequence[int]]], batch_size: int
) -> np.ndarray:
    """The log-probability in nats of the ids at the positions of each row, decoded in order,
    float64 ``[N]``.
    """
    # Each canvas, the position of its first hole, and the index of each id that is read there.
    canvases: dict[bytes, tuple[np.ndarray, int, dict[int, int]]] = {}
    reads: list[list[tuple[bytes, int]]] = []
    for ids, places in rows:
        reads.append([])
        for count, place in enumerate(places):
            shown = ids.copy()
            shown[places[count:]] = model.tokenizer.mask_id
            key = shown.tobytes()
            _, _, known = canvases.setdefault(key, (shown, place, {}))
            reads[-1].append((key, known.setdefault(int(ids[place]), len(known))))
    by_size: dict[int, list[bytes]] = {}
    for key, (shown, _, _) in canvases.items():
        by_size.setdefault(canvas_size(shown.size, is_shared=True), []).append(key)
    num_ids = _power_of_two(max(len(known) for _, _, known in canvases.values()))
    run = compiled(
        _logprobs_at,
        model.network,
        model.compiler_options,
        mask_id=unpredicted(model.network, model.tokenizer.mask_id),
    )
    found: dict[bytes, np.ndarray] = {}
    for size, keys in sorted(by_size.items()):
        count = min(batch_size, _power_of_two(len(keys)))
        for first in range(0, len(keys), count):
            tokens = np.full((count, size), model.tokenizer.pad_id, np.int32)
            length, place = np.ones(count, np.int32), np.zeros(count, np.int32)
            ids = np.zeros((count, num_ids), np.int32)
            some = keys[first : first + count]
            for row, key in enumerate(some):
                shown, place[row], known = canvases[key]
                tokens[row, : shown.size], length[row] = shown, shown.size
                ids[row, : len(known)] = list(known)
            values_BK = np.asarray(run(model.params, tokens, length, place, ids), np.float64)
            found |= zip(some, values_BK, strict=False)
    return np.array([np.sum([found[key][index] for key, index in own]) for own in reads])


def _logprobs_at(
    network: Network,
    params: Any,
    tokens_BL: jax.Array,
    length_B: jax.Array,
    place_B: jax.Array,
    ids_BK: jax.Array,
    *,
    mask_id: int,
) -> jax.Array:
    """The log-probabilities in nats ``[B, K]`` of ids at one position per row. MASK is excluded,
    as in the losses.
    """
    hidden_BLD = network.trunk(params, tokens_BL, length_B, None)[0]
    hidden_BD = jnp.take_along_axis(hidden_BLD, place_B[:, None, None], axis=1)[:, 0]
    logits_BV = network.readout(params, hidden_BD)
    is_mask_1V = jnp.arange(logits_BV.shape[1])[None] == mask_id
    logits_BV = jnp.where(is_mask_1V, -jnp.inf, logits_BV)
    norm_B1 = jax.nn.logsumexp(logits_BV, axis=1, keepdims=True)
    return jnp.take_along_axis(logits_BV, ids_BK, axis=1) - norm_B1


def _power_of_two(count: int) -> int:
    return 1 << max(count - 1, 0).bit_length()
