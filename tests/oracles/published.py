"""Published models in NumPy and float64, from their tensors under their own names."""

from __future__ import annotations

from typing import Any

import numpy as np


class Oracle:
    """One row at a time, as the formulas of the models' papers say.

    Attributes:
      config: what config.json says.
      tensors: by name.
    """

    def __init__(self, config: dict[str, Any], tensors: dict[str, np.ndarray]):
        self.config = config
        self.tensors = {name: value.astype(np.float64) for name, value in tensors.items()}
        self.is_llada = "d_model" in config

    def _said(self, llada: str, other: str) -> Any:
        return self.config[llada if self.is_llada else other]

    def hidden(self, tokens: np.ndarray, *, may_see: np.ndarray | None = None) -> np.ndarray:
        """Input of the LM head at every position, ``[L, D]``; `may_see` ``[L, L]``, None: all."""
        embedding = "model.transformer.wte" if self.is_llada else "model.embed_tokens"
        x = self.tensors[f"{embedding}.weight"][tokens]
        for layer in range(self._said("n_layers", "num_hidden_layers")):
            start = f"model.{'transformer.blocks' if self.is_llada else 'layers'}.{layer}."
            first = "attn_norm" if self.is_llada else "input_layernorm"
            second = "ff_norm" if self.is_llada else "post_attention_layernorm"
            x = x + self._attention(start, self._norm(x, f"{start}{first}"), may_see)
            x = x + self._mlp(start, self._norm(x, f"{start}{second}"))
        return self._norm(x, "model.transformer.ln_f" if self.is_llada else "model.norm")

    def logits(self, tokens: np.ndarray, **options: Any) -> np.ndarray:
        """What the LM head says at every position, unshifted, ``[L, V]``."""
        names = ("model.transformer.ff_out.weight", "lm_head.weight", "model.embed_tokens.weight")
        head = next(self.tensors[name] for name in names if name in self.tensors)
        return self.hidden(tokens, **options) @ head.T

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        mean = np.mean(x * x, axis=-1, keepdims=True)
        return x / np.sqrt(mean + self.config["rms_norm_eps"]) * self.tensors[f"{name}.weight"]

    def _attention(self, start: str, x: np.ndarray, may_see: np.ndarray | None) -> np.ndarray:
        at = start if self.is_llada else f"{start}self_attn."
        heads = self._said("n_heads", "num_attention_heads")
        groups = self._said("n_kv_heads", "num_key_value_heads")

        def project(part: str, count: int) -> np.ndarray:
            y = x @ self.tensors[f"{at}{part}_proj.weight"].T
            y = y + self.tensors.get(f"{at}{part}_proj.bias", 0.0)
            y = y.reshape(len(x), count, -1)
            if f"{at}{part}_norm.weight" in self.tensors:
                y = self._norm(y, f"{at}{part}_norm")
            return y

        q, k, v = self._turn(project("q", heads)), self._turn(project("k", groups)), project(
            "v", groups
        )  # fmt: skip
        out = np.zeros_like(q)
        for head in range(heads):
            group = head // (heads // groups)
            scores = q[:, head] @ k[:, group].T / np.sqrt(q.shape[-1])
            if may_see is not None:
                scores = np.where(may_see, scores, -np.inf)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, head] = weights / weights.sum(axis=1, keepdims=True) @ v[:, group]
        name = "attn_out" if self.is_llada else "o_proj"
        return out.reshape(len(x), -1) @ self.tensors[f"{at}{name}.weight"].T

    def _turn(self, x: np.ndarray) -> np.ndarray:
        size = x.shape[-1]
        half = np.arange(size // 2)
        angle = np.arange(len(x))[:, None] * self.config["rope_theta"] ** (-2 * half / size)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        first, second = x[..., : size // 2], x[..., size // 2 :]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def _gated(self, names: tuple[str, str, str], x: np.ndarray) -> np.ndarray:
        gate, up, down = (self.tensors[f"{name}.weight"].T for name in names)
        inner = x @ gate
        return (inner / (1 + np.exp(-inner)) * (x @ up)) @ down

    def _mlp(self, start: str, x: np.ndarray) -> np.ndarray:
        if self.is_llada:
            return self._gated((f"{start}ff_proj", f"{start}up_proj", f"{start}ff_out"), x)
        if f"{start}mlp.gate.weight" not in self.tensors:
            return self._gated(tuple(f"{start}mlp.{p}_proj" for p in ("gate", "up", "down")), x)
        scores = np.exp(x @ self.tensors[f"{start}mlp.gate.weight"].T)
        scores /= scores.sum(axis=1, keepdims=True)
        y = np.zeros_like(x)
        for place in range(len(x)):
            for expert in np.argsort(-scores[place])[: self.config["num_experts_per_tok"]]:
                names = tuple(
                    f"{start}mlp.experts.{expert}.{p}_proj" for p in ("gate", "up", "down")
                )
                y[place] += scores[place, expert] * self._gated(names, x[place : place + 1])[0]
        return y
