"""What stands for a token."""

import pytest
from viewing_cases import EOS, decode

from dlm_jax.viewing.frames import piece_reader


@pytest.mark.parametrize(("token", "text"), [(0, "a"), (3, "\ufffd"), (EOS, "⟨13⟩")])
def test_a_token_without_text_has_its_id_and_a_part_of_a_character_a_sign(token, text):
    assert piece_reader(decode)(token) == text


def test_a_name_replaces_the_id_of_a_token_without_text():
    assert piece_reader(decode, {EOS: "⟨eos⟩"})(EOS) == "⟨eos⟩"
