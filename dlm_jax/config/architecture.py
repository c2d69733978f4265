"""What tells one published architecture from another: heads, rotary part, alignment, experts."""

from __future__ import annotations

import dataclasses
from typing import Literal

from dlm_jax.config.fields import field, require


@dataclasses.dataclass(frozen=True)
class Architecture:
    """Settings of the Transformer that published models differ in; the defaults are neutral."""

    head_size: int = field(0, "size of one attention head; 0: width / heads")
    rotary_share: float = field(
        1.0, "part of each head, its first numbers, that RoPE turns, in (0, 1]"
    )
    logit_alignment: Literal["same", "shifted"] = field(
        "same",
        "where the prediction of a position stands: same, in the Transformer's output there; or "
        "shifted, in the output of the position before it (the first position keeps its own)",
    )
    experts: int = field(0, "experts of a mixture in place of the MLP; 0: a plain MLP")
    experts_per_token: int = field(0, "experts that each token is sent to")
    expert_width: int = field(0, "inner size of one expert (swiglu)")
    shared_width: int = field(0, "inner size of the expert that every token passes; 0: none")
    dense_layers: int = field(0, "first blocks that have a plain MLP instead of experts")
    router_score: Literal["softmax", "sigmoid"] = field(
        "softmax", "score of an expert for a token: softmax over all experts, or sigmoid of each"
    )
    router_groups: int = field(1, "groups of experts, of which router_groups_kept are chosen first")
    router_groups_kept: int = field(1, "groups that a token's experts come from")
    router_bias: Literal["none", "choice", "weight"] = field(
        "none",
        "a bias of each expert on its score: none; choice, for choosing alone; or weight, also in "
        "the weight of what the expert says",
    )
    router_normalised: bool = field(False, "the weights of a token's experts are made to sum to 1")
    router_scale: float = field(1.0, "factor on the weights of a token's experts")

    lora_rank: int = field(
        0, "rank of adapters, which then train in place of the model; 0: none (docs/training.md)"
    )
    lora_alpha: float = field(16.0, "adapters are scaled by lora_alpha / lora_rank")
    lora_targets: tuple[str, ...] = field(
        ("query", "value"),
        "matrices of the blocks that have adapters: query, key, value, out, gate, up, down",
    )

    def size_of_head(self, width: int, heads: int) -> int:
        """Numbers in one head of queries, keys or values."""
        return self.head_size or width // heads

    def rotary_size(self, width: int, heads: int) -> int:
        """Numbers of a head that RoPE turns."""
        return int(self.size_of_head(width, heads) * self.rotary_share)

    def check_architecture(self, *, width: int, heads: int, depth: int, activation: str) -> None:
        """Raises ValueError for settings that contradict each other or the model's."""
        require(self.head_size >= 0, f"model.head_size={self.head_size} must be at least 0")
        if self.head_size == 0:
            require(
                width % heads == 0 and (width // heads) % 2 == 0,
                f"model.width={width} is not an even multiple of model.heads={heads}; "
                f"use a width of {2 * heads * max(1, round(width / (2 * heads)))}",
            )
        require(
            self.head_size % 2 == 0,
            f"model.head_size={self.head_size} is odd; use {self.head_size + 1}",
        )
        require(
            0 < self.rotary_share <= 1, f"model.rotary_share={self.rotary_share} is not in (0, 1]"
        )
        rotary = self.rotary_size(width, heads)
        require(
            rotary >= 2 and rotary % 2 == 0,
            f"model.rotary_share={self.rotary_share} turns {rotary} numbers of a head, which is no "
            "even number; use 1.0 or 0.5",
        )
        for name in ("experts", "experts_per_token", "expert_width", "shared_width",
                     "dense_layers"):  # fmt: skip
            value = getattr(self, name)
            require(value >= 0, f"model.{name}={value} must be at least 0")
        require(self.lora_rank >= 0, f"model.lora_rank={self.lora_rank} must be at least 0")
        require(self.lora_alpha > 0, f"model.lora_alpha={self.lora_alpha} must be > 0")
        require(len(self.lora_targets) > 0, "model.lora_targets is empty; use query,value, say")
        if self.experts:
            self._check_experts(depth, activation)
            return
        neutral = {f.name: f.default for f in dataclasses.fields(Architecture)}
        for name in neutral:
            is_of_experts = name.startswith(("expert", "shared", "dense", "router"))
            require(
                not is_of_experts or getattr(self, name) == neutral[name],
                f"model.{name}={getattr(self, name)!r} means nothing with model.experts=0; use "
                f"{neutral[name]!r}",
            )

    def _check_experts(self, depth: int, activation: str) -> None:
        require(
            activation == "swiglu",
            f"model.activation={activation!r} is not that of experts; use 'swiglu'",
        )
        require(
            1 <= self.experts_per_token <= self.experts,
            f"model.experts_per_token={self.experts_per_token} is not in [1, {self.experts}], "
            "the number of model.experts",
        )
        require(
            self.expert_width >= 1, f"model.expert_width={self.expert_width} must be at least 1"
        )
        require(
            self.dense_layers < depth,
            f"model.dense_layers={self.dense_layers} leaves no block of model.depth={depth} with "
            "experts; lower it, or use model.experts=0",
        )
        require(
            self.router_groups >= 1 and self.experts % self.router_groups == 0,
            f"model.router_groups={self.router_groups} does not divide model.experts="
            f"{self.experts}; use 1",
        )
        within = self.experts // self.router_groups
        require(
            1 <= self.router_groups_kept <= self.router_groups
            and self.router_groups_kept * within >= self.experts_per_token,
            f"model.router_groups_kept={self.router_groups_kept} of {self.router_groups} groups of "
            f"{within} experts do not hold model.experts_per_token={self.experts_per_token}",
        )
        require(
            self.router_groups == 1 or within >= 2,
            f"model.router_groups={self.router_groups} leaves one expert a group; use fewer",
        )
