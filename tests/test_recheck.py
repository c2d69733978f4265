"""Figures of the docs that are measured again: every table is told of, and every row is there."""

import dataclasses

import pytest

pytest.importorskip("dlm_jax.contrib", reason="benchmarks measure it")

from benchmarks import recheck  # noqa: E402


def test_every_table_with_figures_has_a_row_that_is_checked_or_says_what_makes_it():
    there = {(table.file, table.heading) for table in recheck.tables()}
    checked = {(check.file, check.heading) for check in recheck.CHECKS}
    assert checked | set(recheck.UNCHECKED) == there
    assert not checked & set(recheck.UNCHECKED)


@pytest.mark.parametrize("check", recheck.CHECKS, ids=lambda check: f"{check.file}-{check.row[0]}")
def test_the_row_of_a_check_stands_in_the_docs_with_its_interval(check):
    figure, interval = recheck.documented(check)
    assert figure == figure and interval >= check.slack > 0
    with pytest.raises(ValueError, match="has no row"):
        recheck.documented(dataclasses.replace(check, row=("no such row",)))


def test_figures_that_the_data_of_a_table_gives_are_those_of_the_table():
    checks = [check for check in recheck.CHECKS if check.how == "from the data of the table"]
    assert len(checks) >= 3
    for check in checks:
        figure, interval = recheck.documented(check)
        assert check.measure() == pytest.approx(figure, abs=interval), check.row
