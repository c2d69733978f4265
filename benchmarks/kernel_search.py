"""Ranks kernels of attention and their tiles by the schedules that the TPU compiler writes.

Command: python -m benchmarks.kernel_search --json benchmarks/results/kernels.jsonl
    [--chips v5e v5p v6e] [--only NAME ...] [--list] [--compiler-options none]

A candidate is the attention of 4 rows of 4096 positions with 16 heads of 128, forward and backward,
in bfloat16 without a mask. Every candidate is compiled in a process of its own, for chips that need
not be there; candidates that the file already holds are kept. The compiler's cycles of a program
leave out its kernels, so a kernel's time is read from the bundles of its schedule: one bundle takes
one cycle of one core. Long branches without products run once in every row of tiles; the rest of
the loop runs in every step of the grid, with its products at most at the peak.
The schedule contains no waiting for memory; ``memory`` is the time of a tile's bytes as a share of
its cycles. The estimate is a lower bound that ranks candidates.
``around`` is the program without its kernels. Kernels of tokamax are measured if it is installed.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import itertools
import json
import os
import re
import tempfile
import time
from pathlib import Path
from typing import Any

ROWS, POSITIONS, HEADS, SIZE = 4, 4096, 16, 128
TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
# Cores that share the work of a chip whose parts of a kernel's grid are independent.
CORES = {"v5e": 1, "v5p": 2, "v6e": 1}
_TOKAMAX = "tokamax._src.ops.experimental.tpu.splash_attention.splash_attention_kernel"


@dataclasses.dataclass(frozen=True)
class Tiles:
    """One candidate: a kernel, its tiles in positions, and the layout of queries, keys and values.

    ``h`` is a layout with the features of a head last, ``s`` one with the positions last. `passes`
    is 1 if one kernel computes all gradients.
    """

    kernel: str
    queries: int
    keys: int
    part: int
    layout: str = "hhh"
    passes: int = 1

    @property
    def name(self) -> str:
        """Its name in the file."""
        return " ".join(map(str, dataclasses.astuple(self)))


_SIZES = [
    (1024, 1024, 1024), (2048, 2048, 1024), (1024, 2048, 1024), (2048, 1024, 1024),
    (1024, 1024, 512), (2048, 2048, 512), (2048, 2048, 2048), (512, 512, 512), (512, 1024, 1024),
    (1024, 512, 512), (1024, 4096, 1024), (2048, 4096, 1024), (512, 2048, 1024),
]  # fmt: skip
CANDIDATES = [
    *(Tiles("splash", *sizes) for sizes in _SIZES),
    Tiles("splash", 1024, 1024, 1024, passes=2),
    *(Tiles("splash", 1024, 1024, 1024, layout) for layout in ("shh", "hsh", "hhs", "hss")),
    *(Tiles("tokamax", *sizes) for sizes in _SIZES[:5]),
    *(Tiles("tokamax scheduler", *sizes) for sizes in _SIZES[:2]),
]


def attention(tiles: Tiles) -> Any:
    """The kernel of a candidate, for one row."""
    own = "jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel"
    module = importlib.import_module(own if tiles.kernel == "splash" else _TOKAMAX)
    masks = importlib.import_module(module.__name__.replace("_kernel", "_mask"))
    layouts = [
        module.QKVLayout.HEAD_DIM_MINOR if letter == "h" else module.QKVLayout.SEQ_MINOR
        for letter in tiles.layout
    ]
    sizes = {
        "block_q": tiles.queries, "block_kv": tiles.keys, "block_kv_compute": tiles.part,
        "block_q_dkv": tiles.queries, "block_kv_dkv": tiles.keys,
        "block_kv_dkv_compute": tiles.part, "use_fused_bwd_kernel": tiles.passes == 1,
        **dict(zip(("q_layout", "k_layout", "v_layout"), layouts, strict=True)),
    }  # fmt: skip
    if tiles.passes == 2:
        sizes |= {"block_q_dq": tiles.queries, "block_kv_dq": tiles.keys}
    mask = masks.FullMask((POSITIONS, POSITIONS))
    if tiles.kernel == "splash":
        kernel = module.make_splash_mha_single_device(
            masks.MultiHeadMask([mask] * HEADS), block_sizes=module.BlockSizes(**sizes)
        )
    else:
        scheduled = tiles.kernel == "tokamax scheduler"
        config = module.SplashConfig(**sizes, use_experimental_scheduler=scheduled)
        kernel = module.make_splash_mha_single_device(mask, config=config)
    return lambda q, k, v, ids: kernel(q, k, v, module.SegmentIds(q=ids, kv=ids))


def measure(chip: str, tiles: Tiles, options: tuple[str, ...]) -> dict[str, Any]:
    """The figures of a candidate: bundles of its kernels, milliseconds and compile time."""
    with tempfile.TemporaryDirectory() as folder:
        # The compiler reads its flags when it is loaded.
        os.environ["LIBTPU_INIT_ARGS"] = (
            f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true "
            + os.environ.get("LIBTPU_INIT_ARGS", "")
        )
        from dlm_jax.distributed.mesh import topology_devices

        devices = topology_devices(TOPOLOGIES[chip])
        began = time.perf_counter()
        program = _compiled(devices, tiles, options)
        seconds = time.perf_counter() - began
        written = sorted(Path(folder).glob("*splash*-final_bundles.txt"))
        texts = {re.sub(r"^\d+-|-\d+-final.*$", "", path.name): path.read_text()
                 for path in written}  # fmt: skip
    figures = _figures(chip, tiles, program, devices, texts)
    return figures | {"options": list(options), "compile_seconds": round(seconds, 1)}


def _compiled(devices: Any, tiles: Tiles, options: tuple[str, ...]) -> Any:
    import jax
    import jax.numpy as jnp
    from jax.sharding import SingleDeviceSharding

    from dlm_jax.devices import used
    from dlm_jax.distributed import compiler

    place, kernel = SingleDeviceSharding(devices[0]), attention(tiles)

    def step(q: Any, k: Any, v: Any, ids: Any, g: Any) -> Any:
        with used(place):
            y, pull = jax.vjp(lambda *a: jax.vmap(kernel)(*a, ids), q, k, v)
            return y, pull(g)

    x = jax.ShapeDtypeStruct((ROWS, HEADS, POSITIONS, SIZE), jnp.bfloat16, sharding=place)
    ids = jax.ShapeDtypeStruct((ROWS, POSITIONS), jnp.int32, sharding=place)
    chosen = compiler.options("train", place, options)
    return jax.jit(step, compiler_options=chosen).lower(x, x, x, ids, x).compile()


def _figures(
    chip: str, tiles: Tiles, program: Any, devices: Any, texts: dict[str, str]
) -> dict[str, Any]:
    from dlm_jax.config import MeshConfig
    from dlm_jax.contrib.pod_costs import cost, torus_of
    from dlm_jax.distributed.mesh import CHIPS
    from dlm_jax.distributed.partitions import make_mesh

    facts = CHIPS[devices[0].device_kind]
    torus = torus_of(make_mesh(MeshConfig(fsdp=1), devices))
    plain = "\n".join(x for x in program.as_text().splitlines() if "tpu_custom_call" not in x)
    around = {mode: round(1e3 * cost(plain, torus, mode).seconds, 3) for mode in ("roof", "cycles")}
    kernels = {
        name: timed(bundles_of(text), tiles, facts, CORES[chip], name)
        for name, text in texts.items()
    }
    # Of the model: two products forward and five backward, however many the kernels repeat.
    flops = 2 * 7 * ROWS * HEADS * POSITIONS**2 * SIZE
    ms = sum(one["ms"] for one in kernels.values())
    return {
        "chip": chip, **dataclasses.asdict(tiles), "kernels": kernels, "around": around,
        "ms": round(ms, 3), "peak": round(1e3 * flops / facts.flops / ms, 4),
    }  # fmt: skip


def timed(
    bundles: dict[str, int], tiles: Tiles, chip: Any, cores: int, name: str
) -> dict[str, Any]:
    """A kernel's bundles, milliseconds, and share of a step's time that its bytes take."""
    across = POSITIONS // (tiles.keys if "dkv" in name else tiles.queries)
    down = POSITIONS // (tiles.queries if "dkv" in name else tiles.keys)
    of_heads = ROWS * HEADS * across
    products = 2 if "fwd" in name else 3 if "dq" in name else 5 if tiles.passes == 1 else 4
    flops = 2.0 * products * tiles.queries * tiles.keys * SIZE
    # A schedule does not contain the waiting for units that are busy.
    step = max(bundles["step"] + bundles["tile"], flops / chip.flops * chip.clock * cores)
    cycles = of_heads * (down * step + bundles["row"])
    # Bytes of a step: keys and values forward; queries, gradients and part of theirs backward.
    size = 2.0 * SIZE * (3 * tiles.queries if "dkv" in name else 2 * tiles.keys)
    memory = size / chip.bandwidth * chip.clock * cores / step
    return bundles | {
        "ms": round(1e3 * cycles / chip.clock / cores, 3), "memory": round(memory, 3)
    }  # fmt: skip


def bundles_of(text: str) -> dict[str, int]:
    """Steps of a kernel's loop, and its bundles in a step, in a tile and in a row of tiles."""
    lines = re.findall(r"^ *0x[0-9a-f]+ .*$", text, re.MULTILINE)
    begin = next(i for i, line in enumerate(lines) if " LB: " in line)
    end = max(i for i, line in enumerate(lines) if "loop exit test" in line)
    begins = {
        int(name): i
        for i, line in enumerate(lines)
        for name in re.findall(r"empty region (\d+)", line)
    }
    steps = re.search(r", (\d+) /\* loop exit test", lines[end])
    found = {"steps": int(steps.group(1)) if steps else 0}
    found |= {"step": end - begin, "tile": 0, "row": 0}
    for i, line in enumerate(lines[:end]):
        target = re.search(r"sbr\.rel \(.*target = \$region(\d+)", line)
        if target is None or int(target.group(1)) not in begins:
            continue
        body = lines[i : begins[int(target.group(1))]]
        is_leaf = not any("sbr.rel" in x for x in body[1:])
        if i > begin and is_leaf and len(body) > _SHORT:
            found["tile" if any("vmatmul" in x for x in body) else "row"] += len(body)
    found["step"] -= found["tile"] + found["row"]
    return found


