"""What the heads are shown and asked, against plain Python; whom their losses reach or spare."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stage_cases
import toy

from dlm_jax.config import Config, HeadsConfig, ObjectiveConfig
from dlm_jax.distributed.partitions import path_name
from dlm_jax.heads import critic
from dlm_jax.heads.critic import critic_positions, critic_targets
from dlm_jax.heads.sampler import SAMPLER, prepare_sampler_inputs
from dlm_jax.model.transformer import build
from dlm_jax.objectives.objective import Batch, Drawn, draw_all
from dlm_jax.training.tasks import make_objectives
from dlm_jax.types import Network

WIDTH = 16
LENGTH_B = np.array([8, 8, 5, 8, 1, 0])
ROWS, POSITIONS = len(LENGTH_B), 8


@functools.cache
def _network(reach: int = 1, tied: bool = True) -> Network:
    heads = {"add_sampler_head": True, "sampler_context": reach, "add_critic_head": True}
    return build(toy.config(depth=1, tied_head=tied, **heads))


@functools.cache
def _params(network: Network):
    """Parameters as after training, without compiling what draws fresh ones."""
    rng = np.random.default_rng(1)
    shapes = jax.eval_shape(network.init, jax.random.key(0))
    draw = rng.standard_normal
    return jax.tree.map(lambda leaf: jnp.float32(0.3 * draw(leaf.shape)), shapes)


def _canvas(seed: int = 0):
    """(shown, true tokens, revealed): holes, some of them revealed, and tokens shown wrongly.

    Row 0 is all holes, and row 1 has none. What stands in PAD is no hole, as in real batches.
    """
    rng = np.random.default_rng(seed)
    tokens_BL = rng.integers(0, toy.MASK, (ROWS, POSITIONS)).astype(np.int32)
    wrong_BL = (tokens_BL + rng.integers(1, toy.MASK, tokens_BL.shape)) % toy.MASK
    shown_BL = np.where(rng.random(tokens_BL.shape) < 0.2, wrong_BL, tokens_BL)
    is_hole_BL = rng.random(tokens_BL.shape) < 0.5
    is_hole_BL[0], is_hole_BL[1] = True, False
    is_live_BL = np.arange(POSITIONS)[None] < LENGTH_B[:, None]
    shown_BL = np.where(is_hole_BL & is_live_BL, toy.MASK, shown_BL).astype(np.int32)
    return shown_BL, tokens_BL, rng.random(tokens_BL.shape) < 0.5


def _drawn(shown_BL, tokens_BL, *, hidden_BLD=None, is_supervised_BL=None) -> Drawn:
    """What the objectives drew; nothing is supervised by default."""
    shown_BL, tokens_BL = jnp.asarray(shown_BL), jnp.asarray(tokens_BL)
    if is_supervised_BL is None:
        is_supervised_BL = np.zeros(shown_BL.shape)
    batch = Batch(tokens_BL, jnp.asarray(LENGTH_B), jnp.zeros(ROWS, jnp.int32))
    weight_BL = jnp.float32(is_supervised_BL)
    return Drawn(batch, shown_BL, weight_BL, weight_BL.sum(), hidden_BLD=hidden_BLD)


def _hidden(shape) -> jax.Array:
    return jnp.float32(np.random.default_rng(0).standard_normal((*shape, WIDTH)))


def _inputs(network: Network, shown_BL, tokens_BL, is_revealed_BL):
    drawn = _drawn(shown_BL, tokens_BL, hidden_BLD=_hidden(shown_BL.shape))
    return prepare_sampler_inputs(
        network, _params(network), drawn, jnp.asarray(is_revealed_BL), mask_id=toy.MASK
    )


@pytest.mark.parametrize("reach", [1, 2])
def test_neighbours_are_those_of_a_loop_over_positions(reach):
    network = _network(reach)
    table = np.asarray(_params(network)["embedding"])
    shown, tokens, is_revealed = _canvas()
    left_BLCD, _, right_BLCD = _inputs(network, shown, tokens, is_revealed)
    counts = dict.fromkeys(("edge", "pad", "hole", "revealed", "visible"), 0)

    def neighbour(row: int, place: int) -> np.ndarray:
        nothing = np.zeros(WIDTH, np.float32)
        if not 0 <= place < POSITIONS:
            kind, vector = "edge", nothing
        elif place >= LENGTH_B[row]:
            kind, vector = "pad", nothing
        elif shown[row, place] != toy.MASK:
            kind, vector = "visible", table[shown[row, place]]
        elif is_revealed[row, place]:
            kind, vector = "revealed", table[tokens[row, place]]
        else:
            kind, vector = "hole", nothing
        counts[kind] += 1
        return vector

    for row in range(ROWS):
        for place in range(POSITIONS):
            for offset in range(1, reach + 1):
                left, right = left_BLCD[row, place], right_BLCD[row, place]
                np.testing.assert_array_equal(left[offset - 1], neighbour(row, place - offset))
                np.testing.assert_array_equal(right[offset - 1], neighbour(row, place + offset))
    assert left_BLCD.shape == right_BLCD.shape == (ROWS, POSITIONS, reach, WIDTH)
    assert min(counts.values()) > 5, counts


def test_neighbours_of_a_block_are_what_its_sampling_shows():
    """Earlier blocks are written, later ones are not there, and the own block is as usual."""
    size, reach = 4, 2
    causal = {"attention_type": "block_causal", "block_length": size}
    network = build(toy.config(depth=1, add_sampler_head=True, sampler_context=reach, **causal))
    plain = _network(reach)
    shown, tokens, is_revealed = _canvas()
    table = np.asarray(_params(network)["embedding"])
    hidden = jnp.zeros((*shown.shape, WIDTH))

    def inputs(shown, is_revealed):
        return prepare_sampler_inputs(
            network, _params(network), _drawn(shown, tokens, hidden_BLD=hidden),
            jnp.asarray(is_revealed), mask_id=toy.MASK,
        )  # fmt: skip

    found = inputs(shown, is_revealed)
    for row in range(ROWS):
        for begin in range(0, POSITIONS, size):
            canvas = shown.copy()
            canvas[:, :begin], canvas[:, begin + size :] = tokens[:, :begin], toy.MASK
            revealed = is_revealed.copy()
            revealed[:, begin + size :] = False
            alone = prepare_sampler_inputs(
                plain, {"embedding": jnp.asarray(table)},
                _drawn(canvas, tokens, hidden_BLD=hidden), jnp.asarray(revealed), mask_id=toy.MASK,
            )  # fmt: skip
            block = slice(begin, begin + size)
            for side in (0, 2):
                np.testing.assert_array_equal(found[side][row, block], alone[side][row, block])


def test_one_neighbour_changes_what_the_head_says_beside_it_and_nowhere_else():
    network = _network()
    shown, tokens, is_revealed = _canvas()
    shown[1] = tokens[1]
    other = shown.copy()
    other[1, 3] = (other[1, 3] + 1) % toy.MASK

    def logits(shown):
        inputs = _inputs(network, shown, tokens, np.zeros_like(is_revealed))
        flat = (x.reshape(-1, *x.shape[2:]) for x in inputs)
        found = network.heads["sampler"].readout(_params(network), *flat)
        return np.asarray(found).reshape(ROWS, POSITIONS, -1)

    changed_BL = np.abs(logits(other) - logits(shown)).max(-1)
    expected_BL = np.zeros((ROWS, POSITIONS), bool)
    expected_BL[1, [2, 4]] = True
    np.testing.assert_array_equal(changed_BL > 0, expected_BL)
    assert changed_BL[expected_BL].min() > 1e-3


def _supervised(seed: int = 3):
    shown, tokens, is_revealed = _canvas()
    is_live_BL = np.arange(POSITIONS)[None] < LENGTH_B[:, None]
    is_supervised_BL = (np.random.default_rng(seed).random(shown.shape) < 0.6) & is_live_BL
    # A MASK that stands in the text costs infinity, and is not asked for.
    is_supervised_BL[0, 5] = False
    tokens[0, 5] = toy.MASK
    return shown, tokens, is_revealed, is_supervised_BL


def test_the_loss_of_the_sampler_head_is_the_plain_mean_over_the_supervised_positions():
    network = _network()
    shown, tokens, is_revealed, is_supervised = _supervised()
    inputs = _inputs(network, shown, tokens, is_revealed)
    hidden = _hidden(shown.shape)
    drawn = _drawn(shown, tokens, hidden_BLD=hidden, is_supervised_BL=is_supervised)
    drawn = drawn._replace(noise=(jnp.asarray(is_revealed), drawn.total))
    (head,) = stage_cases.records(HeadsConfig(), add_sampler_head=True).values()
    total, weight = head.loss(network, _params(network), drawn)[:2]
    nats = []
    for row, place in zip(*np.nonzero(is_supervised), strict=True):
        beside = (x[row, place][None] for x in inputs)
        logits = np.asarray(
            network.heads["sampler"].readout(_params(network), *beside)[0], np.float64
        )
        logits[toy.MASK] = -np.inf
        nats.append(np.log(np.exp(logits).sum()) - logits[tokens[row, place]])
    assert len(nats) == int(weight) > 10
    np.testing.assert_allclose(total / weight, np.mean(nats), rtol=1e-5)


def test_seven_of_ten_holes_are_revealed_to_the_sampler_head_by_default():
    (head,) = stage_cases.records(HeadsConfig(), add_sampler_head=True).values()
    shape = (64, 256)
    batch = Batch(*map(jnp.zeros, (shape, 64, 64)))
    drawn = Drawn(batch, jnp.full(shape, toy.MASK), jnp.ones(shape), jnp.ones(()))
    is_revealed_BL, num_supervised = head.draw(drawn, jax.random.key(0))
    assert float(is_revealed_BL.mean()) == pytest.approx(0.7, abs=0.02)
    assert num_supervised == 64 * 256


def _by_path(tree) -> dict[str, np.ndarray]:
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {path_name(path): np.asarray(leaf) for path, leaf in flat}


@pytest.mark.parametrize("tied", [True, False])
def test_the_loss_of_the_sampler_head_has_a_gradient_in_the_head_alone(tied):
    network = _network(tied=tied)
    shown, tokens, is_revealed, is_supervised = map(jnp.asarray, _supervised())
    (head,) = stage_cases.records(HeadsConfig(), add_sampler_head=True).values()

    def loss(params):
        hidden_BLD, _ = network.trunk(params, shown, jnp.asarray(LENGTH_B), None)
        drawn = _drawn(shown, tokens, hidden_BLD=hidden_BLD, is_supervised_BL=is_supervised)
        return head.loss(network, params, drawn._replace(noise=(is_revealed, jnp.float32(1)))).sum

    gradients = _by_path(jax.jit(jax.grad(loss))(_params(network)))
    assert any(path.startswith(SAMPLER) for path in gradients)
    for path, gradient in gradients.items():
        if path.startswith(SAMPLER):
            assert np.isfinite(gradient).all() and np.abs(gradient).max() > 1e-3, path
        else:
            np.testing.assert_array_equal(gradient, np.zeros_like(gradient), err_msg=path)


@pytest.mark.parametrize("masked_only", [True, False])
def test_the_critic_is_asked_about_filled_holes_and_the_text_that_nobody_asks_for(masked_only):
    shown, tokens, _, is_supervised = _supervised()
    drawn = _drawn(shown, tokens, is_supervised_BL=is_supervised)
    is_hole, is_judged = critic_positions(drawn, mask_id=toy.MASK, masked_only=masked_only)
    candidates = np.random.default_rng(5).integers(0, 3, shown.shape).astype(np.int32)
    filled_BL, is_wrong = critic_targets(drawn, jnp.asarray(candidates), is_hole)
    kinds = dict.fromkeys(("pad", "right hole", "wrong hole", "open hole", "shown", "plain"), 0)
    for row in range(ROWS):
        for place in range(POSITIONS):
            at = row, place
            filled, wrong, asked = shown[at], False, False
            if place >= LENGTH_B[row]:
                kind = "pad"
            elif shown[at] == toy.MASK and is_supervised[at]:
                filled, asked = candidates[at], True
                wrong = candidates[at] != tokens[at]
                kind = "wrong hole" if wrong else "right hole"
            elif shown[at] == toy.MASK:
                kind = "open hole"
            elif is_supervised[at]:
                kind = "shown"
            else:
                kind, asked = "plain", not masked_only
            kinds[kind] += 1
            found = (filled_BL[at], is_wrong[at], is_judged[at])
            assert tuple(map(int, found)) == (filled, wrong, asked), (at, kind)
            assert bool(is_hole[at]) is ("hole" in kind and kind != "open hole")
    assert min(kinds.values()) > 0, kinds


def test_the_critic_is_asked_about_every_token_that_may_be_noise():
    shown, tokens, _, is_supervised = _supervised()
    drawn = _drawn(shown, tokens, is_supervised_BL=is_supervised)
    is_hole, is_judged = critic_positions(
        drawn, mask_id=toy.MASK, masked_only=True, shows_noise=True
    )
    np.testing.assert_array_equal(is_judged, is_supervised)
    zeros = jnp.zeros(shown.shape, jnp.int32)
    _, is_wrong = critic_targets(drawn, zeros, is_hole, shows_noise=True)
    is_noise = is_supervised & (shown != toy.MASK)
    wrong = np.asarray(is_wrong)[is_noise]
    np.testing.assert_array_equal(wrong, (shown != tokens)[is_noise])
    assert 1 < wrong.sum() < wrong.size - 1


def test_a_neighbour_that_may_be_noise_shows_its_true_token_or_nothing():
    network = _network()
    shown, tokens, is_revealed, is_noised = _supervised()
    left_BLCD, _, _ = prepare_sampler_inputs(
        network, _params(network), _drawn(shown, tokens, hidden_BLD=_hidden(shown.shape)),
        jnp.asarray(is_revealed), mask_id=toy.MASK, is_noised_BL=jnp.asarray(is_noised),
    )  # fmt: skip
    is_open = is_noised | (shown == toy.MASK)
    seen = np.where(is_revealed & is_open, tokens, shown)
    expected = np.asarray(_params(network)["embedding"])[seen]
    expected[is_open & ~is_revealed] = 0
    expected[np.arange(POSITIONS)[None] >= LENGTH_B[:, None]] = 0
    np.testing.assert_array_equal(left_BLCD[:, 1:, 0], expected[:, :-1])
    assert (is_revealed & is_noised & (shown != tokens) & (shown != toy.MASK)).any()


def test_the_loss_of_the_critic_is_the_binary_cross_entropy_of_the_filled_text(monkeypatch):
    network, params = _network(), _params(_network())
    shown, tokens, _, is_supervised = _supervised()
    filled = np.random.default_rng(7).integers(0, 3, shown.shape).astype(np.int32)
    monkeypatch.setattr(critic, "fill_holes", lambda *rows, **settings: jnp.asarray(filled))
    config = Config(model=toy.config(depth=1, add_critic_head=True))
    head = critic.make_head(config, mask_id=toy.MASK, banned_ids=toy.BANNED)
    hidden_BLD = _hidden(shown.shape)
    drawn = _drawn(shown, tokens, hidden_BLD=hidden_BLD, is_supervised_BL=is_supervised)
    drawn = drawn._replace(noise=(jnp.zeros(ROWS, jnp.uint32), jnp.float32(7)))

    def loss(params):
        found = head.loss(network, params, drawn)
        return found.sum / found.weight

    value, gradient = jax.jit(jax.value_and_grad(loss))(params)
    is_hole = is_supervised & (shown == toy.MASK)
    is_live = np.arange(POSITIONS)[None] < LENGTH_B[:, None]
    is_asked = is_hole | (is_live & ~is_supervised & (shown != toy.MASK))
    filled = np.where(is_hole, filled, shown)
    is_wrong = is_hole & (filled != tokens)
    hidden_BLD, _ = jax.jit(network.trunk)(params, jnp.asarray(filled), jnp.asarray(LENGTH_B), None)
    kernel = np.asarray(params["critic_head"]["out"]["kernel"], np.float64)
    chance_BL = 1 / (1 + np.exp(-(np.asarray(hidden_BLD, np.float64) @ kernel)[..., 0]))
    nats_BL = -np.where(is_wrong, np.log(chance_BL), np.log(1 - chance_BL))
    np.testing.assert_allclose(value, nats_BL[is_asked].sum() / 7, rtol=1e-5)
    assert min(is_wrong.sum(), (is_hole & ~is_wrong).sum(), (is_asked & ~is_hole).sum()) > 1
    for path, leaf in _by_path(gradient).items():
        if path.startswith(SAMPLER):
            np.testing.assert_array_equal(leaf, np.zeros_like(leaf), err_msg=path)
        else:
            # The critic's second pass trains the trunk, by design.
            assert np.abs(leaf).max() > 1e-4, path


def test_the_critic_is_asked_which_tokens_are_random():
    """The whole record: the canvas of the process, read as it is, against the sum by hand."""
    config = Config(
        model=toy.config(depth=1, add_critic_head=True),
        objective=ObjectiveConfig(process="uniform"),
    )
    head = critic.make_head(config, mask_id=toy.MASK, banned_ids=toy.BANNED)
    batch = stage_cases.batch(0)
    objectives = make_objectives(config, stage_cases.TOKENIZER)
    example = draw_all(objectives, batch, jax.random.key(0))
    network = build(config.model)
    params = network.init(jax.random.key(1))
    noise = head.draw(example, jax.random.key(2))
    hidden_BLD, _ = network.trunk(params, example.shown_BL, batch.length_B, None)
    drawn = example._replace(noise=noise, hidden_BLD=hidden_BLD)
    loss = jax.jit(lambda params: head.loss(network, params, drawn))(params)
    judge, flat_PD = network.heads["critic"], hidden_BLD.reshape(-1, hidden_BLD.shape[-1])
    logit_BL = np.asarray(judge(params, flat_PD))
    logit_BL = logit_BL.reshape(example.shown_BL.shape).astype(np.float64)
    is_wrong_BL = np.asarray(example.shown_BL != batch.tokens_BL)
    is_live_BL = np.arange(is_wrong_BL.shape[1])[None] < np.asarray(batch.length_B)[:, None]
    nats_BL = np.log1p(np.exp(np.where(is_wrong_BL, -logit_BL, logit_BL)))
    assert is_wrong_BL.sum() > 4
    assert float(loss.sum / loss.weight) == pytest.approx(nats_BL[is_live_BL].mean(), rel=1e-4)


def test_a_sampler_head_without_revealed_neighbours_warns_in_one_line():
    with pytest.warns(UserWarning, match=r"^heads.sampler_reveal=0 .*; use 0.7$") as warned:
        heads = stage_cases.records(HeadsConfig(sampler_reveal=0.0), add_sampler_head=True)
    assert len(warned) == 1 and list(heads) == [SAMPLER]
