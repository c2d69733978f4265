"""Malicious files and extreme settings: each must give a correct result or one line with the cause.

`dlm_jax.load` reads published directories with their safetensors headers, tokenizers and chat
templates; ``sample.py`` reads request files; `dlm_jax.generate` gets settings at the limits of
their ranges. A case fails if it causes a traceback, an error other than ValueError, an error of
several lines, a hang, or non-finite text.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import resource
import shutil
import signal
import struct
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import dlm_jax
from benchmarks.attacks.report import ROOT, Tally, environment

sys.path.insert(0, str(ROOT / "tests"))

import published_cases as cases  # noqa: E402
import toy  # noqa: E402
import toy_model  # noqa: E402

from dlm_jax.batch.request_file import Line, RequestFile  # noqa: E402
from dlm_jax.batch.runner import run_requests  # noqa: E402
from dlm_jax.hf import chat  # noqa: E402
from dlm_jax.model.transformer import build  # noqa: E402
from dlm_jax.sampling.rules import BUILT_IN  # noqa: E402
from dlm_jax.settings import ABOVE_ZERO, FINITE, INT_LIMIT, Setting  # noqa: E402

_SECONDS = 120
_MEMORY = 12 << 30
_JUNK: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, 10**20, float("nan"), float("inf"), "", "x", "\ud800", [], [[]], {},
    [None], {"a": None}, 2**31, -(2**63),
)  # fmt: skip
_DEEP = b'{"a":' * 50_000 + b"1" + b"}" * 50_000

Case = tuple[str, Callable[[], Any]]


def run(folder: Path, count: int | None, seed: int) -> list[Tally]:
    """Runs all cases, or `count` random cases; returns one tally per kind."""
    os.environ.update(environment(folder))
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, resource.RLIM_INFINITY))
    made: dict[str, list[Case]] = {
        "safetensors headers": list(_headers(folder)),
        "config.json and what else a directory says": list(_described(folder)),
        "tokenizer.json": list(_tokenizers(folder)),
        "chat templates": list(_templates(folder)),
    }
    if count is not None:
        rng, total = random.Random(seed), sum(map(len, made.values()))
        made = {
            name: rng.sample(some, max(1, len(some) * count // total))
            for name, some in made.items()
        }
    tallies = []
    for name, some in made.items():
        tally = Tally(name)
        refused = sum(_note(tally, case) for case in some)
        print(f"    {name}: {refused} refused, {len(some) - refused} done", file=sys.stderr)
        tallies.append(tally)
    return [*tallies, _settings(count, seed), _lines(folder)]


def _note(tally: Tally, case: Case, seconds: int | None = _SECONDS) -> bool:
    """Runs a case and records the result; returns whether the case was refused."""
    name, attempt = case

    def late(number: int, frame: object) -> None:
        raise TimeoutError(f"it takes longer than {seconds} s")

    previous = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds or 0)
    try:
        attempt()
    except ValueError as error:
        text = str(error)
        tally.note(0 < len(text) < 4000 and "\n" not in text, f"{name}: {text[:300]!r}")
        return True
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        tally.note(False, f"{name}: {type(error).__name__}: {str(error)[:300]!r}")
        return True
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
    tally.note(True, name)
    return False


def _directory(folder: Path, change: Callable[[Path], Any], family: str = "llada") -> Case:
    """A case that loads a published directory with a change."""

    def attempt() -> None:
        directory = folder / "published"
        shutil.rmtree(directory, ignore_errors=True)
        cases.write(directory, family)
        change(directory)
        model = dlm_jax.load(directory)
        leaves = [np.asarray(leaf, np.float32) for leaf in _leaves(model.params)]
        if model.chat is not None:
            model.chat.ids([{"role": "user", "content": "hi"}])
        del leaves

    return "", attempt


def _leaves(tree: Any) -> list[Any]:
    return [x for v in tree.values() for x in _leaves(v)] if isinstance(tree, dict) else [tree]


def _named(name: str, case: Case) -> Case:
    return name, case[1]


def _headers(folder: Path) -> Iterator[Case]:
    """Safetensors files with wrong headers, and wrong indices."""
    file = "model-00001-of-00002.safetensors"

    def header(change: Callable[[dict[str, Any], str], Any]) -> Callable[[Path], None]:
        def put(directory: Path) -> None:
            whole = (directory / file).read_bytes()
            size = int.from_bytes(whole[:8], "little")
            said = json.loads(whole[8 : 8 + size])
            first = next(name for name in said if name != "__metadata__")
            text = change(said, first)
            raw = text if isinstance(text, bytes) else json.dumps(said).encode()
            rest = whole[8 + size :]
            (directory / file).write_bytes(struct.pack("<Q", len(raw)) + raw + rest)

        return put

    def raw(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
        def put(directory: Path) -> None:
            (directory / file).write_bytes(change((directory / file).read_bytes()))

        return put

    for key in ("dtype", "shape", "data_offsets"):
        for value in (*_JUNK, "F64", "I8", "F8_E4M3", [-1, 4], [0, 0], [10**18, 10**18], [0, 2**64],
                      [1] * 5000, [2**62, 2], [0.5, 1], ["0", "4"], [True, True]):  # fmt: skip

            def change(said: Any, first: str, key: str = key, value: Any = value) -> None:
                said[first][key] = value

            yield _named(f"{key}={str(value)[:40]}", _directory(folder, header(change)))
    for value in _JUNK:
        for what, change in {
            "entry": lambda said, first, value=value: said.__setitem__(first, value),
            "header": lambda said, first, value=value: json.dumps(value).encode(),
            "metadata": lambda said, first, value=value: said.update(__metadata__=value),
        }.items():
            yield _named(f"{what} {value!r}", _directory(folder, header(change)))
    for size in (0, 1, 2**63, 2**64 - 1, 10**8, 99_999_999):
        yield _named(f"size {size}", _directory(
            folder, raw(lambda data, size=size: struct.pack("<Q", size) + data[8:])))  # fmt: skip
    for name, changed in {
        "empty": lambda data: b"", "seven bytes": lambda data: data[:7],
        "eight": lambda data: data[:8], "cut": lambda data: data[:-1], "more": lambda d: d + b"x",
        "zeros": lambda data: bytes(len(data)),
        "deep": lambda data: struct.pack("<Q", len(_DEEP)) + _DEEP,
        "brackets": lambda data: struct.pack("<Q", 10**6) + b"[" * 10**6,
        "no UTF-8": lambda data: data[:8] + b"\xff" + data[9:],
        "digits": lambda data: struct.pack("<Q", 6000) + b'{"a":' + b"9" * 5994 + b"}",
        "spaces": lambda data: struct.pack("<Q", 10**7) + b" " * 10**7,
        "two keys": lambda data: _doubled(data),
        "overlap": lambda data: _overlapping(data),
    }.items():  # fmt: skip
        yield _named(f"file {name}", _directory(folder, raw(changed)))
    index = "model.safetensors.index.json"
    for value in (*_JUNK, "../x.safetensors", "/etc/passwd", "no.safetensors", "a\0.safetensors"):

        def weight_map(directory: Path, value: Any = value) -> None:
            said = json.loads((directory / index).read_text())
            said["weight_map"] = dict.fromkeys(said["weight_map"], value)
            (directory / index).write_text(json.dumps(said))

        yield _named(f"weight_map to {value!r}", _directory(folder, weight_map))

        def index_of(directory: Path, value: Any = value) -> None:
            (directory / index).write_text(json.dumps({"weight_map": value}))

        yield _named(f"index {value!r}", _directory(folder, index_of))
    yield _named("index deep", _directory(folder, lambda d: (d / index).write_bytes(_DEEP)))
    yield _named("weights not finite", _directory(folder, _not_finite))


def _doubled(data: bytes) -> bytes:
    """A header that lists a tensor twice, with different offsets."""
    size = int.from_bytes(data[:8], "little")
    said = json.loads(data[8 : 8 + size])
    first = next(name for name in said if name != "__metadata__")
    text = json.dumps(said)[:-1] + f", {json.dumps(first)}: {json.dumps(said[first])}}}"
    return struct.pack("<Q", len(text)) + text.encode() + data[8 + size :]


def _overlapping(data: bytes) -> bytes:
    """A header in which a tensor has the offsets of another tensor of the same shape."""
    size = int.from_bytes(data[:8], "little")
    said = json.loads(data[8 : 8 + size])
    shapes: dict[str, str] = {}
    for name, entry in said.items():
        if name == "__metadata__":
            continue
        other = shapes.setdefault(str(entry["shape"]), name)
        entry["data_offsets"] = said[other]["data_offsets"]
    text = json.dumps(said).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + size :]


def _not_finite(directory: Path) -> None:
    made = cases.tensors("llada", cases.CONFIGS["llada"])
    first = next(iter(made))
    made[first][...] = np.nan
    for old in directory.glob("*.safetensors*"):
        old.unlink()
    cases.write_weights(directory, made, 1)


def _described(folder: Path) -> Iterator[Case]:
    """Every field of config.json with junk, and the other files replaced by junk."""
    for family in cases.CONFIGS:
        for key in (*cases.CONFIGS[family], *cases.IDS):
            for value in _JUNK if family == "llada" else random.Random(key).sample(_JUNK, 4):

                def change(directory: Path, key: str = key, value: Any = value) -> None:
                    path = directory / "config.json"
                    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))

                yield _named(f"{family} {key}={value!r}", _directory(folder, change, family))
    junk = [json.dumps(value).encode() for value in _JUNK]
    junk += [b"", b"\xff\xfe", b"{", _DEEP, b"[" * 10**5, b"9" * 5000, b'{"a": 1, "a": 2}', b"\0"]
    for file in ("config.json", "generation_config.json", "tokenizer_config.json", "vocab.json",
                 "chat_template.jinja", "model.safetensors.index.json"):  # fmt: skip
        for content in junk:
            yield _named(f"{file} {content[:20]!r}", _directory(
                folder, lambda d, f=file, c=content: (d / f).write_bytes(c)))  # fmt: skip
    for key in ("mask_token_id", "eos_token_id", "pad_token_id", "bos_token_id", "temperature",
                "top_p", "top_k", "repetition_penalty", "max_new_tokens", "steps"):  # fmt: skip
        for value in _JUNK:
            yield _named(f"generation_config {key}={value!r}", _directory(
                folder, lambda d, k=key, v=value: (d / "generation_config.json").write_text(
                    json.dumps({k: v}))))  # fmt: skip
    for key in ("mask_token", "eos_token", "pad_token", "bos_token", "chat_template",
                "added_tokens_decoder"):  # fmt: skip
        for value in _JUNK:
            yield _named(f"tokenizer_config {key}={value!r}", _directory(
                folder, lambda d, k=key, v=value: (d / "tokenizer_config.json").write_text(
                    json.dumps({k: v}))))  # fmt: skip


def _tokenizers(folder: Path) -> Iterator[Case]:
    """Each part of tokenizer.json replaced by junk."""
    good = json.loads(cases.tokenizer_json())
    for key in good:
        for value in (*_JUNK, {"type": "x"}, {"type": None}, [{"id": -1}], [{"id": 2**40}]):
            yield _named(f"{key}={value!r}", _directory(
                folder, lambda d, k=key, v=value: (d / "tokenizer.json").write_text(
                    json.dumps(good | {k: v}))))  # fmt: skip
    for content in (b"", b"{", _DEEP, b"\xff", b"[" * 10**5, json.dumps(good).encode()[:-9]):
        yield _named(f"whole {content[:20]!r}", _directory(
            folder, lambda d, c=content: (d / "tokenizer.json").write_bytes(c)))  # fmt: skip


def _templates(folder: Path) -> Iterator[Case]:
    """Templates that loop, grow, nest, fail, or access forbidden objects."""
    loops = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"
    for source in (
        loops, loops.replace("{% endfor %}{% endfor %}", "{{ i }}{% endfor %}{% endfor %}"),
        "{% for i in range(10**9) %}{% endfor %}", "{{ 'a' * 10**9 }}", "{{ 'a' * 10**12 }}",
        "{{ [0] * 10**10 }}", "{{ 10 ** 10000000000 }}", "{{ 2 ** 64 ** 5 }}", "{{ 10 ** 9999 }}",
        "{{ 'a' | center(10**10) }}", "{{ '%10000000000d' % 1 }}",
        "{{ '{:9999999999}'.format(1) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ " + "(" * 9999 + ")" * 9999 + " }}",
        "{{ " + "-" * 9999 + "1 }}", "{% if 1 %}" * 999 + "{% endif %}" * 999,
        "{{ " + "[" * 90 + "]" * 90 + " }}", "{{ a.b.c }}", "{{ messages[9].role }}",
        "{% set n = namespace(x='a') %}{% for i in range(99) %}"
        "{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{{ ''.__class__.__mro__ }}", "{{ cycler.__init__.__globals__ }}", "{{ lipsum(9**9) }}",
        "{% include 'x' %}", "{% import 'x' as y %}", "{{ raise_exception('a\\nb') }}", "{{ 1/0 }}",
        "{% for x in messages recursive %}{{ loop([x]) }}{% endfor %}", "{{ '\\ud800' }}", "\0", "",
        "{{ messages | tojson(indent=10**9) }}", "{{ 'x' | indent(10**10) }}", "{{ {}|xmlattr }}",
        "{{ messages|map(attribute='__class__')|list }}", "{{ (range(99999)|list) * 99999 }}",
        "{{ 'a' | replace('', 'b' * 10**6) | replace('', 'c' * 10**6) }}", "{%", "{{",
        "{# ", "{{ }}",
        "{{ 'a'|format(*range(99999)) }}", "{{ range(99999)|batch(1)|list|string }}",
        "{{ 'x'.join(range(99999)|map('string')) }}", "{{ [[]]|sum(start=1) }}", "{{ 1 if }}",
    ):  # fmt: skip
        for file in ("chat_template.jinja", "tokenizer_config.json"):

            def put(directory: Path, file: str = file, source: str = source) -> None:
                text = source if file.endswith("jinja") else json.dumps({"chat_template": source})
                (directory / file).write_text(text)

            name, attempt = _named(f"{file} {source[:50]!r}", _directory(folder, put))
            yield name, _bounded(attempt)


def _bounded(attempt: Callable[[], Any]) -> Callable[[], Any]:
    """The attempt with a shorter time limit for templates, so that hundreds run in minutes."""

    def shorter() -> Any:
        kept, chat._SECONDS = chat._SECONDS, 2.0
        try:
            return attempt()
        finally:
            chat._SECONDS = kept

    return shorter


def _ends(setting: Setting) -> Iterator[Any]:
    """The limits of a setting's range, values just outside the range, and the choices."""
    if setting.choices is not None:
        yield from setting.choices
    elif setting.kind is bool:
        yield from (True, False)
    elif setting.is_list:
        yield from (
            (),
            [],
            (0,),
            (2**31,),
            (-1,),
            "x",
            {0: 1e9},
            {0: -np.inf},
            {0: np.nan},
            (0,) * 999,
        )
    elif setting.kind in (int, float):
        is_int = setting.kind is int
        limit = INT_LIMIT if is_int else FINITE
        low, high = max(setting.low, -limit), min(setting.high, limit)
        for end in (low, high):
            yield int(end) if is_int else end
        step = 1 if is_int else np.inf
        yield int(low) - 1 if is_int else float(np.nextafter(low, -step))
        yield int(high) + 1 if is_int else float(np.nextafter(high, step))
        yield from (0, 1, -1) if is_int else (0.0, -0.0, 1.0, ABOVE_ZERO, 1e-45, 1e-38, 1e-30)
        yield from (0.5, 3e38, -3e38, float("nan"), float("inf"), 10**400, np.float32(0.5))
    else:
        yield from ("", "x", "(", "a{9999}", "(a*)*b", "\ud800", ".*", "[" * 999)


