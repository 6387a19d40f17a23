"""A server on 127.0.0.1 with the part of the Hugging Face Hub's API that pushing a model needs.

Accounts, creating a repository, validation of metadata, preupload, upload by git LFS, commit.
huggingface_hub talks to it with HF_ENDPOINT, and with HF_HUB_DISABLE_XET=1.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import yaml

WRITER, READER, UNKNOWN = "hf_writer0000", "hf_reader0000", "hf_unknown0000"
"""Tokens: of an account that may write, of one that may read, of none."""

LFS_ENDINGS = (".safetensors", ".png")


@dataclass
class Repository:
    """private, files: by path, of the last commit. messages: of the commits."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)


@dataclass
class Hub:
    """The server's state. requests: "METHOD path" of each, in order."""

    endpoint: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    locked: set[str] = field(default_factory=set)
    """Organizations in which the writer may not make repositories."""


@contextmanager
def fake_hub() -> Iterator[Hub]:
    """Serve a hub until the end of the context."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        pass

    def answer(self, status: int, content: object) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if status >= 400:
            self.send_header("X-Error-Message", str(content["error"]))
        self.end_headers()
        self.wfile.write(data)

    def body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def handle_request(self) -> None:
        path = self.path.partition("?")[0]
        self.hub.requests.append(f"{self.command} {path}")
        body = self.body()
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if self.command == "PUT" and path.startswith("/storage/"):  # signed addresses, without a token
            oid = path.rpartition("/")[2]
            assert hashlib.sha256(body).hexdigest() == oid
            self.hub.objects[oid] = body
            return self.answer(200, {})
        if token not in (WRITER, READER):
            return self.answer(401, {"error": "Invalid credentials"})
        return self.api(path, body, token)

    do_GET = do_POST = do_PUT = handle_request

    def api(self, path: str, body: bytes, token: str) -> None:
        hub = self.hub
        if path == "/api/whoami-v2":
            role = "write" if token == WRITER else "read"
            orgs = [{"name": "lab"}, *({"name": name} for name in hub.locked)]
            return self.answer(200, {"name": "me", "orgs": orgs, "auth": {"accessToken": {"role": role}}})
        if path == "/api/validate-yaml":
            metadata = yaml.safe_load(json.loads(body)["content"].split("---\n")[1])
            if isinstance(metadata, dict):
                return self.answer(200, {"errors": [], "warnings": []})
            return self.answer(400, {"error": "invalid", "errors": [{"message": "no mapping"}]})
        if path == "/api/repos/create":
            content = json.loads(body)
            name = f"{content.get('organization') or 'me'}/{content['name']}"
            if content.get("organization") in hub.locked:
                return self.answer(403, {"error": "You don't have the rights to create a model there"})
            if name in hub.repositories:
                return self.answer(409, {"error": "exists", "url": f"{hub.endpoint}/{name}"})
            private = content.get("visibility") == "private" or content.get("private") is True
            hub.repositories[name] = Repository(private)
            return self.answer(200, {"url": f"{hub.endpoint}/{name}", "name": name})
        if path.endswith("/info/lfs/objects/batch"):
            objects = [
                {**each, "actions": {"upload": {"href": f"{hub.endpoint}/storage/{each['oid']}"}}}
                for each in json.loads(body)["objects"]
            ]
            return self.answer(200, {"transfer": "basic", "objects": objects})
        return self.models(path.split("/")[3:], body)

    def models(self, parts: list[str], body: bytes) -> None:
        """Answer /api/models/NAMESPACE/NAME[/ACTION/REVISION]."""
        name = "/".join(parts[:2])
        repository = self.hub.repositories.get(name)
        if repository is None:
            return self.answer(404, {"error": "Repository not found"})
        match parts[2:]:
            case []:
                content = {"id": name, "private": repository.private, "sha": "a" * 40, "siblings": [], "tags": []}
                return self.answer(200, content)
            case ["preupload", "main"]:
                files = [
                    {
                        "path": file["path"],
                        "uploadMode": "lfs" if file["path"].endswith(LFS_ENDINGS) else "regular",
                        "shouldIgnore": False,
                    }
                    for file in json.loads(body)["files"]
                ]
                return self.answer(200, {"files": files})
            case ["commit", "main"]:
                for line in body.splitlines():
                    item = json.loads(line)
                    value = item["value"]
                    match item["key"]:
                        case "header":
                            repository.messages.append(value["summary"])
                        case "file":
                            repository.files[value["path"]] = base64.b64decode(value["content"])
                        case "lfsFile":
                            repository.files[value["path"]] = self.hub.objects[value["oid"]]
                        case other:
                            return self.answer(400, {"error": f"unknown operation {other}"})
                oid = hashlib.sha1(body).hexdigest()
                return self.answer(200, {"commitUrl": f"{self.hub.endpoint}/{name}/commit/{oid}", "commitOid": oid})
            case other:
                return self.answer(404, {"error": f"no such address: {other}"})
