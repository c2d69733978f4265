"""A trained model, loaded from a run, a single file or this package."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

import dlm_jax.config as configs
from dlm_jax import devices, store
from dlm_jax.config import Config, MeshConfig, ModelConfig, ObjectiveConfig, SamplingParams
from dlm_jax.data import (
    NO_MASK,
    Tokenizer,
    check_fits,
    from_json,
    prefix_of,
)
from dlm_jax.distributed import compiler
from dlm_jax.distributed.partitions import (
    axes_of,
    make_mesh,
    named_leaves,
    partition,
    split_rows,
    undeclared,
)
from dlm_jax.hf import (
    ChatTemplate,
    fetched,
    is_published,
    read_model,
    read_published,
    restored,
    saved_chat,
    write_published,
)
from dlm_jax.model.lora import merged
from dlm_jax.model.transformer import build
from dlm_jax.objectives.corruption import SCHEDULES
from dlm_jax.objectives.forward_process import Process, noise_process
from dlm_jax.randomness import check_settings, key_of
from dlm_jax.sampling.params import PRESETS
from dlm_jax.sampling.positions import chunk_size
from dlm_jax.sampling.program import Program
from dlm_jax.sampling.rules import ModelFacts
from dlm_jax.settings import SettingError
from dlm_jax.store.weights import path_of_model
from dlm_jax.structured import Structures
from dlm_jax.types import Axes, Network, Params


@dataclasses.dataclass(frozen=True)
class Model:
    """A network with its parameters, its tokenizer, and recommended sampling settings.

    To sample from a custom network, construct a `Model` from its functions (docs/own_rules.md).

    Attributes:
      network: the model as pure functions.
      params: parameters of the network.
      tokenizer: converts between text and ids.
      sample: default sampling settings.
      max_length: length of the longest training canvas, in tokens; for a published model or one
        trained from it, the maximum length of the published model.
      is_causal: whether the model is autoregressive and therefore has exact likelihoods.
      config: the training config; None if unknown.
      more_eos_ids: ids that end a generation, in addition to the tokenizer's EOS.
      presets: named sets of settings, such as those for the decoding loops in the reference code
        of a published model. `PRESETS` are available for every model.
      chat: chat template of an instruction-tuned model; None for other models.
      family: the family of a published model; empty for other models.
      untrained: heads, as in `heads`, that are not trained yet.
      corpus_sha256: checksum of the training text (`dlm_jax.data.Corpus`); empty if unknown.
      compiler_options: options for compiling programs, as in ``mesh.compiler_options``.
    """

    network: Network
    params: Params
    tokenizer: Tokenizer
    max_length: int
    sample: SamplingParams = SamplingParams()
    is_causal: bool = False
    config: Config | None = None
    more_eos_ids: tuple[int, ...] = ()
    presets: Mapping[str, Mapping[str, Any]] = dataclasses.field(default_factory=dict)
    chat: ChatTemplate | None = None
    family: str = ""
    untrained: tuple[str, ...] = ()
    corpus_sha256: str = ""
    compiler_options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_settings()

    def preset(self, name: str) -> dict[str, Any]:
        """Returns the settings of a preset of this model or of `PRESETS`."""
        known = {**PRESETS, **self.presets}
        if name not in known:
            raise SettingError("preset", name, "is unknown", f"this model has {', '.join(known)}")
        return dict(known[name])

    @property
    def is_custom(self) -> bool:
        """Whether the network is custom, and not that of the config."""
        return self.config is None or self.network is not build(self.config.model)

    @property
    def heads(self) -> tuple[str, ...]:
        """The heads other than the LM head (``sampler``, ``critic``), trained or not."""
        return tuple(self.network.heads)

    @property
    def fills_in_waves(self) -> bool:
        """True if ``fill="auto"`` resolves to ``wavefront``. This requires the masked process and a
        sampler head that was trained with revealed neighbours (``heads.sampler_reveal``).
        """
        is_trained = "sampler" in self.heads and "sampler" not in self.untrained
        reveal = 1.0 if self.config is None else self.config.heads.sampler_reveal
        return is_trained and reveal > 0 and self.process.is_masked

    @property
    def process(self) -> Process:
        """The forward process used in training; the masked process for a custom network."""
        return noise_process(self._objective)

    @property
    def _objective(self) -> ObjectiveConfig:
        return ObjectiveConfig() if self.config is None else self.config.objective

    @property
    def banned_ids(self) -> tuple[int, ...]:
        """Ids that are never written: MASK, ids banned by the tokenizer, and ids of logits without
        a token.
        """
        beyond = range(self.tokenizer.vocab_size, self.network.vocab_size)
        ids = dict.fromkeys((self.tokenizer.mask_id, *self.tokenizer.banned_ids, *beyond))
        return tuple(id_ for id_ in ids if id_ != NO_MASK)

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys((self.tokenizer.eos_id, *self.more_eos_ids)))

    @property
    def start_id(self) -> int | None:
        """The id that a causal network puts before each row; None if it puts none."""
        start = self.config.model.start_id if self.config and self.is_causal else -1
        return None if start < 0 else start

    @functools.cached_property
    def prefix_ids(self) -> tuple[int, ...]:
        """Ids at the start of each row of text, as in the training of a published model."""
        return prefix_of(self.tokenizer, self.start_id)

    @property
    def first_ids(self) -> tuple[int, ...]:
        """Ids before a text without a prompt: BOS if the network does not predict the first token
        of a row, there is a BOS and no other prefix, as in ``generate`` of transformers; otherwise
        empty.
        """
        bos_id = self.tokenizer.bos_id
        is_begun = self.network.predicts_first or bool(self.prefix_ids)
        return () if is_begun or bos_id is None else (bos_id,)

    @functools.cached_property
    def vocabulary(self) -> str:
        """A fingerprint of the tokenizer with 16 hex digits."""
        text = json.dumps(self.tokenizer.to_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @functools.cached_property
    def facts(self) -> ModelFacts:
        space_id = self.tokenizer.space_id
        return ModelFacts(
            vocab_size=self.network.vocab_size,
            banned_ids=self.banned_ids,
            eos_ids=self.eos_ids,
            space_id=-1 if space_id is None else space_id,
            noise=SCHEDULES[self._objective.schedule](self._objective.schedule_power),
            heads=self.heads,
            has_cache=self.network.cached is not None,
            is_causal=self.is_causal,
            block_length=self.network.block_length,
            process=self.process,
            canvas_length=self.network.canvas_length,
            shows_maps=self.network.inside is not None,
            predicts_first=self.network.predicts_first,
        )

    @functools.cached_property
    def structures(self) -> Structures:
        return Structures(
            self.tokenizer, self.network.vocab_size, self.eos_ids, self.facts.banned_ids
        )

    @functools.cached_property
    def params_for_cache(self) -> Params:
        """The parameters in the layout of `CachedTrunk.ready`, for steps with a KV cache."""
        assert self.network.cached is not None, "the request was checked"
        ready = self.network.cached.ready or (lambda params: params)

        def added(params: Params) -> Params:
            whole = ready(params)
            return {name: leaf for name, leaf in whole.items() if params.get(name) is not leaf}

        # On one CPU device, the layout is views of the parameters. Elsewhere it is compiled without
        # the unchanged arrays, because all outputs of a program are new arrays.
        is_local = all(map(devices.is_on_one_cpu, jax.tree.leaves(self.params)))
        with devices.used(split_rows(self.params)):
            return self.params | (added if is_local else jax.jit(added))(self.params)

    def program(
        self,
        is_guided: bool = False,
        *,
        rows: NamedSharding | None = None,
        num_traced: int = 0,
    ) -> Program:
        """The static part of the denoising loop. See `Program` for the arguments."""
        facts = self.facts
        return Program(
            network=self.network,
            mask_id=self.tokenizer.mask_id,
            chunk=chunk_size(self.network.vocab_size),
            rows=rows,
            is_guided=is_guided,
            eos_ids=facts.eos_ids,
            banned_ids=facts.banned_ids,
            pad_id=self.tokenizer.pad_id,
            space_id=facts.space_id,
            num_traced=num_traced,
        )


DTYPES = ("float32", "bfloat16", "stored")
"""The dtypes in which parameters can be loaded."""


def load(
    path: str | os.PathLike[str] | None = None,
    *,
    network: Network | Callable[[ModelConfig], Network] | None = None,
    mesh: Mesh | MeshConfig | None = None,
    dtype: str | None = None,
    ignore_config: Sequence[str] = (),
    report: Callable[[str], None] | None = None,
) -> Model:
    """Loads a model from a run, a weights file, a published directory, the Hub or this package.

    Args:
      path: ``train.out_dir`` of a run or the directory of its checkpoints; a file from ``python -m
        dlm_jax.export``; a directory in Hub layout (docs/published.md); a GGUF file (extra
        ``gguf``); the name of a model that ships with the package, by default ``shakespeare``; or a
        Hub id, ``org/name`` or ``org/name@revision`` (extra ``hub``). Existing paths take
        precedence over the Hub.
      network: the custom network that the model was trained with: a `Network`, or a function of the
        `ModelConfig` of the run.
      mesh: devices over which the parameters and the sampled rows are sharded, or the number of
        devices along each axis. Each shard of a parameter is read directly onto its device. None
        uses a single device.
      dtype: dtype of the parameters, one of `DTYPES`. A published model also computes in this
        dtype. The default is float32, or the stored dtype for a published model.
      ignore_config: names of fields in the config.json of a published directory that are not read.
        A field that this library does not implement is an error otherwise.
      report: function that is called with one line for each skipped damaged checkpoint, with a
        line that lists the recommended settings of a published directory, and with one about
        parameters that `Network.axes` does not declare.

    Raises:
      ValueError: the path contains no usable model, the mesh does not fit the devices, the dtype is
        unknown, or a JAX setting changes results.
    """
    check_settings()
    say = (lambda line: None) if report is None else report
    path = path_of_model(path)
    if dtype is not None and dtype not in DTYPES:
        raise SettingError("dtype", dtype, f"is not one of {', '.join(DTYPES)}")
    compiler_options: tuple[str, ...] = ()
    if isinstance(mesh, MeshConfig):
        compiler_options, mesh = mesh.compiler_options, make_mesh(mesh)
        compiler.options("sample", mesh, compiler_options)
    path = fetched(path)
    if network is not None and is_published(path):
        raise SettingError("path", path, "is not supported with a custom network", "leave one out")

    axes: Params = {}

    def sharding(name: str, shape: tuple[int, ...]) -> NamedSharding | None:
        if mesh is None:
            return None
        known = dict(named_leaves(axes)).get(name, Axes())  # a custom head has none
        return NamedSharding(mesh, partition(known, shape, mesh))

    if is_published(path):
        to = None if dtype == "stored" else dtype
        if mesh is not None:
            axes = axes_of(build(read_model(Path(path), ignore_config)[1]))
        found = read_published(path, dtype=to, place=sharding, ignore=ignore_config)
        if found.settings:
            settings = ", ".join(f"{name}={value!r}" for name, value in found.settings.items())
            say(f"{path} recommends {settings} (generation_config.json)")
        config, params, tokenizer = found.config, found.params, found.tokenizer
        network, chat = build(config.model), found.chat
        more: dict[str, Any] = {
            "more_eos_ids": found.more_eos_ids,
            "presets": found.presets,
            "family": found.family.name,
        }
    else:
        if ignore_config:
            why = f"is not supported for {path}, which has no config.json"
            raise SettingError("ignore_config", list(ignore_config), why, "remove it")

        def abstract(meta: dict[str, Any]) -> Params:
            """The shapes of the parameters of the saved model's network."""
            nonlocal network, axes
            name = (meta.get("own") or {}).get("network")
            if network is None and name:
                raise ValueError(
                    f"{path} was trained with the custom network {name}; pass it in Python: "
                    "dlm_jax.load(path, network=...)"
                )
            if not isinstance(network, Network):
                config = configs.from_saved(meta, where=str(path))
                network = (network or build)(config.model)
            shapes = jax.eval_shape(network.init, key_of(0))
            if mesh is not None:
                axes = axes_of(network, shapes)
            return shapes

        def place(name: str, stored: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            """The dtype and sharding of a stored parameter in memory."""
            to = stored.dtype if dtype == "stored" else jax.numpy.dtype(dtype or "float32")
            return jax.ShapeDtypeStruct(stored.shape, to, sharding=sharding(name, stored.shape))

        params, meta = store.load_params(path, abstract, place=place, report=report)
        assert isinstance(network, Network)
        num_devices = 1 if mesh is None else mesh.size
        if num_devices > 1 and (line := undeclared(network, params, num_devices)):
            say(line)
        config = configs.from_saved(meta, where=str(path))
        tokenizer = from_json(meta["tokenizer"])
        check_fits(tokenizer, network.vocab_size)
        chat = saved_chat(meta, tokenizer)
        more = {
            "untrained": untrained_heads(config, meta.get("step")),
            "corpus_sha256": str((meta.get("corpus") or {}).get("sha256", "")),
        }
        more |= restored(meta["published"], config) if meta.get("published") else {}
    recommended = {"max_length": config.data.seq_len, "sample": config.sample}
    return Model(
        network=network,
        params=params,
        tokenizer=tokenizer,
        is_causal=config.model.attention_type == "causal",
        config=config,
        chat=chat,
        compiler_options=compiler_options,
        **recommended | more,
    )


def untrained_heads(config: Config, step: int | None) -> tuple[str, ...]:
    """Returns the model's heads that start to train after this step; empty if it is unknown."""
    added = config.model.added_heads
    begins = {name: getattr(config.heads, f"start_{name}_iteration") for name in added}
    return () if step is None else tuple(name for name, at in begins.items() if step <= at)


def export(
    model: Model,
    path: str | os.PathLike[str],
    *,
    family: str | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> list[str]:
    """Writes a published directory (config.json, safetensors, tokenizer) and returns its file
    names.

    Both `dlm_jax.load` and the reference code of the family can read the directory. Parameters keep
    their dtype, and adapters are merged into the matrices. Heads other than the LM head are
    omitted. Recommended settings are written to generation_config.json. The directory is created
    atomically.

    Args:
      model: a model loaded by `dlm_jax.load` whose ``[model]`` a published family can express.
      path: path of the directory, which must not exist yet.
      family: output family (`docs/published.md`). None selects the family of the loaded model. If
        the model has no family, the first family that can express all its settings is selected.
      max_shard_bytes: maximum size in bytes of a weights file.
    """
    if model.config is None or model.is_custom:
        raise ValueError("the model is a custom network, which no published family can describe")
    config = model.config
    params = merged(model.params, config.model)
    bare = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, lora_rank=0),
        sample=model.sample,
        data=dataclasses.replace(config.data, seq_len=model.max_length),
    )
    return write_published(
        path,
        bare,
        params,
        model.tokenizer,
        family=family or model.family or None,
        chat=model.chat,
        more_eos_ids=model.more_eos_ids,
        max_shard_bytes=max_shard_bytes,
    )
