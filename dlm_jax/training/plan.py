"""The mesh of a run, and the memory and FLOPs of its training step, without training."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import jax
from jax.sharding import Mesh

from dlm_jax.config import Config, MeshConfig, ModelConfig
from dlm_jax.data import Tokenizer
from dlm_jax.distributed import compiler
from dlm_jax.distributed.mesh import CHIPS, Chip, device_bytes, fsdp_for, topology_devices
from dlm_jax.distributed.partitions import make_mesh, named_leaves
from dlm_jax.progress import waiting
from dlm_jax.randomness import check_settings
from dlm_jax.training.init_from import load_data
from dlm_jax.training.tasks import Task, make_task
from dlm_jax.training.train_step import abstract_state, lower_step
from dlm_jax.types import Params


def mesh_config(
    mesh: MeshConfig, devices: Sequence[Any], num_bytes: Callable[[], float] | None = None
) -> MeshConfig:
    """Returns the mesh of a config for the devices of all processes.

    A value of 0 for ``mesh.fsdp`` is resolved from the size of the training state, which
    `num_bytes` computes (see `state_bytes`). Without `num_bytes`, it is left unresolved if it
    depends on this size.
    """
    memory = device_bytes(devices[0])
    if mesh.fsdp > 0 or not memory:
        return mesh
    inner = mesh.tensor * mesh.expert * mesh.context
    if mesh.data == -1:
        if num_bytes is None:
            return mesh
        num_slices = len({getattr(device, "slice_index", 0) or 0 for device in devices})
        split = max(1, len(devices) // (inner * num_slices))
        return dataclasses.replace(mesh, fsdp=fsdp_for(num_bytes() / mesh.tensor, memory, split))
    # `fsdp` must cover the devices that the other axes leave, so that the mesh contains all.
    return dataclasses.replace(mesh, fsdp=max(1, len(devices) // (inner * mesh.data)))


def state_bytes(task: Task) -> int:
    """The size in bytes of the training state of a task on all devices: parameters, optimiser and
    moving average.
    """
    leaves = jax.tree.leaves(abstract_state(task))
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def bytes_per_device(tree: Any) -> int:
    """The size in bytes of the shards of one device, for arrays or their shapes."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def check_model_fits(model: ModelConfig, positions: int, mesh: Mesh) -> None:
    """Raises ValueError if the size of a Transformer axis is not divisible by its mesh axis."""
    context, kind = mesh.shape.get("context", 1), model.attention_type
    # By axis: what is split, and its size.
    for axis, name, size, count in (
        ("tensor", "model.heads", model.heads, mesh.shape["tensor"]),
        ("tensor", "inner size of the MLP", model.inner_width, mesh.shape["tensor"]),
        ("fsdp", "model.width", model.width, mesh.shape["fsdp"]),
        ("expert", "model.experts", model.experts, mesh.shape.get("expert", 1)),
        ("context", "data.seq_len", positions, context),
    ):
        if size % count or (count > 1 and not size):
            raise ValueError(
                f"mesh.{axis}={mesh.shape[axis]} does not divide {name}={size}, which must be a "
                f"multiple of {count}; use another mesh.{axis}"
            )
    if context > 1 and kind != "bidirectional":
        raise ValueError(
            f"mesh.context={context} requires model.attention_type='bidirectional', not {kind!r}; "
            "use 1"
        )


