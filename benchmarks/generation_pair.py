"""Runs `dlm_jax` and a plain PyTorch loop with the same random weights, in separate processes."""

from __future__ import annotations

import dataclasses
import multiprocessing
import time
from typing import Any

import numpy as np

THREADS = 2
PAUSE_SECONDS = 0.3
FIRST_CHARACTER = 0x100


@dataclasses.dataclass(frozen=True)
class Case:
    """The settings of a generation and the size of its model."""

    name: str
    size: str
    blocks: int = 1
    guidance: float = 0.0
    rows: int = 8
    num_given: int = 32
    gen_length: int = 96
    steps: int = 15
    vocab_size: int = 128

    @property
    def length(self) -> int:
        """Positions of the canvas."""
        return self.num_given + self.gen_length

    @property
    def forwards(self) -> int:
        """Forwards of one row; a step with guidance needs two."""
        return self.steps * (2 if self.guidance else 1)


SIZES: dict[str, dict[str, Any]] = {
    "1m": {"depth": 4, "width": 128, "heads": 4},
    "10m": {"depth": 6, "width": 384, "heads": 6},
}
CANVASES = {
    "1m": {"num_given": 32, "gen_length": 96},
    "10m": {"num_given": 64, "gen_length": 192},
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "blocks": {"blocks": 3},
    "guidance": {"guidance": 1.5},
    "blocks and guidance": {"blocks": 3, "guidance": 0.5},
}


def cases(sizes: list[str], kinds: list[str], **changes: Any) -> list[Case]:
    """The cases of each size, in order."""
    return [
        Case(name=kind, size=size, **(CANVASES[size] | KINDS[kind] | changes))
        for size in sizes
        for kind in kinds
    ]


def prompts_of(case: Case, seed: int) -> np.ndarray:
    """Random prompts ``[B, P]`` of text ids; the last four ids are specials."""
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


def make_model(size: str, vocab_size: int, max_length: int) -> Any:
    """A `dlm_jax.Model` with random nonzero weights; the logits have standard deviation 2."""
    from dlm_jax.config import ModelConfig
    from dlm_jax.data import CharacterTokenizer
    from dlm_jax.inference.model import Model
    from dlm_jax.model.transformer import build

    config = ModelConfig(**SIZES[size], activation="swiglu", vocab_size=vocab_size)
    network = build(config)
    characters = "".join(chr(FIRST_CHARACTER + i) for i in range(vocab_size - 4))
    return Model(
        network=network,
        params=random_params(network),
        tokenizer=CharacterTokenizer(characters),
        max_length=max_length,
    )


def settings_of(case: Case) -> dict[str, Any]:
    """Settings of `dlm_jax.generate`, without those that have no effect."""
    settings: dict[str, Any] = {
        "order": "low_confidence", "temperature": 0.0, "ignore_eos": True,
        "steps": case.steps, "gen_length": case.gen_length,
    }  # fmt: skip
    if case.blocks > 1:
        settings["block_length"] = case.gen_length // case.blocks
    if case.guidance:
        settings["guidance"] = case.guidance
    return settings


class Ours:
    """Generation by `dlm_jax`."""

    def __init__(self, size: str, vocab_size: int, max_length: int):
        self.model = make_model(size, vocab_size, max_length)

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
        """Canvases ``[B, L]``."""
        import dlm_jax

        texts = [self.model.tokenizer.decode(row) for row in prompts_of(case, seed)]
        made = dlm_jax.generate(self.model, texts, batch_size=case.rows, **settings_of(case))
        if not (made.forwards == case.forwards).all():
            raise ValueError(f"{made.forwards} forwards were used, not {case.forwards}")
        return made.tokens[:, : case.length]


class Theirs:
    """Generates with the loop in PyTorch."""

    def __init__(self, size: str, vocab_size: int, params: Any):
        import torch

        from benchmarks.torch_twin import Twin

        torch.set_num_threads(THREADS)
        shape = SIZES[size]
        twin = Twin(vocab_size, shape["depth"], shape["width"], shape["heads"], "swiglu")
        self.twin = twin.load(params).eval()

    def logits(self, tokens_BL: np.ndarray) -> np.ndarray:
        """Logits ``[B, L, V]`` of one forward."""
        import torch

        with torch.no_grad():
            return self.twin(torch.from_numpy(tokens_BL)).numpy()

    def generate(self, case: Case, seed: int) -> np.ndarray:
        """Canvases ``[B, L]``."""
        import torch

        from benchmarks import llada_torch

        mask_id = case.vocab_size - 4
        canvases = llada_torch.generate(
            self.twin,
            torch.from_numpy(prompts_of(case, seed)),
            mask_id=mask_id,
            banned_ids=range(mask_id, case.vocab_size),
            gen_length=case.gen_length,
            block_length=case.gen_length // case.blocks,
            steps=case.steps,
            guidance=case.guidance,
        )
        return canvases.numpy()


def serve(pipe: Any, kind: type, *args: Any) -> None:
    """Makes a generator and calls the requested methods; sends results and seconds."""
    generator = kind(*args)
    while (request := pipe.recv()) is not None:
        name, *values = request
        start = time.perf_counter()
        result = getattr(generator, name)(*values)
        pipe.send((result, time.perf_counter() - start))


class Pair:
    """The two frameworks with the same weights, in separate processes."""

    def __init__(self, size: str):
        length = sum(CANVASES[size].values())
        self._context = multiprocessing.get_context("spawn")
        self._workers: dict[str, tuple[Any, Any]] = {}
        self._start("ours", Ours, size, Case.vocab_size, length)
        params, _ = self.ask("ours", "params")
        self._start("torch", Theirs, size, Case.vocab_size, params)

    def _start(self, name: str, *args: Any) -> None:
        pipe, child = self._context.Pipe()
        process = self._context.Process(target=serve, args=(child, *args), daemon=True)
        process.start()
        child.close()
        self._workers[name] = pipe, process

    def ask(self, name: str, *request: Any) -> tuple[Any, float]:
        """The result of the worker's method, and the seconds."""
        pipe, _ = self._workers[name]
        pipe.send(request)
        return pipe.recv()

    def generate(self, case: Case, seed: int) -> dict[str, tuple[np.ndarray, float]]:
        """Canvases and seconds of both frameworks, which run one after the other."""
        results = {}
        for name in self._workers:
            results[name] = self.ask(name, "generate", case, seed)
            # The threads of one framework spin for a while before they release the cores.
            time.sleep(PAUSE_SECONDS)
        return results

    def close(self) -> None:
        """Ends the processes."""
        for pipe, process in self._workers.values():
            pipe.send(None)
            process.join()
