"""The loops of the published models' own programs, as settings; the first of each is the default.

Each names the order of its program: the default ``random`` is for small models, whose surest tokens
on an empty canvas are the commonest (docs/design.md). Greedy unless their program draws by default;
of positions that tie the lower comes first. Every name is a key of ``Model.presets`` and a value of
``sample.py --preset``.
"""

from __future__ import annotations

from typing import Any

LLADA: dict[str, dict[str, Any]] = {
    # generate.py of LLaDA (Nie et al. 2025), and its README.
    "llada": {
        "gen_length": 128, "steps": 128, "block_length": 32, "temperature": 0.0,
        "order": "low_confidence", "schedule": "linear", "confidence": "sampled",
        "ties": "lower",
    },
    # generate.py of Fast-dLLM (Wu et al. 2025): all holes as sure as the threshold.
    "fast": {
        "gen_length": 128, "steps": 128, "block_length": 32, "temperature": 0.0,
        "order": "threshold", "threshold": 0.9, "confidence": "sampled", "ties": "lower",
    },
}  # fmt: skip

DREAM: dict[str, dict[str, Any]] = {
    # diffusion_generate of Dream (Ye et al. 2025), and its README.
    "dream": {
        "gen_length": 512, "steps": 512, "temperature": 0.2, "top_p": 0.95, "order": "entropy",
        "schedule": "timesteps", "confidence_of": "filtered", "ties": "lower",
    },
    "greedy": {
        "gen_length": 512, "steps": 512, "temperature": 0.0, "order": "entropy",
        "schedule": "timesteps", "ties": "lower",
    },
}  # fmt: skip

LLADA_MOE: dict[str, dict[str, Any]] = {"llada": LLADA["llada"]}

SDAR: dict[str, dict[str, Any]] = {
    # generate.py of SDAR (low_confidence_dynamic), greedy; blocks of 4, and 4 steps for each.
    "sdar": {
        "gen_length": 128, "steps": 132, "temperature": 0.0, "order": "threshold",
        "threshold": 0.85, "threshold_above": True, "confidence": "sampled", "stop_at_eos": True,
        "cache": "exact", "ties": "lower",
    },
    "static": {
        "gen_length": 128, "steps": 132, "temperature": 0.0, "order": "low_confidence",
        "confidence": "sampled", "stop_at_eos": True, "cache": "exact",
        "ties": "lower",
    },
}  # fmt: skip

LLADA2: dict[str, dict[str, Any]] = {
    # generate of LLaDA2.0: 32 steps for a block of 32.
    "llada2": {
        "gen_length": 256, "steps": 288, "temperature": 0.0, "order": "threshold",
        "threshold": 0.95, "threshold_above": True, "confidence": "sampled", "stop_at_eos": True,
        "cache": "exact", "ties": "lower",
    },
    # generate of LLaDA2.1, which rewrites what it wrote: 32 steps of a block and 16 behind them.
    "llada2.1": {
        "gen_length": 256, "steps": 432, "temperature": 0.0, "order": "joint_threshold",
        "threshold": 0.95, "threshold_above": True, "rewrite_threshold": 0.9, "rewrite_steps": 16,
        "confidence": "sampled", "stop_at_eos": True, "cache": "exact",
        "ties": "lower",
    },
}  # fmt: skip

FAST_DLLM: dict[str, dict[str, Any]] = {
    # generate of Fast-dLLM v2 (Wu et al. 2025) and its README: parts of 8 of blocks of 32, each of
    # which begins with a token that the block before predicts.
    "fast_dllm": {
        "gen_length": 512, "steps": 544, "block_length": 8, "temperature": 0.0,
        "order": "threshold", "threshold": 0.9, "threshold_above": True, "threshold_alone": 32,
        "confidence": "sampled", "stop_at_eos": True, "cache": "exact",
        "ties": "lower",
    },
}  # fmt: skip

CAUSAL: dict[str, dict[str, Any]] = {
    "greedy": {
        "gen_length": 128, "steps": 128, "temperature": 0.0, "order": "left_to_right",
        "stop_at_eos": True, "block_length": 1, "ties": "lower",
    },
}  # fmt: skip
