"""Adds the pages of benchmarks/results/ and the notebooks of examples/ to the site.

This is a hook of mkdocs. Notebooks are scripts in jupytext's percent format. Pages link to files of
the repository; links are rewritten for the site, where the results are next to the pages of docs/.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
EXAMPLES = ROOT / "examples"


def on_files(files: Any, config: Any) -> Any:
    """The files of the site, with the pages and pictures of the results and the examples."""
    from mkdocs.structure.files import File

    for path in sorted(RESULTS.iterdir()):
        if path.suffix in (".md", ".png"):
            where = f"results/{path.name}"
            files.append(File.generated(config, where, abs_src_path=str(path)))
    for path in sorted(EXAMPLES.glob("*.py")):
        text = notebook(path.read_text(encoding="utf-8"))
        files.append(File.generated(config, f"examples/{path.stem}.md", content=text))
    return files


def notebook(script: str) -> str:
    """A script in percent format as Markdown, with text cells as text and code cells as blocks."""
    parts = []
    for cell in script.split("# %%")[1:]:
        head, _, body = cell.partition("\n")
        if "[markdown]" in head:
            lines = [line.removeprefix("#").removeprefix(" ") for line in body.strip().splitlines()]
            parts.append("\n".join(lines))
        else:
            parts.append(f"```python\n{body.strip()}\n```")
    return "\n\n".join(parts) + "\n"


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The text of a page with links that are valid on the site."""
    is_result = page.file.src_uri.startswith("results/")
    return (
        markdown.replace("](../../docs/", "](../")
        if is_result
        else markdown.replace("](../benchmarks/results/", "](results/")
    )
