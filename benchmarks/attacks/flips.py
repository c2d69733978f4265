"""Flips bits in every kind of file that the programs read."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

import dlm_jax.config as configs
from benchmarks.attacks.report import TEXT, Tally, environment, finish, flags
from dlm_jax.batch import result_file
from dlm_jax.data import TokenShards, load_corpus, make_tokenizer, shard, train_bpe
from dlm_jax.data.pipeline import is_intact
from dlm_jax.store import load_params, load_weights, save_weights
from dlm_jax.training.checks import check_same_run
from dlm_jax.training.resume import config_of_run

_FLIPS = 200
Read = Callable[[], Any]
"""Reads a file; a ValueError means that damage was detected."""


def run(folder: Path, count: int | None, seed: int) -> list[Tally]:
    """One tally per kind of file."""
    rng = random.Random(seed)
    out_dir = folder / "run"
    finish(folder, "train.py", *flags(folder, out_dir, train__keep_checkpoints=1))
    requests, results = folder / "in.jsonl", folder / "out.jsonl"
    lines = [{"id": f"ä{n}", "gen_length": 4, "steps": 2, "seed": n} for n in range(6)]
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines))
    files_flags = ("--prompts", str(requests), "--output", str(results))
    finish(folder, "sample.py", "--checkpoint", str(out_dir), *files_flags)
    weights = folder / "x.safetensors"
    params, meta = load_params(out_dir)
    save_weights(weights, params, meta)
    mark = str(result_file.run_of(results)["fingerprint"])
    (step,), (best,) = ((out_dir / name).iterdir() for name in ("checkpoints", "best"))
    corpus = _sharded(folder)
    text, tokenizer = folder / "text.txt", folder / "tokenizer.json"
    tokenizer.write_text(train_bpe(TEXT, 262).content)
    learnt = _tokenizer(tokenizer)
    kinds: list[tuple[str, list[Path], Read, Callable[[Any, Any], bool]]] = [
        ("weights file", [weights], lambda: load_weights(weights), _same),
        ("checkpoint", _files(step), lambda: load_params(out_dir, report=_unheard), _same),
        ("best checkpoint", _files(best),
         lambda: load_params(out_dir / "best", report=_unheard), _same),
        ("config.toml, of which --resume reads nothing", [out_dir / "config.toml"],
         lambda: configs.to_dict(config_of_run(out_dir)), _same),
        ("results", [results, result_file.run_path(results)],
         lambda: _results(results, mark), _last_redone),
        ("token file", sorted((folder / "tokens").glob("*.npy")), lambda: _tokens(folder), _same),
        ("sharded corpus", _files(corpus), lambda: _ids(folder, corpus), _same),
        ("text of a run that goes on", [text],
         lambda: _goes_on(meta, corpus={"name": "text", "sha256": _sha256(folder, text)}), _same),
        ("tokenizer.json of a run that goes on", [tokenizer],
         lambda: _goes_on(meta | {"tokenizer": learnt}, tokenizer=_tokenizer(tokenizer)), _same),
    ]  # fmt: skip
    tallies = [
        _attack(name, paths, read, is_harmless, rng, count or _FLIPS)
        for name, paths, read, is_harmless in kinds
    ]
    return [*tallies, _compiled_programs(folder, count or _FLIPS, seed)]


def _attack(
    name: str,
    paths: list[Path],
    read: Read,
    is_harmless: Callable[[Any, Any], bool],
    rng: random.Random,
    count: int,
) -> Tally:
    """Flips `count` bits in each file, one at a time; a crash counts as undetected."""
    tally, expected = Tally(f"{name} ({len(paths)} files)"), read()
    for path in paths:
        whole = path.read_bytes()
        for _ in range(count):
            bit = rng.randrange(8 * len(whole))
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            where = f"{path.name} bit {bit} of {8 * len(whole)}"
            try:
                tally.note(is_harmless(expected, read()), f"{where}: read as something else")
            except ValueError as error:
                tally.note("\n" not in str(error), f"{where}: several lines")
            except Exception as error:
                tally.note(False, f"{where}: {type(error).__name__}: {error}"[:200])
        path.write_bytes(whole)
    return tally


_CHILD = """
import json, random, sys, warnings
from pathlib import Path
import jax, jax.numpy as jnp
warnings.simplefilter("ignore")
folder, count, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
jax.config.update("jax_compilation_cache_dir", str(folder))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
x = jnp.arange(64.0).reshape(8, 8)
def work(): return jax.jit(lambda x: jnp.sort(x @ x, axis=0) + jnp.cumsum(x, axis=0))(x)
expected, rng, bad = work(), random.Random(seed), []
paths = sorted(folder.glob("*-cache"))
for number in range(count):
    path = paths[number % len(paths)]
    whole = path.read_bytes()
    damaged, bit = bytearray(whole), rng.randrange(8 * len(whole))
    damaged[bit // 8] ^= 1 << bit % 8
    path.write_bytes(damaged)
    jax.clear_caches()
    try: is_good = bool((work() == expected).all())
    except Exception as error: is_good = False
    if not is_good: bad.append(f"{path.name} bit {bit}")
    path.write_bytes(whole)
print(json.dumps(bad))
"""


def _compiled_programs(folder: Path, count: int, seed: int) -> Tally:
    """JAX's compilation cache: a damaged program must be recompiled; runs in a child process."""
    tally, cache = Tally("compiled programs"), folder / "compiled"
    arguments = [sys.executable, "-c", _CHILD, str(cache), str(count), str(seed)]
    done = subprocess.run(arguments, env=environment(folder), capture_output=True, text=True)
    bad = json.loads(done.stdout) if done.returncode == 0 else [f"code {done.returncode}"] * count
    for number in range(count):
        tally.note(number >= len(bad), bad[number] if number < len(bad) else "")
    return tally


def _same(expected: Any, found: Any) -> bool:
    """Whether two trees of arrays and plain values are equal."""
    if jax.tree.structure(expected) != jax.tree.structure(found):
        return False
    pairs = zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True)
    return all(
        np.array_equal(a, b) and np.asarray(a).dtype == np.asarray(b).dtype for a, b in pairs
    )


