"""The architecture of `dlm_jax` and LLaDA's generation loop in eager PyTorch, for comparison.

`generate` is written from the description of LLaDA's ``generate.py`` (Nie et al. 2025): the canvas
is the prompt and `gen_length` holes, and blocks are finished from left to right. Every step is a
full forward and commits the most confident predictions of the block, up to a quota, at T = 0. There
is one difference: special ids are never proposed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Attention, then the MLP, each added to its input."""

    def __init__(self, width: int, heads: int, activation: str):
        super().__init__()
        self.heads, self.activation = heads, activation
        is_gated = activation == "swiglu"
        inner = 8 * -(-width // 3) if is_gated else 4 * width
        self.attention_norm, self.mlp_norm = (nn.RMSNorm(width, eps=1e-5) for _ in range(2))
        self.query_norm, self.key_norm = (nn.RMSNorm(width // heads, eps=1e-5) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, inner * (2 if is_gated else 1), bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x, cos, sin, is_visible):
        """Hidden vectors ``[B, L, D]`` after this block."""
        rows, positions, width = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(rows, positions, 3, self.heads, -1)
        q, k, v = qkv.unbind(2)
        q, k = rotate(self.query_norm(q), cos, sin), rotate(self.key_norm(k), cos, sin)
        y = functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=is_visible
        )
        x = x + self.out(y.transpose(1, 2).reshape(rows, positions, width))
        inner = self.up(self.mlp_norm(x))
        if self.activation == "gelu":
            inner = functional.gelu(inner, approximate="tanh")
        elif self.activation == "relu2":
            inner = functional.relu(inner).square()
        else:
            gate, inner = inner.chunk(2, -1)
            inner = functional.silu(gate) * inner
        return x + self.down(inner)


def rotate(x, cos, sin):
    """Queries or keys rotated by their position (half rotation)."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class Twin(nn.Module):
    """Tokens ``[B, L]`` and lengths ``[B]`` to logits ``[B, L, V]``; tied head.

    Without lengths, every position is visible, and attention runs without a mask.
    """

    def __init__(self, vocab_size: int, depth: int, width: int, heads: int, activation: str):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(width, heads, activation) for _ in range(depth))
        self.norm = nn.RMSNorm(width, eps=1e-5)
        self.half_size = width // heads // 2

    def load(self, params: Any) -> Twin:
        """Loads the parameters of `dlm_jax`, a nested dict of NumPy arrays; returns the model."""
        named = {"embedding.weight": params["embedding"], "norm.weight": params["norm"]["scale"]}
        blocks = params["blocks"]
        attention, mlp = blocks["attention"], blocks["mlp"]
        joined = {
            "qkv": [attention[name] for name in ("query", "key", "value")],
            "out": [attention["out"]],
            "up": [mlp[name] for name in ("gate", "up") if name in mlp],
            "down": [mlp["down"]],
        }
        norms = {name: blocks[name] for name in ("attention_norm", "mlp_norm")}
        norms |= {name: attention[name] for name in ("query_norm", "key_norm")}
        for layer in range(len(self.blocks)):
            for name, norm in norms.items():
                named[f"blocks.{layer}.{name}.weight"] = norm["scale"][layer]
            for name, parts in joined.items():
                kernel = np.concatenate([part["kernel"][layer] for part in parts], axis=1)
                named[f"blocks.{layer}.{name}.weight"] = kernel.T
        self.load_state_dict({name: torch.tensor(value) for name, value in named.items()})
        return self

    def forward(self, tokens, length=None):
        """Logits ``[B, L, V]``."""
        frequencies = 10000.0 ** (-torch.arange(self.half_size) / self.half_size)
        at = torch.arange(tokens.shape[1])
        angles = at[:, None, None] * frequencies
        is_visible = None if length is None else (at < length[:, None])[:, None, None, :]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin(), is_visible)
        return functional.linear(self.norm(x), self.embedding.weight)


LogitsFn = Callable[[torch.Tensor], torch.Tensor]
"""Tokens ``[B, L]`` to logits ``[B, L, V]``."""


def quotas(is_hole_BK: torch.Tensor, steps: int) -> torch.Tensor:
    """Number of holes to fill in each step, ``[B, steps]``; the first steps get the remainder."""
    holes_B1 = is_hole_BK.sum(dim=1, keepdim=True)
    return holes_B1 // steps + (torch.arange(steps) < holes_B1 % steps)


def clean_logits(
    logits_fn: LogitsFn,
    tokens_BL: torch.Tensor,
    is_prompt_BL: torch.Tensor,
    mask_id: int,
    guidance: float,
) -> torch.Tensor:
    """Logits ``[B, L, V]`` with classifier-free guidance: ``un + (s + 1) (cond - un)``.

    With guidance, the second half of the forward has masked prompts.
    """
    if not guidance:
        return logits_fn(tokens_BL)
    masked_BL = torch.where(is_prompt_BL, mask_id, tokens_BL)
    cond, un = logits_fn(torch.cat([tokens_BL, masked_BL])).chunk(2)
    return un + (guidance + 1) * (cond - un)


@torch.no_grad()
def generate(
    logits_fn: LogitsFn,
    prompts_BP: torch.Tensor,
    *,
    mask_id: int,
    banned_ids: Sequence[int],
    gen_length: int,
    block_length: int,
    steps: int,
    guidance: float = 0.0,
) -> torch.Tensor:
    """Prompts of equal length with their continuations, ``[B, P + gen_length]``.

    Raises:
      ValueError: the number of blocks does not divide the new tokens or the steps.
    """
    num_blocks, rest = divmod(gen_length, block_length)
    if rest or steps % num_blocks:
        raise ValueError(
            f"gen_length={gen_length} is not a multiple of block_length={block_length}, or "
            f"steps={steps} not one of the number of blocks; change one of them"
        )
    rows, num_given = prompts_BP.shape
    tokens_BL = torch.full((rows, num_given + gen_length), mask_id)
    tokens_BL[:, :num_given] = prompts_BP
    is_prompt_BL = tokens_BL != mask_id
    banned = torch.tensor(banned_ids)
    for start in range(num_given, num_given + gen_length, block_length):
        end = start + block_length
        quota_BS = quotas(tokens_BL[:, start:end] == mask_id, steps // num_blocks)
        for step in range(steps // num_blocks):
            logits_BLV = clean_logits(logits_fn, tokens_BL, is_prompt_BL, mask_id, guidance)
            probs_BLV = logits_BLV.softmax(dim=-1)
            proposed_BL = logits_BLV.index_fill_(-1, banned, -torch.inf).argmax(dim=-1)
            confidence_BL = probs_BLV.gather(-1, proposed_BL[..., None])[..., 0]
            confidence_BL[:, end:] = -torch.inf
            is_hole_BL = tokens_BL == mask_id
            confidence_BL = torch.where(is_hole_BL, confidence_BL, -torch.inf)
            for row in range(rows):
                best = confidence_BL[row].topk(int(quota_BS[row, step])).indices
                tokens_BL[row, best] = proposed_BL[row, best]
    return tokens_BL
