"""The logit algebra: every sampler as a small frozen pytree with its parameters per row."""

from dlm_jax.sampling.transforms.chain import MAX_CANDIDATES, Chain, chain
from dlm_jax.sampling.transforms.feedback import MirostatV1, MirostatV2
from dlm_jax.sampling.transforms.penalties import Dry, Penalties
from dlm_jax.sampling.transforms.protocol import At, Context, LogitTransform, Stateless
from dlm_jax.sampling.transforms.shape import DynamicTemperature, LogitBias, Temperature
from dlm_jax.sampling.transforms.truncate import MinP, TopK, TopNSigma, TopP, TypicalP, Xtc

__all__ = [
    "MAX_CANDIDATES",
    "At",
    "Chain",
    "Context",
    "Dry",
    "DynamicTemperature",
    "LogitBias",
    "LogitTransform",
    "MinP",
    "MirostatV1",
    "MirostatV2",
    "Penalties",
    "Stateless",
    "Temperature",
    "TopK",
    "TopNSigma",
    "TopP",
    "TypicalP",
    "Xtc",
    "chain",
]
