"""Configuration: declares and reads the settings of runs and requests."""

from dlm_jax.config.reading import (
    add_flags,
    add_sample_flags,
    differing,
    flat,
    from_dict,
    from_saved,
    load,
    override,
    parse_flags,
    sample_settings,
    shipped,
    to_dict,
    to_toml,
)
from dlm_jax.config.schema import (
    TRACKERS,
    Config,
    DataConfig,
    HeadsConfig,
    MeshConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimConfig,
    TrainConfig,
    Trait,
    declared,
    keys,
    sections,
)
from dlm_jax.sampling.params import SamplingParams, layered, resolve

__all__ = [
    "Config", "DataConfig", "HeadsConfig", "MeshConfig", "ModelConfig",
    "ObjectiveConfig", "OptimConfig", "SamplingParams",
    "TRACKERS", "TrainConfig", "Trait", "add_flags", "add_sample_flags", "declared",
    "differing", "flat", "from_dict", "from_saved", "keys", "layered", "load", "override",
    "parse_flags", "resolve", "sample_settings", "sections", "shipped", "to_dict", "to_toml",
]  # fmt: skip
