"""Lossless drafting: for any drafter, the texts are those of the causal model alone."""

import functools
import itertools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy
from oracles import drafts as oracle
from oracles import samplers
from safetensors import safe_open
from safetensors.numpy import save_file

import dlm_jax
from dlm_jax.contrib import drafter, drafts
from dlm_jax.data import CharacterTokenizer
from dlm_jax.inference.engine import Engine
from dlm_jax.inference.model import Model
from dlm_jax.inference.request import make_requests, only_chains_in_use
from dlm_jax.model.transformer import build
from dlm_jax.sampling.positions import TrunkOutput
from dlm_jax.types import Status

SLOTS, CANVAS, ROWS, NEW = 256, 16, 3072, 5
TOKENIZER = CharacterTokenizer.of("abcdefg ")
MASK, EOS = TOKENIZER.mask_id, TOKENIZER.eos_id
SHAPE = drafter.DraftShape(
    block_length=3, context=3, depth=1, heads=2, inner=16, rank=4, neighbors=2
)
MOST = SHAPE.block_length + 1
WAYS = [*drafts.DRAFTS]
SAMPLED = [way for way in WAYS if way != "free_waves"]
PROMPT, BAN = "abcde", {4: -math.inf}
IDS = [EOS, 5, 0, 2, 1, 7, 6, 4]
"""In no order, and one letter is never drafted."""


def _random(seed):
    """A drafter that is no identity, as after training, in numbers that float16 has.

    Its sampler head depends much on the neighbours, so that it matters which of them are drafts.
    """
    rng = np.random.default_rng(seed)
    params = drafter.init(jax.random.key(seed), SHAPE, toy.SHAPE["width"], scale_D=0.35)

    def add_noise(path, leaf):
        name = jax.tree_util.keystr(path)
        scale = {"['sampler']['out']": 0.4, "['sampler']['inner']": 0.5}
        scale |= {"['trunk']['near']": 0.05, "['trunk']['far']": 0.05, "['trunk']['scale']": 0.0}
        noisy = np.asarray(leaf) + scale.get(name, 0.3) * rng.standard_normal(leaf.shape)
        return jnp.float32(noisy.astype(np.float16))

    return jax.tree_util.tree_map_with_path(add_noise, params)


@functools.cache
def _plain(seed=9, **changes):
    config = toy.config() if changes else toy.config(attention_type="causal", start_id=MASK)
    network = build(config)
    params = toy.random_params(network, seed=seed)
    return Model(network, params, TOKENIZER, max_length=CANVAS, is_causal=not changes)


@functools.cache
def _model(seed=6):
    return drafter.add(_plain(), _random(seed), SHAPE, IDS)


# Every program has the chain and the static sizes of these rows.
OTHERS = (
    {"prompt": "gg", "temperature": 0.7, "top_p": 0.8, "logit_bias": {3: -1.0}, "gen_length": 4},
    {"prompt": "a", "ignore_eos": True, "gen_length": 9},
)


def _run(way, asked, num_samples=1, model=None, seed=0):
    """The rows of requests, in order, by one program for each way; None: without a drafter."""
    how = {"order": "left_to_right", "cache": "exact"}
    if way is not None:
        how = {"rules": drafts, "order": "drafted", "cache": "drafts", "draft_by": way}
    model = model or (_plain() if way is None else _model())
    requests = []
    cold = {"temperature": 0.0} if way == "free_waves" else {}
    for one in (*asked, *({**one, **cold} for one in OTHERS)):
        size = one.get("gen_length") or one.get("tokens", ()).count(MASK)
        common = {"temperature": 0.0, "steps": size, "gen_length": NEW} | how
        requests += make_requests(model, one, common, first=seed, num_samples=num_samples)
        seed += num_samples * ("seed" not in one)
    requests = only_chains_in_use(requests)[: len(asked) * num_samples]
    with Engine(model, sizes=(SLOTS,), canvases=(CANVAS,), max_waiting=None) as engine:
        rows = {row.number: row for row in engine.run(requests)}
    found = [rows[number] for number in range(len(requests))]
    assert all(row.error is None and row.status == Status.DONE for row in found)
    return found


def _ids(rows):
    return [tuple(row.tokens.tolist()) for row in rows]


def _new(row):
    return tuple(row.tokens[row.committed >= 0].tolist())


