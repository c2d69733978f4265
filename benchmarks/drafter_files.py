"""Text that a causal model writes itself, with its hidden vectors, for `benchmarks.drafter`.

Rows are written token by token, in batches; each batch is one file with its own seed, so that an
interrupted run continues where it stopped.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dlm_jax
from benchmarks import real_model_files as files
from dlm_jax.sampling import vocab
from dlm_jax.sampling.forward import after
from dlm_jax.types import Window

_TOPICS = (
    "the tides", "cooking rice", "the Olympic Games", "binary search", "honey", "rainbows", "maps",
    "the piano", "vitamins", "bridges", "dreams", "sleep", "whales", "yoga", "paper", "the desert",
    "recursion", "museums", "football", "magnets", "soil", "clocks", "inflation", "birds", "salt",
    "volcanoes", "a birthday", "trains", "the moon", "gardening", "horses", "glass", "camping",
    "islands", "tea", "robots", "the circus", "painting", "dentists", "castles", "pirates",
    "wolves", "swimming", "a wedding", "the weather", "coffee", "dragons", "a farm", "chess",
    "airports",
)  # fmt: skip
_FORMS = (
    "Write a Python function about {}, with a docstring.", "Make a numbered list about {}.",
    "Write a dialogue between two friends about {}.", "Tell me a story about {}.",
    "What is {}?", "List five questions about {}.", "Write a class that models {} in Python.",
    "Write an essay about {}.", "Give me a shopping list for {}.", "Interview an expert on {}.",
    "Tell me everything about {}.", "Name eight words that rhyme or go with {}.",
    "Write a Python program that prints facts about {}.", "Name ten things that belong to {}.",
)  # fmt: skip
_OPENINGS = (
    "Once upon a time there was a tale of {}. It", "This is a short story about {}.\n\nThe",
    "Tom: Let us talk about {}.\nLisa: Good idea.\nTom:", "She had never thought about {} before",
    "\"What do you know about {}?\" he asked.\n", "The teacher spoke about {} all morning, and",
)  # fmt: skip


def prompts(model: dlm_jax.Model, texts: Sequence[str], count: int, seed: int) -> list[Any]:
    """What rows begin with, as pairs: ids of a chat whose question the model writes, too, of a
    question, of the opening of a story or a dialogue, or of a piece of a text; and whether a user
    speaks first.
    """
    assert model.chat is not None
    rng = np.random.default_rng(seed)
    questions = [*files.QUESTIONS, *(form.format(t) for form in _FORMS for t in _TOPICS)]
    asked = model.chat.ids([{"role": "user", "content": "?"}])
    mark = model.tokenizer.encode("?")[0]
    blank = asked[: list(asked).index(mark)]  # ends where a user's text begins
    starts: list[Any] = []
    for _ in range(count):
        kind = rng.random()
        if kind < 0.2:
            starts.append((blank, True))
        elif kind < 0.6:
            question = questions[int(rng.integers(len(questions)))]
            starts.append((model.chat.ids([{"role": "user", "content": question}]), False))
        elif kind < 0.8:
            opening = _OPENINGS[int(rng.integers(len(_OPENINGS)))]
            topic = _TOPICS[int(rng.integers(len(_TOPICS)))]
            starts.append((model.tokenizer.encode(opening.format(topic)), False))
        else:
            text = texts[int(rng.integers(len(texts)))]
            begin = rng.integers(max(1, len(text) - 400))
            ids = model.tokenizer.encode(text[begin : begin + 400])
            starts.append((ids[: rng.integers(8, 48)], False))
    return starts


@functools.partial(jax.jit, static_argnames=("network", "eos_id", "turns"))
def _write(
    params: Any, tokens_BL: jax.Array, cache: Any, given_B: jax.Array, temperature_B: jax.Array,
    speaker_B: jax.Array, banned: jax.Array, key: jax.Array, *, network: dlm_jax.Network,
    eos_id: int, turns: tuple[tuple[int, ...], ...],
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Tokens and hidden vectors; a row that ends goes on with the next speaker's turn."""
    cached = network.cached
    assert cached is not None
    num_rows, num_positions = tokens_BL.shape
    length_B = jnp.full(num_rows, num_positions)
    size = max(map(len, turns))
    heads = jnp.array([[*turn, *[-1] * (size - len(turn))] for turn in turns])

    def one(carry: Any, place: jax.Array) -> Any:
        tokens_BL, cache, left_B, speaker_B = carry
        place_B = jnp.full(num_rows, place)
        window = Window(place_B, place_B, place_B + 1)
        hidden_BWD, update = cached.window(params, cache, None, tokens_BL, length_B, window, size=1)
        cache = cached.store(cache, update, None, after(hidden_BWD, place_B))
        logits_BV = network.readout(params, hidden_BWD[:, 0]).at[:, banned].set(-jnp.inf)
        noise = vocab.noise(jax.random.split(jax.random.fold_in(key, place), num_rows))
        heat_B1 = jnp.where(temperature_B > 0, temperature_B, 1.0)[:, None]
        own_B = vocab.choose_with(logits_BV / heat_B1, noise, temperature_B == 0)
        head_B = heads[speaker_B, jnp.minimum(left_B, size - 1)]
        is_forced_B = (left_B < size) & (head_B >= 0)
        own_B = jnp.where(is_forced_B, head_B, own_B)
        token_B = jnp.where(place < given_B, tokens_BL[:, place], own_B)
        ends_B = (token_B == eos_id) & ~is_forced_B & (place >= given_B)
        left_B = jnp.where(ends_B, 0, left_B + 1)
        speaker_B = jnp.where(ends_B, 1 - speaker_B, speaker_B)  # the next one
        return (tokens_BL.at[:, place].set(token_B), cache, left_B, speaker_B), (
            hidden_BWD[:, 0].astype(jnp.float16)
        )

    done_B = jnp.full(num_rows, size)
    start = (tokens_BL, cache, done_B, speaker_B)
    (tokens_BL, *_), hidden_LBD = jax.lax.scan(one, start, jnp.arange(1, num_positions))
    hidden_BLD = jnp.moveaxis(hidden_LBD, 0, 1)
    return tokens_BL, jnp.pad(hidden_BLD, ((0, 0), (1, 0), (0, 0)))