def model_flops(params: Params, config: ModelConfig, *, num_rows: int, num_positions: int) -> float:
    """FLOPs in one training step: the forward and backward pass of the model, without
    recomputation.

    Each matrix parameter costs 6 FLOPs per token that uses it. Attention costs 12 FLOPs per layer,
    head feature and visible pair of positions. A causal model has half the pairs (PaLM, Chowdhery
    et al. 2022, appendix B). A block-causal model reads a noisy and a clean stream. A tied
    embedding table is counted once, as the LM head. `params` are arrays or their shapes.
    """
    kind = config.attention_type

    def uses(path: str) -> float:
        """How often one token uses a parameter."""
        *above, last = path.split("/")
        if last.startswith("expert_"):
            times = config.experts_per_token / config.experts
        else:
            times = float(last == "kernel" or (last == "embedding" and config.tied_head))
        return 2 * times if kind == "block_causal" and above and "blocks" in above[0] else times

    in_products = sum(math.prod(leaf.shape) * uses(path) for path, leaf in named_leaves(params))
    inner = config.heads * config.size_of_head
    pairs = num_positions / 2 if kind == "causal" else num_positions
    # Each stream has half of the pairs, and both have the pairs inside blocks.
    pairs += config.block_length if kind == "block_causal" else 0
    per_token = 6 * in_products + 12 * config.depth * inner * pairs
    return float(num_rows * num_positions * per_token)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A compiled training step, with costs per device.

    Attributes:
      num_parameters: number of parameters of the model.
      sharding: numbers of parameters by the mesh axes that split them.
      memory: bytes by use: ``state``, ``batch``, ``temporaries``.
      flops: model FLOPs per device and step.
      counted_flops: FLOPs that the compiler counts in the program of a device. Each loop body
        counts once.
      text: the program text from the compiler.
    """

    config: Config
    mesh: Mesh
    num_parameters: int
    sharding: Mapping[str, int]
    memory: Mapping[str, int]
    flops: float
    counted_flops: float
    text: str

    @property
    def chip(self) -> Chip | None:
        """Peak performance of the device; None if unknown."""
        return CHIPS.get(self.mesh.devices.flat[0].device_kind)

    def lines(self) -> list[str]:
        """The plan as lines: model, mesh, sharding, memory, FLOPs and compiler options."""
        mesh, gib = self.mesh, 2**30
        axes = " ".join(f"{axis}={length}" for axis, length in mesh.shape.items())
        split = ", ".join(f"{count:,} {where}" for where, count in self.sharding.items())
        uses = ", ".join(f"{name} {size / gib:.2f}" for name, size in self.memory.items())
        total = f"{sum(self.memory.values()) / gib:.2f}"
        total += f" of {self.chip.memory / gib:.2f}" if self.chip else ""
        options = compiler.options("train", mesh, self.config.mesh.compiler_options)
        shown = " ".join(f"{name}={value}" for name, value in options.items())
        return [
            f"model        {self.num_parameters:,} parameters",
            f"mesh         {axes} on {mesh.size} devices: {mesh.devices.flat[0].device_kind}",
            f"sharding     {split}",
            f"memory       {total} GiB a device: {uses}",
            f"work         {self.flops / 1e12:.4g} TFLOP per device and step; the compiler counts "
            f"{self.counted_flops / 1e12:.4g}, each loop body once",
            f"compiler     {shown or 'without options'}",
        ]


def dry_run(
    config: Config, topology: str, report: Callable[[str], None] = lambda line: None
) -> Plan:
    """The plan for a run on the available devices, or on the devices of a topology.

    If ``model.vocab_size`` is set, the corpus is not read.
    """
    check_settings()
    devices = topology_devices(topology) if topology else jax.devices()
    model, tokenizer = config.model, None
    if model.vocab_size == 0:
        config, corpus = load_data(config, report=report)
        tokenizer = corpus.tokenizer
    elif model.has_start and model.start_id < 0:
        model = dataclasses.replace(model, start_id=model.vocab_size - 1)
        config = dataclasses.replace(config, model=model)

    def num_bytes() -> float:
        return state_bytes(planned_task(config, make_mesh(config.mesh, devices), tokenizer))

    return plan(config, make_mesh(mesh_config(config.mesh, devices, num_bytes), devices), tokenizer)


def planned_task(config: Config, mesh: Mesh, tokenizer: Tokenizer | None = None) -> Task:
    """The task of `plan`, which has the same arguments."""
    if tokenizer is None:
        size = config.model.vocab_size
        ids = {"mask_id": size - 1, "pad_id": size - 2, "eos_id": size - 3}
        stand_in = SimpleNamespace(vocab_size=size, banned_ids=(size - 1,), **ids)
        tokenizer = cast(Tokenizer, stand_in)
    return make_task(config, tokenizer, mesh)


def plan(config: Config, mesh: Mesh, tokenizer: Tokenizer | None = None) -> Plan:
    """Compiles the training step of `config` for a mesh, in the stage that trains all heads.

    The devices need not exist, and ``model.vocab_size`` must be set. Without a tokenizer, special
    ids are at the end of the vocabulary.

    Raises:
      ValueError: the batch or the model does not fit the mesh, or the step does not fit in memory.
    """
    check_model_fits(config.model, config.data.seq_len, mesh)
    task, train = planned_task(config, mesh, tokenizer), config.train
    state = abstract_state(task)
    lowered = lower_step(task, task.last_stage, state)
    kind = mesh.devices.flat[0].device_kind
    try:
        with waiting(f"compiling the training step for {mesh.size} devices ({kind})"):
            compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        line = next(line for line in str(error).splitlines() if "RESOURCE_EXHAUSTED" in line)
        raise ValueError(
            f"the step does not fit in the memory of its devices ({' '.join(line.split())[:300]}); "
            "raise mesh.fsdp, or use another model.remat, a larger train.accumulate or a "
            "smaller train.batch_size"
        ) from None
    memory, state_size = cast(Any, compiled.memory_analysis()), bytes_per_device(state)
    sharding: Counter[str] = Counter()
    for leaf in jax.tree.leaves(state.params):
        axes = jax.tree.leaves(tuple(leaf.sharding.spec))
        split = " and ".join(axis for axis in axes if mesh.shape[axis] > 1)
        sharding[f"over {split}" if split else "on every device"] += math.prod(leaf.shape)
    size = {"num_rows": train.batch_size, "num_positions": config.data.seq_len}
    return Plan(
        config=config,
        mesh=mesh,
        num_parameters=sharding.total(),
        sharding=sharding,
        memory={
            "state": state_size,
            "batch": memory.argument_size_in_bytes - state_size,
            "temporaries": memory.temp_size_in_bytes,
        },
        flops=model_flops(state.params, config.model, **size) / mesh.size,
        counted_flops=(compiled.cost_analysis() or {}).get("flops", math.nan),
        text=compiled.as_text() or "",
    )
