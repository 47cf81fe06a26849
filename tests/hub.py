"""A model hub on this machine, with a tiny model or data set under each name that configs ship.

It answers what `huggingface_hub`, `datasets` and `transformers` ask huggingface.co. Processes reach
it as a mirror (HF_ENDPOINT), and as their proxy for all other sites, which it notes and refuses: so
a request past the mirror is seen.
"""

import hashlib
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

RENAMED = {"roberta-large": "FacebookAI/roberta-large"}
"""Old name of a model -> its name, to which the hub redirects."""
TOKEN = "hf_granted"
"""To whom gated repositories are open."""
API = re.compile(
    r"/api/(?P<kind>models|datasets)/(?P<name>[^/]+(/[^/]+)??)"
    r"(/(?P<verb>revision|tree|paths-info|auth-check)(/(?P<revision>[^/]+)(/(?P<path>.+))?)?)?"
)
FILE = re.compile(
    r"/(?P<kind>datasets/)?(?P<name>[^/]+(/[^/]+)??)/resolve/(?P<revision>[^/]+)/(?P<path>.+)"
)
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
    """A folder that is served, as it is when it is first asked for."""

    name: str
    folder: Path

    @cached_property
    def files(self) -> dict[str, bytes]:
        found = sorted(file for file in self.folder.rglob("*") if file.is_file())
        return {file.relative_to(self.folder).as_posix(): file.read_bytes() for file in found}

    @cached_property
    def commit(self) -> str:
        return hashlib.sha1(json.dumps([self.listed(n) for n in self.files]).encode()).hexdigest()

    def digest(self, path: str) -> str:
        """Of a file, as git has it."""
        content = self.files[path]
        return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()

    def listed(self, path: str) -> dict[str, Any] | None:
        """A file or folder, as the hub lists it."""
        if path in self.files:
            size = len(self.files[path])
            return {"type": "file", "path": path, "size": size, "oid": self.digest(path)}
        if any(name.startswith(f"{path}/") for name in self.files):
            return {"type": "directory", "path": path, "size": 0, "oid": "0" * 40}
        return None

    def tree(self, path: str, recursive: bool) -> list[dict[str, Any] | None]:
        """Everything below a folder, or its entries."""
        start = f"{path}/" if path else ""
        below = [name for name in self.files if name.startswith(start)]
        folders = {str(p) for name in below for p in Path(name).parents if str(p).startswith(start)}
        entries = sorted({*below, *folders} - {".", path})
        chosen = [name for name in entries if recursive or "/" not in name.removeprefix(start)]
        return [self.listed(name) for name in chosen]


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
    _resumed: Event = field(default_factory=Event)
    _known: dict[Path, Repository] = field(default_factory=dict)

    def __enter__(self) -> "Hub":
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.hub = self
        Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.resume()
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
        if not folder.is_dir():
            return None
        return self._known.setdefault(folder, Repository(name, folder))

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
        self._resumed.set()
        self._resumed = Event()

    def wait(self) -> None:
        """Until the repositories answer again."""
        self._resumed.wait()


class _Server(ThreadingHTTPServer):
    hub: Hub

    def handle_error(self, *_: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # a client may leave
            super().handle_error(*_)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def log_message(self, *_: Any) -> None:
        pass

    def do_CONNECT(self) -> None:
        self._send(403, {"error": "past the mirror"})
        self.close_connection = True

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        asked = FILE.fullmatch(path) or API.fullmatch(path)
        if asked is None or "://" in self.path:
            self._refuse(404, "EntryNotFound", "Not found")
        elif asked["name"] in RENAMED:
            now = self.path.replace(asked["name"], RENAMED[asked["name"]], 1)
            self._send(307, headers={"Location": now})
        else:
            kind = (asked["kind"] or "models").strip("/")
            found = self.server.hub.repository(kind, asked["name"])
            if found is None:  # which the hub says of private ones, too
                self._refuse(401, "RepoNotFound", "Invalid username or password.")
            elif found.name in self.server.hub.silent:
                self._be_silent()
            elif "verb" not in asked.groupdict():
                self._send_file(found, asked["path"])
            elif asked["verb"] == "tree":
                self._send_tree(found, asked["path"] or "")
            elif asked["verb"] == "paths-info":
                self._send_paths(found, body)
            elif asked["verb"] != "auth-check":
                self._send_info(found)
            elif self._is_open(found):
                self._send(200, {})

    do_HEAD = do_POST = do_GET

    def _send_info(self, found: Repository) -> None:
        sizes = "blobs" in self._query
        siblings = [
            {"rfilename": name} | ({"size": len(content)} if sizes else {})
            for name, content in found.files.items()
        ]
        gated = "manual" if found.name in self.server.hub.gated else False
        at = "2026-01-01T00:00:00.000Z"
        self._send(200, {
            "_id": "0", "id": found.name, "modelId": found.name, "sha": found.commit,
            "private": False, "gated": gated, "disabled": False, "tags": [], "downloads": 0,
            "likes": 0, "lastModified": at, "createdAt": at, "siblings": siblings,
        })  # fmt: skip

    @property
    def _query(self) -> Mapping[str, list[str]]:
        return parse_qs(urlsplit(self.path).query)

    def _send_tree(self, found: Repository, path: str) -> None:
        if path and found.listed(path) is None:
            self._refuse(404, "EntryNotFound", "Entry not found")
        else:
            recursive = self._query.get("recursive", ["false"])[0].lower() in ("true", "1")
            self._send(200, found.tree(path, recursive))

    def _send_paths(self, found: Repository, body: bytes) -> None:
        form = "json" not in self.headers.get("Content-Type", "")
        paths = parse_qs(body.decode()).get("paths", []) if form else json.loads(body)["paths"]
        listed = map(found.listed, [paths] if isinstance(paths, str) else paths)
        self._send(200, [entry for entry in listed if entry])

    def _is_open(self, found: Repository) -> bool:
        """Whether the client may read files; if not, it is told why."""
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if found.name not in self.server.hub.gated or token == TOKEN:
            return True
        why = "you are not in the authorized list" if token else "you must be authenticated"
        text = f"Access to model {found.name} is restricted: {why}."
        self._refuse(403 if token else 401, "GatedRepo", text)
        return False

    def _send_file(self, found: Repository, path: str) -> None:
        if not self._is_open(found):
            return
        header, content = {"X-Repo-Commit": found.commit}, found.files.get(path)
        if content is None:
            self._refuse(404, "EntryNotFound", "Entry not found", header)
            return
        header |= {"ETag": f'"{found.digest(path)}"', "Accept-Ranges": "bytes"}
        status, start, end = 200, 0, len(content)
        if asked := self._range:
            status, start, end = 206, int(asked[1]), min(end, int(asked[2] or end) + 1)
            header["Content-Range"] = f"bytes {start}-{end - 1}/{len(content)}"
        whole = self.command == "HEAD"
        stop = None if whole else self.server.hub.stalls.get(f"{found.name}/{path}")
        if stop is not None:
            self.server.hub.silent.add(found.name)
        self._send(status, content[start:end], header, stop)
        if stop is not None:
            self._be_silent()

    def _be_silent(self) -> None:
        self._note(0)
        if self.server.hub.hangs:
            self.server.hub.wait()
        self.close_connection = True

    def _refuse(
        self, status: int, code: str, why: str, headers: Mapping[str, str] | None = None
    ) -> None:
        said = {"X-Error-Code": code, "X-Error-Message": why}
        self._send(status, {"error": why}, said | dict(headers or {}))

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
