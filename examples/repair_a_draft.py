# %% [markdown]
# # Repair a draft
#
# Edits insert and delete tokens, so a text can grow or shrink during denoising. The shipped
# model `proofreader` was trained on damaged text.

# %%
import dlm_jax

model = dlm_jax.load("proofreader")
drafts = [
    "I will go to the kng and tell him all.",
    "O Romeo, Romeo! wherefoore art thou Romeo?",
    "I know not whre my brother is, nor hiss frend.",
]
result = dlm_jax.generate(model, [{"prompt": "", "draft": draft} for draft in drafts])
for number, (draft, text) in enumerate(zip(drafts, result.texts, strict=True)):
    edits = result.counters.insertions[number], result.counters.deletions[number]
    print(f"{draft}\n{text}\n{edits[0]} inserted, {edits[1]} deleted\n")
