"""The tables of what tokens add as neighbours give the fill that embeddings give."""

import dataclasses

import canvases
import pytest
import rule_cases
import toy

NAME = "random-none-wavefront-confidence"


@pytest.mark.slow
def test_tables_and_embeddings_fill_alike():
    network = toy.network_with_heads()
    slots = list(zip(rule_cases.rows(5), rule_cases.samples(NAME, canvases.ROWS, 5), strict=True))
    assert 16 * network.vocab_size <= canvases.ROWS * canvases.POSITIONS, "tables are in use"
    with_tables = rule_cases.advance(NAME)
    plain = dataclasses.replace(network.heads["sampler"], sides=None)
    without = canvases.make_advance(
        canvases.program(
            dataclasses.replace(network, heads=network.heads | {"sampler": plain}), is_guided=True
        )
    )
    ours, theirs = (
        canvases.results(
            loop(toy.params_with_heads(), rule_cases.make_state(NAME, slots), canvases.FOREVER)
        )
        for loop in (with_tables, without)
    )
    canvases.assert_same_up_to_rounding(ours, theirs)