# Shorter branches start transfers; every step may take them.
_SHORT = 64


def table(results: list[dict[str, Any]]) -> list[str]:
    """The candidates of each chip, fastest first, as a table in Markdown."""
    lines = [
        "| chip | options | kernel | queries x keys (part) | layout | gradient kernels | "
        "bundles of a step | kernels ms (share of the peak) | memory | "
        "around ms (roof / cycles) | ms |",
        "| --- " * 11 + "|",
    ]
    order = list(TOPOLOGIES)
    for one in sorted(results, key=lambda one: (order.index(one["chip"]), _total(one))):
        options = " ".join(one["options"]) or "default"
        what = (
            f"| {one['chip']} | {options} | {one['kernel']} | "
            f"{one['queries']} x {one['keys']} ({one['part']}) | {one['layout']} | "
            f"{one['passes']} | "
        )
        if "refused" in one:
            lines.append(what + "does not compile | | | | |")
            continue
        kernels = one["kernels"].values()
        lines.append(
            what + " + ".join(str(x["step"] + x["tile"]) for x in kernels)
            + f" | {one['ms']:.2f} ({100 * one['peak']:.1f}%) | "
            + " + ".join(f"{100 * x['memory']:.0f}%" for x in kernels)
            + f" | {one['around']['roof']:.2f} / {one['around']['cycles']:.2f} | "
            f"{_total(one):.2f} |"
        )  # fmt: skip
    return lines


