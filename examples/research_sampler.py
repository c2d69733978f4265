# %% [markdown]
# # Pure samplers, traces and gradients
#
# `sampler` is the loop of the engine as pure functions over pytrees: `init`, `step`, `run` and
# `finish`. The functions compose with all JAX transformations, and the texts equal those of
# `generate`.

# %%
import functools

import jax
import jax.numpy as jnp
import numpy as np

import dlm_jax

model = dlm_jax.load()
sampler = dlm_jax.sampler(model, order="random", fill="parallel", steps=4, trace=True)
prompt = model.tokenizer.encode("ROMEO:")
length = prompt.size + 12
canvas = np.concatenate([prompt, np.full(12, model.tokenizer.mask_id)])


def sample(params, seeds):
    tokens = jnp.broadcast_to(jnp.asarray(canvas, jnp.int32), (seeds.size, length))
    state = sampler.init(tokens, jnp.full(seeds.size, length), seeds)
    return sampler.finish(sampler.run(params, state, 4))


seeds = jnp.arange(4, dtype=jnp.uint32)
result = jax.jit(sample, compiler_options=sampler.compiler_options)(model.params, seeds)
print([model.tokenizer.decode(row) for row in np.asarray(result.tokens)])

# %% [markdown]
# `vmap` maps over seeds or parameters; here, the parameters have two scales of the embedding.

# %%
one = jax.jit(jax.vmap(lambda seed: sample(model.params, seed[None]).tokens[0]))
print("vmap over seeds gives the same texts:", bool((one(seeds) == result.tokens).all()))
scales = jnp.array([1.0, 0.5])
scaled = jax.vmap(lambda s: model.params | {"embedding": s * model.params["embedding"]})(scales)
axes = jax.tree.map(lambda _: None, model.params) | {"embedding": 0}
swept = model.params | {"embedding": scaled["embedding"]}
several = jax.jit(jax.vmap(lambda params: sample(params, seeds).tokens, in_axes=(axes,)))(swept)
print("vmap over parameters:", several.shape)

# %% [markdown]
# `shard_map` splits the rows over the available devices.

# %%
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
spec = jax.sharding.PartitionSpec
split = jax.shard_map(
    lambda params, seeds: sample(params, seeds).tokens,
    mesh=mesh,
    in_specs=(spec(), spec("data")),
    out_specs=spec("data"),
    check_vma=False,
)
many = jnp.arange(2 * jax.device_count(), dtype=jnp.uint32)
print("shard_map:", jax.jit(split)(model.params, many).shape)

# %% [markdown]
# The log-probabilities of a replay are differentiable. This cell samples and computes a policy
# gradient in one function; the reward is the number of commas.

# %%
letter = model.tokenizer.encode(",")[0]


@functools.partial(jax.jit, static_argnums=1)
def policy_gradient(params, steps):
    def loss(params):
        tokens = jnp.broadcast_to(jnp.asarray(canvas, jnp.int32), (seeds.size, length))
        state = sampler.init(tokens, jnp.full(seeds.size, length), seeds)
        state, _ = jax.lax.scan(
            lambda state, _: (sampler.step(params, state), None), state, length=steps
        )
        done = sampler.finish(state)
        reward = jnp.sum(done.tokens == letter, axis=1).astype(jnp.float32)
        advantage = reward - reward.mean()
        logprobs = dlm_jax.replay(model, params, done.trace, every_draw=True)
        return -jnp.mean(advantage * logprobs.sum((1, 2)))

    return jax.grad(loss)(params)


slope = policy_gradient(model.params, 4)
print("norm of the gradient:", float(jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(slope)))))

# %% [markdown]
# `replay` computes the log-probabilities of a trace under any parameters, here those that were used
# for sampling.

# %%
trace = jax.device_get(result.trace).trimmed()
again = dlm_jax.replay(model, model.params, trace)
worst = np.abs(np.asarray(again) - np.where(trace.is_written, trace.logprobs, 0)).max()
print("largest difference between replay and trace:", worst)
print("tokens written by each step:", trace.is_written[0].sum(axis=1))
