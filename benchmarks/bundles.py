"""Times of Pallas kernels on a TPU, by the compiler's schedule.

The compiler estimates no cycles of a Pallas kernel, but writes its schedule: bundles of
instructions that start in one cycle each. A bundle in a loop counts once per iteration. Waiting for
memory is not counted.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def written(*names: str) -> Iterator[Callable[[], dict[str, str]]]:
    """A function that returns the schedules of kernels compiled in this context, by name.

    `names` are regular expressions. Kernels of the same name differ in a number at its end. The
    process must not have loaded the TPU library before.
    """
    with tempfile.TemporaryDirectory() as folder:
        # Read when the TPU library is loaded.
        os.environ["LIBTPU_INIT_ARGS"] = (
            f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true "
            "--xla_jf_dump_llo_pass_label_regex=.*final_bundles.* "
            + os.environ.get("LIBTPU_INIT_ARGS", "")
        )

        def schedules() -> dict[str, str]:
            named = re.compile(rf"\d+-((?:{'|'.join(names)})(?:\.\d+)?)-01-final_bundles\.txt")
            found = ((named.fullmatch(path.name), path) for path in Path(folder).iterdir())
            return {match.group(1): path.read_text() for match, path in found if match}

        yield schedules


def seconds(schedules: dict[str, str], clock: float) -> dict[str, float]:
    """The seconds of kernels by name, where every step of the grid takes all branches.

    A name without its number has the longest time of its kernels. The compiler writes one schedule
    for equal kernels.
    """
    found: dict[str, float] = {}
    for name, text in schedules.items():
        lines = re.findall(r"^ *(?:0x[0-9a-f]+|0) .*$", text, re.MULTILINE)
        begin = next((i for i, line in enumerate(lines) if " LB: " in line), 0)
        ends = [i for i, line in enumerate(lines) if "loop exit test" in line]
        number = re.search(r", (\d+) /\* loop exit test", lines[ends[-1]]) if ends else None
        times = int(number.group(1)) if number else 1
        found[name] = ((ends[-1] + 1 if ends else len(lines)) - begin) * times / clock
        whole = name.split(".")[0]
        found[whole] = max(found.get(whole, 0.0), found[name])
    return found
