"""Compares LLaDA's likelihood with the reference program, for given masks and for random masks.

    python -m benchmarks.published_likelihood --code DIR --program get_log_likelihood.py

The reference program's ``get_log_likelihood`` scores answers given prompts with a tiny random LLaDA
(`benchmarks.published_parity`); its masks are recorded, and `bound_at` uses the same masks. Then
`dlm_jax.inference.scoring.score_rows` draws other masks. This library never predicts MASK: the
reference gets a logit of -inf for MASK, and the last column is the effect in nats.
"""

from __future__ import annotations

import argparse
import importlib
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

import dlm_jax
from benchmarks.published_parity import (
    EOS,
    MASK,
    VOCAB,
    cases,
    package,
    program,
    spread,
    write_tokenizer,
)
from dlm_jax.diffusion.likelihood import bound_at
from dlm_jax.diffusion.objectives import Batch
from dlm_jax.inference.scoring import score_rows

DRAWS, AT_ONCE = 128, 16
SIZES = ((5, 9), (0, 14), (11, 1), (17, 20))


def reference_nats(
    own: Any, model: Any, prompt: np.ndarray, answer: np.ndarray, *, bans_mask: bool
) -> tuple[float, np.ndarray]:
    """Nats by the program, and its masks, ``[DRAWS, L]``."""
    drawn, forward = [], own.forward_process

    def noted(*given: Any) -> Any:
        noisy, share = forward(*given)
        drawn.append((noisy == MASK).numpy())
        return noisy, share

    def logits(ids: torch.Tensor) -> Any:
        found = model(ids).logits
        if bans_mask:
            found[..., MASK] = -torch.inf
        return SimpleNamespace(logits=found)

    def called(ids: torch.Tensor) -> Any:
        return logits(ids)

    called.device = "cpu"  # pyright: ignore[reportFunctionMemberAccess]
    own.forward_process = noted
    torch.manual_seed(len(prompt))
    found = own.get_log_likelihood(
        called, torch.tensor(prompt), torch.tensor(answer), mc_num=DRAWS, batch_size=AT_ONCE,
        mask_id=MASK,
    )  # fmt: skip
    own.forward_process = forward
    return -found, np.concatenate(drawn)


def main() -> None:
    """Prints one row per prompt and answer."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--code", required=True, type=Path, metavar="DIR")
    parser.add_argument("--program", required=True, type=Path, metavar="FILE")
    args = parser.parse_args()
    package(args.code, "reference_code")
    own = program(args.program, "reference_likelihood")
    case = cases(None)["llada"]
    module = importlib.import_module(f"reference_code.{case.module}")
    config = getattr(module, case.config)(**case.fields[0])
    reference = case.make(module, case.model, config).eval().float()
    spread(reference, 0)
    with tempfile.TemporaryDirectory() as folder:
        config.architectures = [case.model]
        reference.save_pretrained(folder)
        write_tokenizer(Path(folder))
        model = dlm_jax.load(folder)
    at = jax.jit(bound_at, static_argnums=0, static_argnames="mask_id")
    rng = np.random.default_rng(0)
    print(
        "| prompt + answer | reference nats | same masks | difference | own masks | MASK's nats |"
    )
    print("| --- | --- | --- | --- | --- | --- |")
    for given, free in SIZES:
        tokens = rng.integers(0, EOS - 1, given + free)
        prompt, answer = tokens[:given], tokens[given:]
        wanted, masks = reference_nats(own, reference, prompt, answer, bans_mask=True)
        with_mask, _ = reference_nats(own, reference, prompt, answer, bans_mask=False)
        rows = jnp.asarray(np.tile(tokens.astype(np.int32), (DRAWS, 1)))
        batch = Batch(rows, *(jnp.full(DRAWS, n) for n in (given + free, given)))
        nats_BN = at(model.network, model.params, batch, jnp.asarray(masks), mask_id=MASK)
        nats_B = jnp.sum(nats_BN, axis=1)
        same = float(jnp.mean(nats_B))
        drawn = score_rows(
            model,
            {
                "tokens": tokens[None].astype(np.int32),
                "length": np.array([given + free], np.int32),
                "given": np.array([given], np.int32),
            },
            num_draws=2048, batch_size=1,
        )  # fmt: skip
        error = float(np.sqrt(drawn.variance_B[0] + np.var(np.asarray(nats_B)) / DRAWS))
        z = (float(drawn.nats_B[0]) - wanted) / max(error, 1e-4)
        print(
            f"| {given} + {free} | {wanted:.5f} | {same:.5f} | {abs(same - wanted):.1e} | "
            f"{float(drawn.nats_B[0]):.3f} ({z:+.1f} errors) | {with_mask - wanted:+.4f} |",
            flush=True,
        )
    print(f"vocabulary {VOCAB}, {DRAWS} masks")


if __name__ == "__main__":
    main()
