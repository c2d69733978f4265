"""Kinds: which requests share a program, and how wide their lists are packed."""

import dataclasses

import jax
import numpy as np
import toy

from dlm_jax.config import SamplingParams
from dlm_jax.inference.request import Request, columns
from dlm_jax.inference.slots import Bucket
from dlm_jax.sampling.rules import ModelFacts

FACTS = ModelFacts(vocab_size=toy.VOCAB_SIZE, banned_ids=toy.BANNED, eos_ids=(toy.EOS,))
CHAIN = ("bias", "dry", "temperature")


def _request(seed=0, length=5, **settings):
    sample = SamplingParams(steps=4, chain=CHAIN, **settings)
    return Request(np.full(length, toy.MASK, np.int32), sample, seed)


def _biased(number, **settings):
    """A request with so many entries in its bias."""
    return _request(logit_bias=tuple((n % 8, 0.5) for n in range(number)), **settings)


def _shapes(packed):
    return [leaf.shape[1:] for leaf in jax.tree.leaves(packed)]


def test_a_kind_is_as_wide_as_the_widest_of_its_requests_in_every_list():
    many = [_request(seed, temperature=0.1 + seed) for seed in range(20)]
    wide = _biased(9)
    broken = _request(dry_breakers=tuple(range(8)) * 3)
    for requests in ([wide], [*many, wide], [wide, *many], [*many, broken, *many, wide], many):
        bucket = Bucket(requests, FACTS, 64)
        assert _shapes(bucket.pack(many[:2])) == _shapes(columns(requests, FACTS))
        assert _shapes(bucket.pack([])) == _shapes(bucket.pack(many))
        assert len(jax.tree.leaves(bucket.pack(many))[0]) == 20
        assert bucket.holds(many[5])
        assert bucket.holds(wide) == any(request is wide for request in requests)


def test_what_is_packed_is_what_all_together_are_packed_to():
    requests = [_request(3, temperature=0.3), _biased(20, temperature=0.7), _request(9)]
    bucket = Bucket(requests, FACTS, 64)
    whole = columns(requests, FACTS)
    for number, request in enumerate(requests):
        (ours,) = [bucket.pack([request])]
        for own, all_ in zip(jax.tree.leaves(ours), jax.tree.leaves(whole), strict=True):
            np.testing.assert_array_equal(own[0], all_[number])


def test_a_kind_holds_what_fits_its_canvas():
    bucket = Bucket([_request(length=5)], FACTS, 64)
    assert bucket.holds(_request(length=64)) and not bucket.holds(_request(length=65))
    assert not bucket.holds(dataclasses.replace(_request(), capacity=65))


def test_kinds_of_equal_requests_are_equal_and_others_are_not():
    bucket = Bucket([_request()], FACTS, 64)
    assert bucket.key == Bucket([_request(4, temperature=0.4)], FACTS, 64).key
    for other in (
        Bucket([_request()], FACTS, 128),
        Bucket([_biased(9)], FACTS, 64),
        Bucket([_request(order="left_to_right")], FACTS, 64),
        Bucket([dataclasses.replace(_request(), read_back=True)], FACTS, 64),
    ):
        assert other.key != bucket.key
