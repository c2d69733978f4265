"""Laws of the watch over the processes of a run, on a coordination service that is a dict."""

from __future__ import annotations

import jax
import pytest

from dlm_jax.cli.ends import code_of, end_of
from dlm_jax.distributed import processes
from dlm_jax.distributed.processes import ProcessWatch


class Service:
    """The part of JAX's client that the watch uses."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def key_value_set(self, key: str, value: str, *, allow_overwrite: bool) -> None:
        if not allow_overwrite and key in self.values:
            raise RuntimeError("ALREADY_EXISTS")
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
    """The verdict that each living process finds in a minute in which some are silent."""
    watches, _, clock = three
    found: dict[int, str] = {}
    for _ in range(60):
        clock[0] += 1
        for process, one in enumerate(watches):
            if process not in silent and process not in found:
                one._say()
                verdict = one._verdict()
                if verdict:
                    found[process] = verdict
    return found


def test_nobody_is_lost_while_all_give_signs(three):
    assert _minute(three, set()) == {}


@pytest.mark.parametrize("lost", [1, 2])
def test_a_lost_process_is_found_by_all_others_within_a_minute(three, lost):
    found = _minute(three, {lost})
    assert found.keys() == {0, 1, 2} - {lost}
    assert set(found.values()) == {f"75 process {lost} sent no heartbeat for 25 s"}


def test_the_silence_of_process_0_is_found_by_the_others(three):
    assert set(_minute(three, {0}).values()) == {"75 process 0 sent no heartbeat for 25 s"}


def test_a_process_that_has_ended_as_it_should_is_not_missed(three):
    watches, service, _ = three
    for process in range(3):
        service.values[f"dlm_jax/alive/{process}"] = "done 0"
    watches[1].done(0)
    assert _minute(three, {1}) == {}


def test_all_processes_end_with_the_largest_code_of_those_that_ended_as_they_should(three):
    watches, service, _ = three
    service.values |= {"dlm_jax/alive/0": "done 3", "dlm_jax/alive/2": "done 0"}
    assert watches[1].done(0) == watches[2].done(0) == watches[0].done(3) == 3


def test_the_thread_of_a_watch_has_ended_when_its_process_ends(three):
    """A thread in JAX's client at the end of the interpreter aborts the process."""
    watches, service, _ = three
    service.values |= {f"dlm_jax/alive/{process}": "done 0" for process in (0, 2)}
    watches[1].start()
    watches[1].done(0)
    assert not watches[1]._thread.is_alive()


@pytest.mark.parametrize("process", [0, 2])
@pytest.mark.parametrize("code", [2, 5, 130])
def test_a_process_that_left_with_an_error_is_known_at_once_and_its_code_is_that_of_all(
    three, process, code
):
    assert three[0][process].left(code) == code
    found = _minute(three, {process})
    assert found.keys() == {0, 1, 2} - {process}
    assert set(found.values()) == {f"{code} process {process} ended with code {code}"}


@pytest.mark.parametrize("order", [(0, 1), (1, 0), (2, 1)])
def test_processes_that_fail_at_once_with_different_codes_end_with_that_of_the_first(three, order):
    first, second = order
    assert three[0][first].left(5) == 5
    assert three[0][second].left(2) == 5


class _Ended(BaseException):
    pass


@pytest.mark.parametrize(
    ("verdict", "line"),
    [
        ("75 process 1 is lost", "process 1 is lost; process 0 of 3 also ends: the same command "
         "resumes"),
        ("5 process 1 ended with code 5", "process 1 ended with code 5; process 0 of 3 also ends"),
    ],
)  # fmt: skip
def test_the_line_names_who_is_lost_and_what_to_do(three, monkeypatch, capsys, verdict, line):
    def ended(code):
        raise _Ended(code)

    monkeypatch.setattr(processes.os, "_exit", ended)
    with pytest.raises(_Ended) as caught:
        three[0][0]._end(verdict)
    assert caught.value.args == (int(verdict.split()[0]),)
    assert capsys.readouterr().err == f"error: {line}\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [(OSError(28, "No space left on device"), 5), (SystemExit(2), 2), (KeyboardInterrupt(), 130),
     (RuntimeError("connection reset"), 70)],
)  # fmt: skip
def test_a_failed_process_ends_all_with_its_own_code(monkeypatch, capsys, error, code):
    service, slept = Service(), []

    def fail():
        raise error

    def ended(code):
        raise _Ended(code)

    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(processes, "_client", lambda: service)
    monkeypatch.setattr(ProcessWatch, "start", lambda watch: None)
    monkeypatch.setattr(processes.os, "_exit", ended)
    monkeypatch.setattr(processes.time, "sleep", slept.append)
    with pytest.raises(_Ended) as caught:
        processes.run_together(fail, code_of, end_of)
    assert caught.value.args == (code,)
    assert service.values["dlm_jax/verdict"].startswith(f"{code} process 0 ended")
    # An error without a known cause may be due to a lost process, which is waited for.
    assert (max(slept) > processes.PATIENCE) == (code == 70)