def _results(file: Path, mark: str) -> dict[Any, bytes]:
    """The lines of a results file by key, as a resumed run reads them."""
    content, handle = file.read_bytes(), result_file.open_owned(file, mark)
    if handle is None:
        return {}
    with handle:
        lines = result_file.scan_lines(handle, file)
        return {key: content[offset : offset + size] for key, offset, size in lines}


def _last_redone(expected: dict[Any, bytes], found: dict[Any, bytes]) -> bool:
    """Whether the results are equal, or only the last, which is then repeated, is missing."""
    return list(found.items()) in (list(expected.items()), list(expected.items())[:-1])


def _unheard(line: str) -> None:
    """Ignores messages about a damaged checkpoint."""


def _files(folder: Path) -> list[Path]:
    """The non-empty files in a folder."""
    return [p for p in sorted(folder.rglob("*")) if p.is_file() and p.stat().st_size]


def _sharded(folder: Path) -> Path:
    """A sharded corpus of a few documents."""
    source, out = folder / "documents.jsonl", folder / "shards"
    source.write_text("".join(json.dumps({"text": f"{n} {TEXT[:200]}"}) + "\n" for n in range(30)))
    code = shard.main(
        [str(source), "--out", str(out), "--shards", "2", "--workers", "1", "--held-out", "0.2"]
    )
    assert code == 0, f"exit code {code}"
    return out


def _ids(folder: Path, corpus: Path) -> list[np.ndarray]:
    """All ids of a sharded corpus."""
    found = load_corpus(corpus, seq_len=16, cache_dir=folder / "cache")
    parts = [rows for rows in (found.train_rows, found.val_rows) if isinstance(rows, TokenShards)]
    ids = [np.zeros(len(rows), np.int32) for rows in parts]
    for rows, all_ids in zip(parts, ids, strict=True):
        rows.read_into(all_ids, 0)
    return ids


def _sha256(folder: Path, text: Path) -> str:
    """The digest by which a run identifies its text."""
    return load_corpus(text, seq_len=16, cache_dir=folder / "flipped").sha256


def _tokenizer(path: Path) -> dict[str, Any]:
    """The tokenizer as a run stores it; ValueError if it is invalid."""
    return make_tokenizer(str(path), TEXT).to_json()


def _goes_on(saved: dict[str, Any], **changed: Any) -> dict[str, Any]:
    """The identity with which a saved run continues; ValueError if the run is refused."""
    meta = {"own": {}} | saved | changed
    check_same_run(meta, saved)
    return meta


def _tokens(folder: Path) -> list[bytes]:
    """The token files; ValueError if a file is damaged."""
    paths = sorted((folder / "tokens").glob("*.npy"))
    if not all(map(is_intact, paths)):
        raise ValueError("a token file is damaged")
    return [path.read_bytes() for path in paths]
