"""Laws of the watch over the processes of a run, on a coordination service that is a dict."""

from __future__ import annotations

import jax
import pytest

from dlm_jax.distributed import processes
from dlm_jax.distributed.processes import ProcessWatch


class Service:
    """The part of JAX's client that the watch uses."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def key_value_set(self, key: str, value: str, *, allow_overwrite: bool) -> None:
        self.values[key] = value

    def key_value_try_get(self, key: str) -> str:
        return self.values[key]

    def key_value_dir_get(self, folder: str) -> list[tuple[str, str]]:
        return [item for item in self.values.items() if item[0].startswith(folder)]


@pytest.fixture
def three(monkeypatch):
    """Three watches whose threads do not run, their service, and a clock in seconds."""
    clock = [0.0]
    service = Service()
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    monkeypatch.setattr(processes.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(processes.time, "monotonic_ns", lambda: int(clock[0] * 1e9))
    monkeypatch.setattr(processes.time, "sleep", lambda seconds: None)
    watches = []
    for process in range(3):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        watches.append(ProcessWatch(service))
    return watches, service, clock


def _minute(three, silent: set[int]) -> dict[int, str]:
    """What each that lives finds in a minute in which some are silent."""
    watches, _, clock = three
    found: dict[int, str] = {}
    for _ in range(60):
        clock[0] += 1
        for process, one in enumerate(watches):
            if process not in silent and process not in found:
                one._say()
                verdict = one._found() if process == 0 else one._heard()
                if verdict:
                    found[process] = verdict
                    if process == 0:
                        one._tell(verdict)
    return found


def test_nobody_is_lost_while_all_give_signs(three):
    assert _minute(three, set()) == {}


@pytest.mark.parametrize("lost", [1, 2])
def test_a_lost_process_is_found_by_all_others_within_a_minute(three, lost):
    found = _minute(three, {lost})
    assert found.keys() == {0, 1, 2} - {lost}
    assert set(found.values()) == {f"process {lost} sent no heartbeat for 25 s"}


def test_the_silence_of_process_0_is_found_by_the_others(three):
    assert set(_minute(three, {0}).values()) == {"process 0 sent no heartbeat for 25 s"}


def test_a_process_that_has_ended_as_it_should_is_not_missed(three):
    three[0][1].done()
    assert _minute(three, {1}) == {}


@pytest.mark.parametrize("process", [0, 2])
def test_a_process_that_left_with_an_error_is_known_at_once(three, process):
    three[0][process].left(2)
    found = _minute(three, {process})
    assert set(found.values()) == {f"process {process} ended with code 2"}


def test_the_line_names_who_is_lost_and_what_to_do(three, monkeypatch, capsys):
    class Ended(BaseException):
        pass

    def ended(code):
        raise Ended(code)

    monkeypatch.setattr(processes.os, "_exit", ended)
    watches, service, _ = three
    with pytest.raises(Ended, match="75"):
        watches[0]._end("process 1 sent no heartbeat for 25 s")
    assert capsys.readouterr().err == (
        "error: process 1 sent no heartbeat for 25 s; process 0 of 3 also ends: the same command "
        "resumes from the last checkpoint\n"
    )
    assert watches[1]._heard() == "process 1 sent no heartbeat for 25 s", "told before it ended"