def _next_logits(tokens):
    """Logits of the causal model behind these tokens, by its plain network."""
    row = jnp.asarray([[*tokens, *[0] * (CANVAS - len(tokens))]])
    length = jnp.array([len(tokens) + 1])
    return np.asarray(toy.logits(_plain().network, _plain().params, row, length))[0, len(tokens)]


BANNED = tuple(_plain().facts.banned_ids)
ALLOWED = [id_ for id_ in range(toy.VOCAB_SIZE) if id_ not in BANNED]


def _banned(one):
    return {*BANNED, *one.get("logit_bias", ()), *[EOS] * one.get("ignore_eos", False)}


@functools.cache
def _logits_of():
    """The logits behind `PROMPT` and up to ``NEW - 1`` more tokens."""
    given = tuple(TOKENIZER.encode(PROMPT).tolist())
    rests = [*itertools.product(ALLOWED, repeat=NEW - 1)]
    rows = jnp.asarray([(*given, *rest, 0) for rest in rests])
    read = toy.logits(_plain().network, _plain().params, rows, jnp.full(len(rows), rows.shape[1]))
    found = np.asarray(read, np.float64)
    table = {
        rest[:n]: found[row, len(given) + n] for row, rest in enumerate(rests) for n in range(NEW)
    }
    return table.__getitem__


GREEDY = [
    {"prompt": prompt, "gen_length": size} | more
    for (prompt, size), more in itertools.product(
        [("a", 9), ("bad", 8), ("face", 12), ("g", 3), ("cab fad", 7), ("a bad deed", 6), ("e", 1)],
        [{}, {"ignore_eos": True}, {"logit_bias": {EOS: -math.inf} | BAN}],
    )
] + [
    {"tokens": [1, MASK, MASK, 5, MASK, 6, 2, MASK, MASK, MASK, MASK, MASK, MASK], "infill": True},
    {"tokens": [MASK, MASK, MASK, MASK, MASK, MASK, 3, MASK], "infill": True},
    {"tokens": [0, MASK, 1, MASK, 2, MASK, MASK, MASK, MASK, MASK, 3], "infill": True},
]  # fmt: skip


@functools.cache
def _greedy():
    """The texts of one token at a time, and that they are those of the oracle."""
    rows = _run(None, GREEDY)
    for one, text in zip(GREEDY, _ids(rows), strict=True):
        given = TOKENIZER.encode(one.get("prompt", "")).tolist()
        canvas = one.get("tokens") or [*given, *[MASK] * one["gen_length"]]
        assert text == tuple(oracle.greedy(_next_logits, canvas, MASK, (EOS,), _banned(one)))
    return rows


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", [6, 1])
def test_greedy_texts_are_those_of_the_model_without_a_drafter(way, seed):
    """With EOS and without, with a ban, and between given tokens."""
    expected = _greedy()
    ends = [row.tokens[-1] == EOS for row in expected]
    assert 2 < sum(ends) < len(ends) - 2
    found = _run(way, GREEDY, model=_model(seed))
    assert _ids(found) == _ids(expected)
    taken = [(a.steps, b.steps) for a, b in zip(found, expected, strict=True)]
    assert all(a <= b for a, b in taken) and sum(a < b for a, b in taken) > 3
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a.logprobs, b.logprobs, rtol=1e-4, atol=1e-4)
        assert a.counters.forwards == a.steps


def _check_law(way, number, how=None, **chain):
    chain, how = {"temperature": 1.0} | chain, how or {}
    exact = oracle.texts(_logits_of(), NEW, (EOS,), banned=_banned(how), **chain)
    assert sum(exact.values()) == pytest.approx(1)
    rows = _run(way, [{"prompt": PROMPT, "gen_length": NEW} | chain | how], num_samples=number)
    texts = [_new(row) for row in rows]
    assert oracle.p_value(exact, texts) > 1e-4
    for part in (slice(2), slice(1, 3), slice(2, 4), slice(3, 5)):
        assert oracle.p_value(oracle.of_parts(exact, part), [text[part] for text in texts]) > 1e-4
    filled = sum(row.counters.filled for row in rows)
    accepted = sum(int((row.committed >= 0).sum()) - row.steps for row in rows)
    assert 0.03 * filled < accepted < 0.97 * filled
    return exact, texts


@pytest.mark.parametrize("way", SAMPLED)
def test_texts_have_the_law_of_one_token_at_a_time(way):
    _check_law(way, ROWS)


