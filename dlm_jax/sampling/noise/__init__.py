"""Noise rules: the steps of models whose forward process writes other noise than MASK."""

from collections.abc import Mapping

from dlm_jax.sampling.noise.entropy_renoise import EntropyRenoise
from dlm_jax.sampling.noise.noise_rule import NoiseContext, NoiseRule, NoiseUpdate, NoisyCanvas
from dlm_jax.sampling.noise.posterior import Posterior

NOISE_RULES: Mapping[str, type[NoiseRule]] = {
    rule.name: rule for rule in (Posterior, EntropyRenoise)
}
"""Noise rules, keyed by the value of ``order``."""

__all__ = [
    "EntropyRenoise",
    "NOISE_RULES",
    "NoisyCanvas",
    "NoiseContext",
    "NoiseRule",
    "NoiseUpdate",
    "Posterior",
]
