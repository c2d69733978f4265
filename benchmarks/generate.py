"""Generation on a CPU in float32: LLaDA's loop beside PyTorch, and the time saved by caches.

    python -m benchmarks generate [loop caches] [--sizes 1m 10m] [--rounds 5] [--quick]

``loop`` compares with a plain PyTorch version of LLaDA's loop.
Both frameworks get the same random weights, prompts and two threads, and run in separate processes
that alternate. The logits of one forward must agree to 1e-4, and all tokens must be equal; the exit
code is 1 otherwise. Seconds are those of whole calls, from prompts to tokens, after one that
compiles. ``caches`` has one row of 256 prompt and 256 new tokens in a model with 6 layers of width
256; each step writes one token, so runs with and without a cache have equally many steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import time
from typing import Any

import numpy as np

from benchmarks.report import Table, Worker, parser_of

THREADS = 2


@dataclasses.dataclass(frozen=True)
class Case:
    """The settings of a generation; the last four ids are specials."""

    blocks: int = 1
    guidance: float = 0.0
    rows: int = 8
    num_given: int = 32
    gen_length: int = 96
    steps: int = 15
    vocab_size: int = 128


SIZES: dict[str, dict[str, Any]] = {
    "1m": {"depth": 4, "width": 128, "heads": 4},
    "10m": {"depth": 6, "width": 384, "heads": 6},
}
CANVASES = {"1m": {}, "10m": {"num_given": 64, "gen_length": 192}}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "blocks": {"blocks": 3},
    "guidance": {"guidance": 1.5},
    "blocks and guidance": {"blocks": 3, "guidance": 0.5},
}


def prompts_of(case: Case, seed: int) -> np.ndarray:
    """Random prompts ``[B, P]`` of text ids."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, case.vocab_size - 4, (case.rows, case.num_given))


def random_params(network: Any) -> Any:
    """Random nonzero parameters; the logits of a tied head have standard deviation 2."""
    import jax

    rng = np.random.default_rng(0)

    def draw(path: Any, leaf: Any) -> Any:
        noise = rng.standard_normal(leaf.shape, np.float32)
        name = path[-1].key
        if name == "scale":
            return jax.numpy.asarray(1 + 0.1 * noise)
        fan_in = leaf.shape[-1] / 4 if name == "embedding" else leaf.shape[-2]
        return jax.numpy.asarray(noise * np.float32(fan_in**-0.5))

    shapes = jax.eval_shape(network.init, jax.random.key(0))
    return jax.tree_util.tree_map_with_path(draw, shapes)


class Ours:
    """Generation by `dlm_jax`."""

    def __init__(self, size: str, case: Case):
        from dlm_jax.config import ModelConfig
        from dlm_jax.data import CharacterTokenizer
        from dlm_jax.inference.model import Model
        from dlm_jax.model.transformer import build

        config = ModelConfig(**SIZES[size], activation="swiglu", vocab_size=case.vocab_size)
        network = build(config)
        characters = "".join(chr(0x100 + i) for i in range(case.vocab_size - 4))
        self.model = Model(
            network, random_params(network), CharacterTokenizer(characters),
            max_length=case.num_given + case.gen_length,
        )  # fmt: skip

    def params(self) -> Any:
        """The weights as NumPy arrays."""
        import jax

        return jax.tree.map(np.asarray, self.model.params)

    def logits(self, tokens_BL: np.ndarray) -> np.ndarray:
        """Logits ``[B, L, V]`` of one forward."""
        import jax

        network, params = self.model.network, self.model.params
        length_B = np.full(tokens_BL.shape[0], tokens_BL.shape[1])
        hidden_BLD, _ = jax.jit(network.trunk)(params, tokens_BL, length_B, None)
        return np.asarray(jax.jit(network.readout)(params, hidden_BLD))

    def generate(self, case: Case, seed: int) -> np.ndarray:
        """New tokens ``[B, N]``."""
        import dlm_jax

        prompts = [{"tokens": row} for row in prompts_of(case, seed)]
        texts = dlm_jax.generate(
            self.model, prompts, batch_size=case.rows, order="low_confidence", fill="parallel",
            temperature=0.0, ignore_eos=True, steps=case.steps, gen_length=case.gen_length,
            block_length=case.gen_length // case.blocks, guidance=case.guidance,
        )  # fmt: skip
        forwards = case.steps * (2 if case.guidance else 1)
        assert (texts.forwards == forwards).all(), texts.forwards
        return texts.tokens[:, case.num_given : case.num_given + case.gen_length]


class Theirs:
    """The loop in PyTorch."""

    def __init__(self, size: str, case: Case, params: Any):
        import torch

        from benchmarks.torch_reference import Twin

        torch.set_num_threads(THREADS)
        shape = SIZES[size]
        twin = Twin(case.vocab_size, shape["depth"], shape["width"], shape["heads"], "swiglu")
        self.twin = twin.load(params).eval()

    def logits(self, tokens_BL: np.ndarray) -> np.ndarray:
        """Logits ``[B, L, V]`` of one forward."""
        import torch

        with torch.no_grad():
            return self.twin(torch.from_numpy(tokens_BL)).numpy()

    def generate(self, case: Case, seed: int) -> np.ndarray:
        """New tokens ``[B, N]``."""
        import torch

        from benchmarks.torch_reference import generate

        mask_id = case.vocab_size - 4
        canvases = generate(
            self.twin, torch.from_numpy(prompts_of(case, seed)), mask_id=mask_id,
            banned_ids=range(mask_id, case.vocab_size), gen_length=case.gen_length,
            block_length=case.gen_length // case.blocks, steps=case.steps, guidance=case.guidance,
        )  # fmt: skip
        return canvases.numpy()[:, case.num_given :]