def test_truncated_texts_have_the_law_of_one_token_at_a_time_and_its_support():
    exact, texts = _check_law("waves", ROWS, temperature=0.7, top_p=0.8)
    assert len(exact) < 0.2 * len(ALLOWED) ** NEW
    assert {text for text, p in exact.items() if p * ROWS > 16} <= {*texts}


@pytest.mark.parametrize(
    "how",
    [{"draft_confidence": 0.25}, {"draft_length": 2, "ignore_eos": True, "logit_bias": BAN}],
)
def test_texts_have_the_same_law_if_drafts_end_early_and_under_bans(how):
    _check_law("markov", ROWS, how)


def test_texts_have_the_law_of_a_random_transform():
    """The coin that XTC throws for a draft is that of its verification."""
    _check_law("markov", ROWS, xtc_probability=0.5, xtc_threshold=0.1)


@pytest.mark.nightly
@pytest.mark.parametrize("way", SAMPLED)
def test_many_texts_have_the_law_of_one_token_at_a_time(way):
    _check_law(way, 200_000)
    _check_law(way, 200_000, temperature=0.7, top_p=0.8)


def _first_draft(way, tokens_NL, first_N, has_context=True):
    """Logits of the causal model and of the draft at each row's next position, and the hidden
    vectors of its block.
    """
    network, params, made = _model().network, _model().params, _model().network.heads["drafter"]
    row_N, length_N = jnp.arange(len(first_N)), jnp.full(len(first_N), tokens_NL.shape[1])
    hidden_NLD, _ = network.trunk(params, tokens_NL, length_N, None)
    place_NC = first_N[:, None] - SHAPE.context + jnp.arange(SHAPE.context)[None]
    context_NCD = hidden_NLD[row_N[:, None], place_NC] * has_context
    ids_NC = tokens_NL[row_N[:, None], place_NC]
    block_NKD = made.block(params, context_NCD, ids_NC)
    p_NV = network.readout(params, hidden_NLD[row_N, first_N])
    return p_NV, _heads(way, ids_NC[:, -1], block_NKD[:, 0]), block_NKD


def _heads(way, before_N, hidden_ND):
    made, params = _model().network.heads["drafter"].network, _model().params
    if way == "markov":
        return made.heads["markov"](params, before_N, hidden_ND)
    return made.readout(params, hidden_ND)


