"""Training text: UTF-8 files, JSON, built-in corpora, and the held-out split.

The digest of ``tinyshakespeare`` is always verified, so that results on this corpus are comparable.
``python-reference`` is the language reference that ships with CPython (`pydoc_data.topics`), so
training on it needs no network. Topics of the reference copy parts of longer topics, so a fifth of
the text occurs twice, and a bound on held-out text would partly measure memorisation. A topic is
therefore dropped if at least half of its text occurs in longer topics.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import http.client
import importlib
import json
import os
import sysconfig
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlm_jax.data.pipeline import default_cache_dir
from dlm_jax.data.tokenizers import utf8
from dlm_jax.moved import moved
from dlm_jax.store.files import check_regular, write_whole


@dataclass(frozen=True)
class Document:
    """One document of a corpus.

    Attributes:
      name: name of the document in messages.
      text: the text to train on.
      prompt: given text before `text`, which is never noised; None for plain text.
      messages: turns of a conversation, each with ``role`` and ``content``, which a chat template
        writes; empty for other documents. `text` is then the text of the assistant's turns.
    """

    name: str
    text: str
    prompt: str | None = None
    messages: tuple[dict[str, str], ...] = ()


ROLES = ("system", "developer", "user", "assistant", "tool")


JSON_LINES = (".jsonl", ".jsonlines", ".jl", ".ndjson", ".ldjson")
"""Suffixes of files of JSON lines."""


def is_json_lines(path: str | os.PathLike[str]) -> bool:
    """Returns whether a file has one document per line, by its suffix (`JSON_LINES`)."""
    return Path(path).suffix.lower() in JSON_LINES


def is_json(path: str | os.PathLike[str]) -> bool:
    """Returns whether a file is a list of documents in JSON, by its suffix."""
    return Path(path).suffix.lower() == ".json"


def read_jsonl(name: str, content: str) -> Iterator[Document]:
    """Yields one document per line of `content`, in order; blank lines are skipped.

    A line is an object ``{"prompt": TEXT, "response": TEXT}`` or ``{"text": TEXT}``, or a
    conversation: ``{"messages": [{"role": ROLE, "content": TEXT}, ...]}``, ``{"prompt": TEXT,
    "completion": TEXT}`` or ``{"instruction": TEXT, "input": TEXT, "output": TEXT}``, whose
    ``input`` is optional. Texts to train on (of a response, a text, an assistant's turn) must not
    be empty. If the name ends in ``.json``, `content` is a list of such objects.
    """
    if not is_json(name):
        for number, line in enumerate(content.split("\n"), 1):
            if line.strip():
                yield parse_line(f"{name} line {number}", line)
        return
    remedy = "write a list of records, or rename JSON lines to .jsonl and text to .txt"
    try:
        records = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON ({error}); {remedy}") from None
    if not isinstance(records, list):
        raise ValueError(f"{name} is {_kind(records)}, not a list; {remedy}")
    for number, record in enumerate(records, 1):
        yield _document(f"{name} record {number}", record)


def parse_line(where: str, line: str) -> Document:
    """The document in one line in the format of `read_jsonl`, with the name `where`."""
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where} is not JSON: {error.msg} at column {error.colno}; write one object per line"
        ) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not readable JSON ({error}); correct it") from None
    return _document(where, data)


def _document(where: str, data: Any) -> Document:
    fields = (
        '{"prompt": ..., "response": ...} or {"text": ...}, or a conversation {"messages": [...]}, '
        '{"prompt": ..., "completion": ...} or {"instruction": ..., "output": ...}'
    )
    if not isinstance(data, dict):
        raise ValueError(f"{where} is {_kind(data)}, not an object; write {fields}")
    if data.keys() == {"messages"}:
        return _conversation(where, data["messages"])
    answers = [answer for answer, *asked in _PAIRS if data.keys() - {"input"} == {answer, *asked}]
    if not answers or ("input" in data and answers != ["output"]):
        found = ", ".join(data)[:100] or "none"
        raise ValueError(f"{where} has the fields {found}; expected {fields}")
    (answer,) = answers
    _check_texts(where, data, answer)
    if answer in ("text", "response"):
        return Document(where, data[answer], data.get("prompt"))
    asked = data["prompt"] if "prompt" in data else data["instruction"]
    asked += f"\n\n{data['input']}" if data.get("input") else ""
    turns = {"role": "user", "content": asked}, {"role": "assistant", "content": data[answer]}
    return Document(where, data[answer], messages=turns)


_PAIRS = (("text",), ("response", "prompt"), ("completion", "prompt"), ("output", "instruction"))
"""Fields of a line: the text to train on, and the text before it."""


def _conversation(where: str, messages: Any) -> Document:
    if not isinstance(messages, list):
        raise ValueError(f"{where}: messages is {_kind(messages)}; write a list of turns")
    for number, turn in enumerate(messages, 1):
        at, fields = f"{where}, message {number}", '{"role": ..., "content": ...}'
        if not isinstance(turn, dict):
            raise ValueError(f"{at} is {_kind(turn)}, not an object; write {fields}")
        if turn.keys() != {"role", "content"}:
            found = ", ".join(turn)[:100] or "none"
            raise ValueError(f"{at} has the fields {found}; expected {fields}")
        if turn["role"] not in ROLES:
            role = f"{turn['role']!r:.60}"
            raise ValueError(f"{at}: role={role} is unknown; use one of {', '.join(ROLES)}")
        _check_texts(at, turn, "content" if turn["role"] == "assistant" else None)
    answers = [turn["content"] for turn in messages if turn["role"] == "assistant"]
    if not answers:
        raise ValueError(f"{where} has no message of the assistant; add it or delete the line")
    if messages[0]["role"] == "assistant":
        raise ValueError(f"{where} begins with the assistant; put a message of the user before it")
    return Document(where, "\n\n".join(answers), messages=tuple(messages))


def _check_texts(where: str, texts: dict[str, Any], answer: str | None) -> None:
    """Raises ValueError for a value that is no text, or if the value of `answer` is empty."""
    for field, value in texts.items():
        if not isinstance(value, str):
            raise ValueError(f"{where}: {field} is {_kind(value)}; write a string")
        try:
            utf8(value)
        except ValueError as error:
            raise ValueError(f"{where}: {field}: {error}") from None
    if answer is not None and not texts[answer]:
        raise ValueError(f"{where}: {answer} is empty; add it or delete the line")


def _kind(value: Any) -> str:
    """The JSON type of `value`."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return {str: "a string", list: "a list", dict: "an object"}.get(type(value), "a number")


SHAKESPEARE = "tinyshakespeare"
_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SHAKESPEARE_PATH = "DLM_JAX_TINYSHAKESPEARE"

_NUM_BYTES = 1_115_394
_TIMEOUT_SECONDS = 30.0
_BY_PATH = "pass the path of the file instead: --data.source path/to/input.txt"


def read_shakespeare() -> str:
    """The text of Tiny Shakespeare, from `$DLM_JAX_TINYSHAKESPEARE`, the cache, or a download.

    A download is stored atomically in the cache directory (`default_cache_dir`); a damaged cached
    copy is downloaded again.
    """
    if named := os.environ.get(SHAKESPEARE_PATH):
        path = Path(os.path.expanduser(named))
        check_regular(path)
        try:
            data = path.read_bytes()
        except OSError as error:
            raise ValueError(
                f"{SHAKESPEARE_PATH}={named} cannot be read: {error.strerror}; correct or unset it"
            ) from None
        return _checked(data, f"{SHAKESPEARE_PATH}={named}")
    cached = default_cache_dir() / f"{SHAKESPEARE}.txt"
    with contextlib.suppress(OSError, ValueError):
        return _checked(cached.read_bytes(), str(cached))
    try:
        with urllib.request.urlopen(_URL, timeout=_TIMEOUT_SECONDS) as response:
            # Reading one more byte detects a response that is too long.
            data = response.read(_NUM_BYTES + 1)
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise ValueError(
            f"{SHAKESPEARE} cannot be loaded from {_URL} ({reason}); {_BY_PATH}"
        ) from None
    text = _checked(data, _URL)
    with contextlib.suppress(OSError):
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_whole(cached, data)
    return text


def _checked(data: bytes, where: str) -> str:
    digest = hashlib.sha256(data).hexdigest()
    if digest != SHAKESPEARE_SHA256:
        raise ValueError(
            f"{where}: {len(data)} bytes with the sha256 {digest[:12]}..., but {SHAKESPEARE} has "
            f"{SHAKESPEARE_SHA256[:12]}...; {_BY_PATH}"
        )
    return data.decode("utf-8")


BUILTIN_CORPUS = "python-reference"
PYTHON_SOURCE = "python-source"

Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

# Directories of the standard library to skip: tests (some are not UTF-8), installed packages, and
# the language reference, which is a separate corpus.
_NO_SOURCE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data"}

# Paragraphs of at most this many characters are ignored when copies are detected.
_MIN_COPIED = 40


def read_documents(source: Source) -> tuple[Document, ...]:
    """The documents of `source`, sorted by name, without duplicates or empty documents.

    Args:
      source: `BUILTIN_CORPUS`, `PYTHON_SOURCE` (one document per file of the standard library,
        without tests), `SHAKESPEARE` (downloaded if needed), a path or a glob (`**` matches nested
        folders), or several of these. An existing path is never treated as a glob. A file of JSON
        lines (`JSON_LINES`) contains one document per line, and a ``.json`` file a list of
        documents (see `read_jsonl`). Any other file is one document. A byte-order mark is removed;
        everything else, including line endings, is unchanged. Pipes and devices are not read.
    """
    patterns = names_of(source)
    if not patterns:
        raise ValueError(
            f"source contains no file names; pass a path, a glob or {BUILTIN_CORPUS!r}"
        )
    files: dict[Path, tuple[Path, bool]] = {}
    for pattern in patterns:
        if pattern not in NAMED:
            is_named, matches = _match(pattern)
            for path in matches:
                shown, was_named = files.get(path.resolve(), (path, False))
                files[path.resolve()] = shown, is_named or was_named
    documents = [one for name in sorted(NAMED.keys() & {*patterns}) for one in NAMED[name]()]
    for path, is_named in sorted(files.values()):
        content = _read(path)
        if is_json_lines(path) or is_json(path):
            texts = list(read_jsonl(str(path), content))
        else:
            texts = [Document(str(path), content)] if content else []
        if is_named and not texts:
            raise ValueError(f"{path} is empty; use a file with text")
        documents += texts
    if not documents:
        raise ValueError(f"{describe(source)}: all files are empty; use files with text")
    return tuple(documents)


def join_documents(documents: Sequence[Document]) -> str:
    """The text of all documents in order, separated by blank lines."""
    parts = [document.text.rstrip("\r\n") for document in documents[:-1]]
    return "\n\n".join([*parts, documents[-1].text])


def split_text(text: str, held_out: float) -> tuple[str, str]:
    """Splits `text` into training text and held-out text, which is the end of `text`.

    The text is cut at the last line start that holds out at least the fraction `held_out`, but at
    most twice that fraction. If there is no such line start, the text is cut within a line.
    """
    if len(text) < 2:
        raise ValueError(f"a text of {len(text)} characters cannot be split; use more text")
    size = _num_held_out(len(text), held_out)
    target = len(text) - size
    line_start = text.rfind("\n", 0, target) + 1
    cut = line_start if line_start >= max(1, target - size) else target
    return text[:cut], text[cut:]


def split_documents(
    documents: Sequence[Document], held_out: float, *, name: str
) -> tuple[Sequence[Document], Sequence[Document]]:
    """Splits documents into training and held-out documents, which are the last fraction
    `held_out`.
    """
    if len(documents) < 2:
        raise ValueError(
            f"{name} is one document, but whole documents are held out; use more documents or use "
            f"data.layout=windows"
        )
    size = _num_held_out(len(documents), held_out)
    return documents[:-size], documents[-size:]


def describe(source: Source) -> str:
    """A short description of `source` for messages."""
    patterns = names_of(source)
    shown = ", ".join(patterns[:3])
    return shown if len(patterns) <= 3 else f"{shown} and {len(patterns) - 3} more"


def _num_held_out(count: int, held_out: float) -> int:
    if not 0.0 < held_out < 1.0:
        raise ValueError(f"held_out={held_out} is outside (0, 1); 0.05 holds out 5%")
    return min(max(1, round(count * held_out)), count - 1)


def names_of(source: Source) -> list[str]:
    several = [source] if isinstance(source, str | os.PathLike) else source
    return [os.fspath(pattern) for pattern in several]


def _match(pattern: str) -> tuple[bool, list[Path]]:
    """Returns whether `pattern` is the path of one file, and the matching files."""
    path = Path(os.path.expanduser(pattern))
    if path.is_dir():
        raise ValueError(
            f"{pattern} is a directory; pass its files, such as {path / '**' / '*.txt'}"
        )
    check_regular(path)
    if path.exists():
        return True, [path]
    files = [Path(name) for name in glob.glob(str(path), recursive=True) if os.path.isfile(name)]
    if not files:
        problem = "matches no file" if set(pattern) & set("*?[") else "does not exist"
        advice = f"pass a path, a glob or the built-in corpus {BUILTIN_CORPUS!r}"
        raise ValueError(f"{pattern} {problem}; {moved(pattern) or advice}")
    return False, files


def _read(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read: {error.strerror}; make it readable or remove it"
        ) from error
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path} is not UTF-8: byte 0x{data[error.start]:02x} at byte offset {error.start} "
            f"(line {line}); convert the file to UTF-8 or remove it"
        ) from None
    return text.removeprefix("\ufeff")


