"""Prints docs/peers.md: request fields of other servers and how they are read here.

``python -m benchmarks.peers_page > docs/peers.md``
"""

from __future__ import annotations

from dlm_jax.serving.peers import table

_HEAD = """# Request fields of other servers

The [server](serving.md) reads an alias as the field or setting next to it. A refusal names the
field that the client sent. Fields with the same name and meaning are not listed. `python -m
benchmarks.peers_page` prints this page.
"""


def page() -> str:
    """The page, with the table of the server."""
    return "\n".join([_HEAD, *table(), ""])


if __name__ == "__main__":
    print(page(), end="")
