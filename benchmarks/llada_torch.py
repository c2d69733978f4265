"""LLaDA's generation loop in eager PyTorch, for comparison: low-confidence remasking at T = 0.

Written from the description of LLaDA's ``generate.py`` (Nie et al. 2025): the canvas is the prompt
and `gen_length` holes, and blocks are finished from left to right. Every step is a full forward and
commits the most confident predictions of the block, up to a quota. There is one difference: special
ids are never proposed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

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
