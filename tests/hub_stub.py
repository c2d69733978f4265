"""A hub on loopback that answers `huggingface_hub`; its repositories are dicts of files."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Files = dict[str, bytes]


class Hub:
    """Its state.

    Attributes:
      url: of the endpoint.
      repos: files by revision by repository.
      gated: repositories whose terms nobody has accepted.
      asked: method, path and token of each request.
    """

    def __init__(self) -> None:
        self.url = ""
        self.repos: dict[str, dict[str, Files]] = {}
        self.gated: set[str] = set()
        self.asked: list[tuple[str, str, str]] = []

    def sha(self, name: str, revision: str) -> str:
        content = repr(sorted(self.repos[name][revision].items())).encode()
        return hashlib.sha1(content).hexdigest()

    def files(self, name: str, revision: str) -> Files | None:
        """Of a branch, or of the commit that it is at."""
        for branch, files in self.repos[name].items():
            if revision in (branch, self.sha(name, branch)):
                return files
        return None


def _handler(hub: Hub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            pass

        def reply(self, status: int, body: Any = b"", **headers: str) -> None:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        def lost(self, code: str, status: int = 404) -> None:
            self.reply(status, {"error": code}, X_Error_Code=code, X_Error_Message=code)

        def do_GET(self) -> None:
            self.note()
            path = self.path.partition("?")[0]
            info = re.fullmatch(r"/api/models/([^/]+/[^/]+)/(revision|tree)/([^/]+)/?", path)
            file = re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
            found = info or file
            if found is None:
                return self.reply(404, {"error": path})
            name, revision = found[1], found[3] if info else found[2]
            if name in hub.gated:
                return self.lost("GatedRepo", 403)
            if name not in hub.repos:
                return self.lost("RepoNotFound")
            files = hub.files(name, revision)
            if files is None:
                return self.lost("RevisionNotFound")
            if info and info[2] == "revision":
                branch = next(b for b, one in hub.repos[name].items() if one is files)
                siblings = [{"rfilename": one} for one in files]
                sha = hub.sha(name, branch)
                return self.reply(200, {"id": name, "sha": sha, "siblings": siblings})
            if info:
                entries = [
                    {"type": "file", "path": one, "size": len(data),
                     "oid": hashlib.sha1(data).hexdigest()}
                    for one, data in files.items()
                ]  # fmt: skip
                return self.reply(200, entries)
            assert file is not None
            if file[3] not in files:
                return self.lost("EntryNotFound")
            data = files[file[3]]
            branch = next(b for b, one in hub.repos[name].items() if one is files)
            etag = f'"{hashlib.sha1(data).hexdigest()}"'
            return self.reply(200, data, ETag=etag, X_Repo_Commit=hub.sha(name, branch))

        do_HEAD = do_GET

        def note(self) -> None:
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            hub.asked.append((self.command, self.path, token))

    return Handler


@contextlib.contextmanager
def serving_hub() -> Iterator[Hub]:
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
