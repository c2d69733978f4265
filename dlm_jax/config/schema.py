"""The sections of a config.

Every key is declared once, as a `Setting`. The rules of `dlm_jax.sampling` declare the keys of
``[sample]``. The keys of ``[mesh]`` and ``[objective]`` are declared next to the code that reads
them, those of a head in its file, and this module declares all other keys.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

from dlm_jax.config.rope import read_scaling
from dlm_jax.diffusion.objectives import ObjectiveConfig
from dlm_jax.distributed.mesh import MeshConfig
from dlm_jax.heads import HEADS
from dlm_jax.sampling.params import SamplingParams
from dlm_jax.settings import (
    ABOVE_ZERO,
    BELOW_ONE,
    UNSET,
    Section,
    Setting,
    SettingError,
    Trait,
    names_of,
    require,
    section,
    setting,
    with_settings,
)


@section("heads")
@dataclasses.dataclass(frozen=True)
@with_settings({key: one for head in HEADS for key, one in head.training.items()}, is_first=True)
class HeadsConfig(Section):
    """Training of heads: the settings of each built-in head, and those that all heads share."""

    if TYPE_CHECKING:

        def __init__(self, **settings: Any): ...

    train_main: bool = setting(
        True,
        "train the model; false: the model of train.init_from is frozen, and only heads are "
        "trained",
    )
    learning_rate: float = setting(3e-3, "peak learning rate for the heads (AdamW)", low=ABOVE_ZERO)
    weight_decay: float = setting(0.0, "decoupled weight decay of the heads' matrices", low=0)
    warmup_steps: int = setting(
        50, "number of steps of linear warm-up from the start of each head", low=0
    )
    clip: float = setting(
        1.0, "gradient norm of a head above which its gradient is scaled down", low=ABOVE_ZERO
    )


@section("optim")
@dataclasses.dataclass(frozen=True)
class OptimConfig(Section):
    """The optimiser and its learning-rate schedule."""

    name: str = setting(
        "muon",
        "muon (with Adam for embeddings and norms), or adamw for all parameters",
        choices=("muon", "adamw"),
    )
    learning_rate: float = setting(
        0.02,
        "peak learning rate for the matrices (muon) or for all parameters (adamw)",
        low=ABOVE_ZERO,
    )
    adam_learning_rate: float = setting(
        3e-3, "with muon: peak learning rate for the parameters that Adam trains", low=ABOVE_ZERO
    )
    final_ratio: float = setting(
        0.0, "final learning rate of the cosine schedule, as a fraction of the peak", low=0, high=1
    )
    warmup_steps: int = setting(50, "number of steps of linear warm-up from 0", low=0)
    weight_decay: float = setting(0.0, "decoupled weight decay of matrices", low=0)
    b1: float = setting(0.9, "decay rate of Adam's mean of gradients", low=0, high=BELOW_ONE)
    b2: float = setting(
        0.95, "decay rate of Adam's mean of squared gradients", low=0, high=BELOW_ONE
    )
    muon_momentum: float = setting(0.95, "muon's momentum", low=0, high=BELOW_ONE)
    clip: float = setting(
        1.0, "global gradient norm above which gradients are scaled down", low=ABOVE_ZERO
    )
    ema_decay: float = setting(
        0.0,
        "decay of a moving average of the parameters, which is used for sampling; 0: no average",
        low=0,
        high=BELOW_ONE,
    )


TRACKERS = ("tensorboard", "wandb")


def _fields_of_config(given: Any) -> tuple[str, ...]:
    for name in given:
        is_name = isinstance(name, str) and name.strip() == name != ""
        require(is_name, "train.ignore_config", name, "is not the name of a field", "remove it")
    return tuple(given)


@section("train")
@dataclasses.dataclass(frozen=True)
class TrainConfig(Section):
    """The training run: steps, output paths, and intervals of logs, evaluations and checkpoints."""

    out_dir: str = setting(
        "runs/default", "directory of checkpoints, metrics and plots", Trait.FREE
    )
    init_from: str = setting(
        "",
        "run, weights file, published directory, Hub id or shipped model with the initial "
        "parameters; empty: random parameters",
        Trait.FREE | Trait.ONCE_SAVED,
    )
    mask_like: str = setting(
        "",
        "token of a published causal model without MASK, whose embedding MASK begins with; empty: "
        "the mean of all embeddings, or those of a free id",
        Trait.FREE | Trait.ONCE_SAVED,
    )
    ignore_config: tuple[str, ...] = setting(
        (),
        "fields in the config of the published model in init_from that are not read, as in "
        "--ignore-config",
        Trait.FREE | Trait.ONCE_SAVED,
        hint=tuple[str, ...],
        parse=_fields_of_config,
    )
    steps: int = setting(1000, "optimiser steps", Trait.FREE, low=1)  # upwards
    batch_size: int = setting(
        32, "number of rows per step, over all devices and processes", low=1, high=2**20
    )
    accumulate: int = setting(
        1,
        "number of microbatches per step, which run sequentially to save memory; the result is the "
        "same",
        low=1,
        high=2**20,
    )
    seed: int = setting(
        0, "random seed of the parameters, the data order and the noise", low=0, high=2**32 - 1
    )
    log_every: int = setting(10, "number of steps between two lines of metrics", Trait.FREE, low=1)
    eval_every: int = setting(
        250,
        "number of steps between evaluations on held-out text; 0: only at the end",
        Trait.FREE,
        low=0,
    )
    eval_windows: int = setting(
        256, "maximum number of held-out windows per evaluation", Trait.FREE, low=1
    )
    sample_every: int = setting(
        0, "number of steps between samples during training; 0: only at the end", Trait.FREE, low=0
    )
    trackers: tuple[str, ...] = setting(
        (),
        "additional metric trackers: tensorboard (event files in out_dir) and wandb; each "
        "requires the extra of the same name",
        Trait.FREE,
        hint=tuple[str, ...],
        parse=names_of("train.trackers", TRACKERS, least=0),
    )
    checkpoint_dir: str = setting(
        "",
        "directory or URL (gs://, s3://) of checkpoints; empty: out_dir/checkpoints",
        Trait.FREE,
    )
    checkpoint_every: int = setting(
        250, "number of steps between checkpoints; 0: only at the end", Trait.FREE, low=0
    )
    local_checkpoint_dir: str = setting(
        "",
        "directory on a disk of each host for more checkpoints (docs/pods.md); empty: none",
        Trait.FREE | Trait.LOCAL,
    )
    local_checkpoint_every: int = setting(
        50, "steps between checkpoints in local_checkpoint_dir", Trait.FREE, low=1
    )
    keep_checkpoints: int = setting(2, "number of newest checkpoints to keep", Trait.FREE, low=1)

    def check(self) -> None:
        require(
            self.batch_size % self.accumulate == 0,
            "train.accumulate",
            self.accumulate,
            f"does not divide train.batch_size={self.batch_size}",
            "use a divisor",
            "train.batch_size",
        )
        require(self.out_dir != "", "train.out_dir", UNSET, "is empty", "name a directory")


INIT = "init"
"""The value of ``data.tokenizer`` that selects the tokenizer of ``train.init_from``."""


@section("data")
@dataclasses.dataclass(frozen=True)
class DataConfig(Section):
    """Training text and its tokenizer."""

    source: tuple[str, ...] = setting(
        ("python-reference",),
        "UTF-8 or JSONL files or globs, or python-reference (the language reference inside "
        "CPython), python-source (its standard library) or tinyshakespeare; or sharded corpora, "
        "directories or URLs (gs://, s3://)",
        Trait.FREE | Trait.ONCE_SAVED | Trait.LOCAL,
        hint=tuple[str, ...],
        parse=tuple,
    )
    weights: tuple[float, ...] = setting(
        (),
        "fraction of rows from each sharded corpus; empty: proportional to its number of tokens",
        hint=tuple[float, ...],
        parse=tuple,
    )
    tokenizer: str = setting(
        "character",
        "character: characters of the corpus; byte: the 256 bytes; bpe:N: trained on the corpus; "
        "init: from train.init_from; corpus: from shards; or the path of a tokenizer.json",
    )
    new_characters: str = setting(
        "add",
        "with tokenizer=init and a character model: add new characters of the corpus, with new "
        "embeddings, and report them (add), or raise an error (refuse)",
        choices=("add", "refuse"),
    )
    layout: str = setting(
        "windows",
        "a row is a window of the packed text, or a document",
        choices=("windows", "documents"),
    )
    tail: str = setting(
        "eos",
        "documents: padding of a row; eos is a training target, so that the model learns to stop",
        choices=("eos", "pad"),
    )
    seq_len: int = setting(128, "number of tokens per training row (L)", low=2, high=2**20)
    held_out: float = setting(
        0.05, "fraction of the corpus held out for evaluation", low=ABOVE_ZERO, high=BELOW_ONE
    )
    cache_dir: str = setting(
        "",
        "directory of token files; empty: $DLM_JAX_CACHE or ~/.cache",
        Trait.FREE | Trait.LOCAL,
    )

    def check(self) -> None:
        require(
            len(self.source) > 0,
            "data.source",
            UNSET,
            "is empty",
            "pass a file, a glob or python-reference",
        )


_MOST_WIDTH = 2**20
_HEAD = Trait.OWN | Trait.IDLE


def _of_head(one: Any) -> Any:
    """A setting of a head with the traits of all heads."""
    return dataclasses.field(default=one.default, metadata={**one.metadata, "traits": _HEAD})


def _adapted(given: Any) -> tuple[str, ...]:
    require(len(given) > 0, "model.lora_targets", UNSET, "is empty", "use query,value")
    return tuple(given)


REMATS = ("none", "block", "attention", "dots", "offload", "auto")
"""Values of ``model.remat`` besides names joined by ``+``."""

NAMED = ("attention", "query", "key", "value", "gathered", "middle", "gate", "up")
"""Values inside a block that ``model.remat`` may name.

