# %% [markdown]
# # Quickstart
#
# Load the shipped model, sample from it, and watch a text while it is denoised.

# %%
import dlm_jax

model = dlm_jax.load()
result = dlm_jax.generate(model, ["ROMEO:\n", "JULIET:\n"], gen_length=48, steps=16, seed=1)
for text, forwards in zip(result.texts, result.counters.forwards, strict=True):
    print(f"{text}\n[{forwards} forwards]\n")

# %% [markdown]
# Each prompt has its own settings and seed. A row depends only on its own request, not on the
# rest of the batch.

# %%
prompts = [
    {"prompt": "ROMEO:\n", "temperature": 0.5, "seed": 7},
    {"prompt": "ROMEO:\n", "temperature": 1.0, "top_p": 0.9, "seed": 7},
]
together = dlm_jax.generate(model, prompts, gen_length=32, steps=8)
alone = dlm_jax.generate(model, prompts[:1], gen_length=32, steps=8)
assert together.texts[0] == alone.texts[0]

# %% [markdown]
# `stream` yields the canvas during denoising. Holes are MASK tokens.

# %%
shown = {"gen_length": 16, "steps": 12, "seed": 3}
for rows in dlm_jax.stream(model, ["The king"], every=4, **shown):
    for row in rows.values():
        holes = int((row.tokens == model.tokenizer.mask_id).sum())
        print(f"step {row.steps:2d}: {holes:2d} holes")
