"""A hub on this machine that takes commits: the few calls that ``huggingface_hub`` makes to push a folder, without Xet."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_secret"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class PushServer:
    """Keeps one branch per repository; a context manager.

    Attributes:
        repos: repository -> whether it is private.
        branches: repository and branch -> files by name.
        large: large files by SHA-256.
        uploads: number of large files that were sent.
        refuse_uploads: number of large files that are refused before any is taken.
        refuse: status that every call is answered with; 0 answers properly.
        warning: what the check of a card warns of.
    """

    repos: dict[str, bool] = field(default_factory=dict)
    branches: dict[tuple[str, str], dict[str, bytes]] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    uploads: int = 0
    refuse_uploads: int = 0
    refuse: int = 0
    warning: str = ""

    def __enter__(self) -> PushServer:
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        """Its endpoint."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def upload(self, oid: str, content: bytes) -> bool:
        """Take a large file; False refuses it."""
        with self._lock:
            if self.refuse_uploads:
                self.refuse_uploads -= 1
                return False
            assert hashlib.sha256(content).hexdigest() == oid
            self.large[oid] = content
            self.uploads += 1
            return True

    def commit(self, repo: str, branch: str, lines: list[dict[str, Any]]) -> None:
        """Apply the operations of a commit."""
        files = self.branches.setdefault((repo, branch), {})
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.large[value["oid"]]


def git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _handler(hub: PushServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *_: object) -> None:
            pass

        def do_PUT(self) -> None:
            oid = self.path.rpartition("/")[2]
            taken = hub.upload(oid, self._body())
            self._answer(200 if taken else 403, {} if taken else {"error": "no more room"})

        def do_GET(self) -> None:
            self._answer(200, {"id": "a/b", "sha": COMMIT, "siblings": []})

        def do_POST(self) -> None:
            body, path = self._body(), unquote(urlsplit(self.path).path)
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self._answer(401, {"error": "Invalid username or password."})
            if hub.refuse:
                return self._answer(hub.refuse, {"error": "no"})
            if path == "/api/repos/create":
                return self._create(json.loads(body))
            if path == "/api/validate-yaml":
                return self._validate(json.loads(body)["content"])
            if found := re.fullmatch(r"/api/models/(.+?/.+?)/branch/(.+)", path):
                hub.branches.setdefault((found[1], found[2]), {})
                return self._answer(200, {})
            if found := re.fullmatch(r"/api/models/(.+?/.+?)/preupload/(.+)", path):
                return self._preupload(found[1], found[2], json.loads(body))
            if path.endswith(".git/info/lfs/objects/batch"):
                return self._batch(json.loads(body))
            if found := re.fullmatch(r"/api/models/(.+?/.+?)/commit/(.+)", path):
                hub.commit(found[1], found[2], [json.loads(line) for line in body.splitlines() if line])
                url = f"{hub.url}/{found[1]}/commit/{COMMIT}"
                return self._answer(200, {"commitUrl": url, "commitOid": COMMIT})
            return self._answer(404, {"error": path})

        def _create(self, asked: dict[str, Any]) -> None:
            name = f"{asked['organization']}/{asked['name']}"
            status = 409 if name in hub.repos else 200
            hub.repos.setdefault(name, bool(asked.get("private")) or asked.get("visibility") == "private")
            self._answer(status, {"url": f"{hub.url}/{name}"})

        def _validate(self, card: str) -> None:
            if "base_model: parent" in card:
                return self._answer(400, {"errors": [{"message": '"base_model" with value "parent" is not valid'}]})
            return self._answer(200, {"warnings": [{"message": hub.warning}] if hub.warning else []})

        def _preupload(self, repo: str, branch: str, asked: dict[str, Any]) -> None:
            there = hub.branches.get((repo, branch), {})
            files = []
            for file in asked["files"]:
                name = file["path"]
                large = name.endswith((".safetensors", ".gguf"))
                told = {"path": name, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
                if name in there:
                    told["oid"] = hashlib.sha256(there[name]).hexdigest() if large else git_oid(there[name])
                files.append(told)
            self._answer(200, {"files": files})

        def _batch(self, asked: dict[str, Any]) -> None:
            objects = []
            for wanted in asked["objects"]:
                told = dict(wanted)
                if wanted["oid"] not in hub.large:
                    told["actions"] = {"upload": {"href": f"{hub.url}/store/{wanted['oid']}"}}
                objects.append(told)
            self._answer(200, {"transfer": "basic", "objects": objects})

        def _body(self) -> bytes:
            if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        def _answer(self, status: int, content: dict[str, Any]) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler
