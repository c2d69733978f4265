# %% [markdown]
# # Coherent parallel sampling, measured
#
# A diffusion language model that commits many tokens in one step samples them independently: each
# token fits the visible text, but not its new neighbours. The wavefront uses a small sampler head
# to fill holes outwards from visible tokens, so that every token is drawn given its neighbour. Both
# fills below use the same number of forwards.

# %%
import numpy as np

import dlm_jax

model = dlm_jax.load()
settings = {"gen_length": 48, "num_samples": 32, "seed": 0, "order": "random", "steps": 8}
fills = {}
for fill in ("parallel", "wavefront"):
    fills[fill] = dlm_jax.generate(model, [""], fill=fill, **settings)
    print(fill, repr(fills[fill].texts[0]))

# %% [markdown]
# `score` bounds the negative log-likelihood of a text under the model. Incoherent texts have higher
# values.

# %%
for fill, result in fills.items():
    scored = dlm_jax.score(model, list(result.texts))
    nats = np.sum(scored.nats) / np.sum(scored.characters)
    forwards = np.mean(result.counters.forwards)
    print(f"{fill:9s}  {nats:.2f} nats per character, {forwards:.1f} forwards per text")