@pytest.mark.parametrize(
    ("way", "chain"),
    [("parallel", {}), ("markov", {}), ("markov", {"temperature": 1.5, "top_p": 0.8})],
)
def test_as_many_drafts_are_accepted_as_by_algorithm_1(way, chain):
    chain = {"temperature": 1.0} | chain
    one = {"prompt": PROMPT, "gen_length": NEW, "ignore_eos": True} | chain
    rows = _run(way, [one], num_samples=ROWS // 2, seed=7)
    written = np.array([[(row.committed == step).sum() for step in (0, 1)] for row in rows])
    law = functools.partial(oracle.probabilities, banned=(*BANNED, EOS), **chain)

    # The first block has no hidden vectors to read.
    given = jnp.asarray(TOKENIZER.encode(PROMPT))
    tokens_1L, first_1 = jnp.pad(given, (0, 1))[None], jnp.array([len(given)])
    block_KD = _first_draft(way, tokens_1L, first_1, has_context=False)[2][0]
    every = jnp.arange(toy.VOCAB_SIZE)
    tables = [np.asarray(_heads(way, every, jnp.tile(h[None], (len(every), 1)))) for h in block_KD]
    exact = oracle.accepted(
        lambda drafts: law(_logits_of()(drafts)),
        lambda drafts: law(tables[len(drafts)][(int(given[-1]), *drafts)[-1]]),
        SHAPE.block_length,
    )
    assert (exact[:2] > 0.02).all()
    first = written[:, 0] - 1
    assert oracle.p_value({(n,): p for n, p in enumerate(exact)}, [(n,) for n in first]) > 1e-4

    # Whether the first draft of the second step, where it is not the last hole, is accepted.
    is_some = first < NEW - 2
    tokens_NL = jnp.stack([row.tokens for row in rows])[is_some]
    p_NV, q_NV, _ = _first_draft(way, tokens_NL, len(given) + 1 + jnp.asarray(first[is_some]))
    p, q = (np.stack([law(logits) for logits in np.asarray(x)]) for x in (p_NV, q_NV))
    wanted, found = np.minimum(p, q).sum(1), written[is_some, 1] > 1
    assert wanted.std() > 0.02
    deviation = (wanted * (1 - wanted)).sum() ** 0.5
    assert abs(found.sum() - wanted.sum()) < 4 * deviation
    # More often in the rows in which it is more likely.
    centred = wanted - wanted.mean()
    deviation = (centred**2 * wanted * (1 - wanted)).sum() ** 0.5
    assert abs((centred * (found - wanted)).sum()) < 4 * deviation


@pytest.mark.parametrize("way", SAMPLED)
def test_replayed_drafts_are_accepted_as_often_as_those_of_the_run(way):
    """Each step is repeated from the text before it, without a cache."""
    asked = [one for one in GREEDY if "prompt" in one and one["gen_length"] > 5]
    model, found = _model(), []
    made = model.network.heads["drafter"]
    for row, one in zip(_run(way, asked), asked, strict=True):
        tokens, end = row.tokens, len(TOKENIZER.encode(one["prompt"])) + one["gen_length"]
        padded = jnp.pad(jnp.asarray(tokens), (0, CANVAS + 8 - len(tokens)))[None]
        hidden_LD = model.network.trunk(model.params, padded, jnp.array([len(tokens)]), None)[0][0]
        for step in range(row.steps):
            (places,) = np.nonzero(row.committed == step)
            first, accepted = places[0], 0
            place_C = first - SHAPE.context + np.arange(SHAPE.context)
            is_there_C = jnp.asarray((place_C >= 1) & (step > 0))
            context_CD = jnp.where(is_there_C[:, None], hidden_LD[np.maximum(place_C, 0)], 0.0)
            ids_C = jnp.where(place_C >= 0, padded[0, np.maximum(place_C, 0)], -1)
            block_KD = made.block(model.params, context_CD[None], ids_C[None])[0]
            for offset in range(min(SHAPE.block_length, end - first - 1)):
                before, own = tokens[: first + offset], block_KD[offset][None]
                ids_C = jnp.asarray(before[first - 1 :][::-1][: SHAPE.neighbors])
                if way == "waves":
                    left_CD = made.network.embed(model.params, ids_C)
                    left_CD = jnp.pad(left_CD, ((0, SHAPE.neighbors - len(ids_C)), (0, 0)))
                    read = made.network.heads["sampler"].readout
                    logits_1V = read(model.params, left_CD[None], own, 0 * left_CD[None])
                else:
                    logits_1V = _heads(way, ids_C[:1], own)
                logits_V = samplers.ban(np.asarray(logits_1V)[0], _banned(one))
                if [*tokens[first + offset :]][:1] != [samplers.greedy(logits_V)]:
                    break
                accepted += 1
            is_end = tokens[places[-1]] == EOS or places[-1] + 1 == end
            found.append((accepted, len(places) - 1, is_end))
    assert {wanted == got or (is_end and wanted > got) for wanted, got, is_end in found} == {True}
    assert len({wanted for wanted, _, _ in found}) > 1


def test_a_draft_is_one_of_the_ids_with_its_logits_of_the_lm_head():
    hidden_ND = jax.random.normal(jax.random.key(0), (5, toy.SHAPE["width"]))
    ours = np.asarray(_heads("parallel", None, hidden_ND))
    theirs = _plain().network.readout(_plain().params, hidden_ND)
    np.testing.assert_allclose(ours[:, IDS], np.asarray(theirs)[:, IDS], rtol=1e-5, atol=1e-5)
    assert np.isneginf(np.delete(ours, IDS, axis=1)).all()


def _unlike(number):
    """One of many rows that differ in everything."""
    prompt = "a bad face"[number % 4 : 4 + number % 7]
    settings = {"temperature": (1.0, 0.0, 0.7)[number % 3], "top_p": (1.0, 0.8)[number % 2]}
    settings |= {"draft_length": number % 4, "draft_confidence": (0.0, 0.3)[number % 5 == 0]}
    settings |= {"draft_verified": number % 11 > 0, "ignore_eos": number % 3 == 0}
    return {"prompt": prompt, "gen_length": 1 + number % 8, "seed": number} | settings


@pytest.mark.parametrize("way", ["waves", "markov"])
def test_a_row_depends_on_no_neighbour_and_on_no_row_before_it_in_its_slot(way):
    number = SLOTS + 44
    together = _run(way, [_unlike(n) for n in range(number)])
    refilled = [*range(SLOTS, number)]
    apart = _run(way, [_unlike(n) for n in reversed(refilled)])
    (alone,) = _run(way, [_unlike(SLOTS + 1)])
    pairs = [*zip(apart, reversed(together[SLOTS:]), strict=True), (alone, together[SLOTS + 1])]
    for a, b in pairs:
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.committed, b.committed)
        np.testing.assert_array_equal(a.logprobs, b.logprobs)
        assert a.counters == b.counters


