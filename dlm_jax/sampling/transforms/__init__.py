"""Logit transforms, which are small frozen pytrees with per-row parameters."""

from collections.abc import Mapping

from dlm_jax.sampling.transforms.bias import LogitBias
from dlm_jax.sampling.transforms.chain import Chain, chain
from dlm_jax.sampling.transforms.mirostat import MirostatV1, MirostatV2
from dlm_jax.sampling.transforms.penalties import Dry, Penalties
from dlm_jax.sampling.transforms.temperature import DynamicTemperature, Temperature
from dlm_jax.sampling.transforms.transform import At, Context, LogitTransform
from dlm_jax.sampling.transforms.truncate import (
    MAX_CANDIDATES,
    MinP,
    TopK,
    TopNSigma,
    TopP,
    TypicalP,
)
from dlm_jax.sampling.transforms.xtc import Xtc

TRANSFORMS: Mapping[str, tuple[type[LogitTransform], ...]] = {
    "bias": (LogitBias,),
    "penalties": (Penalties,),
    "dry": (Dry,),
    "temperature": (Temperature, DynamicTemperature),
    "top_n_sigma": (TopNSigma,),
    "top_k": (TopK,),
    "typical_p": (TypicalP,),
    "top_p": (TopP,),
    "min_p": (MinP,),
    "xtc": (Xtc,),
    "mirostat": (MirostatV1, MirostatV2),
}
"""Transforms, keyed by their names in a chain, in the order of the default chain."""

__all__ = [
    "MAX_CANDIDATES",
    "TRANSFORMS",
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
    "Temperature",
    "TopK",
    "TopNSigma",
    "TopP",
    "TypicalP",
    "Xtc",
    "chain",
]
