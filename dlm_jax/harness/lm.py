"""``lm_eval --model dlm_jax``: the model class for lm-evaluation-harness.

The likelihood of a diffusion model is a bound, the mean over several masks. The seed of the masks
depends on the request. The likelihood of a causal model is exact. Results are bitwise independent
of the batch size and of the order of requests.

A request runs in a program whose number of rows depends only on the size of the canvas, which
depends only on the length of the request, also if the harness asks for batches of one.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from dlm_jax import Engine, Model, Network, Request, Status, load, make_requests
from dlm_jax.config import layered
from dlm_jax.data import HubTokenizer
from dlm_jax.inference.request import settings_of_call
from dlm_jax.inference.results import TextReader, canvas_size
from dlm_jax.inference.scoring import compiled
from dlm_jax.objectives.likelihood import bound_at, causal_costs
from dlm_jax.objectives.objective import Batch
from dlm_jax.sampling.rules import with_rules

try:
    from lm_eval.api.model import LM  # type: ignore[import-not-found]
except ImportError:  # the methods need no harness
    LM: Any = object


ROWS = 32
"""Maximum number of rows in a program."""


class Pair(NamedTuple):
    """A row of tokens, int32 ``[n]``; all tokens after the first `given` are scored."""

    ids: np.ndarray
    given: int

    def seed(self, seed: int, *more: object) -> np.ndarray:
        """Four random numbers, uint32 ``[4]``, that depend only on the request and `seed`."""
        told = f"{seed} {self.given} {more}".encode() + self.ids.astype("<i4").tobytes()
        return np.frombuffer(hashlib.sha256(told).digest()[:16], "<u4")


def pair_of(
    model: Model, context: str, continuation: str, *, ids: np.ndarray | None = None
) -> Pair:
    """The ids of a continuation after its context, which is truncated on the left.

    Trailing spaces of the context are moved to the continuation, as in lm-evaluation-harness. `ids`
    are those of a conversation, whose answer is tokenised separately.
    """
    encode, network = model.tokenizer.encode, model.network
    prefix, given, rest = np.zeros(0, np.int32), ids, encode(continuation)
    if given is None:
        kept = context.rstrip()
        continuation = context[len(kept) :] + continuation
        prefix, given = np.array(model.prefix_ids, np.int32), encode(kept)
        whole = encode(kept + continuation)
        rest = whole[given.size :]
        if not np.array_equal(whole[: given.size], given) or not rest.size:
            rest = encode(continuation)
    if not rest.size:
        raise ValueError("the continuation has no tokens; pass some text")
    if not (prefix.size or given.size or network.predicts_first):
        prefix = _first_token(model)
    # A network that does not predict the first token does not read the last one.
    room = model.max_length + (not network.predicts_first) - prefix.size - rest.size
    if room < (0 if prefix.size or network.predicts_first else 1):
        raise ValueError(
            f"continuation of {rest.size} tokens exceeds the model's canvas of {model.max_length}; "
            "use loglikelihood_rolling for whole texts"
        )
    given = np.concatenate([prefix, given[max(0, given.size - room) :]])
    return Pair(np.concatenate([given, rest]).astype(np.int32), int(given.size))


def windows_of(model: Model, text: str) -> list[Pair]:
    """Splits a text into windows that together score each token once. The last window begins with
    tokens of the previous window as context.

    If the network predicts tokens only from those before them, each window begins with a given
    token and is one token longer than the canvas, because the last token is not read.
    """
    ids = model.tokenizer.encode(text).astype(np.int32)
    if not ids.size:
        raise ValueError("the text is empty; pass a text to score")
    prefix, more = np.array(model.prefix_ids, np.int32), 0
    if not model.network.predicts_first:
        ids, prefix, more = np.concatenate([_first_token(model), ids]), prefix[:0], 1
    size, count = model.max_length - prefix.size, ids.size - more
    windows = []
    for first in range(0, count, size):
        begin = max(0, min(first, count - size))
        part = np.concatenate([prefix, ids[begin : begin + size + more]])
        windows.append(Pair(part, prefix.size + more + first - begin))
    return windows


def _first_token(model: Model) -> np.ndarray:
    """The token before a text without a context: BOS or EOS, as in lm-evaluation-harness."""
    return np.array(model.prefix_ids[-1:] or model.first_ids or (model.tokenizer.eos_id,), np.int32)


_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of the length argument, in lm-evaluation-harness's order of precedence."""


