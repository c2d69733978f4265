# %% [markdown]
# # Write your own training loop
#
# `dlm_jax.training.problem` returns the training of a config as pure functions: `init`, `loss`,
# `gradient` and `batches`. You provide the loop and the optimiser.

# %%
import itertools

import jax
import optax

import dlm_jax
import dlm_jax.config
from dlm_jax.training import problem

config = dlm_jax.config.load("quickstart", {"data.seq_len": "64"})
made = problem(config)
key = jax.random.key(0)
params = made.init(key)
labels = jax.tree_util.tree_map_with_path(
    lambda path, leaf: "slow" if "embedding" in jax.tree_util.keystr(path) else "fast", params
)
optimizer = optax.partition({"slow": optax.adam(3e-3), "fast": optax.adam(1e-2)}, labels)


# %%
@jax.jit
def train_step(params, state, batch, step):
    loss, grads = made.gradient(params, batch, key, step)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


state = optimizer.init(params)
for step, batch in enumerate(itertools.islice(made.batches(), 150)):
    params, state, loss = train_step(params, state, batch, step)
    if step % 50 == 49:
        print(f"step {step + 1}: {loss:.3f} nats per character")

# %%
model = dlm_jax.Model(made.network, params, made.tokenizer, config.data.seq_len)
print(dlm_jax.generate(model, ["The "], gen_length=40, steps=40, temperature=0.7).texts[0])
