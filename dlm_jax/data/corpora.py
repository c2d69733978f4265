"""Text to train on: corpora known by name, any UTF-8 files, and the split that holds some out.

The built-in corpus is the language reference that ships with CPython (`pydoc_data.topics`), so
that training needs no network. Many of its topics are copies of parts of longer ones: a fifth of
the text occurs twice, and a bound on held-out text would partly measure memory. A topic is
therefore left out when at least half of it stands in the longer topics that were kept.
"""

from __future__ import annotations

import glob
import importlib
import os
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dlm_jax.data import tinyshakespeare
from dlm_jax.data.jsonl import read_jsonl

BUILTIN_CORPUS = "python-reference"
PYTHON_SOURCE = "python-source"

Source = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]

# Folders of the standard library whose files are not its source: tests, some of which are not even
# UTF-8, what was installed, and the language reference, which is a corpus of its own.
_NO_SOURCE = {"test", "tests", "idle_test", "site-packages", "dist-packages", "pydoc_data"}

# A paragraph that occurs in two topics counts as a copy from this length (characters) on.
_MIN_COPIED = 40


@dataclass(frozen=True)
class Document:
    """One document of a corpus.

    Attributes:
      name: where it came from.
      text: what is to be learnt.
      prompt: what it answers, given to the model and never noised; None for plain text.
    """

    name: str
    text: str
    prompt: str | None = None


def read_documents(source: Source) -> tuple[Document, ...]:
    """The documents of `source`, by name, each once and none of them empty.

    Args:
      source: `BUILTIN_CORPUS`, `PYTHON_SOURCE` (a document per file of the standard library, tests
        left out), `tinyshakespeare.NAME` (downloaded if need be), a path or a glob (`**` spans
        folders), or several of these. A path that exists is taken literally, even if
        it looks like a glob. A file is one document, and one whose name ends in ``.jsonl`` a
        document per line, in its order (see `read_jsonl`). A byte-order mark is removed;
        everything else, line endings included, stays as it is.

    Raises:
      ValueError: a path or glob that matches nothing, a folder, an unreadable file, a file that is
        not UTF-8 (with the byte offset), a bad line of JSON, an empty file that was named (one
        that a glob found is passed over), nothing left at all, or Shakespeare's text neither on
        disk nor to be had.
    """
    patterns = _patterns(source)
    if not patterns:
        raise ValueError(f"source names no files; give a path, a glob or {BUILTIN_CORPUS!r}")
    named: dict[str, list[Document]] = {}
    found: dict[Path, tuple[Path, bool]] = {}
    for pattern in patterns:
        if pattern in NAMED:
            named[pattern] = NAMED[pattern]()
            continue
        is_named, matches = _match(pattern)
        for path in matches:
            shown, was_named = found.get(path.resolve(), (path, False))
            found[path.resolve()] = shown, is_named or was_named
    documents = [document for name in sorted(named) for document in named[name]]
    for path, is_named in sorted(found.values()):
        content = _read(path)
        if path.suffix == ".jsonl":
            texts = [Document(*line) for line in read_jsonl(str(path), content)]
        else:
            texts = [Document(str(path), content)] if content else []
        if texts:
            documents += texts
        elif is_named:
            raise ValueError(f"{path} is empty; give a file with text in it")
    if not documents:
        raise ValueError(f"{describe(source)}: every file found is empty; give files with text")
    return tuple(documents)


def join_documents(documents: Sequence[Document]) -> str:
    """The text of all documents in order, one blank line between two of them."""
    parts = [document.text.rstrip("\r\n") for document in documents[:-1]]
    return "\n\n".join([*parts, documents[-1].text])


