"""Adds the pages of benchmarks/results/ to the site of the documentation.

A hook of mkdocs. Pages link to each other as files of the repository, and the links are rewritten
for the site, where the results lie beside the pages of docs/.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def on_files(files: Any, config: Any) -> Any:
    """The files of the site, with the pages and pictures of the results."""
    from mkdocs.structure.files import File

    for path in sorted(RESULTS.iterdir()):
        if path.suffix in (".md", ".png"):
            where = f"results/{path.name}"
            files.append(File.generated(config, where, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The text of a page with links that hold on the site."""
    is_result = page.file.src_uri.startswith("results/")
    return (
        markdown.replace("](../../docs/", "](../")
        if is_result
        else markdown.replace("](../benchmarks/results/", "](results/")
    )
