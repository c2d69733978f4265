"""Plants one fault at a time in a copy of the package, and records which tests see it.

    python -m benchmarks.planted --check
    python -m benchmarks.planted [--area draws] [--only NAME] [--slow]
    python -m benchmarks.planted --table
    python -m benchmarks.planted --unchanged

The faults are data: `benchmarks/planted_faults.toml` gives each fault as two texts of one file,
before and after, and gives each area the tests that must see its faults. For each area, the tests
run once on the unchanged copy, where they must pass. For each fault, the default tests run with a
limit of 75 s on two cores; with `--slow`, the slow tests follow if the default tests see nothing.
The records go to `benchmarks/results/planted.jsonl`. A fault that is recorded there is not run
again, unless its texts have changed, its run reached a lower limit, or `--again` is given.

Each run is one process with the limit in processor time, 150 s for two cores, so that several runs
at once and other load change no result. Runs start as forks of one process that has imported JAX.

A fault is seen by `default` or `slow` if a test of that kind fails. It counts as `crash` if the
tests cannot be collected, which shows nothing about them. It is seen by `none` otherwise, also if
the tests reach their limit.

`--unchanged` prints the time of the tests of each area without a fault.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import importlib
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
FAULTS = Path(__file__).parent / "planted_faults.toml"
RESULTS = Path(__file__).parent / "results" / "planted.jsonl"
LIMIT, SLOW_LIMIT = 75.0, 600.0  # seconds on two cores
WAITING = 20.0  # seconds of the clock after which a run is ended, per second of its limit
IMPORTED = ("jax", "flax.nnx", "optax", "orbax.checkpoint", "grain", "scipy", "tokenizers", "numpy")
SEEN = ("default", "slow", "crash", "none")


class Fault(NamedTuple):
    """One planted fault.

    Attributes:
      name: unique name.
      area: key of the tests that must see it.
      file: path of the changed file.
      before: text that occurs exactly once in the file.
      after: text that replaces it.
      law: the law or formula that the fault breaks.
      differs: an input for which the result differs, and how.
    """

    name: str
    area: str
    file: str
    before: str
    after: str
    law: str
    differs: str

    @property
    def digest(self) -> str:
        """A hash of the change."""
        return hashlib.sha256("\0".join(self[2:5]).encode()).hexdigest()[:16]


class Outcome(NamedTuple):
    """The outcome of one run of tests.

    Attributes:
      passed: True if the run ended and no test failed.
      failed: the first failed test; empty if none.
      crashed: True if the tests could not be collected or run.
      timed_out: True if the run reached its limit.
      seconds: processor time of the run on two cores, hence half of the time of all threads.
      tail: the last lines of its output.
    """

    passed: bool
    failed: str
    crashed: bool
    timed_out: bool
    seconds: float
    tail: str


def load() -> tuple[dict[str, list[str]], list[Fault]]:
    """The tests of each area, and the faults."""
    data = tomllib.loads(FAULTS.read_text())
    return data["areas"], [Fault(**fault) for fault in data["faults"]]


def problems(areas: dict[str, list[str]], faults: Sequence[Fault]) -> list[str]:
    """What is wrong with the data, one line per problem."""
    found = [
        f"areas.{area}: {path} does not exist"
        for area, paths in areas.items()
        for path in paths
        if not list(ROOT.glob(path))
    ]
    for what in ("name", "digest"):
        counts = Counter(getattr(fault, what) for fault in faults)
        found += [f"{value}: {what} occurs {n} times" for value, n in counts.items() if n > 1]
    for fault in faults:
        found += [f"{fault.name}: {problem}" for problem in _problems_of(fault, areas)]
    return found


def _problems_of(fault: Fault, areas: dict[str, list[str]]) -> list[str]:
    if fault.area not in areas:
        return [f"the area {fault.area!r} has no tests"]
    if not all(fault._replace(after="-")):
        return ["a field is empty"]
    path = ROOT / fault.file
    if not path.exists():
        return [f"{fault.file} does not exist"]
    text = path.read_text()
    count = text.count(fault.before)
    if count != 1:
        return [f"its text occurs {count} times in {fault.file}"]
    try:
        compile(text.replace(fault.before, fault.after), fault.file, "exec")
    except SyntaxError as error:
        return [f"{fault.file} does not compile after the change: {error}"]
    return []


def copy_tree(into: Path) -> None:
    """Copies the tracked files of the working tree."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, into / name)


def write(path: Path, text: str) -> None:
    """Writes a source file, and drops its bytecode, whose check has a resolution of one second."""
    path.write_text(text)
    for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        stale.unlink()


def order_tests(tree: Path, paths: Sequence[str], names: Sequence[str] = ()) -> list[str]:
    """The files of an area. Files that contain more of `names` come first."""
    found = {test for path in paths for file in tree.glob(path) for test in _tests_in(file)}

    def rank(test: Path) -> tuple[int, Path]:
        text = test.read_text()
        return -sum(bool(re.search(rf"\b{name}\b", text)) for name in names), test

    return [str(test.relative_to(tree)) for test in sorted(found, key=rank)]


