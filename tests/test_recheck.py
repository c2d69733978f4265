"""Figures of the docs that are measured again: the rows are there, and the data give them."""

import dataclasses

import pytest

from benchmarks import recheck


@pytest.mark.parametrize("check", recheck.CHECKS, ids=lambda check: f"{check.file}-{check.row[0]}")
def test_the_row_of_a_check_stands_in_the_docs_with_its_interval(check):
    figure, interval = check.documented()
    assert figure == figure and interval >= check.slack > 0
    with pytest.raises(ValueError, match="has no row"):
        dataclasses.replace(check, row=("no such row",)).documented()
    if not check.needs_model:
        assert check.measure() == pytest.approx(figure, abs=interval)
