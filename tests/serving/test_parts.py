"""The text of a canvas, by the steps that wrote it."""

import numpy as np

from dlm_jax.inference.results import Row
from dlm_jax.serving.parts import text_parts
from dlm_jax.types import Status

MASK = 256


class _Bytes:
    """A tokenizer of bytes, whose decoder drops the space that begins a text."""

    mask_id = MASK

    def decode(self, ids):
        return bytes(int(id_) for id_ in ids).decode("utf-8", errors="replace").removeprefix(" ")


def test_the_parts_of_a_canvas_are_its_text_by_the_step_that_wrote_it():
    # Two steps wrote the bytes of one letter, and the second text begins with a space.
    tokens = np.array([*b"A ", *"\u00e9b c".encode(), MASK, MASK, *b" d"])
    committed = np.array([-1, -1, 0, 2, 2, 1, -1, -1, -1, 3, 4])
    is_frozen, logprobs = np.arange(tokens.size) < 2, np.zeros(tokens.size, np.float32)
    row = Row(tokens, is_frozen, logprobs, committed, 5, 0, Status.RUNNING)
    assert text_parts(_Bytes(), row, 2) == [
        ("", 0), ("\u00e9b", 2), (" ", 1), ("c", -1), ("\u2591" * 2, None), ("", 3), ("d", 4),
    ]  # fmt: skip
    assert text_parts(_Bytes(), row, 2, 6) == [("", 0), ("\u00e9b", 2), (" ", 1)]