def request_of(
    model: Model,
    context: str,
    given: Mapping[str, Any],
    common: Mapping[str, Any],
    *,
    seed: int = 0,
    ids: np.ndarray | None = None,
) -> tuple[Request, tuple[str, ...]]:
    """A generation request of lm-evaluation-harness, and its stop strings.

    ``do_sample=False``, the default, sets the temperature to 0. Other settings take precedence over
    those in `common`. The context, or the `ids` of a conversation, is truncated on the left.
    """
    settings = {name: value for name, value in given.items() if value is not None}
    until = settings.pop("until", ())
    until = (until,) if isinstance(until, str) else until
    if not isinstance(until, list | tuple) or not all(isinstance(text, str) for text in until):
        raise ValueError(f"until={until!r} is not a list of strings; use ['\\n']")
    until = tuple(filter(None, until))
    does_sample = settings.pop("do_sample", False)
    if not isinstance(does_sample, bool):
        raise ValueError(f"do_sample={does_sample!r} is not a bool; use True or False")
    if not does_sample:
        settings["temperature"] = 0.0
    lengths = {name: settings.pop(name) for name in _LENGTHS if name in settings}
    name, length = next(iter(lengths.items()), ("", 256))
    if type(length) is not int or length < 1:
        raise ValueError(f"{name}={length!r} is not an integer of at least 1; use 256")
    prefix = np.array(model.prefix_ids if ids is None else (), np.int32)
    ids = model.tokenizer.encode(context) if ids is None else ids
    room = model.max_length - prefix.size
    length = min(length, room - 1)
    ids = np.concatenate([prefix, ids[max(0, ids.size - room + length) :]]).astype(np.int32)
    words = Pair(ids, 0).seed(seed, until, length, sorted(settings.items()))
    row = {"seed": int(words[0]), "gen_length": length, **settings}
    row |= {"tokens": ids} if ids.size else {"prompt": ""}
    (request,) = make_requests(model, row, common)
    return request, until


def texts(
    model: Model, requests: Sequence[tuple[Request, tuple[str, ...]]], *, slots: int
) -> list[str]:
    """Texts that do not depend on their order. Programs have `slots` rows."""
    written = [""] * len(requests)
    readers: dict[int, TextReader] = {}

    def numbered() -> Iterator[Request]:
        for number, (request, until) in enumerate(requests):
            readers[number] = TextReader(model, request, until)
            yield request

    with Engine(model, sizes=(slots,)) as engine:
        for row in engine.run(numbered(), num_steps=2, is_watched=True):
            reader = readers.get(row.number)
            if reader is None:  # its text has ended before its row
                continue
            if row.error is not None:
                raise row.error
            pieces = reader.pieces(row)
            if pieces and pieces[-1].is_last:
                written[row.number] = reader.whole(row)[0]
                del readers[row.number]
                if row.status is Status.RUNNING:
                    engine.cancel(row.number)
    return written


