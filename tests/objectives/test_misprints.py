"""Misprints: rows whose tokens are all different, so that each shown one names where it is from."""

import itertools
from typing import NamedTuple

import jax
import numpy as np
import pytest

from dlm_jax.objectives.objective import misprint

ROWS, POSITIONS = 160, 40
SHARES = np.array([0.0, 0.15, 0.45, 1.0], np.float32)

_misprint = jax.jit(misprint, static_argnames="kinds")


class Rows(NamedTuple):
    """The last live token of each row is never free, so that it says where the row ends."""

    tokens: np.ndarray
    length: np.ndarray
    given: np.ndarray
    is_free: np.ndarray
    ratio: np.ndarray


class Account(NamedTuple):
    """The misprints of a row, by the places of the clean tokens: where one is missing, where
    another stands instead, and where a stray one stands in front, with what is shown there."""

    missing: list[int]
    wrong: dict[int, int]
    stray: dict[int, int]


def _rows(seed: int = 0, *, lengths=(40, 33, 20, 6, 2, 1, 0), ratio=None) -> Rows:
    rng = np.random.default_rng(seed)
    tokens = np.stack([rng.permutation(200)[:POSITIONS] for _ in range(ROWS)]).astype(np.int32)
    length = np.resize(np.array(lengths, np.int32), ROWS)
    given = rng.integers(0, length // 2 + 1)
    place = np.arange(POSITIONS)[None]
    is_free = (place >= given[:, None]) & (place < length[:, None] - 1)
    ratios = rng.choice(SHARES, ROWS) if ratio is None else np.full(ROWS, ratio, np.float32)
    return Rows(tokens, length, given, is_free, ratios)


def _printed(rows: Rows, key: int = 0, **kinds: tuple[str, ...]):
    """Shown and true tokens of each row up to its new length."""
    found = _misprint(
        jax.random.key(key), rows.tokens, rows.length, rows.is_free, rows.ratio, **kinds
    )
    shown, true, length = map(np.asarray, found)
    assert (length <= POSITIONS).all()
    return [(s[:n].tolist(), t[:n].tolist()) for s, t, n in zip(shown, true, length, strict=True)]


def _account(tokens, shown, true) -> Account:
    """What happened to a row, told from what should stand at each of its positions alone.

    That is the clean token behind the last kept one: it stays the same behind a stray one, and goes
    on by one behind a kept one, and by one more for each that was missing in front of that.
    """
    place_of = {token: place for place, token in enumerate(tokens)}
    due = [place_of[token] for token in true]
    if shown[-1] == tokens[-1]:
        due.append(len(tokens))
    assert due[0] == 0
    account = Account([], {}, {})
    for position, (here, following) in enumerate(itertools.pairwise(due)):
        assert following >= here
        if following == here:
            account.stray[here] = shown[position]
            continue
        account.missing.extend(range(here, following - 1))
        if shown[position] != tokens[following - 1]:
            account.wrong[following - 1] = shown[position]
    return account


def _accounts(rows: Rows, key: int = 0) -> list[Account]:
    return [
        _account(tokens[:n].tolist(), shown, true)
        for tokens, n, (shown, true) in zip(
            rows.tokens, rows.length, _printed(rows, key), strict=True
        )
        if n
    ]


def test_each_row_reads_as_clean_tokens_but_for_free_ones_that_are_missing_wrong_or_stray():
    rows = _rows(1)
    live = np.flatnonzero(rows.length)
    met = np.zeros(3, int)
    for index, account in zip(live, _accounts(rows), strict=True):
        tokens, is_free = rows.tokens[index, : rows.length[index]], rows.is_free[index]
        for places in (account.missing, account.wrong, account.stray):
            assert all(is_free[place] for place in places)
        for shown in (*account.wrong.values(), *account.stray.values()):
            assert shown in tokens
        # In front of a missing token, or behind one, nothing is stray.
        assert not set(account.stray) & set(account.missing)
        assert not {place - 1 for place in account.stray} & set(account.missing)
        met += len(account.missing), len(account.wrong), len(account.stray)
    assert (met > ROWS).all()


def test_a_row_loses_what_is_missing_gains_what_is_stray_and_is_cut_at_the_canvas():
    rows = _rows(3)
    printed, live = _printed(rows), np.flatnonzero(rows.length)
    assert all(not printed[index][0] for index in np.flatnonzero(rows.length == 0))
    cut = 0
    for index, account in zip(live, _accounts(rows), strict=True):
        clean, shown = rows.tokens[index, : rows.length[index]], printed[index][0]
        if len(shown) == POSITIONS and shown[-1] != clean[-1]:
            cut += 1
            continue
        assert shown[-1] == clean[-1]
        assert len(shown) == len(clean) - len(account.missing) + len(account.stray)
    assert 3 < cut < np.sum(rows.length == POSITIONS)


@pytest.mark.parametrize("ratio", [0.3, 0.9])
def test_a_third_of_the_misprints_is_of_each_kind_and_half_of_the_stray_ones_double(ratio):
    rows = _rows(6, lengths=(24,), ratio=ratio)
    strays, doubles, counts = 0, [], np.zeros(2)
    for key in range(6):
        for tokens, account in zip(rows.tokens, _accounts(rows, key), strict=True):
            counts += len(account.missing), len(account.wrong)
            strays += len(account.stray)
            doubles += [shown == tokens[at - 1] for at, shown in account.stray.items() if at]
    # One in 24 of the wrong ones happens to be the right one, and of the stray ones to double.
    expected = np.array([1, 23 / 24, 1 - ratio / 3]) * ratio / 3
    shares = np.array([*counts, strays]) / (6 * rows.is_free.sum())
    np.testing.assert_allclose(shares, expected, rtol=0.08)
    assert np.mean(doubles) == pytest.approx(0.5 + 0.5 / 24, abs=0.04)


def _lone(rows: Rows, printed, row: int) -> list[int] | None:
    """Clean places of what is shown, where the row is long enough and fits."""
    clean = rows.tokens[row, : rows.length[row]].tolist()
    shown, _ = printed[row]
    if len(clean) < 6 or not shown or shown[-1] != clean[-1]:
        return None
    return [clean.index(token) for token in shown]


def test_the_usual_kinds_are_those_of_before_in_any_way_of_asking():
    rows = _rows(8)
    usual = ("missing", "wrong", "stray")
    assert _printed(rows, kinds=usual) == _printed(rows)
    assert _printed(rows, kinds=(*usual, "transposed")) != _printed(rows)


def test_transposed_tokens_change_places_and_each_is_due_where_it_belongs():
    rows = _rows(9, ratio=0.2)
    swaps = 0
    for row, (shown, true) in enumerate(printed := _printed(rows, kinds=("transposed",))):
        clean = rows.tokens[row, : rows.length[row]].tolist()
        assert true == clean
        moved = [place for place in range(len(clean)) if shown[place] != clean[place]]
        firsts, seconds = moved[::2], moved[1::2]
        assert [place + 1 for place in firsts] == seconds
        for place in firsts:
            assert shown[place : place + 2] == clean[place : place + 2][::-1]
            assert rows.is_free[row, place : place + 2].all()
        swaps += len(firsts)
    assert swaps > ROWS and len(printed) == ROWS
    # A token that is hit changes places with the next one unless that is hit or given, too.
    rows = _rows(9, lengths=(40,), ratio=0.2)._replace(is_free=np.ones((ROWS, POSITIONS), bool))
    moved = sum(s != t for shown, true in _printed(rows, kinds=("transposed",))
                for s, t in zip(shown, true, strict=True))  # fmt: skip
    assert moved / (2 * ROWS * (POSITIONS - 1)) == pytest.approx(0.2 * 0.8, rel=0.1)


def test_two_missing_tokens_leave_the_first_of_them_due():
    rows = _rows(10, ratio=0.1)
    seen = 0
    printed = _printed(rows, kinds=("missing_pair",))
    for row, (_, true) in enumerate(printed):
        places = _lone(rows, printed, row)
        clean = rows.tokens[row, : rows.length[row]].tolist()
        for index in range(1, len(places or [])):
            left, here = places[index - 1 : index + 1]
            assert clean.index(true[index]) == left + 1
            # Two, or one whose next may not be missing, or more where hits stand side by side.
            seen += here - left == 3
            if here - left == 2:
                assert not rows.is_free[row, left + 2] or here - left != 3
    assert seen > 50


def test_two_wrong_tokens_stand_side_by_side_and_nothing_moves():
    rows = _rows(11, lengths=(40,), ratio=0.1)
    runs = []
    for shown, true in _printed(rows, kinds=("wrong_pair",)):
        assert len(shown) == len(true)
        wrong = "".join("x" if s != t else " " for s, t in zip(shown, true, strict=True))
        runs += [len(run) for run in wrong.split()]
    # One of two is single where the other happens to be right, or may not be wrong.
    assert np.mean(np.array(runs) == 2) > 0.7


def test_two_stray_tokens_stand_in_front_of_what_is_due_at_both_and_half_double_two():
    rows = _rows(12, lengths=(30,), ratio=0.05)
    doubles, seen = 0, 0
    for row, (shown, true) in enumerate(_printed(rows, kinds=("stray_pair",))):
        clean = rows.tokens[row, : rows.length[row]].tolist()
        due = [clean.index(token) for token in true]
        assert shown[-1] == clean[-1]
        assert [clean[place] for place in sorted(set(due))] == clean
        for place in set(due):
            at = [index for index, other in enumerate(due) if other == place]
            assert len(at) in (1, 3) and shown[at[-1]] == clean[place]
            if len(at) == 3 and place > 1:
                seen += 1
                doubles += shown[at[0] : at[2]] == clean[place - 2 : place]
    assert seen > 100 and doubles / seen == pytest.approx(0.5, abs=0.1)
