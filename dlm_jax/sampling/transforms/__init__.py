"""Logit transforms, which are small frozen pytrees with per-row parameters."""

from dlm_jax.sampling.transforms.chain import TRANSFORMS, Chain, chain, sample_logits
from dlm_jax.sampling.transforms.mirostat import Mirostat
from dlm_jax.sampling.transforms.penalties import Dry, LogitBias, Penalties
from dlm_jax.sampling.transforms.temperature import Temperature
from dlm_jax.sampling.transforms.transform import At, Context, LogitTransform
from dlm_jax.sampling.transforms.truncate import (
    MAX_CANDIDATES,
    MinP,
    TopK,
    TopNSigma,
    TopP,
    TypicalP,
    Xtc,
)

__all__ = [
    "MAX_CANDIDATES",
    "TRANSFORMS",
    "At",
    "Chain",
    "Context",
    "Dry",
    "LogitBias",
    "LogitTransform",
    "MinP",
    "Mirostat",
    "Penalties",
    "Temperature",
    "TopK",
    "TopNSigma",
    "TopP",
    "TypicalP",
    "Xtc",
    "chain",
    "sample_logits",
]
