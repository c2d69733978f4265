"""Configuration of a run and of its model: frozen dataclasses that validate themselves."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from dlm_jax.config.architecture import Architecture
from dlm_jax.config.data import INIT, DataConfig
from dlm_jax.config.fields import field, require, require_fit
from dlm_jax.config.heads import HeadsConfig
from dlm_jax.config.mesh import MeshConfig
from dlm_jax.config.objective import ObjectiveConfig
from dlm_jax.config.optim import OptimConfig
from dlm_jax.config.sample import SampleConfig
from dlm_jax.config.train import TrainConfig


@dataclasses.dataclass(frozen=True)
class ModelConfig(Architecture):
    """Shape of the Transformer, from small GPT-like to LLaMA-like, and which heads it has."""

    mode: Literal["language_model", "sequence_scorer"] = field(
        "language_model",
        "language_model; or sequence_scorer: predicts which share of a text is corrupted",
    )
    depth: int = field(6, "number of Transformer blocks")
    width: int = field(128, "size of the hidden vectors (D)")
    heads: int = field(4, "attention heads; width must be a multiple of it")
    kv_heads: int = field(0, "key/value heads shared by groups of heads; 0: as many as heads")
    mlp_width: int = field(0, "inner size of the MLP; 0: 4 * width (swiglu: 8/3, rounded to 8)")
    activation: Literal["relu2", "gelu", "swiglu"] = field(
        "relu2", "MLP non-linearity: relu2 (squared ReLU), gelu (tanh form) or swiglu"
    )
    norm: Literal["rms", "layer"] = field("rms", "normalisation: rms (RMSNorm) or layer")
    norm_epsilon: float = field(1e-5, "added to the mean square or variance in a norm")
    qk_norm: bool = field(True, "RMSNorm of queries and keys over the head, before RoPE")
    qkv_bias: bool = field(False, "biases on the query, key and value projections")
    rope_theta: float = field(10000.0, "base of the rotary position frequencies")
    tied_head: bool = field(True, "the LM head is the transposed embedding table")
    attention_type: Literal["bidirectional", "causal", "block_causal"] = field(
        "bidirectional",
        "bidirectional; causal: an autoregressive model, each position from those to its left; or "
        "block_causal: a position sees its own block and those before it",
    )
    block_length: int = field(
        0, "block_causal: positions of a block, from the begin of the row on, at least 2"
    )
    vocab_size: int = field(0, "number of logits; 0: the tokenizer's vocabulary")
    start_id: int = field(
        -1, "causal: id that the model reads before the first token; -1: the tokenizer's MASK"
    )
    compute_dtype: Literal["float32", "bfloat16"] = field(
        "float32",
        "dtype of activations; parameters, norms and softmax stay float32; float16 has "
        "too small a range for gradients without scaled losses",
    )
    remat: Literal["none", "block", "attention", "dots", "offload"] = field(
        "none",
        "what the backward pass computes again to save memory: none; block (everything), "
        "attention (all but what attention returns), dots (all but matrix products) or offload "
        "(everything, and the inputs of blocks lie in the host's memory)",
    )
    add_sampler_head: bool = field(
        False, "a head that sees a hole's neighbours, for coherent parallel filling"
    )
    sampler_context: int = field(1, "neighbours that the sampler head sees on each side")
    sampler_width: int = field(0, "inner size of the sampler head's MLP; 0: width")
    sampler_residual: bool = field(
        False, "the sampler head adds to the hidden vector, and begins as the LM head"
    )
    add_critic_head: bool = field(False, "a head that predicts which tokens of a text are wrong")

    def __post_init__(self) -> None:
        shown = f"model.remat={self.remat!r} is not a name"
        require(isinstance(self.remat, str), f"{shown}; use 'block' or 'none'")
        require_fit("model", self)
        for name in ("depth", "width", "heads"):
            value = getattr(self, name)
            require(value >= 1, f"model.{name}={value} must be at least 1")
        for name in ("kv_heads", "mlp_width", "vocab_size", "sampler_width"):
            value = getattr(self, name)
            require(value >= 0, f"model.{name}={value} must be at least 0")
        require(
            -1 <= self.start_id < (self.vocab_size or math.inf),
            f"model.start_id={self.start_id} is outside the vocabulary; use -1",
        )
        self.check_architecture(
            width=self.width, heads=self.heads, depth=self.depth, activation=self.activation
        )
        require(
            self.kv_heads == 0 or self.heads % self.kv_heads == 0,
            f"model.kv_heads={self.kv_heads} does not divide model.heads={self.heads}; "
            f"use 0 or a divisor of {self.heads}",
        )
        is_block_causal = self.attention_type == "block_causal"
        require(
            self.block_length >= 2 if is_block_causal else self.block_length == 0,
            f"model.block_length={self.block_length} does not go with model.attention_type="
            f"{self.attention_type!r}; use {'at least 2' if is_block_causal else 0}",
        )
        require(
            self.logit_alignment == "same" or self.attention_type != "causal",
            "model.logit_alignment='shifted' does not go with model.attention_type='causal', whose "
            "outputs are aligned by what it reads; use 'same'",
        )
        self._check_heads()
        require(self.norm_epsilon > 0, f"model.norm_epsilon={self.norm_epsilon} must be > 0")
        require(self.rope_theta > 0, f"model.rope_theta={self.rope_theta} must be > 0")

    @property
    def inner_width(self) -> int:
        """Inner size of an MLP."""
        is_gated = self.activation == "swiglu"
        return self.mlp_width or (8 * -(-self.width // 3) if is_gated else 4 * self.width)

    def _check_heads(self) -> None:
        """Raises ValueError for heads that this kind of model cannot have."""
        require(
            self.sampler_context >= 1,
            f"model.sampler_context={self.sampler_context} must be at least 1",
        )
        for name in ("add_sampler_head", "add_critic_head"):
            require(
                not getattr(self, name) or self.mode == "language_model",
                f"model.{name}=True needs model.mode='language_model', and it is {self.mode!r}; "
                "change one of them",
            )
            require(
                not getattr(self, name) or self.attention_type == "bidirectional",
                f"model.{name}=True needs model.attention_type='bidirectional', and it is "
                f"{self.attention_type!r}; change one of them",
            )
        require(
            self.mode == "language_model" or self.attention_type == "bidirectional",
            "model.mode='sequence_scorer' needs model.attention_type='bidirectional'",
        )


@dataclasses.dataclass(frozen=True)
class Config:
    """Everything a run needs; every default constructs."""

    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    objective: ObjectiveConfig = dataclasses.field(default_factory=ObjectiveConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    heads: HeadsConfig = dataclasses.field(default_factory=HeadsConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
    sample: SampleConfig = dataclasses.field(default_factory=SampleConfig)

    def __post_init__(self) -> None:
        require(
            self.optim.warmup_steps < self.train.steps or self.train.steps == 1,
            f"optim.warmup_steps={self.optim.warmup_steps} leaves nothing of "
            f"train.steps={self.train.steps}; lower it",
        )
        require(
            self.sample.gen_length <= self.data.seq_len,
            f"sample.gen_length={self.sample.gen_length} does not fit the canvas of "
            f"data.seq_len={self.data.seq_len}; lower it, or use 0 to fill the canvas",
        )
        share, rows = self.objective.denoising_share, self.train.batch_size
        require(
            share in (0, 1) or 1 <= round(share * rows) < rows,
            f"objective.denoising_share={share} of train.batch_size={rows} rows leaves an "
            "objective without rows; raise train.batch_size",
        )
        require(
            self.data.tokenizer != INIT or self.train.init_from != "",
            "data.tokenizer='init' is that of train.init_from, which is empty; name a model there",
        )
        require(
            self.heads.train_main or self.train.init_from != "",
            "heads.train_main=False keeps the model as it is, and it is fresh; name the one to "
            "keep in train.init_from",
        )
        require(
            self.model.lora_rank == 0 or (self.heads.train_main and self.train.init_from != ""),
            f"model.lora_rank={self.model.lora_rank} trains adapters of a model that is there; "
            "name it in train.init_from, with heads.train_main=true",
        )
        require(
            self.model.attention_type != "causal" or self.sample.order == "left_to_right",
            f"model.attention_type='causal' cannot fill sample.order={self.sample.order!r}; "
            "use left_to_right",
        )
        require(
            self.model.attention_type != "block_causal"
            or self.model.block_length % (self.sample.block_length or 1) == 0,
            f"sample.block_length={self.sample.block_length} is not the model.block_length="
            f"{self.model.block_length} that the model is trained with, nor a part of it; use 0 "
            "for the same",
        )
        require(
            self.model.attention_type != "block_causal" or self.objective.proofreading_share == 0,
            f"objective.proofreading_share={self.objective.proofreading_share} moves tokens out of "
            "their blocks, which model.attention_type='block_causal' cannot; use 0",
        )