def start_tests(tree: Path, options: Sequence[str], limit: float) -> int:
    """Runs tests in a process of its own, until the end or the limit. Returns its id."""
    pid = os.fork()
    if pid == 0:
        _run_pytest(tree, options, limit)
    return pid


def _run_pytest(tree: Path, options: Sequence[str], limit: float) -> None:
    """Becomes the process of a run. Does not return."""
    os.setsid()
    with _output_of(tree).open("w") as output:
        for stream in (1, 2):
            os.dup2(output.fileno(), stream)
    processor = int(2 * limit)
    resource.setrlimit(resource.RLIMIT_CPU, (processor, processor + 5))
    signal.alarm(int(WAITING * limit))
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", str(ROOT)))]
    for name in [name for name in sys.modules if name.split(".")[0] in ("benchmarks", "dlm_jax")]:
        del sys.modules[name]
    code = 2
    try:
        pytest = importlib.import_module("pytest")
        code = int(pytest.main(["-n", "0", "-q", *options]))
    finally:
        sys.stdout.flush()
        os._exit(code)


def _output_of(tree: Path) -> Path:
    return tree.with_suffix(".log")


def _tests_in(path: Path) -> list[Path]:
    return list(path.rglob("test_*.py")) if path.is_dir() else [path]


def names_around(fault: Fault, text: str) -> list[str]:
    """The module that a fault changes, and the last class and functions that begin before it."""
    ahead = text[: text.index(fault.before)]
    defined = re.findall(r"^(?:class|def) (\w+)", ahead, re.MULTILINE)[-1:]
    methods = re.findall(r"^    def (\w+)", ahead, re.MULTILINE)[-1:]
    return [*dict.fromkeys([Path(fault.file).stem, *defined, *methods])]


def read_outcome(tree: Path, status: int, used: resource.struct_rusage) -> Outcome:
    """The outcome of the run that ended in a tree."""
    text = _output_of(tree).read_text()
    code = os.waitstatus_to_exitcode(status)
    timed_out = -code in (signal.SIGXCPU, signal.SIGALRM, signal.SIGKILL)

    def tests(kinds: str) -> list[str]:
        # A setup that fails is an ERROR of a test. An ERROR without a test is one of collection.
        return re.findall(rf"^(?:{kinds}) (\S+::.*?)(?: - .*)?$", text, re.MULTILINE)

    failed = tests("FAILED|ERROR")
    passed = code in (0, 5)  # 5: no tests
    return Outcome(
        passed=passed,
        failed=failed[0] if failed else "",
        crashed=not passed and not timed_out and not failed,
        timed_out=timed_out,
        seconds=(used.ru_utime + used.ru_stime) / 2,
        tail="\n".join(text.splitlines()[-12:]),
    )


def read_records() -> dict[str, dict[str, Any]]:
    """The newest record of each fault, by digest."""
    if not RESULTS.exists():
        return {}
    records = map(json.loads, RESULTS.read_text().splitlines())
    return {record["digest"]: record for record in records}


# A task yields the options of pytest and the limit, and receives the outcome.
Task = Generator[tuple[list[str], float], Outcome, None]
UNTIL_FAILED = ["-x"]


def try_area(
    area: str, paths: Sequence[str], limit: float, passed: dict[str, bool], tree: Path
) -> Task:
    """Runs the tests of an area without a fault. Prints whether they pass, and in what time."""
    outcome = yield order_tests(tree, paths), SLOW_LIMIT
    within = "within" if outcome.seconds <= limit else "NOT WITHIN"
    state = "pass" if outcome.passed else "FAIL"
    print(f"{area}: unchanged, tests {state} in {outcome.seconds:.1f} s, {within} {limit:g} s")
    if not outcome.passed:
        print(outcome.tail)
    passed[area] = outcome.passed


def try_fault(fault: Fault, paths: Sequence[str], limit: float, slow: bool, tree: Path) -> Task:
    """Runs the tests of an area with one fault in the tree, and appends the record."""
    path = tree / fault.file
    text = path.read_text()
    files = order_tests(tree, paths, names_around(fault, text))
    write(path, text.replace(fault.before, fault.after))
    try:
        kind = "default"
        outcome = yield [*files, *UNTIL_FAILED], limit
        seconds, timed_out = outcome.seconds, outcome.timed_out
        if slow and not outcome.failed and not outcome.crashed:
            kind = "slow"
            outcome = yield [*files, *UNTIL_FAILED, "-m", "slow"], SLOW_LIMIT
            seconds, timed_out = seconds + outcome.seconds, timed_out or outcome.timed_out
    finally:
        write(path, text)
    seen = "crash" if outcome.crashed else kind if outcome.failed else "none"
    record = {
        "name": fault.name, "area": fault.area, "digest": fault.digest, "seen": seen,
        "test": outcome.failed, "tried": "default, slow" if slow else "default",
        "limit": limit, "timed_out": timed_out, "seconds": round(seconds, 1),
        "commit": _commit(),
    }  # fmt: skip
    record |= {"tail": outcome.tail} if seen == "crash" else {}
    with RESULTS.open("a") as file:
        file.write(json.dumps(record) + "\n")
    by = f"{seen} {outcome.failed}{' (limit)' if timed_out else ''}"
    print(f"  {fault.name}: {by.strip()}, {record['seconds']} s", flush=True)


