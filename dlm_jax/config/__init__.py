"""Configuration: what a run and a request may ask for, and how it is read."""

from dlm_jax.config.data import DataConfig
from dlm_jax.config.flags import add_flags, add_sample_flags, parse_flags
from dlm_jax.config.heads import HeadsConfig
from dlm_jax.config.mesh import MeshConfig
from dlm_jax.config.objective import ObjectiveConfig
from dlm_jax.config.optim import OptimConfig
from dlm_jax.config.reading import (
    MOVED,
    from_dict,
    key_types,
    load,
    override,
    sample_settings,
    sections,
    shipped,
    to_dict,
)
from dlm_jax.config.sample import RowSettings, SampleConfig, resolve
from dlm_jax.config.schema import Config, ModelConfig
from dlm_jax.config.train import TRACKERS, TrainConfig
from dlm_jax.config.writing import differing, to_toml

__all__ = [
    "MOVED",
    "TRACKERS",
    "Config",
    "DataConfig",
    "HeadsConfig",
    "MeshConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "OptimConfig",
    "RowSettings",
    "SampleConfig",
    "TrainConfig",
    "add_flags",
    "add_sample_flags",
    "differing",
    "from_dict",
    "key_types",
    "load",
    "override",
    "parse_flags",
    "resolve",
    "sample_settings",
    "sections",
    "shipped",
    "to_dict",
    "to_toml",
]
