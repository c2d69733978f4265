"""Training text: UTF-8 files, JSON, built-in corpora, and the held-out split."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import http.client
import importlib
import json
import os
import sysconfig
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dlm_jax.data.tokenizers import utf8
from dlm_jax.store.files import check_regular, write_whole


def default_cache_dir() -> Path:
    """The directory `$DLM_JAX_CACHE`, or `~/.cache/dlm_jax` if the variable is not set."""
    return Path(os.path.expanduser(os.environ.get("DLM_JAX_CACHE") or "~/.cache/dlm_jax"))


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

    def check_plain(self, remedy: str) -> None:
        """Raises ValueError with the remedy for a prompt or a conversation."""
        if self.prompt is not None or self.messages:
            what = "is a conversation" if self.messages else "has a prompt"
            raise ValueError(
                f"{self.name} {what}, which rows of packed text separate from its response; "
                f"{remedy}"
            )


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
    conversation: ``{"messages": [{"role": ROLE, "content": TEXT}, ...]}``. Texts to train on (of a
    response, a text, an assistant's turn) must not be empty. If the name ends in ``.json``,
    `content` is a list of such objects.
    """
    if is_json(name):
        records = _loads(name, content)
        if not isinstance(records, list):
            raise ValueError(f"{name} is not a list of records; write one, or rename it to .jsonl")
        for number, record in enumerate(records, 1):
            yield _document(f"{name} record {number}", record)
        return
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            yield parse_line(f"{name} line {number}", line)


def parse_line(where: str, line: str) -> Document:
    """The document in one line in the format of `read_jsonl`, with the name `where`."""
    return _document(where, _loads(where, line))


def _loads(where: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{where} is not JSON ({error}); write one object per line in a .jsonl file, or a "
            "list of objects in a .json file"
        ) from None


def _document(where: str, data: Any) -> Document:
    fields = set(data) if isinstance(data, dict) else set()
    if fields == {"messages"}:
        return _conversation(where, data["messages"])
    if fields not in ({"text"}, {"prompt", "response"}):
        raise ValueError(
            f"{where} has the fields {', '.join(sorted(fields))[:100] or 'none'}; expected "
            '{"prompt": ..., "response": ...}, {"text": ...} or {"messages": [...]}'
        )
    for field, text in data.items():
        _check_text(f"{where}: {field}", text, is_answer=field != "prompt")
    return Document(where, data.get("text") or data["response"], data.get("prompt"))


def _conversation(where: str, messages: Any) -> Document:
    if not isinstance(messages, list):
        raise ValueError(f"{where}: messages is not a list of turns")
    answers = []
    for number, turn in enumerate(messages, 1):
        at = f"{where}, message {number}"
        if not (isinstance(turn, dict) and turn.keys() == {"role", "content"}):
            raise ValueError(f'{at} is not {{"role": ..., "content": ...}}')
        if turn["role"] not in ROLES:
            role = f"{turn['role']!r:.60}"
            raise ValueError(f"{at}: role={role} is unknown; use one of {', '.join(ROLES)}")
        is_answer = turn["role"] == "assistant"
        _check_text(f"{at}: content", turn["content"], is_answer=is_answer)
        answers += [turn["content"]] * is_answer
    if not answers or messages[0]["role"] == "assistant":
        raise ValueError(
            f"{where} does not begin with another role, or has no message of the assistant; add it "
            "or delete the line"
        )
    return Document(where, "\n\n".join(answers), messages=tuple(messages))


def _check_text(what: str, value: Any, *, is_answer: bool) -> None:
    """Raises ValueError for a value that is no text, or for an empty answer."""
    if not isinstance(value, str):
        raise ValueError(f"{what} is not a text; write a string")
    try:
        utf8(value)
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None
    if is_answer and not value:
        raise ValueError(f"{what} is empty; add it or delete the line")


SHAKESPEARE = "tinyshakespeare"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"


def read_shakespeare() -> str:
    """The text of Tiny Shakespeare, from `tinyshakespeare.txt` in the cache (`default_cache_dir`),
    or downloaded there.

    The digest is verified, so that results on this corpus are comparable; another file in the cache
    is downloaded again.
    """
    cached = default_cache_dir() / f"{SHAKESPEARE}.txt"
    with contextlib.suppress(OSError):
        data = cached.read_bytes()
        if hashlib.sha256(data).hexdigest() == SHAKESPEARE_SHA256:
            return data.decode()
    try:
        with urllib.request.urlopen(_URL, timeout=30.0) as response:
            data = response.read()
        if hashlib.sha256(data).hexdigest() != SHAKESPEARE_SHA256:
            raise OSError("its sha256 is another")
    except (OSError, http.client.HTTPException) as error:
        raise ValueError(
            f"{SHAKESPEARE} cannot be loaded from {_URL} ({error}); put the file at {cached}, or "
            "pass its path: --data.source path/to/input.txt"
        ) from None
    with contextlib.suppress(OSError):
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_whole(cached, data)
    return data.decode()


