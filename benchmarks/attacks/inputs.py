"""Bad flags, settings and files: each must be refused in one line with the right exit code.

The code is 2, or 6 for valid input that does not fit into memory.

The programs run in this process, so that hundreds take a minute; limits on time and memory prevent
hangs and aborts.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import random
import resource
import signal
import sys
import typing
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

import dlm_jax.config as configs
from benchmarks.attacks.report import Tally, environment, finish, flags
from dlm_jax.cli import common, evaluation, exporter, sample, server, train
from dlm_jax.cli.ends import End
from dlm_jax.data import shard
from dlm_jax.data.tokenizers import train_bpe
from dlm_jax.inference.model import Model
from dlm_jax.sampling.rules import BUILT_IN
from dlm_jax.store import load_params, save_weights

_SECONDS = 60
_MEMORY = 12 << 30
_NO_FLOATS = ("inf", "-inf", "nan", "1e400", "x", "", "1e39")
_NO_INTEGERS = (str(10**20), str(-(10**20)), str(2**63), "x", "1.5", "", "inf", "9" * 5000)
_NO_CHOICES = ("no-such", "", "\u2028")
_NO_BOOLEANS = ("maybe", "2", "")

Case = tuple[Callable[..., int], list[str]]


def run(folder: Path, count: int | None, seed: int) -> list[Tally]:
    """Runs all inputs, or `count` random inputs; returns one tally per program."""
    os.environ.update(environment(folder))
    out_dir = folder / "run"
    finish(folder, "train.py", *flags(folder, out_dir))
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, resource.RLIM_INFINITY))
    files = folder / "bad"
    files.mkdir()
    cases: dict[str, list[Case]] = {
        "train.py, keys": list(_keys(folder)),
        "train.py, files": [(train.main, case) for case in _train_files(folder, files, out_dir)],
        "sample.py, settings": [(sample.main, case) for case in _settings(out_dir)],
        "sample.py, flags and files": [(sample.main, c) for c in _sample_files(files, out_dir)],
        "evaluate, export": list(_others(files, out_dir)),
        "sharded corpora": [(shard.main, case) for case in _shards(files)],
        "serve": [(server.main, case) for case in _served(files, out_dir)],
    }
    if count is not None:
        rng = random.Random(seed)
        total = sum(map(len, cases.values()))
        cases = {
            name: rng.sample(some, max(1, len(some) * count // total))
            for name, some in cases.items()
        }
    before = _tree(folder)
    # Cache the model, because loading takes most of the time and is not attacked.
    loading, cached = common.load_model, functools.cache(common.load_model)

    def load(path: str | None, *, ignore_config: Sequence[str] = (), **options: Any) -> Model:
        return cached(path, ignore_config=tuple(ignore_config), **options)

    common.load_model = sample.load_model = evaluation.load_model = server.load_model = load
    try:
        tallies = [_attack(name, some) for name, some in cases.items()]
        tallies.append(_bad_requests(folder, out_dir))
    finally:
        common.load_model = sample.load_model = evaluation.load_model = loading
        server.load_model = loading
    left = Tally("files changed or left by refused inputs")
    left.note(_tree(folder) == before, f"{sorted(_tree(folder).items() ^ before.items())[:4]}")
    return [*tallies, left]


def _attack(name: str, cases: list[Case]) -> Tally:
    tally, codes = Tally(name), Counter[int | None]()
    for main, arguments in cases:
        code, out, err = _ended(main, arguments)
        codes[code] += 1
        # A program that runs for ten seconds first prints its progress.
        told = [line for line in err.split("\n")[:-1] if not line.startswith("sample: 0 tokens")]
        is_refused = (
            code in (End.REFUSED, End.NO_MEMORY)
            and out == ""
            and len(told) == 1
            and told[0].startswith("error: ")
            and err.endswith("\n")
        )
        shown = " ".join(part if len(part) < 60 else f"{part[:60]}..." for part in arguments[-4:])
        tally.note(is_refused, f"{name} {shown!r}: code {code}, {err[-300:]!r}")
    counts = ", ".join(f"{int(code or 0)}: {count}" for code, count in codes.items())
    print(f"    exit codes of {name}: {counts}", file=sys.stderr)
    return tally


def _bad_requests(folder: Path, out_dir: Path) -> Tally:
    """Runs a file of invalid requests; each result must have an error of one line."""
    tally, source, target = Tally("requests of a file"), folder / "cache", folder / "tokens"
    source, target = source / "bad.jsonl", target / "bad-out.jsonl"
    lines = list(_request_lines())
    source.write_bytes(b"\n".join(lines) + b"\n")
    flags = ["--checkpoint", str(out_dir), "--prompts", str(source), "--output", str(target)]
    code, _, err = _ended(sample.main, flags)
    if code != End.PARTLY or "Traceback" in err:
        tally.note(False, f"code {code}, {err[-600:]!r}")
        return tally
    rows = [json.loads(row) for row in target.read_bytes().split(b"\n") if row]
    tally.note(len(rows) == len(lines), f"{len(rows)} results of {len(lines)} requests")
    for line, row in zip(lines, rows, strict=False):
        is_told = "error" in row and "\n" not in row["error"] and "Traceback" not in row["error"]
        tally.note(is_told, f"{line[:80]!r}: {str(row)[:200]}")
    return tally


def _request_lines() -> Iterator[bytes]:
    """Lines that are not JSON, are not objects, or have impossible values."""
    yield from (
        b"{", b"[]", b"3", b"null", b"\xff", b"[" * 100_000, b"9" * 5000, b'{"prompt": 3}',
        b'{"prompt": "\\ud800"}', b'{"prompt": "\xc3\xbc"}', b'{"prompt": "a", "template": "b"}',
        b'{"tokens": [1e3]}', b'{"tokens": [1000000000000000000000000]}', b'{"tokens": [-1]}',
        b'{"tokens": "abc"}', b'{"tokens": [[1]]}', b'{"tokens": [99999]}', b'{"seed": -1}',
        b'{"seed": 4294967296}', b'{"seed": 1.5}', b'{"max_length": 0}', b'{"max_length": 9999999}',
        b'{"gen_length": 99}', b'{"gen_length": 100000000000000000000}', b'{"id": 1.5}',
        b'{"id": "line 7"}', b'{"x": 1}', b'{"draft": ""}', b'{"infill": 3}', b'{"steps": true}',
        b'{"template": "<hole:100000000000000000000>"}', b'{"logit_bias": {"x": 1}}',
        b'{"logit_bias": {"99999999999999999999": 1}}', b'{"logit_bias": {"1": NaN}}',
        b'{"logit_bias": {"1": 1e400}}', b'{"dry_breakers": [1e30]}', b'{"chain": ["x"]}',
        b'{"chain": [3]}', b'{"host_sampler": "os:environ"}', b'{"read_back": "all"}',
    )  # fmt: skip
    for name, setting in BUILT_IN.settings.items():
        if setting.annotation in (int, float):
            for value in (b"NaN", b"-Infinity", b"1e400", b'"x"', b"[]", b"{}", b"null", b"[1]"):
                yield b'{"%s": %s}' % (name.encode(), value)


def _ended(main: Callable[..., int], arguments: list[str]) -> tuple[int | None, str, str]:
    """Exit code, standard output and standard error of a program that runs in this process."""

    def late(number: int, frame: object) -> None:
        raise TimeoutError

    out, err = io.StringIO(), io.StringIO()
    previous = signal.signal(signal.SIGALRM, late)
    signal.alarm(_SECONDS)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(arguments)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    return code, out.getvalue(), err.getvalue()


def _tree(folder: Path) -> dict[str, int]:
    """Files with their sizes, except caches and temporary files of other programs."""
    found = (path for path in folder.rglob("*") if path.is_file())
    return {
        str(p): p.stat().st_size
        for p in found
        if "cache" not in p.parts and "tokens" not in p.parts
    }


def _bad_values(hint: Any) -> tuple[str, ...]:
    if hint in (int, float, bool):
        return {int: _NO_INTEGERS, float: _NO_FLOATS, bool: _NO_BOOLEANS}[hint]
    return _NO_CHOICES if typing.get_origin(hint) is typing.Literal else ()


def _keys(folder: Path) -> Iterator[Case]:
    """Every key of a config with invalid values."""
    for key, setting in configs.SETTINGS.items():
        for value in _bad_values(setting.annotation):
            yield train.main, [*flags(folder, folder / "new"), f"--{key}={value}"]
    for section, key in (("model", "depth"), ("train", "steps"), ("model", "width")):
        for value in ("0", "-1"):
            yield train.main, [*flags(folder, folder / "new"), f"--{section}.{key}={value}"]


def _train_files(folder: Path, files: Path, out_dir: Path) -> Iterator[list[str]]:
    """Configs, texts, tokenizers and models that are invalid or belong to another run."""
    base = flags(folder, folder / "new")

    def put(name: str, content: bytes) -> str:
        (files / name).write_bytes(content)
        return str(files / name)

    tomls = [
        b"[train", b"\xff\xfe", b"steps = 3", b"[train]\nsteps = '3'", b"[nothing]\nx = 1",
        b"[train]\nsteps = 3\nsteps = 4", b"[model]\ndepth = inf", b"[model]\nrope_theta = inf",
        b"[model]\nrope_theta = nan", b"train = 3", b"[data]\nsource = 3", b"[data]\nsource = []",
        b"[train]\nsteps = 100000000000000000000", b"x = " + b"[" * 50_000, b"[train]\nseed = -1",
        b"[data]\nheld_out = 1", b"[optim]\nclip = -inf",
        b"[data]\nheld_out = nan", b"[data]\nseq_len = 1", b'[train]\nout_dir = ""',
    ]  # fmt: skip
    for number, content in enumerate(tomls):
        yield [*base, "--config", put(f"{number}.toml", content)]
    nowhere = ("nowhere.toml", str(folder), "/proc/self/mem", "x" * 300, "/" + "y/" * 3000)
    for name in (*nowhere, "a\x00b"):
        yield [*base, "--config", name]
        yield [*base, "--data.source", name]
        yield [*base, "--data.tokenizer", f"{name}.json"]
        yield [*base, "--train.init_from", name]
    for size in ("", "-1", "0", "99", "99999999999", str(10**30), "1e3", "\u0663"):
        yield [*base, "--data.tokenizer", f"bpe:{size}"]
    for number, content in enumerate(_tokenizers()):
        yield [*base, "--data.tokenizer", put(f"{number}.json", content)]
    pairs = [
        b"{}", b"[]", b"null", b'{"text": 3}', b'{"text": ""}', b'{"prompt": "a"}', b"\xff", b"{",
        b'{"text": "a", "x": 1}', b'{"text": "\\ud800"}', b"[" * 100_000, b'{"text": NaN}',
        b'{"prompt": "' + b"a" * 400 + b'", "response": "b"}', b"9" * 5000,
    ]  # fmt: skip
    for number, content in enumerate(pairs):
        path = put(f"{number}.jsonl", content + b'\n{"text": "good"}\n')
        yield [*base, "--data.layout", "documents", "--data.source", path]
    for number, content in enumerate((b"", b"x", b"short", b"\xff" * 100, b"a\xc3")):
        yield [*base, "--data.source", put(f"{number}.txt", content)]
    for number, content in enumerate(_weights(files, out_dir)):
        yield [*base, "--train.init_from", put(f"init{number}.safetensors", content)]
    yield [*base, "--train.out_dir", put("a-file", b"precious")]
    yield [*base, "--train.out_dir", str(files / "a-file" / "below")]
    yield [*base, "--train.out_dir", str(files / ("z" * 300))]
    yield [*base, "--train.out_dir", "/proc/run"]
    yield [*flags(folder, out_dir), "--model.depth", "3"]
    yield [*base, "--data.cache_dir", str(files / "a-file")]
    yield [*base, "--mesh.tensor", "3"]
    yield [*base, "--model.depth", "4096", "--model.width", "131072", "--model.heads", "2"]
    yield [*base, "--train.batch_size", "1048576", "--train.accumulate", "3"]
    for flag in (
        "--train.stepz",
        "train",
        "--train.steps",
        "--",
        "--num-processes=2",
        "--process-id=1",
    ):
        yield [*base, flag]


def _tokenizers() -> Iterator[bytes]:
    good = json.loads(train_bpe("some text, some text", 262).content)
    yield from (
        b"", b"{", b"[]", b"3", b"{}", b'{"model": 3}', b'{"model": {}}', b"\xff", b"[" * 100_000,
        b'{"model": {"type": "BPE", "vocab": {}, "merges": []}}',
    )  # fmt: skip
    for number in (2**31, 2**32 - 1, 2**32, 2**64, -1, 2**22, 1.5, "x", None):
        vocab = dict(good["model"]["vocab"])
        vocab[next(iter(vocab))] = number
        yield json.dumps(good | {"model": good["model"] | {"vocab": vocab}}).encode()
        added = [{"id": number, "content": "<|mask|>", "special": True, "single_word": False,
                  "lstrip": False, "rstrip": False, "normalized": False}]  # fmt: skip
        if number != -1 and isinstance(number, int) and number >= 2**32:
            yield json.dumps(good | {"added_tokens": added}).encode()


def _weights(files: Path, out_dir: Path) -> Iterator[bytes]:
    """Weights files that are damaged, from another program, or inconsistent with their model."""
    params, meta = load_params(out_dir)
    path = files / "good.safetensors"

    def made(**changes: Any) -> bytes:
        save_weights(path, changes.get("params", params), changes.get("meta", meta))
        return path.read_bytes()

    def config(section: str, **values: Any) -> dict[str, Any]:
        old = meta["config"]
        return meta | {"config": old | {section: old[section] | values}}

    good = made()
    yield from (good[:-5], good[:7], b"", b"\xff" * 100, good + b"x", good[:8] + b"{}" + good[10:])
    for name in ("config", "tokenizer"):
        yield made(meta={key: value for key, value in meta.items() if key != name})
        for junk in (None, 3, [], "x", {}):
            yield made(meta=meta | {name: junk})
    for changed in (
        config("model", depth=1), config("model", width=32), config("model", vocab_size=7),
        config("model", depth=10**9), config("model", rope_theta=float("inf")),
        config("model", heads=3), config("model", no_such=1), config("data", seq_len=10**12),
        config("data", seq_len=-1), config("sample", temperature=-1),
        config("model", qk_norm=False),
    ):  # fmt: skip
        yield made(meta=changed)
    yield made(params=params | {"more": {"x": np.zeros(2, np.float32)}})
    yield made(params={key: value for key, value in params.items() if key != "blocks"})
    header = {"dlm_jax": json.dumps(meta), "crc32_of_file": "00000000"}
    for tensors in ({"a": np.zeros(2, np.int8)}, {"a": np.zeros(2), "a/b": np.zeros(2)}):
        yield safetensors.numpy.save(tensors, header)
        yield safetensors.numpy.save(tensors)


def _settings(out_dir: Path) -> Iterator[list[str]]:
    """Every setting of a request with invalid values."""
    for name, setting in BUILT_IN.settings.items():
        hint = setting.annotation
        for value in (*_bad_values(hint), *(("no-such",) if hint in (int, float) else ())):
            yield ["--checkpoint", str(out_dir), f"--{name.replace('_', '-')}={value}"]


def _sample_files(files: Path, out_dir: Path) -> Iterator[list[str]]:
    run = ["--checkpoint", str(out_dir)]
    for flag in ("num-samples", "max-length", "seed", "batch-size", "read-back", "max-candidates",
                 "num-processes", "process-id"):  # fmt: skip
        for value in _NO_INTEGERS:
            yield [*run, f"--{flag}={value}"]
    for value in ("os:environ", "math:pi", "json", "json:", ":x", "no_such:f", "json:dumpz",
                  "leaving:x", "failing:x", "..:x", "\u2028:x"):  # fmt: skip
        yield [*run, "--host-sampler", value]
        yield [*run, "--rules", value.split(":")[0] or "nothing.x"]
    (files / "leaving.py").write_text("raise SystemExit(0)\n")
    (files / "failing.py").write_text("1 / 0\n")
    for text in ("Z\u00fc", "\ud800", "The " * 40, "\x00"):
        yield [*run, "--prompt", text]
    for text in ("no gap", "<hole:0>", "<hole:99999999999999999999>", "<hole:x>", "< hole:3>"):
        yield [*run, "--template", text]
    yield [*run, "--max-length", "1048577"]
    yield [*run, "--max-length", "1000000"]
    yield [*run, "--trace", str(files)]
    yield [*run, "--trace", "/proc/x.html"]
    yield [*run, "--trace", str(files / "no" / "x.html")]
    for name in ("nowhere", str(files), "/proc/self/mem", "x" * 300, "/" + "y/" * 3000):
        yield ["--checkpoint", name]
        yield [*run, "--prompts", name, "--output", str(files / "o.jsonl")]
    (files / "in.jsonl").write_text('{"gen_length": 2, "steps": 1}\n')
    for name in (str(files), "/proc/out", str(files / "in.jsonl" / "x"), "/dev/null", "z" * 300):
        yield [*run, "--prompts", str(files / "in.jsonl"), "--output", name]
    for number, content in enumerate(_weights(files, out_dir)):
        path = files / f"{number}.safetensors"
        path.write_bytes(content)
        yield ["--checkpoint", str(path)]


def _shards(files: Path) -> Iterator[list[str]]:
    good, out = files / "documents.jsonl", files / "corpus"
    good.write_text("".join(f'{{"text": "document {n}"}}\n' for n in range(9)))
    run = [str(good), "--out", str(out), "--workers", "1"]
    for flag in ("shards", "workers", "sample-mb"):
        for value in (*_NO_INTEGERS, "0", "-1"):
            yield [*run, f"--{flag}={value}"]
    for value in (*_NO_FLOATS, "0", "1", "-0.1"):
        yield [*run, f"--held-out={value}"]
    for kind in ("", "no-such", "character", "bpe:", "bpe:9", "bpe:99999999999", "nowhere.json"):
        yield [*run, "--tokenizer", kind]
    for name in (str(good), str(good / "below"), "/proc/corpus", "z" * 300):
        yield [str(good), "--out", name, "--workers", "1"]
    for name in ("nowhere", str(files), "nowhere/*.txt", "", "\x00", "x" * 300):
        yield [name, "--out", str(out), "--workers", "1"]
    yield []
    yield [str(good)]


def _served(files: Path, out_dir: Path) -> Iterator[list[str]]:
    run = ["--checkpoint", str(out_dir), "--port", "0"]
    for flag in ("port", "slots", "steps-per-call", "max-waiting", "max-rows", "max-steps",
                 "max-body"):  # fmt: skip
        for value in (*_NO_INTEGERS, "-1"):
            yield [*run, f"--{flag}={value}"]
    for flag in ("max-seconds", "drain"):
        for value in (*(v for v in _NO_FLOATS if v != "1e39"), "0", "-1"):
            yield [*run, f"--{flag}={value}"]
    for name in ("nowhere", str(files), "/proc/self/mem", "x" * 300):
        yield ["--port", "0", "--checkpoint", name]
        yield [*run, "--chat-template", name]
        yield [*run, "--preset", name]
    for host in ("", "no such host", "999.999.999.999", "\u2028"):
        yield [*run, "--host", host]
    yield [*run, "--mesh.data", "3"]
    yield [*run, "--dtype", "int8"]
    yield [*run, "--no-such"]


def _others(files: Path, out_dir: Path) -> Iterator[Case]:
    run = ["--checkpoint", str(out_dir)]
    for flag in ("num-draws", "batch-size", "seed"):
        for value in (*_NO_INTEGERS, "-1"):
            yield evaluation.main, [*run, "--continuation", "The fox", f"--{flag}={value}"]
    for name in ("nowhere", str(files), "/proc/self/mem", "x" * 300):
        yield evaluation.main, [*run, "--text", name]
        yield evaluation.main, [*run, "--pairs", name]
        yield evaluation.main, [*run, "--held-out", name]
        yield exporter.main, ["--checkpoint", name, "--out", str(files / "e.safetensors")]
    for name in ("x", "x.bin", str(files), "/proc/x.safetensors", str(files / "in.jsonl" / "x")):
        yield exporter.main, [*run, "--out", name]
    yield exporter.main, [*run, "--out", str(files / "e.safetensors"), "--dtype", "int8"]
    for text in ("", "Z", "\ud800"):
        yield evaluation.main, [*run, "--continuation", text]
    (files / "e.safetensors").write_bytes(next(_weights(files, out_dir)))
    yield evaluation.main, ["--checkpoint", str(files / "e.safetensors")]
    save_weights(files / "whole.safetensors", *load_params(out_dir))
    yield evaluation.main, ["--checkpoint", str(files / "whole.safetensors")]
