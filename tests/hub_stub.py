"""A Hugging Face Hub in memory, on 127.0.0.1: enough of its HTTP interface for huggingface_hub to push and pull.

    with HubStub() as hub:
        run(code, env=hub.environment(cache))

It supports private and gated repositories, branches, revisions, large files and deletions, and records every request
in `requests`. huggingface_hub reads HF_ENDPOINT when it is imported, so clients run in processes of their own.
"""

import base64
import hashlib
import json
import math
import os
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

READ, WRITE = "hf_read", "hf_write"  # tokens: the first may read private repositories, the second may also write
_NAME = r"((?:[\w.-]+/)?[\w.-]+)"
_REVISION = r"(refs/pr/\d+|[^/]+)"
_LARGE = (".safetensors", ".bin")


@dataclass
class Repo:
    """Files by commit; branches point to commits."""

    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        seed = repr(
            (sorted((name, hashlib.sha256(data).hexdigest()) for name, data in files.items()), len(self.commits))
        )
        commit = hashlib.sha1(seed.encode()).hexdigest()
        self.commits[commit] = files
        self.branches[branch] = commit
        return commit

    def resolve(self, revision: str) -> str | None:
        revision = self.branches.get(revision, revision)
        return revision if revision in self.commits else None


class HubStub:
    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[tuple[str, str]] = []
        self.large: dict[str, bytes] = {}
        self.ranges: list[int] = []  # the offsets at which downloads were resumed
        self.cut: int | None = None  # the next large download is cut off after so many bytes
        self.messages: list[str] = []  # of commits
        self.refused: int | None = None  # so many large uploads succeed, then all fail; None: all succeed
        stub = self

        class Handler(_Handler):
            hub = stub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "HubStub":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def environment(self, home: Path, token: str | None = None, **more: str) -> dict[str, str]:
        """Variables for a process that uses this Hub, with its cache under `home`."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))}
        mine = {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        return {**kept, **mine, "NO_PROXY": "127.0.0.1", **({"HF_TOKEN": token} if token else {}), **more}

    def add(self, name: str, directory: Path, branch: str = "main", **kwargs: Any) -> str:
        """Commit the files of a directory to a repository, which is created if necessary; returns the commit."""
        files = {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}
        return self.repos.setdefault(name, Repo(**kwargs)).commit(files, branch)

    def files(self, name: str, revision: str = "main") -> dict[str, bytes]:
        repo = self.repos[name]
        return repo.commits[repo.resolve(revision) or ""]

    def downloaded(self) -> list[str]:
        """Names of the files that were downloaded, in order."""
        found = (
            re.fullmatch(rf"/{_NAME}/resolve/[^/]+/(.+)", path) for method, path in self.requests if method == "GET"
        )
        return [match[2] for match in found if match]


class _Handler(BaseHTTPRequestHandler):
    hub: HubStub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._route("HEAD")

    def do_GET(self) -> None:
        self._route("GET")

    def do_POST(self) -> None:
        self._route("POST")

    def do_PUT(self) -> None:
        self._route("PUT")

    # -- plumbing ----------------------------------------------------------------------------------------------------

    def _route(self, method: str) -> None:
        parts = urlsplit(self.path)
        # Data sets and models share their names here.
        path = re.sub(
            r"^(?:(/api/)datasets|/datasets)/", lambda m: f"{m[1]}models/" if m[1] else "/", unquote(parts.path)
        )
        query = parse_qs(parts.query)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.requests.append((method, path))
        for verbs, pattern, work in _ROUTES:
            match = re.fullmatch(pattern, path)
            if method in verbs and match:
                work(self, *match.groups(), body=body, query=query)
                return
        self._send(404, {"error": f"the stub has no {method} {path}"})

    def _send(
        self, status: int, value: Any = None, data: bytes | None = None, upto: int | None = None, **headers: str
    ) -> None:
        payload = json.dumps(value).encode() if data is None else data
        self.send_response(status)
        if status >= 400:
            headers.setdefault("X-Error-Message", (value or {}).get("error", ""))
        for name, text in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name.replace("_", "-"), text)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(payload[:upto])

    def _token(self) -> str | None:
        return (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None

    def _repo(self, name: str) -> Repo | None:
        """The repository, if this client may read it; otherwise sends the error and returns None."""
        repo, token = self.hub.repos.get(name), self._token()
        if token not in (None, READ, WRITE):
            self._send(401, {"error": "Invalid credentials in Authorization header"})
        elif repo is None or (repo.private and token is None):
            self._send(401 if token is None else 404, {"error": "Repository not found"}, X_Error_Code="RepoNotFound")
        elif repo.gated and token is None:
            self._send(401, {"error": "Access to this model is restricted"}, X_Error_Code="GatedRepo")
        else:
            return repo
        return None

    def _may_write(self) -> bool:
        if self._token() != WRITE:
            self._send(403, {"error": "You need a token with write access"})
            return False
        return True

    # -- the interface -----------------------------------------------------------------------------------------------

    def create(self, body: bytes, **_: Any) -> None:
        if not self._may_write():
            return
        given = json.loads(body)
        name = f"{given.get('organization') or 'me'}/{given['name']}" if "/" not in given["name"] else given["name"]
        status = 409 if name in self.hub.repos else 200
        if status == 200:
            self.hub.repos[name] = Repo(private=given.get("private") or given.get("visibility") == "private")
            self.hub.repos[name].commit({".gitattributes": b""})
        self._send(status, {"url": f"{self.hub.url}/{name}", "name": name, "id": name, "error": "exists"})

    def branch(self, name: str, branch: str, **_: Any) -> None:
        repo = self._repo(name)
        if repo is None or not self._may_write():
            return
        status = 409 if branch in repo.branches else 200
        repo.branches.setdefault(branch, repo.branches["main"])
        self._send(status, {"error": "exists"})

    def preupload(self, name: str, revision: str, body: bytes, **_: Any) -> None:
        modes = [
            {"path": f["path"], "uploadMode": "lfs" if f["path"].endswith(_LARGE) else "regular", "shouldIgnore": False}
            for f in json.loads(body)["files"]
        ]
        self._send(200, {"files": modes})

    def batch(self, name: str, body: bytes, **_: Any) -> None:
        objects = [  # no upload is requested for files that are there already
            o
            if o["oid"] in self.hub.large
            else {**o, "actions": {"upload": {"href": f"{self.hub.url}/large/{o['oid']}"}}}
            for o in json.loads(body)["objects"]
        ]
        self._send(200, {"transfer": "basic", "objects": objects})

    def large(self, oid: str, body: bytes, **_: Any) -> None:
        assert hashlib.sha256(body).hexdigest() == oid
        if self.hub.refused is not None:
            if self.hub.refused == 0:
                return self._send(400, {"error": "the storage is full"})
            self.hub.refused -= 1
        self.hub.large[oid] = body
        self._send(200, {})

    def commit(self, name: str, revision: str, body: bytes, query: dict[str, list[str]], **_: Any) -> None:
        repo = self._repo(name)
        if repo is None or not self._may_write():
            return
        head = repo.resolve(revision)
        if head is None:
            self._send(404, {"error": "no such revision"}, X_Error_Code="RevisionNotFound")
            return
        files = dict(repo.commits[head])
        for line in body.decode().splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                self.hub.messages.append(value["summary"])
            if entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                files[value["path"]] = self.hub.large[value["oid"]]
            elif entry["key"] == "deletedFile":
                files.pop(value["path"], None)
        answer = {}
        if "create_pr" in query:
            number = 1 + sum(branch.startswith("refs/pr/") for branch in repo.branches)
            revision, answer["pullRequestUrl"] = f"refs/pr/{number}", f"{self.hub.url}/{name}/discussions/{number}"
        commit = repo.commit(files, revision)
        answer |= {"commitUrl": f"{self.hub.url}/{name}/commit/{commit}", "commitOid": commit, "hookOutput": ""}
        self._send(200, answer)

    def info(self, name: str, revision: str | None = None, **_: Any) -> None:
        found = self._files(name, revision or "main")
        if found is not None:
            repo, commit, files = found
            siblings = [{"rfilename": path, "size": len(data)} for path, data in files.items()]
            self._send(200, {"id": name, "sha": commit, "private": repo.private, "siblings": siblings, "tags": []})

    def tree(self, name: str, revision: str, **_: Any) -> None:
        found = self._files(name, revision)
        if found is not None:
            entries = [
                {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for path, data in found[2].items()
            ]
            self._send(200, entries)

    def _files(self, name: str, revision: str) -> tuple[Repo, str, dict[str, bytes]] | None:
        repo = self._repo(name)
        if repo is None:
            return None
        commit = repo.resolve(revision)
        if commit is None:
            self._send(404, {"error": f"Invalid rev id: {revision}"}, X_Error_Code="RevisionNotFound")
            return None
        return repo, commit, repo.commits[commit]

    def resolve(self, name: str, revision: str, path: str, **_: Any) -> None:
        found = self._files(name, revision)
        if found is None:
            return
        _, commit, files = found
        if path not in files:
            self._send(404, {"error": "Entry not found"}, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
            return
        data = files[path]
        tag = f'"{hashlib.sha256(data).hexdigest()}"'
        start = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if start:
            self.hub.ranges.append(int(start[1]))
            rest = data[int(start[1]) :]
            self._send(206, data=rest, ETag=tag, X_Repo_Commit=commit, Content_Range=f"bytes {start[1]}-/{len(data)}")
        else:
            cut = self.hub.cut if self.command == "GET" and path.endswith(_LARGE) else None
            if cut is not None:
                self.hub.cut, self.close_connection = None, True
            self._send(200, data=data, upto=cut, ETag=tag, X_Repo_Commit=commit, Accept_Ranges="bytes")

    def validate(self, body: bytes, **_: Any) -> None:
        """The rules of a card's front matter that the Hub documents (hub-docs: model cards, eval results)."""
        text = json.loads(body)["content"]
        front = yaml.safe_load(text.split("---")[1]) if text.startswith("---") else {}
        wrong = [key for key in ("license", "pipeline_tag", "library_name") if not isinstance(front.get(key, ""), str)]
        for key in ("tags", "metrics", "datasets", "language", "base_model"):
            value = front.get(key, [])
            if not all(isinstance(item, str) and item for item in (value if isinstance(value, list) else [value])):
                wrong.append(key)
        for entry in front.get("model-index", []):
            for result in entry["results"]:
                if not entry["name"] or not result["task"]["type"]:
                    wrong.append("model-index")
                if not result["dataset"]["type"] or not result["dataset"]["name"]:
                    wrong.append("model-index dataset")
                for metric in result["metrics"]:
                    if (
                        not metric["type"]
                        or not isinstance(metric["value"], int | float)
                        or math.isnan(metric["value"])
                    ):
                        wrong.append("model-index metric")
        if wrong:
            said = f"Invalid metadata in {', '.join(wrong)}"
            return self._send(400, {"error": said, "errors": [{"message": said}], "warnings": []})
        self._send(200, {"errors": [], "warnings": []})


_ROUTES: list[tuple[tuple[str, ...], str, Any]] = [
    (("POST",), "/api/repos/create", _Handler.create),
    (("POST",), "/api/validate-yaml", _Handler.validate),
    (("POST",), rf"/api/models/{_NAME}/branch/(.+)", _Handler.branch),
    (("POST",), rf"/api/models/{_NAME}/preupload/(.+)", _Handler.preupload),
    (("POST",), rf"/api/models/{_NAME}/commit/(.+)", _Handler.commit),
    (("POST",), rf"/{_NAME}\.git/info/lfs/objects/batch", _Handler.batch),
    (("PUT",), r"/large/(\w+)", _Handler.large),
    (("GET", "HEAD"), rf"/{_NAME}/resolve/{_REVISION}/(.+)", _Handler.resolve),
    (("GET",), rf"/api/models/{_NAME}/tree/{_REVISION}.*", _Handler.tree),
    (("GET",), rf"/api/models/{_NAME}/revision/{_REVISION}", _Handler.info),
    (("GET",), rf"/api/models/{_NAME}", _Handler.info),
]