BUILTIN_CORPUS = "python-reference"
PYTHON_SOURCE = "python-source"

Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


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
    documents = [one for name in sorted(NAMED.keys() & {*patterns}) for one in NAMED[name]()]
    paths: dict[Path, Path] = {}
    for pattern in patterns:
        if pattern not in NAMED:
            paths |= {path.resolve(): path for path in match_files(pattern)}
    for path in sorted(paths.values()):
        documents += documents_in(str(path), _read(path))
    if not documents:
        raise ValueError(f"{describe(source)}: there is no text; pass files with text")
    return tuple(documents)


def documents_in(name: str, content: str) -> Iterable[Document]:
    """The documents in the content of a file; none if it is empty."""
    if is_json_lines(name) or is_json(name):
        return read_jsonl(name, content)
    return [Document(name, content)] if content else []


def join_documents(documents: Sequence[Document]) -> str:
    """The text of all documents in order, separated by blank lines."""
    parts = [document.text.rstrip("\r\n") for document in documents[:-1]]
    return "\n\n".join([*parts, documents[-1].text])


def split_text(text: str, held_out: float, *, name: str = "the text") -> tuple[str, str]:
    """Splits `text` into training text and held-out text, which is the end of `text`.

    The text is cut at the last line start that holds out at least the fraction `held_out`, but at
    most twice that fraction. If there is no such line start, the text is cut within a line.
    """
    size = _num_held_out(name, len(text), held_out)
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
    size = _num_held_out(f"{name} with data.layout=documents", len(documents), held_out)
    return documents[:-size], documents[-size:]


def _num_held_out(what: str, count: int, held_out: float) -> int:
    if not 0.0 < held_out < 1.0:
        raise ValueError(f"held_out={held_out} is outside (0, 1); 0.05 holds out 5%")
    if count < 2:
        raise ValueError(f"{what} is one piece, of which no part can be held out; use more text")
    return min(max(1, round(count * held_out)), count - 1)


def describe(source: Source) -> str:
    """A short description of `source` for messages."""
    patterns = names_of(source)
    shown = ", ".join(patterns[:3])
    return shown if len(patterns) <= 3 else f"{shown} and {len(patterns) - 3} more"


def names_of(source: Source) -> list[str]:
    several = [source] if isinstance(source, str | os.PathLike) else source
    return [os.fspath(pattern) for pattern in several]


def match_files(pattern: str) -> list[Path]:
    """The files of a path or a glob; `**` matches nested folders."""
    path = Path(os.path.expanduser(pattern))
    if path.is_dir():
        raise ValueError(
            f"{pattern} is a directory; pass its files, such as {path / '**' / '*.txt'}"
        )
    check_regular(path)
    if path.exists():
        return [path]
    files = [Path(name) for name in glob.glob(str(path), recursive=True) if os.path.isfile(name)]
    if not files:
        raise ValueError(
            f"{pattern} does not exist; pass a path, a glob or the built-in corpus "
            f"{BUILTIN_CORPUS!r}"
        )
    return files


def _read(path: Path) -> str:
    try:
        return decode(str(path), path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; make it readable") from None


def decode(where: str, data: bytes) -> str:
    """The text of bytes in UTF-8, without a byte-order mark; an error names `where`."""
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(f"{where} is not UTF-8 ({error}); convert or remove it") from None


def _builtin_documents() -> list[Document]:
    """Topics of the language reference that ships with CPython, sorted by name.

    Topics copy parts of longer topics, so a fifth of the text occurs twice, and a bound on held-out
    text would partly measure memorisation. A topic is therefore dropped if at least half of its
    text, in paragraphs of more than 40 characters, occurs in longer topics.
    """
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    seen: set[str] = set()
    documents: list[Document] = []
    for name in sorted(topics, key=lambda name: (-len(topics[name]), name)):
        paragraphs = [part for part in topics[name].split("\n\n") if len(part) > 40]
        copied = sum(len(part) for part in paragraphs if part in seen)
        if 2 * copied < sum(map(len, paragraphs)):
            documents.append(Document(f"{BUILTIN_CORPUS}:{name}", topics[name].strip("\n") + "\n"))
            seen.update(paragraphs)
    return sorted(documents, key=lambda document: document.name)


# Directories of the standard library to skip: tests (some are not UTF-8), installed packages, and
# the language reference, which is a separate corpus.
_NO_SOURCE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data"}


def _python_source() -> list[Document]:
    """Modules of the standard library, sorted by path, without tests and installed packages."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = (path.relative_to(root) for path in sorted(root.rglob("*.py")))
    paths = [path for path in paths if _NO_SOURCE.isdisjoint(path.parts[:-1])]
    texts = ((path, _read(root / path)) for path in paths)
    return [Document(f"{PYTHON_SOURCE}:{path.as_posix()}", text) for path, text in texts if text]


NAMED: dict[str, Callable[[], list[Document]]] = {
    BUILTIN_CORPUS: _builtin_documents,
    PYTHON_SOURCE: _python_source,
    SHAKESPEARE: lambda: [Document(SHAKESPEARE, read_shakespeare())],
}
"""Corpora that are identified by name, independently of the working directory."""