def _builtin_documents() -> list[Document]:
    """Topics of the language reference, sorted by name, without copies of other topics."""
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise ValueError(
            f"the corpus {BUILTIN_CORPUS!r} needs pydoc_data, which this Python lacks; install "
            f"the complete standard library or pass text files"
        ) from error
    seen: set[str] = set()
    kept: list[Document] = []
    for name in sorted(topics, key=lambda name: (-len(topics[name]), name)):
        paragraphs = [part for part in topics[name].split("\n\n") if len(part) > _MIN_COPIED]
        copied = sum(len(part) for part in paragraphs if part in seen)
        if 2 * copied < sum(map(len, paragraphs)):
            kept.append(Document(f"{BUILTIN_CORPUS}:{name}", topics[name].strip("\n") + "\n"))
            seen.update(paragraphs)
    return sorted(kept, key=lambda document: document.name)


def _python_source() -> list[Document]:
    """Modules of the standard library, sorted by path, without tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _NO_SOURCE]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    texts = [(path.relative_to(root), _read(path)) for path in sorted(paths)]
    if not texts:
        raise ValueError(
            f"the corpus {PYTHON_SOURCE!r} needs the source of the standard library, which "
            f"{root} lacks; install it or pass text files"
        )
    return [Document(f"{PYTHON_SOURCE}:{path.as_posix()}", text) for path, text in texts if text]


NAMED: dict[str, Callable[[], list[Document]]] = {
    BUILTIN_CORPUS: _builtin_documents,
    PYTHON_SOURCE: _python_source,
    SHAKESPEARE: lambda: [Document(SHAKESPEARE, read_shakespeare())],
}
"""Corpora that are identified by name, independently of the working directory."""