def _model() -> dlm_jax.Model:
    """A small model with all heads and rows of 8 tokens, so that every rule applies."""
    size = toy_model.TOKENIZER.vocab_size
    network = build(toy.config(vocab_size=size, add_sampler_head=True, add_critic_head=True))
    return dataclasses.replace(
        toy_model.MODEL, network=network, params=toy.random_params(network), max_length=8
    )


def _extremes() -> Iterator[dict[str, Any]]:
    """Each setting at its limits, by itself and with the rules that read it; extreme canvases."""
    base = {"prompt": "A ", "gen_length": 4, "steps": 4}
    for name, setting in BUILT_IN.settings.items():
        for value in _ends(setting):
            yield base | {name: value}
    owners = {"order": BUILT_IN.commit, "fill": BUILT_IN.fill, "remask": BUILT_IN.remask}
    for selector, table in owners.items():
        for choice, cls in table.items():
            for setting in cls.settings():
                for value in _ends(setting):
                    yield base | {selector: choice, setting.name: value}
    vocab = toy_model.TOKENIZER.vocab_size
    every = dict.fromkeys(range(vocab), -np.inf)
    for bias in (every, {k: every[k] for k in list(every)[1:]}):
        yield base | {"logit_bias": bias}
        yield base | {"logit_bias": bias, "temperature": 0.0}
    tiny = {"temperature": 1e-30, "top_p": 1e-45, "min_p": 1.0, "top_k": 1, "typical_p": 1e-45}
    for fill in BUILT_IN.fill:
        yield base | tiny | {"fill": fill}
        yield base | {"temperature": FINITE, "fill": fill}
        yield base | {"logit_bias": {1: 1e9, 2: -1e9}, "fill": fill}
    for length in range(10):
        prompt = {"prompt": "A cat ra"[:length]}
        for gen_length in (0, 1, 8 - length, 9 - length, 8, INT_LIMIT):
            yield base | prompt | {"gen_length": gen_length, "steps": 1}
        for size in (1, length, length + 1):
            yield base | prompt | {"gen_length": 0, "steps": 1, "max_length": size}
    for tokens in (
        [],
        [0],
        [0] * 8,
        [0] * 9,
        [-1],
        [vocab],
        [2**31],
        [toy_model.TOKENIZER.mask_id],
    ):
        yield {"tokens": tokens, "gen_length": 0, "steps": 1}