def split_text(text: str, held_out: float) -> tuple[str, str]:
    """(training text, held-out text): the two together are `text`, held out is its end.

    The cut is at a line start, the nearest one that holds out at least `held_out` but at most
    twice as much; text without such a line start is cut at the character.

    Args:
      text: at least two characters.
      held_out: share of the characters to hold out, in (0, 1).

    Raises:
      ValueError: `held_out` is outside (0, 1), or `text` has fewer than two characters.
    """
    _check_share(held_out)
    if len(text) < 2:
        raise ValueError(f"a text of {len(text)} characters cannot be split; give more text")
    wanted = min(max(1, round(len(text) * held_out)), len(text) - 1)
    target = len(text) - wanted
    line_start = text.rfind("\n", 0, target) + 1
    cut = line_start if line_start >= max(1, target - wanted) else target
    return text[:cut], text[cut:]


def split_documents(
    documents: Sequence[Document], held_out: float, *, name: str
) -> tuple[Sequence[Document], Sequence[Document]]:
    """(training documents, held-out documents): whole ones, the last `held_out` of their number.

    Raises:
      ValueError: `held_out` is outside (0, 1), or there are fewer than two documents of `name`.
    """
    _check_share(held_out)
    if len(documents) < 2:
        raise ValueError(
            f"{name} is one document, and whole documents are held out; "
            "give more of them or use data.layout=windows"
        )
    wanted = min(max(1, round(len(documents) * held_out)), len(documents) - 1)
    return documents[:-wanted], documents[-wanted:]


def describe(source: Source) -> str:
    """A short name of `source` for messages."""
    patterns = _patterns(source)
    shown = ", ".join(patterns[:3])
    return shown if len(patterns) <= 3 else f"{shown} and {len(patterns) - 3} more"


def _check_share(held_out: float) -> None:
    if not 0.0 < held_out < 1.0:
        raise ValueError(f"held_out={held_out} is outside (0, 1); 0.05 holds out 5%")


def _patterns(source: Source) -> list[str]:
    several = [source] if isinstance(source, str | os.PathLike) else source
    return [os.fspath(pattern) for pattern in several]


def _match(pattern: str) -> tuple[bool, list[Path]]:
    """Whether `pattern` names one file, and the files that it stands for."""
    path = Path(os.path.expanduser(pattern))
    if path.is_dir():
        raise ValueError(f"{pattern} is a folder; name its files, such as {path / '**' / '*.txt'}")
    if path.exists():
        return True, [path]
    files = [Path(name) for name in glob.glob(str(path), recursive=True) if os.path.isfile(name)]
    if not files:
        problem = "matches no file" if set(pattern) & set("*?[") else "does not exist"
        raise ValueError(
            f"{pattern} {problem}; give a path, a glob or the built-in corpus {BUILTIN_CORPUS!r}"
        )
    return False, files


def _read(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ValueError(
            f"{path} cannot be read: {error.strerror}; make it readable or leave it out"
        ) from error
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(
            f"{path} is not UTF-8: byte 0x{data[error.start]:02x} at byte offset {error.start} "
            f"(line {line}); convert the file to UTF-8 or leave it out"
        ) from None
    return text.removeprefix("\ufeff")


def _builtin_documents() -> list[Document]:
    """Topics of the language reference, sorted by name, copies left out (see the module)."""
    try:
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    except ImportError as error:
        raise ValueError(
            f"the corpus {BUILTIN_CORPUS!r} needs pydoc_data, which this Python lacks; "
            "install the complete standard library or give text files"
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
    """Modules of the standard library, sorted by path; tests and installed packages left out."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _NO_SOURCE]
        paths += [Path(folder, name) for name in names if name.endswith(".py")]
    texts = [(path.relative_to(root), _read(path)) for path in sorted(paths)]
    if not texts:
        raise ValueError(
            f"the corpus {PYTHON_SOURCE!r} needs the source of the standard library, which "
            f"{root} lacks; install it or give text files"
        )
    return [Document(f"{PYTHON_SOURCE}:{path.as_posix()}", text) for path, text in texts if text]


NAMED: dict[str, Callable[[], list[Document]]] = {
    BUILTIN_CORPUS: _builtin_documents,
    PYTHON_SOURCE: _python_source,
    tinyshakespeare.NAME: lambda: [Document(tinyshakespeare.NAME, tinyshakespeare.read())],
}
"""Corpora by name, which mean the same from every directory."""
