"""The chunked proposal against one that computes all logits at once."""

import dataclasses
import functools
import types

import canvases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy

from dlm_jax.config import SamplingParams
from dlm_jax.sampling import transforms as tf
from dlm_jax.sampling.edits import EDIT_RULES
from dlm_jax.sampling.mask_step import step
from dlm_jax.sampling.positions import TrunkOutput
from dlm_jax.sampling.propose import FillInput, Parallel
from dlm_jax.sampling.transforms import At, Context
from dlm_jax.settings import Setting, per_row, rule
from dlm_jax.types import Network

ROWS, POSITIONS = 3, 7
TEMPERATURES = (0.0, 1.0, 0.7)


def _network(width=toy.VOCAB_SIZE) -> Network:
    """Hidden vectors are the logits themselves, so that a test can write them."""
    return Network(
        init=lambda key: {},
        trunk=lambda params, tokens_BL, length_B, cache: (params["hidden"], cache),
        embed=lambda params, ids: jnp.zeros((*ids.shape, width)),
        readout=lambda params, hidden_ND: hidden_ND * params["scale"],
        vocab_size=width,
    )


NETWORK = _network()
PARAMS = {"scale": jnp.float32(1.5)}


def _keys():
    return jax.vmap(jax.random.key)(jnp.arange(ROWS, dtype=jnp.uint32))


def _context(is_open_BL):
    tokens_BL = jnp.where(is_open_BL, toy.MASK, 1)
    order_BL = jnp.full(tokens_BL.shape, -1)
    return Context(tokens_BL, order_BL, ~is_open_BL, jnp.full(ROWS, POSITIONS))


def _filled(hidden_BLD, is_open_BL, *, network=NETWORK, chain=None, **more):
    chain, context = chain or canvases.make_chain(TEMPERATURES), _context(is_open_BL)
    fill = {
        "network": network,
        "params": PARAMS,
        "output": TrunkOutput(hidden_BLD),
        "chunk": 8,
        "tokens_BL": context.tokens_BL,
        "length_B": context.length_B,
        "is_open_BL": is_open_BL,
        "is_seen_BL": context.is_visible_BL,
        "chain": chain,
        "chain_state": chain.init(context),
        "key_B": _keys(),
    }
    return Parallel().propose(FillInput(**fill | more))


@functools.partial(jax.jit, static_argnames="chunk")
def _propose(hidden_BLD, is_open_BL, keys_B, *, chunk):
    def score(state_N, logits_NV, drawn):
        return jnp.max(logits_NV, axis=-1) + drawn.logprob_N, ()

    rule = types.SimpleNamespace(score=score)
    return _filled(hidden_BLD, is_open_BL, key_B=keys_B, rule=rule, chunk=chunk)[:2]


@jax.jit
def _all_at_once(hidden_BLD, is_open_BL, keys_B):
    """Ids and log-probabilities of every position, from one array of all logits."""
    chain = canvases.make_chain(TEMPERATURES)
    total = ROWS * POSITIONS
    row_N, index_N = jnp.divmod(jnp.arange(total), POSITIONS)
    key_N = jax.vmap(jax.random.fold_in)(keys_B[row_N], index_N)
    clean_NV = hidden_BLD.reshape(total, -1) * PARAMS["scale"]
    at = At(row_N, index_N, key_N, jnp.ones(total, bool))
    ids_N, _ = chain.draw(chain.init(_context(is_open_BL)), clean_NV, at)
    logprob_NV = jax.nn.log_softmax(clean_NV)
    logprob_N = jnp.take_along_axis(logprob_NV, ids_N[:, None], axis=1)[:, 0]
    confidence_N = clean_NV.max(-1) + logprob_N
    return tuple(x.reshape(ROWS, POSITIONS) for x in (ids_N, logprob_N, confidence_N))


def _example(seed=0):
    rng = np.random.default_rng(seed)
    hidden = rng.standard_normal((ROWS, POSITIONS, toy.VOCAB_SIZE)).astype(np.float32)
    return jnp.asarray(hidden), jnp.asarray(rng.random((ROWS, POSITIONS)) < 0.6)


@pytest.mark.parametrize(
    "chunk", [5, 21, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 20, 64))]
)
def test_chunks_of_any_size_propose_what_one_pass_over_all_logits_does(chunk):
    hidden_BLD, is_open_BL = _example()
    ids_BL, logprob_BL, confidence_BL = _all_at_once(hidden_BLD, is_open_BL, _keys())
    ours, is_finite_B = _propose(hidden_BLD, is_open_BL, _keys(), chunk=chunk)
    np.testing.assert_array_equal(ours.tokens_BL, jnp.where(is_open_BL, ids_BL, 0))
    for mine, theirs in [(ours.logprob_BL, logprob_BL), (ours.confidence_BL, confidence_BL)]:
        np.testing.assert_allclose(mine, jnp.where(is_open_BL, theirs, 0), rtol=1e-5, atol=1e-6)
    assert is_finite_B.all()
    assert not set(np.asarray(ours.tokens_BL)[is_open_BL].tolist()) & set(toy.BANNED)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("place", [0, 5, toy.MASK])
def test_non_finite_logit_condemns_its_own_row_alone(bad, place):
    hidden_BLD, _ = _example(2)
    is_open_BL = jnp.ones((ROWS, POSITIONS), bool)
    sound, _ = _propose(hidden_BLD, is_open_BL, _keys(), chunk=5)
    for row in range(ROWS):
        broken = hidden_BLD.at[row, 4, place].set(bad)
        ours, is_finite_B = _propose(broken, is_open_BL, _keys(), chunk=5)
        assert is_finite_B.tolist() == [other != row for other in range(ROWS)]
        others = np.arange(ROWS) != row
        np.testing.assert_array_equal(ours.tokens_BL[others], sound.tokens_BL[others])
        np.testing.assert_array_equal(ours.logprob_BL[others], sound.logprob_BL[others])