def test_a_step_writes_as_many_tokens_as_it_may():
    """All drafts and one more without verification; at most two of one draft; one of none."""
    sizes = [*range(1, 12)]
    base = {"prompt": "ab", "temperature": 1.0, "ignore_eos": True}
    kinds = {"draft_verified": False}, {"draft_length": 1}, {"draft_confidence": 1.0}
    asked = [base | more | {"gen_length": size} for more in kinds for size in sizes]
    written = [np.bincount(row.committed[row.committed >= 0]) for row in _run("waves", asked)]
    whole, two, one = (written[len(sizes) * i : len(sizes) * (i + 1)] for i in range(3))
    for size, row in zip(sizes, whole, strict=True):
        assert len(row) == math.ceil(size / MOST) and (row[:-1] == MOST).all()
    assert {n for row in two for n in row} == {1, 2}
    assert all((row == 1).all() for row in one)
    (row,) = _run("waves", [base | {"gen_length": 9, "draft_verified": False, "draft_length": 1}])
    assert row.steps == 5
    # Published causal models recommend blocks of one token.
    (row,) = _run("waves", [base | {"gen_length": 9, "draft_verified": False, "block_length": 1}])
    assert row.steps == math.ceil(9 / MOST)
    # A greedy row, too, drafts as long as the head is sure.
    asked = [
        base | {"gen_length": 9, "temperature": 0.0, "draft_confidence": c} for c in (0, 0.6, 1)
    ]
    filled = [row.counters.filled for row in _run("waves", asked)]
    assert filled[0] > filled[1] > filled[2] == 0


def test_markov_logits_given_its_tokens_are_those_it_drew_from():
    chosen = dlm_jax.sampler(
        _model(), rules=drafts, order="drafted", draft_by="markov", cache="drafts", steps=9,
        temperature=0.7, top_p=0.8,
    )  # fmt: skip
    rng, rows, given = np.random.default_rng(0), 6, 5
    tokens = np.full((rows, CANVAS), MASK)
    tokens[:, :given] = rng.integers(0, MASK, (rows, given))
    state = chosen.init(tokens, np.full(rows, 14), np.arange(rows))
    count_B = jnp.array([3, 3, 2, 1, 0, 3])

    @jax.jit
    def both(params, state):
        first_B = jnp.full(rows, given)
        rule, fill = state.rules.commit.draft_input(chosen.program, params, state, first_B, count_B)
        hidden = jax.random.normal(jax.random.key(3), fill.output.hidden_BLD.shape)
        fill = replace(fill, is_traced=True, output=TrunkOutput(hidden))
        out = rule.propose(fill)
        ids_BL = jnp.where(fill.is_open_BL, out.proposal.tokens_BL, -1)
        places_N = jnp.arange(ids_BL.size)
        is_open_N = fill.is_open_BL.reshape(-1)

        def logprobs(ids_BL):
            logits_NV = rule.logits(fill, ids_BL, out.level_BL)(places_N, is_open_N)
            at = fill.at(places_N, is_open_N)
            found_N = fill.draw_logprob(logits_NV, jnp.maximum(ids_BL, 0).reshape(-1), at)
            return found_N.reshape(ids_BL.shape), logits_NV.reshape(*ids_BL.shape, -1)

        second_BL = ids_BL.at[:, 2].set((ids_BL[:, 2] + 1) % MASK)
        return fill.is_open_BL, out, *logprobs(ids_BL), logprobs(second_BL)[1]

    is_open, out, found, logits, others = both(_model().params, state)
    assert np.asarray(is_open).sum(1).tolist() == count_B.tolist()
    recorded = np.asarray(out.draw_logprob_BL)[is_open]
    assert (recorded < 0).any()
    np.testing.assert_allclose(np.asarray(found)[is_open], recorded, rtol=1e-5, atol=1e-5)
    # The second draft is what the third reads, and the first does not.
    is_same = (np.asarray(logits) == np.asarray(others)).all(-1)[0]
    assert is_same[1:].tolist() == [True, True, False]


