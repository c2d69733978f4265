"""Prints the time of the kernels of logit transforms on a TPU, by the compiler's schedule.

Command: python -m benchmarks.bundles [--topology v5e:2x2] (prints JSON; `benchmarks.logit_chain`
reads it)

The compiler estimates no cycles of a Pallas kernel, but writes its schedule: bundles of
instructions that start in one cycle each. A bundle in a loop counts once per iteration, and a
search over the values of a position takes `PASSES` passes. ``usual`` omits the branches for ties at
a cut and for a cut that keeps fewer than `min_keep` tokens; ``worst`` counts them. Waiting for
memory is not counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from dlm_jax.sampling import transforms as tf

PASSES = 15
_TIES = 17
# A search has this many bundles outside of its passes; the loop over ties has about 15.
_SEARCH = 60
_LINE = re.compile(r"^\s*(?:0x[0-9a-f]+|0)\s+([A-Z]{2})?\s*:\s*(>*)")
# Transforms with a cut by value, whose search runs only for `min_keep`.
_RARE = (tf.TopNSigma, tf.MinP, tf.MirostatV2)
_USUAL = (tf.TopK, tf.TypicalP, tf.TopP, tf.MirostatV1)


class Part(NamedTuple):
    """Bundles at one depth, once or in a loop, and the parts inside."""

    is_loop: bool
    depth: int
    bundles: int
    inside: list[Any]


def parts(text: str) -> list[Part]:
    """The nested loops of a schedule; the outermost loop is that over programs."""
    found = (_LINE.match(line) for line in text.splitlines())
    rows = [(one.group(1) == "LB", len(one.group(2))) for one in found if one]

    def read(place: int) -> tuple[Part, int]:
        is_loop, depth = rows[place]
        bundles, inside = 1, []
        place += 1
        while place < len(rows) and rows[place][1] >= depth:
            if rows[place][1] > depth:
                part, place = read(place)
                inside.append(part)
            elif rows[place][0]:
                break
            else:
                bundles, place = bundles + 1, place + 1
        return Part(is_loop, depth, bundles, inside), place

    place, result = 0, []
    while place < len(rows):
        part, place = read(place)
        result.append(part)
    return result


def cycles(text: str, programs: int, turns: int, are_usual: list[bool]) -> tuple[float, float]:
    """Usual and worst cycles of a kernel.

    Args:
      text: the schedule.
      programs: number of programs.
      turns: iterations of a loop over the vocabulary.
      are_usual: for each search, in order, whether it usually runs.
    """
    left = iter(are_usual)

    def of(part: Part) -> tuple[float, float]:
        is_search = part.is_loop and part.depth == 2 and any(one.is_loop for one in part.inside)
        is_usual = is_search and part.bundles >= _SEARCH and next(left)
        inside = [of(one) for one in part.inside]
        usual, worst = (part.bundles + sum(one[place] for one in inside) for place in (0, 1))
        if is_search:
            times = PASSES if part.bundles >= _SEARCH else _TIES
            return (PASSES * usual if is_usual else 0.0), times * worst
        times = turns if part.is_loop and part.depth > 1 else 1
        return times * usual, times * worst

    counted = [of(part) for part in parts(text)]
    assert next(left, None) is None, "a search is missing"
    return programs * sum(x for x, _ in counted), programs * sum(y for _, y in counted)


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


def kernels(topology: str) -> dict[str, tuple[float, float]]:
    """Usual and worst seconds of each kernel in the chains of `benchmarks.logit_chain`."""
    from benchmarks import logit_chain
    from dlm_jax.distributed.mesh import CHIPS, topology_devices
    from dlm_jax.sampling import vocab
    from dlm_jax.sampling.transforms import resident

    found: dict[str, tuple[float, float]] = {}
    num_blocks = -(-logit_chain.VOCAB // vocab.RESIDENT_WIDTH)
    with written(r"[\w-]+?") as schedules:
        device = topology_devices(topology)[0]
        for group in logit_chain.kernel_groups():
            kinds, name = [type(t) for t, _ in group.steps], resident.name_of(group.steps)
            logit_chain.compiled(group.run, device, *group.args)
            usual, worst = cycles(
                next(text for key, text in schedules().items() if key.split(".")[0] == name),
                logit_chain.POSITIONS // resident.POSITIONS,
                num_blocks // vocab.blocks_at_once(num_blocks),
                [kind in _USUAL for kind in kinds if kind in _USUAL + _RARE],
            )
            clock = CHIPS[device.device_kind].clock
            found[name] = (usual / clock, worst / clock)
    return found


def main() -> None:
    """Prints JSON: usual and worst seconds by the name of the kernel."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topology", default="v5e:2x2")
    print(json.dumps(kernels(parser.parse_args().topology)))


if __name__ == "__main__":
    main()
