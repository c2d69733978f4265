"""Plants one fault at a time in a copy of the package, and records which tests see it.

    python -m benchmarks planted --check | --unchanged | --table
    python -m benchmarks planted [--area draws] [--only NAME] [--slow] [--quick]

`benchmarks/planted_faults.toml` gives each fault as two texts of one file, before and after, and
the tests of each area that must see its faults. The default tests of the area run with a limit of
75 s on two cores, as processor time; with ``--slow``, the slow tests follow if the default tests
see nothing. A fault is seen by ``default`` or ``slow`` if a test of that kind fails. It counts as
``crash`` if the tests cannot be collected, and as ``none`` otherwise, also at the limit.

The records go to `benchmarks/results/planted.jsonl`. A recorded fault is not run again unless its
texts have changed or ``--again`` is given. ``--unchanged`` runs the tests of each area without a
fault: they must pass within the limit.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple

from benchmarks.report import print_machine

ROOT = Path(__file__).parent.parent
FAULTS = Path(__file__).parent / "planted_faults.toml"
RESULTS = Path(__file__).parent / "results" / "planted.jsonl"
LIMIT, SLOW_LIMIT = 75.0, 600.0  # seconds on two cores
IMPORTS = 5.0  # seconds of processor time before the first test
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
    """What a run of tests shows: ``passed``, ``failed``, ``crash`` or ``limit``."""

    kind: str
    test: str
    seconds: float
    tail: str


def load() -> tuple[dict[str, list[str]], list[Fault]]:
    """The tests of each area, and the faults."""
    data = tomllib.loads(FAULTS.read_text())
    return data["areas"], [Fault(**fault) for fault in data["faults"]]


def problems(areas: dict[str, list[str]], faults: Sequence[Fault]) -> list[str]:
    """What is wrong with the data, one line per problem."""
    lines = [
        f"areas.{area}: {path} does not exist"
        for area, paths in areas.items() for path in paths if not list(ROOT.glob(path))
    ]  # fmt: skip
    for what in ("name", "digest"):
        counts = Counter(getattr(fault, what) for fault in faults)
        lines += [f"{value}: {what} occurs {n} times" for value, n in counts.items() if n > 1]
    for fault in faults:
        path = ROOT / fault.file
        text = path.read_text() if path.exists() else ""
        if fault.area not in areas:
            lines.append(f"{fault.name}: the area {fault.area!r} has no tests")
        elif not all(fault._replace(after="-")):
            lines.append(f"{fault.name}: a field is empty")
        elif (count := text.count(fault.before)) != 1:
            lines.append(f"{fault.name}: its text occurs {count} times in {fault.file}")
        else:
            try:
                compile(text.replace(fault.before, fault.after), fault.file, "exec")
            except SyntaxError as error:
                lines.append(f"{fault.name}: {fault.file} does not compile: {error}")
    return lines


def copy_tree(into: Path) -> None:
    """Copies the tracked files of the working tree."""
    command = ["git", "ls-files", "-z"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, into / name)


def write(path: Path, text: str) -> None:
    """Writes a source file, and drops its bytecode, whose check has a resolution of one second."""
    path.write_text(text)
    for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        stale.unlink()


def order_tests(tree: Path, paths: Sequence[str], words: Sequence[str] = ()) -> list[str]:
    """The files of an area. Files that contain more of the words come first."""

    def rank(test: Path) -> tuple[int, Path]:
        text = test.read_text()
        return -sum(bool(re.search(rf"\b{word}\b", text)) for word in words), test

    tests = {
        test for path in paths for file in tree.glob(path)
        for test in (file.rglob("test_*.py") if file.is_dir() else [file])
    }  # fmt: skip
    return [str(test.relative_to(tree)) for test in sorted(tests, key=rank)]


def run_tests(tree: Path, options: Sequence[str], limit: float) -> Outcome:
    """Runs tests in a process of its own until the end or the limit, which counts both cores."""
    processor = int(2 * limit + IMPORTS)

    def prepare() -> None:
        os.setsid()
        resource.setrlimit(resource.RLIMIT_CPU, (processor, processor + 5))
        signal.alarm(int(20 * limit))

    log = tree.with_suffix(".log")
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", "-n", "0", "-q", *options], cwd=tree,
            env=os.environ | {"PYTHONPATH": str(tree)}, stdout=output, stderr=subprocess.STDOUT,
            preexec_fn=prepare,
        )  # fmt: skip
        _, status, used = os.wait4(process.pid, 0)
    process.returncode = code = os.waitstatus_to_exitcode(status)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what the tests have started
    text = log.read_text()
    # A setup that fails is an ERROR of a test. An ERROR without a test is one of collection.
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+::.*?)(?: - .*)?$", text, re.MULTILINE)
    is_limit = -code in (signal.SIGXCPU, signal.SIGALRM, signal.SIGKILL)
    kind = "failed" if failed else "passed" if code in (0, 5) else "limit" if is_limit else "crash"
    seconds = (used.ru_utime + used.ru_stime) / 2
    return Outcome(kind, failed[0] if failed else "", seconds, "\n".join(text.splitlines()[-12:]))


def try_fault(fault: Fault, paths: Sequence[str], limit: float, slow: bool, tree: Path) -> None:
    """Runs the tests of an area with one fault in the tree, and appends the record."""
    path = tree / fault.file
    text = path.read_text()
    ahead = text[: text.index(fault.before)]
    words = [path.stem]
    for pattern in (r"^(?:class|def) (\w+)", r"^    def (\w+)"):
        words += re.findall(pattern, ahead, re.MULTILINE)[-1:]
    files = order_tests(tree, paths, words)
    write(path, text.replace(fault.before, fault.after))
    try:
        kind, outcome = "default", run_tests(tree, [*files, "-x"], limit)
        if slow and outcome.kind in ("passed", "limit"):
            kind, outcome = "slow", run_tests(tree, [*files, "-x", "-m", "slow"], SLOW_LIMIT)
    finally:
        write(path, text)
    seen = {"failed": kind, "crash": "crash"}.get(outcome.kind, "none")
    command = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    record = {
        "name": fault.name, "area": fault.area, "digest": fault.digest, "seen": seen,
        "test": outcome.test, "tried": "default, slow" if slow else "default", "limit": limit,
        "timed_out": outcome.kind == "limit", "seconds": round(outcome.seconds, 1),
        "commit": commit,
    }  # fmt: skip
    record |= {"tail": outcome.tail} if seen == "crash" else {}
    with RESULTS.open("a") as file:
        file.write(json.dumps(record) + "\n")
    print(f"  {fault.name}: {seen} {outcome.test}, {outcome.seconds:.1f} s", flush=True)


def read_records() -> dict[str, dict[str, Any]]:
    """The newest record of each fault, by digest."""
    lines = RESULTS.read_text().splitlines() if RESULTS.exists() else []
    return {record["digest"]: record for record in map(json.loads, lines)}


def table(faults: Sequence[Fault]) -> str:
    """The table of areas, in Markdown: planted faults and by what they are seen."""
    records = read_records()
    lines = [
        "| area | planted | fast tests | slow tests | crash | none | not run | at the limit |",
        "|" + " --- |" * (len(SEEN) + 4),
    ]
    for area in [*dict.fromkeys(fault.area for fault in faults), "all"]:
        some = [records.get(fault.digest) for fault in faults if area in (fault.area, "all")]
        counts = Counter(record["seen"] if record else "not run" for record in some)
        at_limit = sum(bool(record and record["timed_out"]) for record in some)
        cells = [area, len(some), *(counts[kind] for kind in (*SEEN, "not run")), at_limit]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def main() -> int:
    """Checks, runs or tabulates the faults. Returns 1 if the data or the unchanged tests fail."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="run the first fault of each area")
    parser.add_argument("--area", action="append", help="run the faults of this area only")
    parser.add_argument("--only", action="append", metavar="NAME", help="run this fault only")
    parser.add_argument("--slow", action="store_true", help="also run the slow tests")
    parser.add_argument("--again", action="store_true", help="also run recorded faults")
    parser.add_argument("--check", action="store_true", help="check the data and end")
    parser.add_argument("--unchanged", action="store_true", help="time all areas without a fault")
    parser.add_argument("--table", action="store_true", help="print the table and end")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds on two cores")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time")
    args = parser.parse_args()
    areas, faults = load()
    if args.table:
        print(table(faults))
        return 0
    lines = problems(areas, faults)
    if lines or args.check:
        print("\n".join([*lines, f"{len(faults)} faults, {len(lines)} problems"]))
        return bool(lines)
    os.environ |= {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", f"{tempfile.gettempdir()}/planted_jax_cache")
    print_machine()
    if args.quick:
        faults = list({fault.area: fault for fault in reversed(faults)}.values())
    records = {} if args.again else read_records()
    due = [
        fault for fault in faults
        if (args.area is None or fault.area in args.area)
        and (args.only is None or fault.name in args.only)
        and (fault.digest not in records
             or args.slow and records[fault.digest]["seen"] == "none"
             and "slow" not in records[fault.digest]["tried"])
    ]  # fmt: skip
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="planted_") as folder:
        trees: Queue[Path] = Queue()
        for number in range(args.jobs):
            tree = Path(folder) / f"tree{number}"
            copy_tree(tree)
            trees.put(tree)

        def run(job: str | Fault) -> None:
            tree = trees.get()
            try:
                if isinstance(job, Fault):
                    try_fault(job, areas[job.area], args.limit, args.slow, tree)
                    return
                outcome = run_tests(tree, order_tests(tree, areas[job]), SLOW_LIMIT)
                print(f"{job}: {outcome.kind} {outcome.test}, {outcome.seconds:.1f} s", flush=True)
                if outcome.kind != "passed" or outcome.seconds > args.limit:
                    failed.append(job)
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(run, areas if args.unchanged else due))
    print(table(faults))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
