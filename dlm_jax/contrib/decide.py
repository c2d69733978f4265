"""Decisions: the exact probabilities of several labels after a prompt or in it.

The canvas of a label has one hole per token, so labels of different lengths have different
canvases, and no end token is scored. Tokens are decoded from left to right, each from the canvas
with the previously decoded tokens. Labels share the canvases of their common prefixes, and all
one-token labels share one forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dlm_jax import Model, Network
from dlm_jax.inference.results import canvas_size
from dlm_jax.inference.scoring import compiled
from dlm_jax.objectives.losses import unpredicted
from dlm_jax.settings import UNSET, SettingError, brief, require

SLOT = "<slot>"
"""The marker of the label's place in a prompt."""


@dataclass(frozen=True)
class Decision:
    """The probabilities of the labels of one prompt.

    Attributes:
      labels: the ``C`` labels.
      logprobs: float64 ``[C]``, log-probability of each label in nats. The probabilities can sum to
        less than 1, because other texts are possible.
      probabilities: float64 ``[C]``, normalised over the labels. NaN where the logits of the model
        are not finite.
      num_tokens: int ``[C]``, number of tokens in each label.
    """

    labels: tuple[str, ...]
    logprobs: np.ndarray
    probabilities: np.ndarray
    num_tokens: np.ndarray

    @property
    def best(self) -> str:
        """The most likely label; in a tie, the first one."""
        return self.labels[np.argmax(self.probabilities)]


def decide(
    model: Model,
    prompts: str | Sequence[str],
    labels: Sequence[str] | Sequence[Sequence[str]],
    *,
    temperature: float = 1.0,
    length_penalty: float = 0.0,
    batch_size: int = 32,
) -> list[Decision]:
    """Computes the probabilities of the labels for each prompt.

    The score of a label is ``log p = sum_i log p(token_i | prompt, the label's tokens before it,
    one hole per remaining token)``, and its probability is the softmax of ``log p / (temperature n
    ** length_penalty)`` over the labels, where n is the number of tokens in a label. All label
    lengths have the same prior probability, as in infilling with a given length. Each label is
    tokenised separately.

    The label stands after the prompt, or in place of ``<slot>`` in it.

    The result of a prompt does not depend on the other prompts. Programs with the same number of
    rows produce bitwise equal results; other programs agree within floating-point tolerance.

    Args:
      model: a model from `dlm_jax.load`, or a custom one.
      prompts: one or more texts.
      labels: at least two labels, shared by all prompts, or a list of them for each prompt.
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
    is_shared = isinstance(labels, str) or all(isinstance(label, str) for label in labels)
    each: Any = [labels] * len(texts) if is_shared else labels
    require(len(each) == len(texts), "labels", UNSET, f"are {len(each)} for {len(texts)} prompts")
    rows: list[tuple[np.ndarray, range]] = []
    for number, (text, own) in enumerate(zip(texts, each, strict=True)):
        try:
            rows += _rows(model, text, own)
        except SettingError as error:
            where = f"prompt {number}: " if len(texts) > 1 else ""
            raise SettingError(
                error.name, error.value, error.why, f"{where}{error.remedy}", error.others
            ) from None
    ends = np.cumsum([len(own) for own in each])[:-1]
    sizes = np.split(np.array([len(places) for _, places in rows]), ends)
    scores = np.split(_logprobs(model, rows, batch_size), ends)
    made = []
    for own, size, score in zip(each, sizes, scores, strict=True):
        heated = score / (temperature * np.power(size, length_penalty))
        shares = np.exp(heated - np.logaddexp.reduce(heated))
        made.append(Decision(tuple(own), score, shares, size))
    return made


def _rows(model: Model, prompt: str, labels: Sequence[str]) -> list[tuple[np.ndarray, range]]:
    """The ids of a prompt with each of the labels, and the positions of the label."""
    encode = model.tokenizer.encode
    require(isinstance(prompt, str), "prompt", prompt, "is not a string", "use a string")
    require(prompt.count(SLOT) < 2, "prompt", UNSET, f"has {SLOT} twice", "write it once")
    before, behind = (encode(text) for text in prompt.partition(SLOT)[::2])
    before = np.concatenate([np.array(model.prefix_ids, np.int32), before])
    if not len(before) and not model.network.predicts_first:
        is_there = bool(model.first_ids)
        why = "has no text before the label, but the model predicts tokens from earlier ones"
        require(is_there, "prompt", UNSET, why, "put a text before it")
        before = np.array(model.first_ids, np.int32)
    ids = _label_ids(model, labels)
    length, most = len(before) + max(map(len, ids)) + len(behind), model.max_length
    why = f"with its labels has {length} tokens, but the canvas of the model has {most}"
    require(length <= most, "prompt", UNSET, why, "shorten it")
    sees_behind = not model.is_causal and not model.network.block_length
    why = f"has text after {SLOT}, which a causal or block-causal model does not attend to"
    require(sees_behind or not len(behind), "prompt", UNSET, why, "put the label at the end")
    return [
        (
            np.concatenate([before, own, behind]).astype(np.int32),
            range(len(before), len(before) + len(own)),
        )
        for own in ids
    ]


def _label_ids(model: Model, labels: Any) -> list[np.ndarray]:
    """The ids of the labels, at least two different ones."""
    is_list = not isinstance(labels, str) and isinstance(labels, Sequence)
    require(is_list, "labels", labels, "are not a list of labels")
    found: dict[bytes, tuple[str, np.ndarray]] = {}
    for label in labels:
        is_text = isinstance(label, str) and label != ""
        require(is_text, "labels", labels, "have one that is empty or no string", "remove it")
        try:
            ids = model.tokenizer.encode(label)
        except ValueError as error:
            raise SettingError("labels", label, f"cannot be written: {error}") from None
        require(ids.size > 0, "labels", label, "has no tokens", "remove it")
        if other := found.get(ids.tobytes()):
            why = f"has the same tokens as {brief(other[0])}"
            raise SettingError("labels", label, why, "remove it")
        found[ids.tobytes()] = label, ids
    require(len(found) >= 2, "labels", labels, "are fewer than two", "add some")
    return [ids for _, ids in found.values()]


def _logprobs(
    model: Model, rows: Sequence[tuple[np.ndarray, range]], batch_size: int
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
