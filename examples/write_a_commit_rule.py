# %% [markdown]
# # Write a commit rule
#
# A commit rule selects the candidates that a step writes. A rule is one class: its settings are
# fields, and `select` returns the positions. The settings become keywords, request keys and flags.

# %%
import jax
import jax.numpy as jnp

import dlm_jax

EVERY = dlm_jax.Setting("stride", 4, "strided: distance of the holes that a step fills", low=1)


@dlm_jax.rule
class Strided(dlm_jax.CommitRule):
    """Fills every n-th hole of a row, starting with the first."""

    stride_B: jax.Array = dlm_jax.per_row(EVERY)

    def select(self, state, context, proposal):
        place_BL = jnp.cumsum(context.is_hole_BL, axis=1) - 1
        return context.is_hole_BL & (place_BL % self.stride_B[:, None] == 0), state


# %% [markdown]
# The rule is named after its class. Rows of one batch can have different values.

# %%
model = dlm_jax.load()
result = dlm_jax.generate(
    model,
    [{"prompt": "ROMEO:\n", "stride": 2}, {"prompt": "ROMEO:\n", "stride": 8}],
    rules=[Strided],
    order="strided",
    gen_length=24,
    steps=24,
    seed=1,
)
for text, committed, forwards in zip(
    result.texts, result.committed, result.counters.forwards, strict=True
):
    print(repr(text), f"{forwards} forwards, steps of the tokens:")
    print(committed[committed >= 0])