def test_readouts_follow_the_open_positions():
    """Law 9: as many readouts of `chunk` as the open ones fill; none when all are shut."""
    calls = []

    def readout(params, hidden_ND):
        jax.debug.callback(lambda: calls.append(hidden_ND.shape[0]))
        return hidden_ND * params["scale"]

    counting = dataclasses.replace(NETWORK, readout=readout)

    @jax.jit
    def propose(hidden_BLD, is_open_BL, keys_B):
        return _filled(hidden_BLD, is_open_BL, network=counting, key_B=keys_B, chunk=4)

    hidden_BLD, _ = _example()
    for num_open in (0, 1, 4, 5, 8, 21):
        calls.clear()
        is_open = np.random.default_rng(num_open).permutation(ROWS * POSITIONS) < num_open
        is_open_BL = jnp.asarray(is_open.reshape(ROWS, POSITIONS))
        jax.block_until_ready(propose(hidden_BLD, is_open_BL, _keys()))
        jax.effects_barrier()
        assert calls == [4] * -(-num_open // 4)


@pytest.mark.parametrize("scoring", [None, "uncertainty", "likelihood"])
def test_no_array_of_a_step_holds_logits_of_the_whole_canvas(scoring):
    vocab_size, chunk = 997, 16
    network = _network(vocab_size)
    readout = functools.partial(_wide_readout, vocab_size=vocab_size)
    network = dataclasses.replace(
        network, readout=readout,
        trunk=lambda params, tokens_BL, length_B, cache: (jnp.zeros((*tokens_BL.shape, 5)), cache),
    )  # fmt: skip
    program = canvases.program(network, chunk=chunk)
    params = {"scale": jnp.float32(1)}
    edit = None
    if scoring is not None:
        sample = SamplingParams(edit=True, edit_token="mask", edit_scoring=scoring)
        edit = EDIT_RULES[scoring].pack([sample] * canvases.ROWS, None)
    state = canvases.make_state(canvases.mixed_rows(), canvases.LOW_CONFIDENCE, edit=edit)
    jaxpr = jax.make_jaxpr(functools.partial(step, program))(params, state)
    sizes = list(_sizes(jaxpr.jaxpr))
    assert any(vocab_size in shape for shape in sizes)
    for shape in sizes:
        if vocab_size in shape:
            assert np.prod(shape) <= chunk * vocab_size


def _wide_readout(params, hidden_ND, *, vocab_size):
    return jnp.tile(hidden_ND[:, :1] * params["scale"], (1, vocab_size))


def _sizes(jaxpr):
    """Shapes of all values in a jaxpr and in every jaxpr inside it."""
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            yield getattr(variable.aval, "shape", ())
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            inner = getattr(inner, "jaxpr", inner)
            if hasattr(inner, "eqns"):
                yield from _sizes(inner)


def test_the_likeliest_other_token_is_unknown_where_the_row_cannot_write_it():
    """Of the first row anything can be written, of the others not what they or the model ban."""
    hidden_BLD, is_open_BL = _example()
    is_open_BL = jnp.zeros_like(is_open_BL)
    own_BL = jnp.asarray(np.random.default_rng(1).integers(0, 8, (ROWS, POSITIONS)), jnp.int32)
    none, others = toy.VOCAB_SIZE, range(0, toy.VOCAB_SIZE, 2)
    bans = np.full((ROWS, len(others)), none, np.int32)
    bans[1:] = others
    chain = tf.chain(
        tf.LogitBias(jnp.asarray(bans), jnp.full(bans.shape, -jnp.inf)),
        tf.Temperature(jnp.array(TEMPERATURES)),
    )
    out = _filled(
        hidden_BLD, is_open_BL, chain=chain, own_BL=own_BL, is_scored_BL=~is_open_BL,
        keeps_best=True, banned_ids=(3,),
    )  # fmt: skip
    found = np.asarray(out.best_BL)
    logits = np.array(hidden_BLD)
    np.put_along_axis(logits, np.asarray(own_BL)[:, :, None], -np.inf, axis=2)
    for row, banned in enumerate([{3}, {3, *others}, {3, *others}]):
        best = logits[row].argmax(-1).tolist()
        assert found[row].tolist() == [-1 if id_ in banned else id_ for id_ in best]
    assert (found[0] % 2 == 0).any() and (found[1:] >= 0).any() and (found[1:] < 0).any()


def test_a_row_whose_tokens_are_only_scored_does_not_end_because_of_the_draws_of_others():
    @rule
    class OnlyReal(tf.LogitTransform):
        is_on_B: jax.Array = per_row(Setting("only_real", False, "leaves NaN at padding"))

        def apply(self, state, logits_NV, at):
            return jnp.where(at.is_real_N[:, None], logits_NV, jnp.nan)

    hidden_BLD, _ = _example()
    is_open_BL = jnp.zeros((ROWS, POSITIONS), bool).at[1:].set(True)
    chain = tf.chain(OnlyReal(jnp.ones(ROWS, bool)), tf.Temperature(jnp.array(TEMPERATURES)))
    own_BL = jnp.where(is_open_BL, -1, 1)
    out = _filled(hidden_BLD, is_open_BL, chain=chain, own_BL=own_BL)
    assert np.asarray(out.is_finite_B).all()
