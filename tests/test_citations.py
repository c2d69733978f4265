"""What code and docs cite is there: files by path, names by dots, nothing that a user lacks."""

import importlib
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent
TRACKED = [
    ROOT / name
    for name in subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\n")
    if name.endswith((".py", ".md", ".toml")) and (ROOT / name).exists()
]  # fmt: skip
PATH = re.compile(
    r"(?<![\w/.-])((?:docs|configs|benchmarks|tests|dlm_jax)/[\w/.-]*\w\.(?:py|md|toml|csv|png|html))"
)
NAME = re.compile(r"`(dlm_jax(?:\.\w+)+)`")
# Not shipped: the sources of the design, and how it was worked out.
UNKNOWN = re.compile(r"seeds/|notes/\w+\.md|\bDESIGN\b")


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_every_cited_path_exists():
    missing = {
        (str(path.relative_to(ROOT)), cited)
        for path in TRACKED
        for cited in PATH.findall(_text(path))
        if not (ROOT / cited).exists()
    }
    assert not missing


def test_nothing_is_cited_that_a_user_lacks():
    found = {
        (str(path.relative_to(ROOT)), cited)
        for path in TRACKED
        if path != Path(__file__)
        for cited in UNKNOWN.findall(_text(path))
    }
    assert not found


def test_every_cited_name_can_be_imported():
    names = {name for path in TRACKED for name in NAME.findall(_text(path))}
    assert len(names) > 20
    for name in sorted(names):
        _resolve(name)


def _resolve(name: str) -> None:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            fields = getattr(found, "__dataclass_fields__", {})
            found = fields[part] if part in fields else getattr(found, part)
        return
    raise AssertionError(f"{name} cannot be imported")
