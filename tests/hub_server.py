"""A hub on this machine: the model API, files with ranges behind a redirect to another origin, and faults to switch on.

``HubServer`` answers what ``huggingface_hub`` asks: ``/api/models/NAME[/revision/REV]`` and ``/NAME/resolve/REV/FILE``. Large
files (here: safetensors) are redirected to a second port, as the real hub redirects to its content network.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from star_elastic.checkpoint import onepass
from star_elastic.remote import mirror
from star_elastic.remote.hub import Patience

MOST_HASHED = 2**30
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Fetched:
    """A request for the content of a file."""

    name: str
    start: int
    stop: int
    authorization: str | None = None


@dataclass
class Faults:
    """What goes wrong, and how often; each is counted down as it happens.

    Attributes:
        busy_listing: the API answers 503.
        busy: a file answers 503.
        drop: sends half of a range and closes the connection.
        short: declares and sends fewer bytes than asked for.
        shifted: sends the wrong range, and says so in Content-Range.
        refuse_range: answers 416.
        gzip: claims an encoding.
        corrupt: name of a file of which one byte differs from what was hashed.
        no_ranges: sends whole files only.
        expire_after: an address of the content network answers 403 after so many requests; 0 for never.
        stall: takes a request for a file and never answers.
        stall_midway: sends half of a range, and then nothing, on a connection that stays open.
        stall_listing: the API takes a request and never answers.
        wait: called before each range is sent.
    """

    busy_listing: int = 0
    busy: int = 0
    drop: int = 0
    short: int = 0
    shifted: int = 0
    refuse_range: int = 0
    gzip: int = 0
    corrupt: str = ""
    no_ranges: bool = False
    expire_after: int = 0
    stall: int = 0
    stall_midway: int = 0
    stall_listing: int = 0
    wait: Callable[[], None] = lambda: None


@dataclass
class HubServer:
    """Serves one folder as one model; a context manager.

    Attributes:
        folder: what is served.
        name: under which name.
        commit: the commit that its main branch points to.
        gated: whether files are only given to those who send the token.
        token: the token.
        faults: what goes wrong.
        fetched: content that was asked for, in order.
        redirected: files for which the hub was asked where they lie, in order.
    """

    folder: Path
    name: str = "org/tiny"
    commit: str = COMMIT
    gated: bool = False
    token: str = "hf_secret"
    faults: Faults = field(default_factory=Faults)
    fetched: list[Fetched] = field(default_factory=list)
    redirected: list[str] = field(default_factory=list)

    def __enter__(self) -> HubServer:
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._uses: list[int] = []
        self._servers = [_Server(("127.0.0.1", 0), _handler(self)) for _ in range(2)]
        for server in self._servers:
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()

    @property
    def url(self) -> str:
        """Its endpoint."""
        return f"http://127.0.0.1:{self._servers[0].server_port}"

    @property
    def content_url(self) -> str:
        """Where large files lie."""
        return f"http://127.0.0.1:{self._servers[1].server_port}"

    def strikes(self, fault: str) -> bool:
        """Whether a counted fault happens now."""
        with self._lock:
            left = getattr(self.faults, fault)
            setattr(self.faults, fault, max(0, left - 1))
            return left > 0

    def new_address(self, file: str) -> str:
        """Where a large file lies, for some requests."""
        with self._lock:
            self.redirected.append(file)
            self._uses.append(0)
            return f"{self.content_url}/content/{file}?ticket={len(self._uses) - 1}"

    def admits(self, ticket: int) -> bool:
        """Whether an address is still good; counts its use."""
        with self._lock:
            self._uses[ticket] += 1
            return not self.faults.expire_after or self._uses[ticket] <= self.faults.expire_after

    def stall(self) -> None:
        """Hold a connection open until the end."""
        self._closing.wait(60)

    def listing(self) -> dict[str, object]:
        """The answer of the model API."""
        return {"id": self.name, "sha": self.commit, "siblings": [self._sibling(path) for path in self._files()]}

    def _files(self) -> list[Path]:
        return sorted(path for path in self.folder.rglob("*") if path.is_file())

    def _sibling(self, path: Path) -> dict[str, object]:
        if path.stat().st_size > MOST_HASHED:  # a hole, of which nobody reads all
            lfs = {"sha256": "0" * 64, "size": path.stat().st_size, "pointerSize": 130}
            return {"rfilename": str(path.relative_to(self.folder)), "size": path.stat().st_size, "lfs": lfs}
        content = path.read_bytes()
        told: dict[str, object] = {
            "rfilename": str(path.relative_to(self.folder)),
            "size": len(content),
            "blobId": hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest(),
        }
        if path.suffix == ".safetensors":
            told["lfs"] = {"sha256": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
        return told

    def content(self, name: str, start: int, stop: int) -> bytes:
        """The bytes that are sent of a file; past its end there are none."""
        path = self.folder / name
        with path.open("rb") as file:
            file.seek(start)
            content = bytearray(file.read(stop - start))
        if name == self.faults.corrupt and stop >= path.stat().st_size:
            content[-1] ^= 1
        return bytes(content)


def use(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it this process's hub, ask for exact ranges of small units, and do not wait long."""
    from huggingface_hub import constants, file_download

    template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    for module in (constants, file_download):
        if hasattr(module, "HUGGINGFACE_CO_URL_TEMPLATE"):
            monkeypatch.setattr(module, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(onepass, "GAP_BYTES", 0)
    monkeypatch.setattr(onepass, "UNIT_BYTES", 4096)
    monkeypatch.setattr(mirror, "HEADER_GUESS", 16)
    monkeypatch.setattr(mirror, "PATIENCE", Patience(tries=4, wait=0.001, timeout=5))
    monkeypatch.setattr(mirror, "IMPATIENCE", Patience(tries=3, wait=0.001, timeout=5))


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, address: object) -> None:
        """Say nothing of those who hang up, as all do in the end."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, address)  # type: ignore[arg-type]


def _handler(hub: HubServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # a body after its head would wait for 40 ms

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            path = unquote(urlsplit(self.path).path)
            if path.startswith("/content/"):
                if not hub.admits(int(urlsplit(self.path).query.removeprefix("ticket="))):
                    return self._fail(403)
                return self._send_file(path.removeprefix("/content/"))
            if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
                return self._send_listing(found[1], found[2])
            if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                return self._resolve(found[1], found[2], found[3])
            return self._fail(404, "EntryNotFound")

        def _send_listing(self, name: str, revision: str | None) -> None:
            if hub.strikes("stall_listing"):
                return hub.stall()
            if hub.strikes("busy_listing"):
                return self._fail(503)
            if name != hub.name:
                return self._fail(401, None if self._known() else "RepoNotFound")
            if revision not in (None, "main", hub.commit):
                return self._fail(404, "RevisionNotFound")
            return self._send(200, json.dumps(hub.listing()).encode(), {"Content-Type": "application/json"})

        def _known(self) -> bool:
            return self.headers.get("Authorization") == f"Bearer {hub.token}"

        def _resolve(self, name: str, commit: str, file: str) -> None:
            if hub.gated and not self._known():
                return self._fail(401, "GatedRepo")
            if name != hub.name or commit != hub.commit or not (hub.folder / file).is_file():
                return self._fail(404, "EntryNotFound")
            if file.endswith(".safetensors"):
                return self._send(302, b"", {"Location": hub.new_address(file)})
            return self._send_file(file)

        def _send_file(self, name: str) -> None:
            size = (hub.folder / name).stat().st_size
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            start, stop = (int(asked[1]), int(asked[2]) + 1) if asked else (0, size)
            hub.fetched.append(Fetched(name, start, stop, self.headers.get("Authorization")))
            large = name.endswith(".safetensors")
            if large:
                hub.faults.wait()
                if hub.strikes("stall"):
                    return hub.stall()
                if hub.strikes("busy"):
                    return self._fail(503)
                if hub.strikes("refuse_range") or stop > size:
                    return self._fail(416)
            if asked is None or hub.faults.no_ranges:
                return self._send(200, hub.content(name, 0, size), {}, drop=large and hub.strikes("drop"))
            if large and start > 0 and hub.strikes("shifted"):
                start, stop = start - 1, stop - 1
            headers = {"Content-Range": f"bytes {start}-{stop - 1}/{size}"}
            if large and hub.strikes("gzip"):
                headers["Content-Encoding"] = "gzip"
            if large and hub.strikes("short"):
                stop -= 1
            return self._send(206, hub.content(name, start, stop), headers, drop=large and hub.strikes("drop"))

        def _send(self, status: int, body: bytes, headers: dict[str, str], drop: bool = False) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            try:
                if status == 206 and len(body) > 1 and hub.strikes("stall_midway"):
                    self.wfile.write(body[: len(body) // 2])
                    hub.stall()
                self.wfile.write(body[: len(body) // 2] if drop else body)
            except (BrokenPipeError, ConnectionResetError):  # who asked has heard enough
                drop = True
            if drop:
                self.close_connection = True

        def _fail(self, status: int, code: str | None = None) -> None:
            self._send(status, b"{}", {"X-Error-Code": code} if code else {})

    return Handler