VOCAB, GIVEN, BLOCK = 512, 256, 32
ATTENTION: dict[str, dict[str, Any]] = {
    "bidirectional": {},
    "block_causal": {"attention_type": "block_causal", "block_length": BLOCK},
    "causal": {"attention_type": "causal", "start_id": VOCAB - 4},
}
BLOCKS = {"order": "low_confidence", "block_length": BLOCK}
CACHES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dual": ("bidirectional", "dual", BLOCKS),
    "exact, block-causal": ("block_causal", "exact", BLOCKS),
    "exact, causal": ("causal", "exact", {"order": "left_to_right"}),
}


def make_model(kind: str, max_length: int) -> Any:
    """A `dlm_jax.Model` of this kind with random nonzero weights."""
    from dlm_jax.config import ModelConfig
    from dlm_jax.data import CharacterTokenizer
    from dlm_jax.inference.model import Model
    from dlm_jax.model.transformer import build

    network = build(ModelConfig(
        depth=6, width=256, heads=4, vocab_size=VOCAB, activation="gelu", **ATTENTION[kind]
    ))  # fmt: skip
    return Model(
        network, random_params(network),
        CharacterTokenizer("".join(chr(0x100 + i) for i in range(VOCAB - 4))),
        max_length=max_length, is_causal=kind == "causal",
    )  # fmt: skip


def time_cached(model: Any, rows: int, new: int, **settings: Any) -> tuple[float, int, np.ndarray]:
    """Seconds, computed positions of a row, and new tokens, after a run that compiles."""
    import dlm_jax

    rng = np.random.default_rng(1)
    prompts = [{"tokens": row} for row in rng.integers(0, VOCAB - 4, (rows, GIVEN))]
    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        texts = dlm_jax.generate(
            model, prompts, batch_size=rows, gen_length=new, steps=new, temperature=0.0,
            ignore_eos=True, **settings,
        )  # fmt: skip
        seconds.append(time.perf_counter() - began)
    counters = texts.counters
    positions = int(counters.positions[0]) or int(counters.forwards[0]) * (GIVEN + new)
    return seconds[1], positions, texts.tokens[:, GIVEN : GIVEN + new]


def compare_caches(args: argparse.Namespace) -> bool:
    """Prints seconds, positions and the share of equal tokens."""
    new = 32 if args.quick else 256
    table = Table(args, "cache", "positions", "s", "without: positions", "s without", "times less",
                  "same tokens")  # fmt: skip
    for name, (kind, cache, settings) in CACHES.items():
        model = make_model(kind, GIVEN + new)
        seconds, positions, tokens = time_cached(model, 1, new, cache=cache, **settings)
        plain = time_cached(model, 1, new, **settings)
        same = float((tokens == plain[2]).mean())
        table.add(name, positions, seconds, plain[1], plain[0], plain[0] / seconds, same)
    return True


def compare_loops(args: argparse.Namespace) -> bool:
    """Prints equal tokens and seconds; returns whether all are equal."""
    # XLA starts a thread for each allowed core; the processes inherit the affinity.
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    table = Table(args, "size", "case", "tokens", "equal", "torch s", "dlm_jax s", "torch / ours")
    is_equal = True
    for size in args.sizes:
        case = Case(**CANVASES[size])
        ours = Worker(Ours, size, case)
        theirs = Worker(Theirs, size, case, ours.ask("params")[0])
        tokens_BL = prompts_of(case, 0)
        one, other = (worker.ask("logits", tokens_BL)[0] for worker in (ours, theirs))
        is_equal &= float(np.abs(one - other).max()) < 1e-4
        for kind, changes in KINDS.items():
            case = Case(**CANVASES[size], **changes)
            equal, compared, seconds = 0, 0, []
            for seed in range(args.rounds + 1):
                mine, other = (worker.ask("generate", case, seed) for worker in (ours, theirs))
                equal, compared = equal + int((mine[0] == other[0]).sum()), compared + mine[0].size
                seconds += [(other[1], mine[1])] if seed else []
            is_equal &= equal == compared
            torch, dlm = (statistics.median(column) for column in zip(*seconds, strict=True))
            # The ratio within a round depends little on the load of the machine.
            ratio = statistics.median(a / b for a, b in seconds)
            table.add(size, kind, compared, equal, torch, dlm, ratio)
        ours.close()
        theirs.close()
    return is_equal


def main() -> int:
    """Prints the tables; the exit code is 1 if any tokens differ."""
    parser = parser_of(__doc__)
    parts = {"loop": compare_loops, "caches": compare_caches}
    parser.add_argument("parts", nargs="*", choices=[*parts, []], default=list(parts))
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    if args.quick:
        args.sizes, args.rounds = ["1m"], 1
    return int(not all([parts[name](args) for name in args.parts]))


if __name__ == "__main__":
    raise SystemExit(main())
