# %% [markdown]
# # Train your own network
#
# A network is a record of pure functions over a dict of parameters. The network below has no
# attention: each position reads the sum of a window around it.

# %%
import tempfile

import jax
import jax.numpy as jnp

import dlm_jax
import dlm_jax.config

WIDTH, REACH = 64, 4


def make_network(model_config):
    vocab = model_config.vocab_size

    def init(key):
        keys = jax.random.split(key, 2)
        return {
            "embedding": jax.random.normal(keys[0], (vocab, WIDTH)) * 0.1,
            "kernel": jax.random.normal(keys[1], (2 * REACH + 1, WIDTH, WIDTH)) * 0.05,
        }

    def trunk(params, tokens_BL, length_B, cache=None):
        num_positions = tokens_BL.shape[1]
        is_live_BL1 = (jnp.arange(num_positions) < length_B[:, None])[..., None]
        hidden_BLD = params["embedding"][tokens_BL] * is_live_BL1
        padded = jnp.pad(hidden_BLD, ((0, 0), (REACH, REACH), (0, 0)))
        for offset in range(2 * REACH + 1):
            window = padded[:, offset : offset + num_positions]
            hidden_BLD += jax.nn.gelu(window @ params["kernel"][offset])
        return hidden_BLD * is_live_BL1, cache

    def embed(params, ids):
        return params["embedding"][ids]

    def readout(params, hidden_ND):
        return hidden_ND @ params["embedding"].T

    return dlm_jax.Network(init, trunk, embed, readout, vocab_size=vocab)


# %%
with tempfile.TemporaryDirectory() as folder:
    config = dlm_jax.config.load(
        "quickstart",
        {
            "train.steps": "200", "train.eval_every": "0", "train.sample_every": "0",
            "train.checkpoint_every": "200", "train.log_every": "50", "data.seq_len": "64",
            "optim.name": "adamw", "optim.learning_rate": "0.003", "train.out_dir": folder,
        },
    )  # fmt: skip
    dlm_jax.train(config, network=make_network)
    model = dlm_jax.load(folder, network=make_network)

# %%
print(dlm_jax.generate(model, ["The "], gen_length=40, steps=40, temperature=0.7).texts[0])