def test_a_saved_drafter_drafts_the_same(tmp_path):
    path = tmp_path / "drafter.safetensors"
    drafter.save(_model(), path)
    loaded = drafter.load(_plain(), path)
    asked = [_unlike(number) for number in range(40)]
    for a, b in zip(_run("waves", asked), _run("waves", asked, model=loaded), strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)
        np.testing.assert_array_equal(a.logprobs, b.logprobs)
        assert a.counters == b.counters
    coarse = jax.tree.map(lambda x: x.astype(jnp.bfloat16), _plain().params)
    drafter.load(replace(_plain(), params=coarse), path)
    with pytest.raises(ValueError, match=r"^[^\n]*drafter[^\n]*another model[^\n]*; use [^\n]+$"):
        drafter.load(_plain(seed=1), path)
    with pytest.raises(ValueError, match="has no drafter; add one by"):
        drafter.save(_plain(), path)
    with pytest.raises(ValueError, match="the model has a drafter; add another one to the model"):
        drafter.load(_model(), path)
    named = replace(_plain(), tokenizer=CharacterTokenizer.of("hijklmn "))
    with pytest.raises(ValueError, match=r"^[^\n]*another vocabulary[^\n]*; use [^\n]+$"):
        drafter.load(named, path)
    with pytest.raises(ValueError, match=r"^[^\n]*causal[^\n]*; use [^\n]+$"):
        drafter.load(replace(_plain(), is_causal=False), path)
    with pytest.raises(ValueError, match=r"^[^\n]*causal[^\n]*; use [^\n]+$"):
        drafter.add(_plain(is_causal=False), _random(0), SHAPE, IDS)
    for change, said in (
        ({"heads": 3}, "a number of heads that divides the width 16"),
        ({"block_length": 1}, "use blocks of 2 or more"),
        ({"inner": 8}, "do not fit its shape and the model's width"),
    ):
        with pytest.raises(ValueError, match=said):
            drafter.add(_plain(), _random(0), replace(SHAPE, **change), IDS)
    with pytest.raises(ValueError, match="ids has id 99, outside the vocabulary of 12"):
        drafter.add(_plain(), _random(0), SHAPE, [99])


@pytest.mark.parametrize("kind", ["text", "tensors", "cut", "missing"])
def test_a_file_that_is_no_drafter_is_refused(kind, tmp_path):
    path = tmp_path / "other"
    if kind == "text":
        path.write_text("This is no file of tensors.")
    elif kind == "tensors":
        save_file({"a": np.zeros(2, np.float32)}, path, {"base": "a"})
    elif kind == "cut":
        drafter.save(_model(), path)
        with safe_open(path, "numpy") as file:
            names, facts = file.keys(), file.metadata()
            kept = {name: file.get_tensor(name) for name in names if "markov" not in name}
        save_file(kept, path, facts)
    said = "is not a file; pass a drafter" if kind == "missing" else "is not a drafter; use "
    with pytest.raises(ValueError, match=rf"^[^\n]*other {said}[^\n]*$"):
        drafter.load(_plain(), path)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"structure": "a+"}, "structure"),
        ({"edit": True, "schedule": "all"}, "edit"),
        ({"remask": "scheduled"}, "remask='scheduled'"),
        ({"guidance": 1.0}, "guidance=1.0"),
        ({"repetition_penalty": 1.2}, "repetition_penalty=1.2"),
        ({"temperature": 2.0, "temperature_end": 0.5}, "temperature_end=0.5"),
        ({"cache": "none"}, "cache='none'"),
        ({"cache": "exact"}, "cache='exact'"),
        ({"order": "left_to_right"}, "cache='drafts' requires order='drafted'"),
        ({"trace": True}, "trace"),
        ({"read_back": 2}, "order='drafted'"),
        ({"steps": 7}, "steps=7"),
        ({"draft_confidence": 1.5}, "draft_confidence=1.5"),
        ({"draft_length": -1}, "draft_length=-1"),
        ({"draft_by": "tree"}, "draft_by='tree'"),
        ({"draft_by": "free_waves", "temperature": 0.7}, "draft_by='free_waves'"),
        ({"model": "plain"}, "order='drafted' requires a causal model with a drafter"),
    ],
)
def test_what_does_not_go_together_is_refused_in_one_line(changes, line):
    settings = {"order": "drafted", "cache": "drafts", "gen_length": 8, "steps": 8} | changes
    model = _plain() if settings.pop("model", "") else _model()
    with pytest.raises(ValueError, match=r"^[^\n]+(; |, )[^\n]+$") as refusal:
        dlm_jax.generate(model, ["ab"], rules=drafts, **settings)
    assert line in str(refusal.value)
