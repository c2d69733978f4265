from __future__ import annotations

from dlm_jax.metrics import loss_curves

RECORDS = [
    {"kind": "train", "step": 5, "loss": 4.0, "elbo": 4.0, "grad_norm": 1.0, "param_norm": 2.0,
     "tokens_per_second": 9.0, "learning_rate": 0.1, "time": 7.0},
    {"kind": "evaluation", "step": 5, "bound": 3.5, "standard_error": 0.1, "windows": 4},
    {"kind": "train", "step": 10, "loss": 6.0, "elbo": 3.0, "sampler": 2.5, "critic": 1.0,
     "critic_alpha": 0.5, "sampler_learning_rate": 0.2,
     "grad_norm": 1.0, "param_norm": 2.0, "tokens_per_second": 9.0},
]  # fmt: skip


def test_every_part_of_the_loss_has_a_curve_from_where_it_begins():
    assert loss_curves(RECORDS, "bound") == {
        "training loss": ([5, 10], [4.0, 6.0]),
        "critic": ([10], [1.0]),
        "elbo": ([5, 10], [4.0, 3.0]),
        "held-out bound": ([5], [3.5]),
        "sampler": ([10], [2.5]),
    }


def test_without_training_there_is_nothing_to_draw():
    assert loss_curves(RECORDS[1:2], "bound") == {}