``gathered`` are the keys and values of all devices along the mesh axis ``context``.
"""


def _remat(given: Any) -> str:
    names = str(given).split("+")
    is_known = given in REMATS or (set(names) <= set(NAMED) and len(set(names)) == len(names))
    require(
        is_known,
        "model.remat",
        given,
        f"is neither one of {', '.join(REMATS)} nor some of {', '.join(NAMED)} joined by +",
        "use auto",
    )
    return str(given)


def _rope(given: Any) -> str:
    made = read_scaling(given)
    return "" if made is None else str(made)


def _dtype(given: Any) -> str:
    if given == "float16":
        raise SettingError(
            "model.compute_dtype",
            given,
            "is not one of float32, bfloat16",
            "its range is too small for activations and gradients; use 'bfloat16'",
        )
    return _DTYPE.checked(given)


_DTYPE = Setting(
    "model.compute_dtype",
    "float32",
    "dtype of activations; parameters, norms and softmax remain float32; the range of float16 is "
    "too small for gradients without loss scaling",
    choices={name: name for name in ("float32", "bfloat16")},
)


@section("model")
@dataclasses.dataclass(frozen=True)
@with_settings({key: _of_head(one) for head in HEADS for key, one in head.model.items()})
class ModelConfig(Section):
    """The Transformer, from GPT-like to LLaMA-like, and its heads."""

    if TYPE_CHECKING:

        def __init__(self, **settings: Any): ...

    head_size: int = setting(0, "size of one attention head; 0: width / heads", low=0)
    rotary_share: float = setting(
        1.0,
        "fraction of each head that RoPE rotates, from its start, in (0, 1]",
        Trait.UNSEEN,
        low=ABOVE_ZERO,
        high=1,
    )
    logit_alignment: str = setting(
        "same",
        "output that predicts the token at a position: same (the output at this position) or "
        "shifted (the output at the previous position; the first position uses its own, and has no "
        "prediction in a causal model, which then has no start_id)",
        Trait.TURNED | Trait.UNSEEN,
        choices=("same", "shifted"),
    )
    experts: int = setting(0, "number of experts that replace the MLP; 0: a plain MLP", low=0)
    experts_per_token: int = setting(0, "experts per token", Trait.UNSEEN, low=0)
    expert_width: int = setting(0, "inner size of one expert (swiglu)", low=0)
    shared_width: int = setting(
        0, "inner size of the shared expert, which every token uses; 0: no shared expert", low=0
    )
    dense_layers: int = setting(
        0, "number of blocks at the start that have a plain MLP instead of experts", low=0
    )
    router_score: str = setting(
        "softmax",
        "score of an expert for a token: softmax over all experts, or sigmoid of each score",
        Trait.UNSEEN,
        choices=("softmax", "sigmoid"),
    )
    router_groups: int = setting(
        1,
        "number of groups of experts; router_groups_kept of them are selected first",
        Trait.UNSEEN,
        low=1,
    )
    router_groups_kept: int = setting(
        1, "number of groups from which the experts of a token are selected", Trait.UNSEEN, low=1
    )
    router_bias: str = setting(
        "none",
        "bias on the score of each expert: none, choice (only for the selection) or weight (also "
        "for the output weight)",
        Trait.UNSEEN,
        choices=("none", "choice", "weight"),
    )
    router_normalised: bool = setting(
        False, "normalise the weights of a token's experts to sum to 1", Trait.UNSEEN
    )
    router_scale: float = setting(
        1.0,
        "factor that multiplies the weights of a token's experts",
        Trait.UNSEEN,
        low=ABOVE_ZERO,
    )
    router_scales: bool = setting(
        False,
        "the router normalises and scales its input, and the weight of each expert is scaled",
    )
    experts_beside: bool = setting(
        False,
        "add the experts to the MLP instead of replacing it; requires post_norms",
    )

    lora_rank: int = setting(
        0,
        "rank of LoRA adapters, which are trained instead of the model; 0: none (docs/training.md)",
        Trait.OWN,
        low=0,
    )
    lora_alpha: float = setting(
        16.0, "adapters are scaled by lora_alpha / lora_rank", _HEAD, low=ABOVE_ZERO
    )
    lora_targets: tuple[str, ...] = setting(
        ("query", "value"),
        "block matrices that have adapters: query, key, value, out, gate, up, down; mask: the "
        "embedding of the last id, which is added if a causal model without MASK is converted",
        _HEAD,
        hint=tuple[str, ...],
        parse=_adapted,
    )

    depth: int = setting(6, "number of Transformer blocks", low=1, high=2**12)
    width: int = setting(128, "size of the hidden vectors (D)", low=1, high=2**17)
    heads: int = setting(
        4, "number of attention heads, a divisor of width", Trait.UNSEEN, low=1, high=2**12
    )
    kv_heads: int = setting(
        0,
        "number of key/value heads, shared by groups of heads; 0: same as heads",
        Trait.UNSEEN,
        low=0,
        high=2**12,
    )
    mlp_width: int = setting(
        0,
        "inner size of the MLP; 0: 4 * width (gated: 8/3 * width, as a multiple of 8)",
        low=0,
        high=_MOST_WIDTH,
    )
    activation: str = setting(
        "relu2",
        "MLP non-linearity: relu2 (squared ReLU), gelu (tanh form), swiglu, or geglu (gated GELU)",
        Trait.UNSEEN,
        choices=("relu2", "gelu", "swiglu", "geglu"),
    )
    norm: str = setting("rms", "normalisation: rms (RMSNorm) or layer", choices=("rms", "layer"))
    norm_epsilon: float = setting(
        1e-5, "epsilon added to the mean square or variance in a norm", Trait.UNSEEN, low=ABOVE_ZERO
    )
    qk_norm: bool = setting(True, "RMSNorm of queries and keys in each head, before RoPE")
    qkv_bias: bool = setting(False, "biases on the query, key and value projections")
    rope_theta: float = setting(
        10000.0, "base of the rotary position frequencies", Trait.UNSEEN, low=ABOVE_ZERO
    )
    rope_scaling: str = setting(
        "",
        "scaling of the rotary frequencies: linear:factor=F, "
        "llama3:factor=F,original=LENGTH,low=TURNS,high=TURNS or "
        "yarn:factor=F,original=LENGTH,low=TURNS,high=TURNS,scale=S; empty: none",
        Trait.UNSEEN,
        parse=_rope,
    )
    tied_head: bool = setting(True, "the LM head is the transposed embedding table")
    attention_type: str = setting(
        "bidirectional",
        "bidirectional, causal (an autoregressive model), block_causal (a position attends to its "
        "own and earlier blocks) or canvas (a causal text, followed by a canvas that attends to "
        "the text and itself)",
        Trait.TURNED | Trait.UNSEEN,
        choices=("bidirectional", "causal", "block_causal", "canvas"),
    )
    block_length: int = setting(
        0,
        "block_causal: number of positions per block, from the start of the row; canvas: number of "
        "positions per canvas; at least 2",
        Trait.TURNED,
        low=0,
    )
    attention_window: int = setting(
        0,
        "canvas: attention window over the text in sliding layers; 0: unlimited",
        Trait.UNSEEN,
        low=0,
    )
    full_every: int = setting(
        0,
        "canvas: every n-th layer attends to all positions (full layer), and the other layers "
        "attend within attention_window; 0: all layers are full",
        Trait.UNSEEN,
        low=0,
    )
    full_head_size: int = setting(0, "head_size of the full layers; 0: same as head_size", low=0)
    full_kv_heads: int = setting(
        0, "kv_heads of the full layers; 0: same as kv_heads", Trait.UNSEEN, low=0, high=2**12
    )
    full_rope_theta: float = setting(
        0.0, "rope_theta of the full layers; 0: same as rope_theta", Trait.UNSEEN, low=0
    )
    full_rotary_share: float = setting(
        1.0,
        "fraction of the rotary pairs that are rotated in full layers, highest frequencies first",
        Trait.UNSEEN,
        low=ABOVE_ZERO,
        high=1,
    )
    full_value_from_key: bool = setting(
        False, "full layers use their keys as values, before norm and RoPE"
    )
    attention_scale: float = setting(
        0.0, "scale of the attention scores; 0: head_size ** -0.5", Trait.UNSEEN, low=0
    )
    value_norm: bool = setting(
        False, "RMSNorm of values in each head, without a learned scale", Trait.UNSEEN
    )
    post_norms: bool = setting(
        False, "also normalise the outputs of attention and the MLP before they are added"
    )
    layer_scales: bool = setting(
        False,
        "canvas: each block scales its output, with separate factors for the text and the canvas",
    )
    embedding_scaled: bool = setting(
        False, "embeddings are multiplied by sqrt(width)", Trait.UNSEEN
    )
    logit_cap: float = setting(
        0.0, "logits are capped as cap * tanh(logits / cap); 0: no cap", Trait.UNSEEN, low=0
    )
    self_conditioning: bool = setting(
        False, "canvas: embeddings also depend on the predictions of the previous step"
    )
    vocab_size: int = setting(
        0, "number of logits; 0: size of the tokenizer's vocabulary", Trait.FOUND, low=0, high=2**22
    )
    start_id: int = setting(
        -1,
        "causal: id before the first token; -1: the tokenizer's MASK",
        Trait.FOUND | Trait.TURNED | Trait.IDLE,
        low=-1,
    )
    compute_dtype: str = setting(
        "float32", _DTYPE.help, _HEAD, choices=("float32", "bfloat16"), parse=_dtype
    )
    remat: str = setting(
        "none",
        "values that the backward pass recomputes to save memory: none, block (everything), "
        "attention (all except the output of attention), dots (all except matrix products), "
        "offload (everything; inputs of blocks are kept in host memory), or all except the names "
        f"joined by +: {', '.join(NAMED)}; auto: the first of "
        "attention+query+key+value+middle+gate+up (on GPUs), attention+gate+up, attention and "
        "block that fills at most a third of an accelerator's memory",
        _HEAD | Trait.FREE,
        parse=_remat,
    )

    @property
    def size_of_head(self) -> int:
        return self.head_size or self.width // self.heads

    @property
    def has_start(self) -> bool:
        """Whether the input of the network is ``start_id`` and all tokens except the last."""
        return self.attention_type == "causal" and self.logit_alignment == "same"

    @property
    def predicts_first(self) -> bool:
        """Whether the network predicts the first token of a row (`Network.predicts_first`)."""
        return self.attention_type != "causal" or self.has_start

    @property
    def rotary_size(self) -> int:
        return int(self.size_of_head * self.rotary_share)

    @property
    def is_gated(self) -> bool:
        return self.activation in ("swiglu", "geglu")

    @property
    def layers(self) -> dict[str, tuple[int, ...]]:
        """The layer indices of each stack of blocks, in the order of the stack's parameters."""
        first, every = self.dense_layers, self.full_every
        full = tuple(range(every - 1, self.depth, every)) if every else ()
        rest = tuple(at for at in range(first, self.depth) if at not in full)
        return {"dense_blocks": tuple(range(first)), "blocks": rest, "full_blocks": full}

    @property
    def inner_width(self) -> int:
        gated = 8 * -(-self.width // 3)
        return self.mlp_width or (gated if self.is_gated else 4 * self.width)

    def check(self) -> None:
        require(
            self.start_id < (self.vocab_size or math.inf),
            "model.start_id",
            self.start_id,
            "is outside the vocabulary",
            "use -1",
            "model.vocab_size",
        )
        self._check_attention()
        if self.experts:
            self._check_experts()
        self._check_heads()

    def _check_attention(self) -> None:
        heads, kind = self.heads, self.attention_type
        if self.head_size == 0:
            require(
                self.width % heads == 0 and (self.width // heads) % 2 == 0,
                "model.width",
                self.width,
                f"is not an even multiple of model.heads={heads}",
                f"use a width of {2 * heads * max(1, round(self.width / (2 * heads)))}",
                "model.heads",
            )
        require(
            self.head_size % 2 == 0,
            "model.head_size",
            self.head_size,
            "is odd",
            f"use {self.head_size + 1}",
        )
        require(
            self.rotary_size >= 2 and self.rotary_size % 2 == 0,
            "model.rotary_share",
            self.rotary_share,
            f"rotates {self.rotary_size} dimensions of a head, which is odd",
            "use 1.0 or 0.5",
            "model.width",
            "model.heads",
            "model.head_size",
        )
        require(
            self.kv_heads == 0 or heads % self.kv_heads == 0,
            "model.kv_heads",
            self.kv_heads,
            f"does not divide model.heads={heads}",
            f"use 0 or a divisor of {heads}",
            "model.heads",
        )
        self._check_canvas()
        is_in_blocks = kind in ("block_causal", "canvas")
        require(
            self.block_length >= 2 if is_in_blocks else self.block_length == 0,
            "model.block_length",
            self.block_length,
            f"is not supported with model.attention_type={kind!r}",
            f"use {'at least 2' if is_in_blocks else 0}",
            "model.attention_type",
        )

    def _check_canvas(self) -> None:
        names = ("attention_window", "full_every", "layer_scales", "self_conditioning")
        for name in names if self.attention_type != "canvas" else ():
            require(
                not getattr(self, name),
                f"model.{name}",
                getattr(self, name),
                f"requires model.attention_type='canvas', not {self.attention_type!r}",
                f"use {self.declared[name].default!r}",
                "model.attention_type",
            )
        every, heads, groups = self.full_every, self.heads, self.full_kv_heads
        require(
            every == 0 or (every >= 2 and self.depth % every == 0 and not self.dense_layers),
            "model.full_every",
            every,
            f"does not divide model.depth={self.depth} into groups of at least 2 layers",
            "use 0",
            "model.depth",
            "model.dense_layers",
        )
        require(
            (every > 0) == (self.attention_window > 0),
            "model.attention_window",
            self.attention_window,
            f"is not supported with model.full_every={every}",
            "set both or neither",
            "model.full_every",
        )
        require(
            self.full_head_size % 2 == 0,
            "model.full_head_size",
            self.full_head_size,
            "is odd",
            f"use {self.full_head_size + 1}",
        )
        require(
            groups == 0 or heads % groups == 0,
            "model.full_kv_heads",
            groups,
            f"does not divide model.heads={heads}",
            f"use 0 or a divisor of {heads}",
            "model.heads",
        )

    def _check_experts(self) -> None:
        require(
            self.is_gated,
            "model.activation",
            self.activation,
            "is not supported with experts",
            "use 'swiglu' or 'geglu'",
            "model.experts",
        )
        require(
            not self.experts_beside or (self.post_norms and not self.dense_layers),
            "model.experts_beside",
            True,
            "requires model.post_norms=true and model.dense_layers=0",
            "change one of them",
            "model.post_norms",
            "model.dense_layers",
        )
        require(
            1 <= self.experts_per_token <= self.experts,
            "model.experts_per_token",
            self.experts_per_token,
            f"is not in [1, {self.experts}], the number of model.experts",
            "",
            "model.experts",
        )
        require(
            self.expert_width >= 1, "model.expert_width", self.expert_width, "must be at least 1"
        )
        require(
            self.dense_layers < self.depth,
            "model.dense_layers",
            self.dense_layers,
            f"leaves no block of model.depth={self.depth} with experts",
            "lower it, or use model.experts=0",
            "model.depth",
        )
        require(
            self.experts % self.router_groups == 0,
            "model.router_groups",
            self.router_groups,
            f"does not divide model.experts={self.experts}",
            "use 1",
            "model.experts",
        )
        within = self.experts // self.router_groups
        require(
            self.router_groups_kept <= self.router_groups
            and self.router_groups_kept * within >= self.experts_per_token,
            "model.router_groups_kept",
            self.router_groups_kept,
            f"must be at most {self.router_groups}, and these groups of {within} experts must have "
            f"at least model.experts_per_token={self.experts_per_token} experts",
            "",
            "model.experts_per_token",
        )
        require(
            self.router_groups == 1 or within >= 2,
            "model.router_groups",
            self.router_groups,
            "leaves one expert per group",
            "use fewer",
        )

    def _check_heads(self) -> None:
        for head in HEADS:
            name, kind = head.switch, self.attention_type
            if not getattr(self, name):
                continue
            require(
                kind in head.attention,
                f"model.{name}",
                True,
                f"requires model.attention_type={' or '.join(map(repr, head.attention))}, not "
                f"{kind!r}",
                "change one of them",
                "model.attention_type",
            )


@dataclasses.dataclass(frozen=True)
class Config:
    """The config of a run; the defaults are valid."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    objective: ObjectiveConfig = dataclasses.field(default_factory=ObjectiveConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    heads: HeadsConfig = dataclasses.field(default_factory=HeadsConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    sample: SamplingParams = dataclasses.field(default_factory=SamplingParams)

    def __post_init__(self) -> None:
        self._check_run()
        self._check_begin()
        self._check_attention()
        if not self.objective.noise_process.is_masked:
            self._check_process()

    def _check_run(self) -> None:
        warmup, steps = self.optim.warmup_steps, self.train.steps
        require(
            warmup < steps or steps == 1,
            "optim.warmup_steps",
            warmup,
            f"is not less than train.steps={steps}",
            "lower it",
            "train.steps",
        )
        require(
            self.sample.gen_length <= self.data.seq_len,
            "sample.gen_length",
            self.sample.gen_length,
            f"does not fit the canvas of data.seq_len={self.data.seq_len}",
            "lower it, or use 0 to fill the canvas",
            "data.seq_len",
        )
        share, rows = self.objective.denoising_share, self.train.batch_size
        require(
            share in (0, 1) or 1 <= round(share * rows) < rows,
            "objective.denoising_share",
            share,
            f"of train.batch_size={rows} rows leaves an objective without rows",
            "raise train.batch_size",
            "train.batch_size",
        )

    def _check_process(self) -> None:
        model, kind = self.model, self.objective.process
        for name, value, needed in (
            ("model.attention_type", model.attention_type != "causal", True),
            ("heads.sampler_trunk_share", getattr(self.heads, "sampler_trunk_share", 0), 0),
        ):
            require(
                value == needed,
                "objective.process",
                kind,
                f"is not supported with {name}",
                "use 'masked'",
                name,
            )

    def _check_begin(self) -> None:
        is_fresh = self.train.init_from == ""
        require(
            self.data.tokenizer != INIT or not is_fresh,
            "data.tokenizer",
            self.data.tokenizer,
            "requires train.init_from, which is empty",
            "name a model",
            "train.init_from",
        )
        require(
            not self.train.mask_like or not is_fresh,
            "train.mask_like",
            self.train.mask_like,
            "requires train.init_from, which is empty",
            "name a model",
            "train.init_from",
        )
        require(
            not self.train.ignore_config or not is_fresh,
            "train.ignore_config",
            self.train.ignore_config,
            "requires train.init_from, which is empty",
            "name a model",
            "train.init_from",
        )
        require(
            not self.train.mask_like or self.model.attention_type != "causal",
            "train.mask_like",
            self.train.mask_like,
            "has no effect with model.attention_type='causal'",
            "remove it",
            "model.attention_type",
        )
        require(
            self.heads.train_main or not is_fresh,
            "heads.train_main",
            False,
            "freezes an untrained model",
            "name a trained model in train.init_from",
            "train.init_from",
        )
        require(
            self.model.lora_rank == 0 or (self.heads.train_main and not is_fresh),
            "model.lora_rank",
            self.model.lora_rank,
            "trains adapters of an existing model",
            "name it in train.init_from, with heads.train_main=true",
            "train.init_from",
            "heads.train_main",
        )

    def _check_attention(self) -> None:
        kind, block = self.model.attention_type, self.model.block_length
        require(
            kind != "causal" or self.sample.order == "left_to_right",
            "model.attention_type",
            kind,
            f"does not support sample.order={self.sample.order!r}",
            "use left_to_right",
            "sample.order",
        )
        require(
            kind != "block_causal" or block % (self.sample.block_length or 1) == 0,
            "sample.block_length",
            self.sample.block_length,
            f"is neither model.block_length={block} nor a divisor of it",
            "use 0 for the same value",
            "model.block_length",
        )
        require(
            kind != "block_causal" or self.objective.proofreading_share == 0,
            "objective.proofreading_share",
            self.objective.proofreading_share,
            "moves tokens between blocks, which model.attention_type='block_causal' does not "
            "support",
            "use 0",
            "model.attention_type",
        )


def declared() -> dict[str, Setting]:
    """All settings of a config, by dotted key."""
    return {
        f"{name}.{key}": one
        for name, cls in sections().items()
        for key, one in cls.declared.items()
    }


def keys(trait: Trait) -> tuple[str, ...]:
    """The dotted keys of the settings with a given trait."""
    return tuple(
        f"{name}.{key}"
        for name, cls in sections().items()
        for key, found in cls.traits.items()
        if trait in found
    )


def sections() -> dict[str, Any]:
    return {field.name: field.default_factory for field in dataclasses.fields(Config)}
