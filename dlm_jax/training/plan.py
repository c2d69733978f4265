"""The mesh of a run, and the memory and FLOPs of its training step, without training."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import jax
from jax.sharding import Mesh

from dlm_jax.config import Config, MeshConfig, ModelConfig, TrainConfig
from dlm_jax.data import Setup, Tokenizer
from dlm_jax.distributed import compiler
from dlm_jax.distributed.mesh import CHIPS, Chip, device_bytes, fsdp_for, topology_devices
from dlm_jax.distributed.partitions import (
    PLACES,
    batch_sharding,
    fitting,
    make_mesh,
    named_leaves,
)
from dlm_jax.heads import Stage
from dlm_jax.progress import waiting
from dlm_jax.randomness import check_settings, key_of
from dlm_jax.training.checks import check_process
from dlm_jax.training.init_from import load_data
from dlm_jax.training.tasks import Task, make_task
from dlm_jax.training.train_step import TrainState, abstract_batch, make_train_step
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
    leaves = jax.tree.leaves(task.abstract_state())
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)


def check_batch_fits(train: TrainConfig, mesh: Mesh) -> None:
    """Raises ValueError if the rows of a microbatch cannot be divided evenly among the devices."""
    part = train.batch_size // train.accumulate
    try:
        batch_sharding(mesh, part)
    except ValueError:
        if train.accumulate == 1:
            raise
        raise ValueError(
            f"train.accumulate={train.accumulate} gives microbatches of {part} rows, which "
            "are not divisible by the number of devices across which the batch is split; lower it"
        ) from None


def check_model_fits(model: ModelConfig, positions: int, mesh: Mesh) -> None:
    """Raises ValueError if the size of a Transformer axis is not divisible by its mesh axis."""
    sizes = {
        "tensor": {"model.heads": model.heads, "inner size of the MLP": model.inner_width},
        "fsdp": {"model.width": model.width},
        "context": {"data.seq_len": positions},
    }
    for axis, split in sizes.items():
        count = mesh.shape.get(axis, 1)
        for name, size in split.items():
            if size % count:
                fits = [n for n in range(1, count) if size % n == 0 and mesh.size % n == 0]
                raise ValueError(
                    f"mesh.{axis}={count} does not divide {name}={size}; use {max(fits)}"
                )
    experts = mesh.shape.get("expert", 1)
    if experts > 1 and (not model.experts or model.experts % experts):
        raise ValueError(
            f"mesh.expert={experts} splits experts, but the model of the config has "
            f"{model.experts or 'none'}; use 1 or a divisor of their number"
        )
    context, kind = mesh.shape.get("context", 1), model.attention_type
    if context > 1 and kind not in ("bidirectional", "block_causal"):
        raise ValueError(
            f"mesh.context={context} requires model.attention_type='bidirectional' or "
            f"'block_causal', not {kind!r}; use 1"
        )
    if context > 1 and kind == "block_causal" and positions % (2 * context * model.block_length):
        raise ValueError(
            f"mesh.context={context} splits data.seq_len={positions} into {2 * context} pieces, "
            f"which must be multiples of model.block_length={model.block_length}; use another "
            f"mesh.context, or a data.seq_len that {2 * context * model.block_length} divides"
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
    in_products = sum(
        math.prod(leaf.shape)
        * _share_met(path, leaf, config)
        * (2 if kind == "block_causal" and "blocks" in path.split("/")[0] else 1)
        for path, leaf in named_leaves(params)
    )
    inner = config.heads * config.size_of_head
    pairs = num_positions / 2 if kind == "causal" else num_positions
    # Each stream has half of the pairs, and both have the pairs inside blocks.
    pairs += config.block_length if kind == "block_causal" else 0
    per_token = 6 * in_products + 12 * config.depth * inner * pairs
    return float(num_rows * num_positions * per_token)


def _share_met(path: str, leaf: Any, config: ModelConfig) -> float:
    """The fraction of a parameter that one token uses. For the parameters of experts, this is the
    fraction of the experts to which a token is routed.
    """
    last = path.split("/")[-1]
    if last.startswith("expert_"):
        return config.experts_per_token / config.experts
    return float(last == "kernel" or (last == "embedding" and config.tied_head))


@dataclass(frozen=True)
class Plan:
    """A compiled training step, with costs per device.

    Attributes:
      state: shapes and shardings of the training state.
      memory: bytes by use: ``state``, ``batch``, ``temporaries``.
      flops: model FLOPs per device and step.
      counted_flops: FLOPs that the compiler counts in the program of a device. Each loop body
        counts once.
      text: the program text from the compiler.
    """

    config: Config
    mesh: Mesh
    state: TrainState
    memory: dict[str, int]
    flops: float
    counted_flops: float
    compile_seconds: float
    options: Mapping[str, str]
    text: str

    @property
    def chip(self) -> Chip | None:
        """Peak performance of the device; None if unknown."""
        return CHIPS.get(self.mesh.devices.flat[0].device_kind)

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(self.state.params))


def dry_run(
    config: Config, topology: str, report: Callable[[str], None] = lambda line: None
) -> Plan:
    """The plan for a run on the available devices, or on the devices of a topology.

    If ``model.vocab_size`` is set, the corpus is not read.
    """
    check_settings()
    check_process(config)
    topology_of = topology_devices(topology) if topology else None
    tokenizer = None
    if config.model.vocab_size == 0:
        config, corpus = load_data(config, report=report)
        tokenizer = corpus.tokenizer
    elif config.model.has_start and config.model.start_id < 0:
        model = dataclasses.replace(config.model, start_id=config.model.vocab_size - 1)
        config = dataclasses.replace(config, model=model)
    devices = topology_of or jax.devices()

    def num_bytes() -> float:
        return state_bytes(planned_task(config, make_mesh(config.mesh, devices), tokenizer))

    mesh = make_mesh(mesh_config(config.mesh, devices, num_bytes), devices)
    check_batch_fits(config.train, mesh)
    check_model_fits(config.model, config.data.seq_len, mesh)
    return plan(config, mesh, tokenizer)


def planned_task(config: Config, mesh: Mesh, tokenizer: Tokenizer | None = None) -> Task:
    """The task of `plan`, which has the same arguments."""
    if tokenizer is None:
        mask_id = config.model.vocab_size - 1
        tokenizer = cast(
            Tokenizer,
            SimpleNamespace(
                vocab_size=config.model.vocab_size,
                mask_id=mask_id,
                pad_id=mask_id - 1,
                eos_id=mask_id - 2,
                banned_ids=(mask_id,),
            ),
        )
    return make_task(Setup(config, tokenizer, mesh))


def lower_step(task: Task, stage: Stage, state: TrainState) -> jax.stages.Lowered:
    """The training step of a stage, for a state or its shapes, before it is compiled."""
    config, train, mesh = task.setup.config, task.setup.config.train, task.setup.mesh
    step = make_train_step(
        task.loss(stage),
        task.optimizer(stage),
        state,
        mesh=mesh,
        batch_size=train.batch_size,
        accumulate=train.accumulate,
        ema_decay=config.optim.ema_decay,
        compiler_options=config.mesh.compiler_options,
    )
    batch = abstract_batch(config, batch_sharding(mesh, train.batch_size))
    return step.lower(state, batch, jax.eval_shape(lambda: key_of(0)))


def plan(config: Config, mesh: Mesh, tokenizer: Tokenizer | None = None) -> Plan:
    """Compiles the training step of `config` for a mesh, in the stage that trains all heads.

    The devices need not exist, and ``model.vocab_size`` must be set. Without a tokenizer, special
    ids are at the end of the vocabulary.

    Raises:
      ValueError: the batch or the model does not fit the mesh, or the step does not fit in memory.
    """
    task, train = planned_task(config, mesh, tokenizer), config.train
    state = task.abstract_state()
    lowered = lower_step(task, task.stage(train.steps), state)
    start, kind = time.perf_counter(), mesh.devices.flat[0].device_kind
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
    seconds, memory = time.perf_counter() - start, cast(Any, compiled.memory_analysis())
    state_size = sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(state)
    )
    size = {"num_rows": train.batch_size, "num_positions": config.data.seq_len}
    return Plan(
        config=config,
        mesh=mesh,
        state=state,
        memory={
            "state": state_size,
            "batch": memory.argument_size_in_bytes - state_size,
            "temporaries": memory.temp_size_in_bytes,
        },
        flops=model_flops(state.params, config.model, **size) / mesh.size,
        counted_flops=(compiled.cost_analysis() or {}).get("flops", math.nan),
        compile_seconds=seconds,
        options=compiler.options("train", mesh, config.mesh.compiler_options),
        text=compiled.as_text() or "",
    )


def lines(plan: Plan) -> list[str]:
    """The plan as lines: mesh, shardings of matrices and activations, memory and FLOPs."""
    model, train, memory, gib = plan.config.model, plan.config.train, plan.memory, 2**30
    mesh, chip, kind = plan.mesh, plan.chip, plan.mesh.devices.flat[0].device_kind
    rows, positions, size = (
        train.batch_size // train.accumulate,
        plan.config.data.seq_len,
        model.size_of_head,
    )
    activations = {
        "hidden": (rows, positions, model.width),
        "queries": (rows, positions, model.heads, size),
        "keys": (rows, positions, model.kv_heads or model.heads, size),
        "inner": (rows, positions, model.inner_width),
        "losses": (rows, positions),
        "rows": (rows,),
    }
    places = [
        (path, leaf.shape, leaf.sharding.spec)
        for path, leaf in named_leaves(plan.state.params)
        if len(leaf.shape) > 1
    ]
    places += [
        (f"activation {name}", shape, fitting(PLACES[name], shape, mesh))
        for name, shape in activations.items()
    ]
    shardings = []
    for name, shape, spec in places:
        split = [
            f"{length} over {' x '.join((axes,) if isinstance(axes, str) else axes)}"
            for length, axes in zip(shape, spec, strict=False)
            if axes
        ]
        where = ", ".join(split) or "whole on every device"
        shardings.append(f"place        {name} {list(shape)}: {where}")
    axes = " ".join(f"{axis}={length}" for axis, length in mesh.shape.items())
    options = " ".join(f"{name}={value}" for name, value in plan.options.items())
    return [
        f"model        {plan.num_parameters:,} parameters",
        f"mesh         {axes} on {mesh.size} devices: {kind}{f' ({chip.name})' if chip else ''}",
        *shardings,
        f"memory       {sum(memory.values()) / gib:.2f}"
        f"{f' of {chip.memory / gib:.2f}' if chip else ''} GiB a device: "
        + ", ".join(f"{name} {size / gib:.2f}" for name, size in memory.items()),
        f"work         {plan.flops / 1e12:.4g} TFLOP per device and step; the compiler counts "
        f"{plan.counted_flops / 1e12:.4g}, each loop body once",
        f"compiler     {options or 'without options'}",
        f"compiled     in {plan.compile_seconds:.1f} s; nothing was run or written",
    ]
