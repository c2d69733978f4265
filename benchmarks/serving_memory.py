"""Measures the memory of the server after each of several crowds of clients.

``python -m benchmarks.serving_memory [--rounds 8] [--clients 1000]``

The server runs in its own process (`dlm_jax.serve`, with the flags after ``--``). In every round,
all clients of `benchmarks.crowd` connect concurrently; most of them misbehave. After they have
disconnected and no row runs or waits, the program reads the server's resident memory (VmRSS),
threads and open files. The first rounds compile programs and fill pools; the last line compares the
second half of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

from benchmarks.crowd import crowd

_PATIENCE = 120.0


@contextlib.contextmanager
def served(flags: list[str]) -> Iterator[tuple[str, int]]:
    """Starts a server that ends with the context; returns its address and process id."""
    command = [sys.executable, "-m", "dlm_jax.serve", "--port", "0", *flags]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), process.pid
        finally:
            process.send_signal(signal.SIGTERM)
    if process.returncode:
        raise SystemExit(f"the server ended with code {process.returncode}")


def held(pid: int) -> tuple[float, int, int]:
    """Resident memory in MiB, threads and open files of a process."""
    told = Path(f"/proc/{pid}/status").read_text()
    rss, threads = (int(re.findall(rf"^{name}:\s+(\d+)", told, re.M)[0])
                    for name in ("VmRSS", "Threads"))  # fmt: skip
    return rss / 1024, threads, len(os.listdir(f"/proc/{pid}/fd"))


def settled(url: str) -> int:
    """The number of loaded programs of the server, once no row runs or waits.

    Raises:
      SystemExit: abandoned rows continue to run.
    """
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until:
        figures = httpx.get(f"{url}/metrics").text
        told = dict(
            re.findall(r"^dlm_jax_(rows_running|rows_waiting|programs) (\S+)", figures, re.M)
        )
        if not float(told["rows_running"]) and not float(told["rows_waiting"]):
            return int(float(told["programs"]))
        time.sleep(0.05)
    raise SystemExit("a slot was lost: rows run that nobody waits for")


def main() -> None:
    """Prints one row per round."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("flags", nargs="*", help="flags of the server, after --")
    args = parser.parse_args()
    columns = ("round", "s", "texts", "seeds with one text", "closed early", "VmRSS MiB",
               "programs", "threads", "files")  # fmt: skip
    print(f"| {' | '.join(columns)} |\n{'| --- ' * len(columns)}|")
    found = []
    with served(args.flags) as (url, pid):
        for number in range(1, args.rounds + 1):
            began = time.perf_counter()
            told = asyncio.run(crowd(url, args.clients))
            programs = settled(url)
            closed = [one for one in told if isinstance(one, BaseException)]
            for error in closed:
                if not isinstance(error, httpx.WriteError | httpx.ReadError):
                    raise error
            texts: dict[int, set[str]] = {}
            answered = [one for one in told if isinstance(one, tuple)]
            for seed, text in answered:
                texts.setdefault(seed, set()).add(text)
            same = sum(len(one) == 1 for one in texts.values())
            found.append(held(pid))
            rss, threads, files = found[-1]
            print(
                f"| {number} | {time.perf_counter() - began:.1f} | {len(answered)} | "
                f"{same} of {len(texts)} | {len(closed)} | {rss:.1f} | {programs} | "
                f"{threads} | {files} |",
                flush=True,
            )
    half = found[args.rounds // 2 :]
    clients = args.clients * (len(half) - 1)
    grown = (half[-1][0] - half[0][0]) * 1024
    print(f"\nround {args.rounds - len(half) + 1} to {args.rounds}: {grown:+.0f} KiB for {clients} "
          "clients")  # fmt: skip


if __name__ == "__main__":
    main()
