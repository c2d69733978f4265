"""Frames of made-up rows in which everything happens that a view must show."""

from __future__ import annotations

import numpy as np

from dlm_jax.viewing.frames import Frame

# "é" and "€" are spread over several ids; 12 is a word, 13 stands for no text.
BYTES = [b"a", b" ", b"\n", b"\xc3", b"\xa9", b"\xe2", b"\x82", b"\xac b", b"\t", b"<",
         b"</script>", "\u2028".encode(), b" word", b""]  # fmt: skip
EOS = 13


def decode(ids) -> str:
    """Text of ids, as a byte-level tokenizer gives it."""
    return b"".join(BYTES[int(token)] for token in ids).decode("utf-8", errors="replace")


def frame(text: str = "", *, row=0, step=0, committed=None, logprobs=None, **changes) -> Frame:
    """A frame from letters: `A` is token 0, `B` token 1, ...; lower case is given, `.` a hole."""
    letters = np.array(list(text), dtype="U1")
    is_hole = letters == "."
    is_frozen = np.array([letter.islower() for letter in letters], bool)
    tokens = np.array([max(ord(letter.upper()) - ord("A"), 0) for letter in letters], np.int32)
    if committed is None:
        committed = np.where(is_hole | is_frozen, -1, 0)
    if logprobs is None:
        logprobs = np.where(is_hole | is_frozen, 0, -0.5)
    committed, logprobs = np.asarray(committed), np.asarray(logprobs, np.float32)
    if changes.get("origin") is not None:
        changes["origin"] = np.asarray(changes["origin"], np.int32)
    return Frame(row, step, tokens, is_frozen, is_hole, committed, logprobs, **changes)


def random_row(row: int, seed: int, *, length=30, steps=12) -> list[Frame]:
    """Frames of a row whose steps commit, rewrite, remask, insert and delete."""
    rng = np.random.default_rng(seed)
    is_frozen = np.arange(length) < 3
    state = {
        "tokens": rng.integers(0, len(BYTES), length),
        "is_frozen": is_frozen,
        "is_hole": ~is_frozen,
        "committed": np.full(length, -1),
        "logprobs": np.zeros(length),
    }
    out = [Frame(row, 0, **state, steps=steps)]
    for step in range(1, steps + 1):
        origin = _edited(state, rng) if step % 3 == 0 else None
        if origin is not None:
            state = {name: array[np.maximum(origin, 0)] for name, array in state.items()}
            is_new = origin < 0
            state["is_frozen"] &= ~is_new
            state["is_hole"] |= is_new
        state = {name: array.copy() for name, array in state.items()}
        live = np.flatnonzero(~state["is_frozen"])
        taken = rng.permutation(live)[:2]
        state["is_hole"][taken] = True
        holes = rng.permutation(np.flatnonzero(state["is_hole"]))
        written = np.concatenate([holes[: len(holes) // 3 + 1], rng.permutation(live)[:2]])
        state["is_hole"][written] = False
        state["tokens"][written] = rng.integers(0, len(BYTES), len(written))
        state["committed"][written] = step - 1
        state["logprobs"][written] = -rng.exponential(1, len(written))
        for name, nothing in (("committed", -1), ("logprobs", 0)):
            state[name][state["is_hole"]] = nothing
        status = "done" if step == steps else "running"
        out.append(Frame(row, step, **state, status=status, origin=origin, steps=steps))
    return out


def _edited(state, rng) -> np.ndarray:
    """An origin with two positions gone and, at one gap, up to three new."""
    live = np.flatnonzero(~state["is_frozen"])
    kept = np.setdiff1d(np.arange(state["tokens"].size), rng.permutation(live)[:2])
    return np.insert(kept, rng.integers(3, kept.size), [-1] * int(rng.integers(0, 4)))
