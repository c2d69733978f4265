# %% [markdown]
# # Constrain an answer
#
# `structure` is a regular expression that the whole new text of a row matches. The expression is
# compiled to an automaton over tokens, which is a parameter of the row, so rows with different
# patterns can share a batch.

# %%
import re

import dlm_jax

model = dlm_jax.load()
patterns = [r"(ROMEO|JULIET):\n[A-Z][a-z ]{4,12}[.!]", r"[0-9]{2}/[0-9]{2}/[0-9]{4}"]
result = dlm_jax.generate(
    model,
    [{"prompt": "", "structure": pattern} for pattern in patterns],
    gen_length=24,
    steps=24,
    temperature=0.8,
    ignore_eos=False,
)
for pattern, text in zip(patterns, result.texts, strict=True):
    assert re.fullmatch(pattern, text)
    print(repr(text))
