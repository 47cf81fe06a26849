"""A model hub on this machine, with a tiny model or data set under each name that configs ship.

It answers what `huggingface_hub`, `datasets` and `transformers` ask huggingface.co. Processes reach
it as a mirror (HF_ENDPOINT), and as their proxy for all other sites, which it notes and refuses: so
a request past the mirror is seen.
"""

import hashlib
import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

RENAMED = {"roberta-large": "FacebookAI/roberta-large"}
"""Old name of a model -> its name, to which the hub redirects."""
TOKEN = "hf_granted"  # to whom gated repositories are open
NAME = "(?P<name>[^/]+(/[^/]+)??)"
API = re.compile(
    f"/api/(?P<kind>models|datasets)/{NAME}"
    "(/(?P<verb>revision|tree|paths-info)/[^/]+(/(?P<path>.+))?)?"
)
FILE = re.compile(f"/(?P<kind>datasets)?/?{NAME}/resolve/[^/]+/(?P<path>.+)")
ELSEWHERE = ("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "SENTENCE_TRANSFORMERS_", "TORCH_HOME")
"""Beginnings of variables by which libraries find a hub and its caches."""


class Request(NamedTuple):
    """What a client asked; status 0: without an answer; `first_byte`: from where of a file."""

    method: str
    path: str
    status: int
    first_byte: int = 0


@dataclass(frozen=True)
class Repository:
    """A folder that is served, its files as they are when it is first asked for."""

    name: str
    folder: Path

    @cached_property
    def files(self) -> dict[str, bytes]:
        found = sorted(file for file in self.folder.rglob("*") if file.is_file())
        return {file.relative_to(self.folder).as_posix(): file.read_bytes() for file in found}

    @cached_property
    def commit(self) -> str:
        return digest(b"".join(self.files.values()))

    def listed(self, paths: Iterable[Path]) -> list[dict[str, Any]]:
        """Files and folders, as the hub lists them."""
        names = [path.relative_to(self.folder).as_posix() for path in paths if path.exists()]
        return [
            {"type": "file" if name in self.files else "directory", "path": name,
             "size": len(self.files.get(name, b"")), "oid": digest(self.files.get(name, b""))}
            for name in names
        ]  # fmt: skip


repository = cache(Repository)


def digest(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()


@dataclass
class Hub:
    """Serves ROOT/models/OWNER/NAME and ROOT/datasets/OWNER/NAME, inside a `with` block.

    Attributes:
        root: folder of what is served.
        gated: names of repositories whose files need a licence.
        stalls: "OWNER/NAME/FILE" -> bytes of it after which its repository stops answering.
        hangs: whether a repository that stopped answering keeps its clients waiting; else it closes
            their connections.
        requests: all so far.
    """

    root: Path
    gated: set[str] = field(default_factory=set)
    stalls: dict[str, int] = field(default_factory=dict)
    hangs: bool = False
    requests: list[Request] = field(default_factory=list)
    silent: set[str] = field(default_factory=set)

    def __enter__(self) -> "Hub":
        self._server: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.hub = self
        Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def environment(self, home: Path, offline: bool = False) -> dict[str, str]:
        """All variables of a process whose libraries keep what they fetch in `home`."""
        kept = {name: v for name, v in os.environ.items() if not name.startswith(ELSEWHERE)}
        proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"))
        return kept | dict.fromkeys(proxies, self.address) | {
            "no_proxy": "127.0.0.1", "NO_PROXY": "127.0.0.1", "HF_ENDPOINT": self.address,
            "HF_HOME": str(home), "TORCH_HOME": str(home / "torch"),
            "HF_HUB_OFFLINE": str(int(offline)),
            "HF_HUB_DOWNLOAD_TIMEOUT": "1", "HF_HUB_ETAG_TIMEOUT": "1",
            "HF_UPDATE_DOWNLOAD_COUNTS": "0",  # at another site
        }  # fmt: skip

    def repository(self, kind: str, name: str) -> Repository | None:
        folder = self.root / kind / name
        return repository(name, folder) if folder.is_dir() else None

    def fetched(self) -> Counter[str]:
        """Files whose content was sent, as "OWNER/NAME/FILE", and how often."""
        sent = (r.path for r in self.requests if r.method == "GET" and r.status in (200, 206))
        return Counter(f"{m['name']}/{m['path']}" for m in map(FILE.fullmatch, sent) if m)

    @property
    def past(self) -> set[str]:
        """Sites that were asked for past the mirror; `datasets` builds names from the mirror's."""
        sites = {r.path for r in self.requests if r.method == "CONNECT" or "://" in r.path}
        return {site for site in sites if urlsplit(self.address).netloc not in site}

    def resume(self) -> None:
        """Repositories that stopped answering answer again."""
        self.stalls.clear(), self.silent.clear()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Any

    def log_message(self, *_: Any) -> None:
        pass

    def do_CONNECT(self) -> None:
        self._send(403, {"error": "past the mirror"})
        self.close_connection = True

    def do_GET(self) -> None:
        hub: Hub = self.server.hub
        url = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        asked = FILE.fullmatch(unquote(url.path)) or API.fullmatch(unquote(url.path))
        if asked is None or url.netloc:
            self._refuse(404, "EntryNotFound", "Not found")
        elif asked["name"] in RENAMED:
            now = self.path.replace(asked["name"], RENAMED[asked["name"]], 1)
            self._send(307, headers={"Location": now})
        elif (found := hub.repository(asked["kind"] or "models", asked["name"])) is None:
            # which the hub says of private ones, too
            self._refuse(401, "RepoNotFound", "Invalid username or password.")
        elif found.name in hub.silent:
            self._be_silent()
        elif asked.re is FILE:
            self._send_file(found, asked["path"])
        elif asked["verb"] == "paths-info":  # of other releases of `datasets`
            paths = json.loads(body)["paths"] if body[0] == "{" else parse_qs(body)["paths"]
            paths = [paths] if isinstance(paths, str) else paths
            self._send(200, found.listed(found.folder / path for path in paths))
        elif asked["verb"] != "tree":
            self._send_info(found, "blobs" in url.query)
        elif (folder := found.folder / (asked["path"] or "")).is_dir():
            below = re.search("recursive=(true|1)", url.query, re.IGNORECASE)
            self._send(200, found.listed(sorted(folder.glob("**/*" if below else "*"))))
        else:
            self._refuse(404, "EntryNotFound", "Entry not found")

    do_HEAD = do_POST = do_GET

    def _send_info(self, found: Repository, sizes: bool) -> None:
        siblings = [
            {"rfilename": name, "size": len(content) if sizes else None}
            for name, content in found.files.items()
        ]
        gated = "manual" if found.name in self.server.hub.gated else False
        at = "2026-01-01T00:00:00.000Z"
        self._send(200, {
            "_id": "0", "id": found.name, "modelId": found.name, "sha": found.commit,
            "private": False, "gated": gated, "disabled": False, "tags": [], "downloads": 0,
            "likes": 0, "lastModified": at, "createdAt": at, "siblings": siblings,
        })  # fmt: skip

    def _send_file(self, found: Repository, path: str) -> None:
        hub: Hub = self.server.hub
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if found.name in hub.gated and token != TOKEN:
            self._refuse(403 if token else 401, "GatedRepo", f"{found.name} is restricted")
            return
        header, content = {"X-Repo-Commit": found.commit}, found.files.get(path)
        if content is None:
            self._refuse(404, "EntryNotFound", "Entry not found", header)
            return
        header |= {"ETag": f'"{digest(content)}"', "Accept-Ranges": "bytes"}
        status, start, end = 200, 0, len(content)
        if asked := self._range:
            status, start, end = 206, int(asked[1]), min(end, int(asked[2] or end) + 1)
            header["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
        stop = hub.stalls.get(f"{found.name}/{path}") if self.command == "GET" else None
        self._send(status, content[start:end], header, stop)
        if stop is not None:
            hub.silent.add(found.name)
            self._be_silent()

    def _be_silent(self) -> None:
        self._note(0)
        if self.server.hub.hangs:
            time.sleep(6)  # longer than a client waits
        self.close_connection = True

    def _refuse(
        self, status: int, code: str, why: str, headers: Mapping[str, str] | None = None
    ) -> None:
        said = {"X-Error-Code": code, "X-Error-Message": why, **(headers or {})}
        self._send(status, {"error": why}, said)

    @property
    def _range(self) -> re.Match[str] | None:
        return re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))

    def _note(self, status: int) -> None:
        start = int(self._range[1]) if self._range else 0
        self.server.hub.requests.append(Request(self.command, self.path, status, start))

    def _send(
        self, status: int, content: Any = b"", headers: Mapping[str, str] | None = None,
        stop: int | None = None,
    ) -> None:  # fmt: skip
        """Send bytes, or other content as JSON; `stop`: only so many bytes of them."""
        self._note(status)
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | dict(headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:stop])
            self.wfile.flush()
