"""What the programs say of flags in refusals."""

import pytest

from dlm_jax.cli.common import naming_flags
from dlm_jax.settings import SettingError


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        (SettingError("top_p", 2, "is outside (0, 1]"), "--top-p=2 is outside (0, 1]"),
        (
            SettingError("top_p", 2, "with top_k=3 of x.y=1", "use order='a=b' or temperature=0"),
            "--top-p=2 with --top-k=3 of x.y=1; use --order='a=b' or --temperature=0",
        ),
        (
            SettingError("seed", -1, "is outside [0, 2**32)"),
            "--seed=-1 is outside [0, 2**32)",
        ),
        (
            ValueError("--trace x: there is no such folder"),
            "--trace x: there is no such folder",
        ),
        (ValueError("prompt of 9 tokens leaves no room"), "prompt of 9 tokens leaves no room"),
        (ValueError("checkpoint: model.width=3 is odd"), "checkpoint: model.width=3 is odd"),
    ],
)
def test_a_refusal_of_a_setting_names_its_flag(refusal, said):
    with pytest.raises(ValueError, match=".") as error, naming_flags():
        raise refusal
    assert str(error.value) == said