def run_all(tasks: Sequence[Callable[[Path], Task]], trees: Sequence[Path]) -> None:
    """Runs tasks, as many at a time as there are trees. A task is a function of its tree."""
    waiting, free = list(tasks), list(trees)
    running: dict[int, tuple[Task, Path]] = {}

    def go_on(task: Task, tree: Path, outcome: Any) -> None:
        try:
            options, limit = task.send(outcome)
        except StopIteration:
            free.append(tree)
        else:
            running[start_tests(tree, options, limit)] = task, tree

    try:
        while waiting or running:
            while waiting and free:
                tree = free.pop()
                go_on(waiting.pop(0)(tree), tree, None)
            pid, status, used = os.wait4(-1, 0)
            if pid in running:
                _kill_all_of(pid)
                task, tree = running.pop(pid)
                go_on(task, tree, read_outcome(tree, status, used))
    finally:
        for pid in running:
            _kill_all_of(pid)


def _kill_all_of(pid: int) -> None:
    """Ends what a run has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()


def table(faults: Sequence[Fault]) -> str:
    """The table of areas, in Markdown: planted faults and by what they are seen."""
    records = read_records()
    lines = [
        "| area | planted | fast tests | slow tests | crash | none | not run | at the limit |",
        "|" + " --- |" * (len(SEEN) + 4),
    ]
    for area in [*dict.fromkeys(fault.area for fault in faults), "all"]:
        own = [fault for fault in faults if area in (fault.area, "all")]
        found = [records.get(fault.digest) for fault in own]
        counts = Counter(record["seen"] if record else "not run" for record in found)
        at_limit = sum(bool(record and record["timed_out"]) for record in found)
        cells = [area, len(own), *(counts[kind] for kind in (*SEEN, "not run")), at_limit]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _wanted(faults: Sequence[Fault], args: argparse.Namespace) -> list[Fault]:
    """The faults that are selected and not recorded."""
    records = read_records()

    def is_due(fault: Fault) -> bool:
        record = records.get(fault.digest)
        if record is None or args.again:
            return True
        if record["seen"] == "none" and record["timed_out"] and record["limit"] < args.limit:
            return True
        return args.slow and record["seen"] == "none" and "slow" not in record["tried"]

    return [
        fault
        for fault in faults
        if (args.area is None or fault.area in args.area)
        and (args.only is None or fault.name in args.only)
        and is_due(fault)
    ]


def main() -> int:
    """Checks, runs or tabulates the faults. Returns 1 if the data or the unchanged tests fail."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--area", action="append", help="run the faults of this area only")
    parser.add_argument("--only", action="append", metavar="NAME", help="run this fault only")
    parser.add_argument("--slow", action="store_true", help="also run the slow tests")
    parser.add_argument(
        "--trust", action="store_true", help="do not run the tests of an area without a fault"
    )
    parser.add_argument("--again", action="store_true", help="also run recorded faults")
    parser.add_argument("--check", action="store_true", help="check the data and end")
    parser.add_argument("--unchanged", action="store_true", help="time all areas without a fault")
    parser.add_argument("--table", action="store_true", help="print the table and end")
    parser.add_argument(
        "--limit", type=float, default=LIMIT,
        help="seconds on two cores for the default tests of an area",
    )  # fmt: skip
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time")
    parser.add_argument(
        "--cache", type=Path, default=Path(tempfile.gettempdir()) / "planted_jax_cache",
        help="directory for compiled programs, shared by all runs",
    )  # fmt: skip
    args = parser.parse_args()
    areas, faults = load()
    if args.table:
        print(table(faults))
        return 0
    found = problems(areas, faults)
    if found or args.check:
        print("\n".join([*found, f"{len(faults)} faults, {len(found)} problems"]))
        return bool(found)
    wanted = _wanted(faults, args)
    os.environ |= {
        "JAX_COMPILATION_CACHE_DIR": str(args.cache), "JAX_PLATFORMS": "cpu",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3",
    }  # fmt: skip
    for name in IMPORTED:
        importlib.import_module(name)
    passed: dict[str, bool] = {}
    tasks: list[Callable[[Path], Task]] = []
    if not args.trust:
        tasks += [
            functools.partial(try_area, area, areas[area], args.limit, passed)
            for area in (areas if args.unchanged else dict.fromkeys(f.area for f in wanted))
        ]
    if args.unchanged:
        wanted = []
    tasks += [
        functools.partial(try_fault, fault, areas[fault.area], args.limit, args.slow)
        for fault in wanted
    ]
    with tempfile.TemporaryDirectory(prefix="planted_") as folder:
        trees = [Path(folder) / f"tree{number}" for number in range(args.jobs)]
        for tree in trees:
            copy_tree(tree)
        run_all(tasks, trees)
    return not all(passed.values())


if __name__ == "__main__":
    sys.exit(main())