def _total(one: dict[str, Any]) -> float:
    """Milliseconds of the kernels and, by the mean of both estimates, of what is around them."""
    if "refused" in one:
        return float("inf")
    return one["ms"] + (one["around"]["roof"] + one["around"]["cycles"]) / 2


def _measured(chip: str, tiles: Tiles, options: list[str]) -> dict[str, Any]:
    from benchmarks.pods import measured_apart

    try:
        flags = ["--json", "-", "--row", f"{chip} {tiles.name}"]
        return measured_apart("benchmarks.kernel_search", flags, options)
    except SystemExit as error:
        what = str(error).strip().splitlines()[-1]
        refused = {"refused": what[:300], "options": options}
        return {"chip": chip, **dataclasses.asdict(tiles), **refused}


def main() -> None:
    """Measures the candidates that are missing and prints the table."""
    from benchmarks.pods import parser_of

    parser = parser_of(__doc__)
    parser.add_argument("--chips", nargs="*", default=list(TOPOLOGIES))
    args = parser.parse_args()
    every = [
        (chip, tiles)
        for chip, tiles in itertools.product(args.chips, CANDIDATES)
        if tiles.kernel == "splash" or importlib.util.find_spec("tokamax")
    ]
    names = {f"{chip} {tiles.name}": (chip, tiles) for chip, tiles in every}
    if args.row:
        print(json.dumps(measure(*names[args.row], tuple(args.compiler_options))))
        return
    if args.list:
        print("\n".join(names))
        return
    lines = args.json.read_text().splitlines() if args.json and args.json.exists() else []
    results = [json.loads(line) for line in lines]
    fields = ["chip", *(field.name for field in dataclasses.fields(Tiles))]
    there = {(" ".join(str(one[field]) for field in fields), *one["options"]) for one in results}
    for name, (chip, tiles) in names.items():
        is_asked = not args.only or any(part in name for part in args.only)
        if (name, *args.compiler_options) in there or not is_asked:
            continue
        results.append(_measured(chip, tiles, args.compiler_options))
        if args.json:
            args.json.write_text("".join(json.dumps(one) + "\n" for one in results))
    print("\n".join(table(results)))


if __name__ == "__main__":
    main()