def write(
    model: dlm_jax.Model, root: Path, folders: Sequence[Path], count: int, rows: int, length: int
) -> None:
    """Writes files up to `count` under `root`; each has `rows` rows of `length` positions."""
    assert model.chat is not None and model.network.cached is not None
    root.mkdir(parents=True, exist_ok=True)
    waiting = [n for n in range(count) if not (root / f"{n:03d}.npz").exists()]
    if not waiting:
        return
    roles = (("user", "?"), ("assistant", "!"), ("user", "?"))
    asked = list(model.chat.ids([{"role": role, "content": text} for role, text in roles]))
    user, answer = (int(model.tokenizer.encode(text)[0]) for text in "?!")
    first, said, last = asked.index(user), asked.index(answer), len(asked) - 1
    last -= asked[::-1].index(user)
    eos_id = model.tokenizer.eos_id
    # What begins a user's turn, and an answer, behind the EOS of the turn before.
    turns = tuple(asked[said + 2 : last]), tuple(asked[first + 2 : said])
    texts = list(itertools.islice(files.documents(folders), 4000))
    banned = jnp.array([n for n in model.banned_ids if n != eos_id], jnp.int32)
    for number in waiting:
        rng = np.random.default_rng(number)
        tokens_BL, given_B = np.zeros((rows, length), np.int32), np.zeros(rows, np.int32)
        speaker_B = np.zeros(rows, np.int32)
        for row, (ids, is_user) in enumerate(prompts(model, texts, rows, number)):
            ids = ids[: length // 2]
            tokens_BL[row, : len(ids)], given_B[row] = ids, len(ids)
            speaker_B[row] = not is_user
        temperature_B = rng.choice([0.0, 0.7, 1.0], rows, p=[0.25, 0.25, 0.5]).astype(np.float32)
        cache = model.network.cached.init(model.params, rows, length)
        out_BL, hidden_BLD = _write(
            model.params_for_cache, jnp.asarray(tokens_BL), cache, jnp.asarray(given_B),
            jnp.asarray(temperature_B), jnp.asarray(speaker_B), banned, jax.random.key(number),
            network=model.network, eos_id=eos_id, turns=turns,
        )  # fmt: skip
        begun_file = root / f".{number:03d}.npz"
        np.savez(
            begun_file, tokens=np.asarray(out_BL, np.int32), hidden=np.asarray(hidden_BLD),
            given=given_B, temperature=temperature_B,
        )  # fmt: skip
        begun_file.rename(root / f"{number:03d}.npz")
        print(json.dumps({"file": number, "tokens": int(rows * length)}), flush=True)