def masks_of(pair: Pair, num_draws: int, seed: int, block_length: int = 0) -> np.ndarray:
    """The masks for a pair, bool ``[draws, n]``; a single mask if one token is scored.

    Masks are drawn in antithetic pairs with the same random order of tokens: the first mask hides
    the first k tokens in this order, and the second mask the k-th and all later tokens. For a
    block-causal model, masks are drawn for each block separately.
    """
    n = pair.ids.size
    places = np.arange(pair.given, n)
    unit = block_length or n
    blocks = [places[places // unit == block] for block in np.unique(places // unit)]
    if all(block.size == 1 for block in blocks):
        return (np.arange(n) >= pair.given)[None]
    rng = np.random.Generator(np.random.Philox(key=pair.seed(seed).view("<u8")))
    masks = np.zeros((num_draws, n), bool)
    for block in blocks:
        # A level approximates the fraction of tokens hidden by the first mask of a pair. Levels are
        # evenly spaced.
        pairs = -(-num_draws // 2)
        levels = (rng.random() + np.arange(pairs) / pairs) % 1.0
        for number, level in enumerate(levels):
            order = rng.permutation(block)
            count = 1 + min(int(level * block.size), block.size - 1)
            masks[2 * number, order[:count]] = True
            if 2 * number + 1 < num_draws:
                masks[2 * number + 1, order[count - 1 :]] = True
    return masks


def _bounds(network: Network, params: Any, batch: Batch, masked: Any, *, mask_id: int) -> Any:
    return (jax.numpy.sum(bound_at(network, params, batch, masked, mask_id=mask_id), axis=1),)


def _exact(network: Network, params: Any, batch: Batch, masked: Any, *, mask_id: int) -> Any:
    """The cost of each row of a causal model, and whether its scored tokens are the likeliest."""
    nats_RL, is_top_RL = causal_costs(network, params, batch, mask_id=mask_id)
    return jax.numpy.sum(nats_RL, axis=1), jax.numpy.all(is_top_RL, axis=1)


def _guesses(network: Network, params: Any, batch: Batch, masked: Any, *, mask_id: int) -> Any:
    """The most likely id at each position and its log-probability."""
    shown = jax.numpy.where(masked, mask_id, batch.tokens_BL)

    def of_row(hidden_LD: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = network.readout(params, hidden_LD)
        is_mask = jax.numpy.arange(logits.shape[1])[None] == mask_id
        logits = jax.numpy.where(is_mask, -jax.numpy.inf, logits)
        sure = jax.numpy.max(logits, axis=1) - jax.nn.logsumexp(logits, axis=1)
        return jax.numpy.argmax(logits, axis=1), sure

    return jax.lax.map(of_row, network.trunk(params, shown, batch.length_B, None)[0])


class DlmJax(LM):
    """A model of dlm_jax with the methods that lm-evaluation-harness calls. The arguments of a
    request of the harness are in its ``args``.

    Args:
      checkpoint: as in `dlm_jax.load`; the shipped model by default.
      draws: number of masks per likelihood.
      seed: random seed of the masks and the generated texts.
      dtype: as in `dlm_jax.load`.
      preset: name of one of the model's presets.
      model: a loaded model, used instead of `checkpoint`.
      **settings: settings for generated texts by name (docs/settings.md). ``rules`` can be the name
        of a module. ``batch_size``, ``max_batch_size`` and ``device`` of the harness are ignored.
    """

    def __init__(
        self,
        checkpoint: str | None = None,
        *,
        draws: int = 32,
        seed: int = 0,
        dtype: str | None = None,
        preset: str | None = None,
        model: Model | None = None,
        **settings: Any,
    ):
        super().__init__()
        for name in ("batch_size", "max_batch_size", "device"):
            settings.pop(name, None)
        model = model or load(checkpoint, dtype=dtype)
        if not model.process.is_masked:
            raise ValueError(
                "the harness scores with random masks, which requires a masking process, but the "
                f"model was trained with objective.process={model.process.name!r}; use "
                "dlm_jax.score"
            )
        if not 1 <= draws <= 1 << 16:
            raise ValueError(f"draws={draws} is outside [1, 65536]; for example, use 32")
        self.model, self._num_draws, self._seed = model, draws, seed
        self._is_chat = False
        self._chats: dict[str, np.ndarray] = {}
        if isinstance(rules := settings.get("rules"), str):
            settings["rules"] = importlib.import_module(rules)
        self._settings = layered(model.preset(preset) if preset else None, settings)
        settings_of_call(model, self._settings)

    def nats(self, pairs: Sequence[Pair]) -> np.ndarray:
        """The negative log-likelihood of each pair in nats, float64 ``[N]``."""
        if self.model.is_causal:
            return self.nats_and_greedy(pairs)[0]
        unit = self.model.network.block_length
        masks = [masks_of(pair, self._num_draws, self._seed, unit) for pair in pairs]
        rows = [(pair, mask) for pair, drawn in zip(pairs, masks, strict=True) for mask in drawn]
        nats = np.array(self._run(_bounds, rows)[0], np.float64)
        ends = np.cumsum([len(drawn) for drawn in masks])
        return np.array([float(np.mean(some)) for some in np.split(nats, ends[:-1])])

    def nats_and_greedy(self, pairs: Sequence[Pair]) -> tuple[np.ndarray, list[bool]]:
        """`nats`, and whether the model generates each pair's scored tokens at temperature 0, the
        most confident token first, or the leftmost token in a causal model.
        """
        if self.model.is_causal:
            nats, is_greedy = self._run(_exact, [(pair, np.zeros(0, bool)) for pair in pairs])
            return np.array(nats, np.float64), list(map(bool, is_greedy))
        masks = [np.arange(pair.ids.size) >= pair.given for pair in pairs]
        is_greedy = [True] * len(pairs)
        while open_ := [i for i, mask in enumerate(masks) if is_greedy[i] and mask.any()]:
            guesses = self._run(_guesses, [(pairs[i], masks[i]) for i in open_])
            for i, ids_L, confidence_L in zip(open_, *guesses, strict=True):
                holes = np.flatnonzero(masks[i])
                at = holes[np.argmax(confidence_L[holes])]
                is_greedy[i] = bool(ids_L[at] == pairs[i].ids[at])
                masks[i][at] = False
        return self.nats(pairs), is_greedy

    def _run(
        self, fn: Callable[..., Any], rows: Sequence[tuple[Pair, np.ndarray]]
    ) -> list[list[Any]]:
        """The results of `fn`, each a list with one value per row: a pair and a mask ``[n]``, True
        at hidden tokens and empty for a causal model. Rows of one canvas size run together.
        """
        model, mask_id = self.model, self.model.tokenizer.mask_id
        run = compiled(fn, model.network, model.compiler_options, mask_id=mask_id)
        sizes = [canvas_size(pair.ids.size, is_shared=True) for pair, _ in rows]
        results: list[Any] = [None] * len(rows)
        for size in sorted(set(sizes)):
            places = [place for place, own in enumerate(sizes) if own == size]
            # About as many positions as saturate the device.
            most = 256 if jax.default_backend() == "cpu" else 8192
            count = max(1, min(most // size, ROWS))
            for first in range(0, len(places), count):
                some = places[first : first + count]
                tokens = np.full((count, size), model.tokenizer.pad_id, np.int32)
                length, given = np.ones(count, np.int32), np.zeros(count, np.int32)
                is_masked = np.zeros((count, size), bool)
                for number, (pair, mask) in enumerate(rows[place] for place in some):
                    n = pair.ids.size
                    tokens[number, :n], length[number], given[number] = pair.ids, n, pair.given
                    is_masked[number, : mask.size] = mask
                batch: Any = Batch(*map(jax.numpy.asarray, (tokens, length, given)))
                columns = jax.device_get(run(model.params, batch, is_masked))
                for place, *values in zip(some, *columns, strict=False):
                    results[place] = values
        return [list(column) for column in zip(*results, strict=True)]

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation, and whether greedy decoding generates it."""
        pairs = [
            pair_of(self.model, *request.args, ids=self._chat_ids(request.args[0]))
            for request in requests
        ]
        nats, are_greedy = self.nats_and_greedy(pairs)
        return list(zip((-nats).tolist(), are_greedy, strict=True))

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """The log-likelihood of whole texts, scored in windows of the canvas size."""
        windows = [windows_of(self.model, request.args[0]) for request in requests]
        nats = self.nats([pair for some in windows for pair in some])
        ends = np.cumsum([len(some) for some in windows])
        return [-float(some.sum()) for some in np.split(nats, ends[:-1])]

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Generates texts; each text ends at its first stop string."""
        known = with_rules(self._settings.get("rules", ())).request_settings.keys()
        known |= {"until", "do_sample", *_LENGTHS}
        for name in sorted({name for request in requests for name in request.args[1]} - known):
            print(f"{name} is not a setting of dlm_jax; it is ignored", file=sys.stderr)
        rows = []
        for request in requests:
            context, given = request.args
            given = {name: value for name, value in given.items() if name in known}
            how: Any = {"seed": self._seed, "ids": self._chat_ids(context)}
            rows.append(request_of(self.model, context, given, self._settings, **how))
        # A few rows saturate a CPU.
        slots = 8 if jax.default_backend() == "cpu" else ROWS
        return texts(self.model, rows, slots=slots)

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The conversation as text. Without the header of an answer, it ends with the last turn's
        content, which is the beginning of the answer (``gen_prefix``).
        """
        how = {"begins_answer": add_generation_prompt, "continues": not add_generation_prompt}
        text = self._chat.text(chat_history, **how)
        self._is_chat, self._chats[text] = True, self._chat.ids(chat_history, **how)
        return text

    def _chat_ids(self, context: str) -> np.ndarray | None:
        """The ids of a conversation; None for other contexts.

        The text of a conversation does not tell the template's special tokens from their names in a
        message, so its ids are known. The harness can also repeat texts of earlier processes.
        """
        tokenizer = self.model.tokenizer
        if context in self._chats or not (self._is_chat and context):
            return self._chats.get(context)
        is_marked = isinstance(tokenizer, HubTokenizer)
        return tokenizer.encode_marked(context) if is_marked else tokenizer.encode(context)

    @property
    def tokenizer_name(self) -> str:
        return f"dlm_jax-{self.model.vocabulary}"

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The chat template; empty if no template is applied."""
        self._is_chat |= bool(chat_template)
        return self._chat.source if chat_template else ""

    @property
    def _chat(self) -> Any:
        if self.model.chat is None:
            raise ValueError("the model has no chat template; remove --apply_chat_template")
        return self.model.chat