def _settings(count: int | None, seed: int) -> Tally:
    """Runs rows of extreme settings; each must finish with allowed tokens or be refused."""
    tally, model = Tally("extremes of settings"), _model()
    asked = list(_extremes())
    if count is not None:
        asked = random.Random(seed).sample(asked, min(count, len(asked)))
    lines = [Line(number, number, settings) for number, settings in enumerate(asked, 1)]
    kept = _Kept()
    _note(tally, ("all of them", lambda: run_requests(model, lines, kept, batch_size=8)), None)
    refused = 0
    for line in lines:
        result = kept.found.get(line.id, {"error": "\nno result"})
        error = result.get("error")
        if error is not None:
            refused += 1
            is_good = bool(error) and "\n" not in error and "status" not in result
        else:
            given = len(line.settings.get("prompt", ""))
            new = result["tokens"][given:] if "tokens" not in line.settings else []
            result["text"].encode()
            is_good = not {*new} & {*model.banned_ids} and result["status"] != "non_finite"
        tally.note(is_good, f"{str(line.settings)[:200]}: {str(result)[:300]}")
    print(f"    extremes: {refused} refused, {len(lines) - refused} done", file=sys.stderr)
    return tally


class _Kept:
    """Results by id."""

    def __init__(self) -> None:
        self.done: set[Any] = set()
        self.found: dict[Any, dict[str, Any]] = {}

    def write(self, result: Any) -> None:
        """Stores a result; the id must be new."""
        assert result["id"] not in self.found
        self.found[result["id"]] = dict(result)


