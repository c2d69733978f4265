"""Published decoders: ten commit rules, and the remask rule of WINO."""

from dlm_jax.contrib.decoders.credit import Credit
from dlm_jax.contrib.decoders.dawn import Dawn
from dlm_jax.contrib.decoders.dilated import Dilated
from dlm_jax.contrib.decoders.frechet import Frechet
from dlm_jax.contrib.decoders.hierarchical import Hierarchical
from dlm_jax.contrib.decoders.klass import Klass
from dlm_jax.contrib.decoders.local_leap import LocalLeap
from dlm_jax.contrib.decoders.position_aware import PositionAware
from dlm_jax.contrib.decoders.prophet import Prophet
from dlm_jax.contrib.decoders.slow_fast import SlowFast
from dlm_jax.contrib.decoders.wino import Wino

__all__ = [
    "Credit",
    "Dawn",
    "Dilated",
    "Frechet",
    "Hierarchical",
    "Klass",
    "LocalLeap",
    "PositionAware",
    "Prophet",
    "SlowFast",
    "Wino",
]
