"""``train.py --dry-run``: what a run would need of its devices, without running it."""

from __future__ import annotations

import dataclasses

import jax

from dlm_jax.config import Config
from dlm_jax.distributed.sharding import make_mesh
from dlm_jax.distributed.topology import topology_devices
from dlm_jax.randomness import check_settings
from dlm_jax.training import say
from dlm_jax.training.checks import check_model_fits, check_parts
from dlm_jax.training.placing import mesh_config
from dlm_jax.training.plan import Plan, plan
from dlm_jax.training.resolved import load_resolved


def dry_run(config: Config, topology: str) -> Plan:
    """The plan of a run on the devices present, or on those of a topology that need not exist.

    With ``model.vocab_size`` given, the corpus is not looked at.

    Raises:
      ValueError: as `dlm_jax.training.plan.plan`, or the topology is not known.
    """
    check_settings()
    devices = topology_devices(topology) if topology else None
    tokenizer = None
    if config.model.vocab_size == 0:
        config, corpus = load_resolved(config, report=say)
        tokenizer = corpus.tokenizer
    elif config.model.attention_type == "causal" and config.model.start_id < 0:
        model = dataclasses.replace(config.model, start_id=config.model.vocab_size - 1)
        config = dataclasses.replace(config, model=model)
    devices = jax.devices() if devices is None else devices
    mesh = make_mesh(mesh_config(config, devices), devices)
    check_parts(config, mesh)
    check_model_fits(config, mesh)
    return plan(config, mesh, tokenizer)
