"""Characters that are spread over several tokens."""

from __future__ import annotations

import numpy as np
import pytest
from viewing_cases import EOS, decode

from dlm_jax.viewing.frames import Pieces

HOLE = -1


@pytest.mark.parametrize(
    ("ids", "texts"),
    [
        ([0, 3, 4, 0], ["a", "é", "a"]),
        ([5, 6, 7, 1], ["€ b", " "]),
        ([3, 3, 4], ["�", "é"]),
        ([3, HOLE, 4], ["�", "", "�"]),
        ([5, 6], ["�", "�"]),
        ([EOS, 0], ["⟨13⟩", "a"]),
        ([HOLE, HOLE, 0], ["", "", "a"]),
        ([], []),
    ],
)
def test_pieces_are_whole_characters_and_cover_each_position_once(ids, texts):
    tokens = np.array(ids, np.int32)
    split = list(Pieces(decode).split(np.maximum(tokens, 0), tokens == HOLE))
    assert [piece.text for piece in split] == texts
    covered = [place for piece in split for place in range(piece.start, piece.stop)]
    assert covered == list(range(len(ids)))


def test_a_name_replaces_the_id_of_a_token_without_text():
    assert Pieces(decode, {EOS: "⟨eos⟩"})([EOS]) == "⟨eos⟩"
