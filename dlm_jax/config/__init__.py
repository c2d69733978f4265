"""Configuration: what a run and a request may ask for, and how it is read."""

from dlm_jax.config.heads import HeadsConfig
from dlm_jax.config.reading import (
    add_flags,
    add_sample_flags,
    from_dict,
    key_types,
    load,
    parse_flags,
    sample_settings,
    sections,
    to_dict,
)
from dlm_jax.config.sample import RowSettings, SampleConfig, resolve
from dlm_jax.config.schema import (
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimConfig,
    TrainConfig,
)

__all__ = [
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
    "from_dict",
    "key_types",
    "load",
    "parse_flags",
    "resolve",
    "sample_settings",
    "sections",
    "to_dict",
]