def _lines(folder: Path) -> Tally:
    """Mixes malicious request lines with valid lines; each must have a result or an error."""
    tally = Tally("lines of requests")
    long = b"a" * 100_000_000
    bad = [
        b'{"prompt": "' + long + b'"}', b'{"prompt": "\xff' + long[:999] + b'"}', _DEEP,
        b'{"tokens": [' + b"1," * 10**6 + b"1]}", b'{"x": ' + b"9" * 10**6 + b"}", b"[" * 10**6,
        b'{"prompt": "\\ud800"}', b'{"prompt": "\\udc00\\ud800"}', b'{"id": "\\ud800"}',
        b'{"prompt": "A", "prompt": "A"}', b'{"logit_bias": {"1": 1, "1": 2}}', b"nan", b"NaN",
        b'{"temperature": NaN}', b'{"temperature": 1e999}', b'{"steps": 1e3}', b'{"seed": -0.0}',
        b'{"\\u0000": 1}', b"\0", b"\xef\xbb\xbf{}", b'{"prompt": "\\u0000"}', b"{}{}", b"{},",
        b'{"id": "' + b"i" * 10**6 + b'", "x": 1}', b'{"' + b"k" * 10**6 + b'": 1}', b'{"a":1,}',
        b'{"id": null}', b'{"id": ' + b"1" * 5000 + b"}", b'{"template": "' + b"<hole:1>" * 10**5 +
        b'"}', b'{"logit_bias": {"1": ' + b"9" * 400 + b'}, "chain": ["bias"]}',
        b'{"chain": ["' + b"x" * 10**6 + b'"]}', b'{"structure": "' + b"(" * 10**5 + b'"}',
    ]  # fmt: skip
    bad += [
        json.dumps({name: value}).encode()
        for name in (*BUILT_IN.settings, "prompt", "tokens", "template", "draft", "infill",
                     "max_length", "seed", "id")
        for value in ({"a": {}}, [[[]]], [None], {"": ""}, "\udfff")
    ]  # fmt: skip
    good = [b'{"id": "good %d", "prompt": "A ", "gen_length": 3, "steps": 1}' % n for n in (1, 2)]
    path = folder / "hurt.jsonl"
    path.write_bytes(b"\n".join([good[0], *bad, good[1]]) + b"\n")
    kept = _Kept()
    found = kept.found

    def attempt() -> None:
        lines = list(RequestFile(path, known=[*BUILT_IN.settings, "infill"]))
        run_requests(_model(), lines, kept, batch_size=8)
        tally.note(len(lines) == len(found) == len(bad) + 2, f"{len(found)} of {len(bad) + 2}")

    _note(tally, ("lines", attempt), None)
    for name in ("good 1", "good 2"):
        tally.note(found.get(name, {}).get("status") == "done", f"{name}: {found.get(name)}")
    for id_, result in found.items():
        if str(id_).startswith("good"):
            continue
        text = result.get("error", "")
        is_told = "\n" not in text and len(text) < 2000 and (text or result["status"] == "done")
        tally.note(bool(is_told), f"{str(id_)[:40]}: {text[:300]!r}, {len(text)} characters")
    return tally
