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
        names = ("model.transformer.wte", "model.embed_tokens", "model.word_embeddings")
        x = next(self.tensors[f"{n}.weight"] for n in names if f"{n}.weight" in self.tensors)[
            tokens
        ]
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
        is_fused = f"{start}attention.dense.weight" in self.tensors
        at = start if self.is_llada else f"{start}{'attention' if is_fused else 'self_attn'}."
        heads = self._said("n_heads", "num_attention_heads")
        groups = self._said("n_kv_heads", "num_key_value_heads")

        def project(part: str, count: int) -> np.ndarray:
            if is_fused:
                size = self.config["head_dim"]
                first = {"q": 0, "k": heads, "v": heads + groups}[part] * size
                kernel = self.tensors[f"{at}query_key_value.weight"]
                kernel = kernel[first : first + count * size]
            else:
                kernel = self.tensors[f"{at}{part}_proj.weight"]
            y = x @ kernel.T + self.tensors.get(f"{at}{part}_proj.bias", 0.0)
            y = y.reshape(len(x), count, -1)
            long = {"q": "query", "k": "key", "v": "value"}[part]
            for name in (f"{at}{part}_norm", f"{at}{long}_layernorm"):
                if f"{name}.weight" in self.tensors:
                    y = self._norm(y, name)
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
        name = "attn_out" if self.is_llada else "dense" if is_fused else "o_proj"
        return out.reshape(len(x), -1) @ self.tensors[f"{at}{name}.weight"].T

    def _turn(self, x: np.ndarray) -> np.ndarray:
        size = int(x.shape[-1] * self.config.get("partial_rotary_factor", 1))
        half = np.arange(size // 2)
        angle = np.arange(len(x))[:, None] * self.config["rope_theta"] ** (-2 * half / size)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        first, second, rest = np.split(x, [size // 2, size], axis=-1)
        turned = [first * cos - second * sin, second * cos + first * sin, rest]
        return np.concatenate(turned, axis=-1)

    def _gated(self, names: tuple[str, str, str], x: np.ndarray) -> np.ndarray:
        gate, up, down = (self.tensors[f"{name}.weight"].T for name in names)
        inner = x @ gate
        return (inner / (1 + np.exp(-inner)) * (x @ up)) @ down

    def _mlp(self, start: str, x: np.ndarray) -> np.ndarray:
        if self.is_llada:
            return self._gated((f"{start}ff_proj", f"{start}up_proj", f"{start}ff_out"), x)
        if f"{start}mlp.gate.weight" not in self.tensors:
            return self._gated(tuple(f"{start}mlp.{p}_proj" for p in ("gate", "up", "down")), x)
        chosen, weights = self._route(start, x @ self.tensors[f"{start}mlp.gate.weight"].T)
        y = np.zeros_like(x)
        for place, expert in zip(*np.nonzero(chosen), strict=True):
            names = tuple(f"{start}mlp.experts.{expert}.{p}_proj" for p in ("gate", "up", "down"))
            y[place] += weights[place, expert] * self._gated(names, x[place : place + 1])[0]
        shared = tuple(f"{start}mlp.shared_experts.{p}_proj" for p in ("gate", "up", "down"))
        return y + self._gated(shared, x) if f"{shared[0]}.weight" in self.tensors else y

    def _route(self, start: str, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Which experts each token goes to, and the weight of every one."""
        count = self.config["num_experts_per_tok"]
        if "n_group" not in self.config:
            scores = np.exp(logits)
            scores /= scores.sum(axis=1, keepdims=True)
            chosen = np.argsort(np.argsort(-scores)) < count
            if self.config.get("norm_topk_prob"):
                scores /= np.where(chosen, scores, 0).sum(axis=1, keepdims=True)
            return chosen, scores
        scores = 1 / (1 + np.exp(-logits))
        biased = scores + self.tensors[f"{start}mlp.gate.expert_bias"]
        groups = biased.reshape(len(biased), self.config["n_group"], -1)
        best = np.sort(groups, axis=2)[:, :, -2:].sum(axis=2)
        is_kept = np.argsort(np.argsort(-best)) < self.config["topk_group"]
        biased = np.where(is_kept[:, :, None], groups, -np.inf).reshape(biased.shape)
        chosen = np.argsort(np.argsort(-biased)) < count
        # The score of a single expert stays as it is.
        total = np.where(chosen, scores, 0).sum(axis=1, keepdims=True) if count > 1 else 1.0
        return chosen, scores / total * self.config["routed_scaling_factor"]
