"""Requests are refused by name, and grouped by what is compiled in."""

import math
from dataclasses import replace

import jax
import numpy as np
import pytest
import rule_cases
import toy

from dlm_jax.config import SamplingParams
from dlm_jax.inference.request import (
    Request,
    check_canvas,
    columns,
    only_chains_in_use,
)
from dlm_jax.sampling.rules import ModelFacts
from dlm_jax.settings import on_device

TOKENS = np.array([1, 2, toy.MASK, toy.MASK], np.int32)
FACTS = ModelFacts(vocab_size=toy.VOCAB_SIZE, banned_ids=toy.BANNED, eos_ids=(toy.EOS,))


def _request(*, steps=4, tokens=TOKENS, seed=0, is_draft=None, **settings) -> Request:
    host = {name: settings.pop(name) for name in ("host_sampler", "read_back") if name in settings}
    return Request(tokens, SamplingParams(steps=steps, **settings), seed, is_draft, **host)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"steps": 0}, "steps=0 is outside [1, 2147483647]"),
        ({"seed": -1}, "seed=-1 is outside"),
        ({"seed": 2**32}, "seed=4294967296 is outside"),
        ({"tokens": np.zeros(0, np.int32)}, "tokens have shape (0,)"),
        ({"tokens": np.zeros((2, 3), np.int32)}, "tokens have shape (2, 3)"),
        ({"host_sampler": 3}, "host_sampler=3 is not callable"),
        ({"read_back": 1}, "read_back=1 is not a bool"),
    ],
)
def test_bad_request_is_refused_by_name(changes, said):
    with pytest.raises(ValueError, match="^[^\n]*$") as refusal:
        _request(**changes)
    assert said in str(refusal.value)


def test_fewer_steps_than_blocks_with_work_are_refused():
    tokens = np.array([1, 8, 8, 2, 3, 8], np.int32)
    check_canvas(_request(tokens=tokens, steps=2, block_length=2), FACTS, mask_id=toy.MASK)
    draft = np.array([False, True, True, True, True, True])
    for changes, busy in (({}, 2), ({"is_draft": draft}, 3)):
        request = _request(tokens=tokens, steps=busy - 1, block_length=2, **changes)
        with pytest.raises(ValueError, match=f"less than the {busy} blocks of block_length=2 .*"):
            check_canvas(request, FACTS, mask_id=toy.MASK)
    check_canvas(_request(tokens=tokens, steps=1), FACTS, mask_id=toy.MASK)


def test_rows_that_agree_in_what_is_compiled_in_run_together():
    alike = [
        _request(steps=3), _request(temperature=0.3), _request(top_p=0.5, remask_start=0.3),
        _request(block_length=2, seed=4), _request(threshold=0.2), _request(gen_length=3),
    ]  # fmt: skip
    others = [
        _request(order="threshold"), _request(order="threshold", confidence="max"),
        _request(schedule="all"), _request(remask="scheduled", remask_start=0.5),
        _request(remask="scheduled", remask_by="critic"), _request(fill="wavefront"),
        _request(guidance=1.0), _request(chain=("temperature",)),
        _request(edit=True, edit_token="mask"), _request(renoise="mask", renoise_start=0.5),
        _request(read_back=True),
    ]  # fmt: skip
    assert len({one.static for one in alike}) == 1
    assert len({one.static for one in [*alike, *others, *others]}) == 1 + len(others)


@pytest.mark.parametrize(
    "settings",
    [
        {"logit_bias": ((3, 0.5), (4, -math.inf)), "top_k": 3, "dry_breakers": (1, 2)},
        {"mirostat": 2, "temperature": 0.3, "temperature_end": 0.1, "order": "threshold"},
        {"dynatemp_range": 0.4, "edit": True, "edit_token": "mask"},
        {"remask": "scheduled", "renoise": "mask", "renoise_start": 0.5, "fill": "wavefront"},
        {"cache": "dual", "block_length": 2},
    ],
)
def test_columns_lie_on_the_host_and_are_what_is_packed_for_the_device(settings):
    requests = [_request(seed=7, **settings), _request(seed=2**32 - 1, steps=9)]
    requests[1] = replace(requests[1], sample=replace(requests[0].sample, steps=9))
    host, device = (
        columns(requests, rule_cases.FACTS),
        on_device(columns(requests, rule_cases.FACTS)),
    )
    assert jax.tree.structure(host) == jax.tree.structure(device)
    assert len(jax.tree.leaves(host)) > 20
    for ours, theirs in zip(jax.tree.leaves(host), jax.tree.leaves(device), strict=True):
        assert type(ours) is np.ndarray and isinstance(theirs, jax.Array)
        # What a call is compiled for, which must not depend on where an argument lies.
        assert (ours.dtype, theirs.weak_type) == (theirs.dtype, False)
        np.testing.assert_array_equal(ours, theirs)


def test_chains_keep_what_any_row_of_the_same_chain_asks_for():
    short = ("top_k", "temperature", "top_p")
    requests = [
        _request(temperature=0.5), _request(top_p=0.5), _request(chain=short),
        _request(chain=short, top_p=0.2),
    ]  # fmt: skip
    chains = [request.sample.chain for request in only_chains_in_use(requests)]
    assert chains == [("temperature", "top_p")] * 2 + [("top_p",)] * 2
    for old, new in zip(requests, only_chains_in_use(requests), strict=True):
        assert (new.tokens is old.tokens) and new.sample.top_p == old.sample.top_p
