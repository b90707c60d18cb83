"""A local mock of the Hugging Face Hub. The real huggingface_hub client can push to it and pull from it.

    with HubServer(folder, uploads="lfs") as hub:
        token = hub.add_user("me")
        hub.create_repo("me/model", private=True)
        hub.commit("me/model", {"config.json": b"{}"})          # or from a client: hub.endpoint is its HF_ENDPOINT
        hub.fail(503, path="model.safetensors", times=2)        # the next two requests for that file
        hub.files("me/model"), hub.requests

It has repositories with branches, tags and pull requests; private and gated repositories; read and write tokens;
preupload, three upload modes, commits, and downloads with ranges. It can simulate failures. All data is in memory,
except the files that hf_xet's simulator writes to ``folder``. `hub_client.py` runs the client.

The upload modes, argument ``uploads``:
  * ``regular``: each file is part of its commit. The real Hub accepts this for small text files only.
  * ``lfs``: large files are PUT first, in parts if they are larger than ``part_size``. The client must set
    HF_HUB_DISABLE_XET=1, because it does not fall back to LFS.
  * ``xet``: hf_xet writes large files to ``folder``, since the server's xet URL is ``local://``. Only hf_xet can read
    them, because their chunks are compressed.

As on the real Hub, blobs have another host name (``localhost``) than the API (``127.0.0.1``). A token that is sent to
the blobs' host has leaked. Status codes and headers follow the client's source. They were not compared with the real
Hub.
"""
import base64
import hashlib
import json
import re
import struct
import threading
import time
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Callable, Iterator, Optional, Union
from urllib.parse import parse_qs, quote, unquote, urlsplit

__all__ = ["Fault", "HubServer", "Recorded"]

LARGE = (".safetensors", ".bin", ".pth", ".npz")  # uploaded before the commit, except in the mode "regular"
UPLOADS = ("regular", "lfs", "xet")
SILENCE, CUT = "silence", "cut"


# -------------------------------------------------------------------------------------------------- data
@dataclass(frozen=True)
class File:
    """A file of one commit."""

    size: int
    sha256: str
    oid: str  # of the blob in git; a large file's blob is its pointer
    large: bool
    xet: Optional[str] = None  # hf_xet's hash of the content

    @property
    def etag(self) -> str:
        return self.sha256 if self.large else self.oid

@dataclass(frozen=True)
class Commit:
    oid: str
    title: str
    files: dict[str, File]


@dataclass
class Repository:
    id: str
    private: bool = False
    gated: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)  # name -> commit
    tags: dict[str, str] = field(default_factory=dict)

    @property
    def owner(self) -> str:
        return self.id.split("/")[0]

    def find(self, revision: str) -> Optional[Commit]:
        """Return the commit of a branch, a tag, ``refs/pr/N`` or a commit hash."""
        oid = self.branches.get(revision) or self.tags.get(revision) or revision
        return self.commits.get(oid)

    def add(self, files: dict[str, File], title: str, branch: str) -> Commit:
        parent = self.branches.get(branch, "")
        described = json.dumps([parent, title, {path: file.oid for path, file in files.items()}], sort_keys=True)
        oid = hashlib.sha1(f"{self.id} {len(self.commits)} {described}".encode()).hexdigest()
        self.commits[oid] = Commit(oid, title, files)
        self.branches[branch] = oid
        return self.commits[oid]


@dataclass
class Recorded:
    """A received request. ``status`` is 0 until a complete answer is sent."""

    method: str
    host: str
    path: str
    headers: dict[str, str]  # lower-case names
    body: bytes = b""
    status: int = 0

    @property
    def token(self) -> Optional[str]:
        return self.headers.get("authorization", "").removeprefix("Bearer ") or None


@dataclass
class Fault:
    """A simulated failure, see :meth:`HubServer.fail`."""

    what: Union[int, str]
    method: Optional[str]
    path: str
    times: Optional[int]
    after: int
    code: Optional[str]

    def concerns(self, method: str, path: str) -> bool:
        if self.times == 0 or (self.what == CUT and method == "HEAD"):  # no content to cut
            return False
        return self.method in (None, method) and re.search(self.path, path) is not None


class HubServer:
    """Serve the Hub in a thread of this process, inside a ``with`` statement. The module's docstring has an example.

    Args:
        folder: Folder of hf_xet's simulator.
        uploads: Upload mode of large files: ``regular``, ``lfs`` or ``xet``.
    """

    def __init__(self, folder: Path, uploads: str = "lfs") -> None:
        if uploads not in UPLOADS:
            raise ValueError(f"unknown uploads {uploads!r}, known are {', '.join(UPLOADS)}")
        self.folder, self.uploads = Path(folder).resolve(), uploads
        self.repositories: dict[str, Repository] = {}
        self.users: dict[str, tuple[str, str]] = {}  # token -> user, role
        self.blobs: dict[str, bytes] = {}  # SHA-256 -> content
        self.requests: list[Recorded] = []
        self.faults: list[Fault] = []
        self.lock = threading.RLock()
        self.over = threading.Event()  # ends requests that get no answer

    def __enter__(self) -> "HubServer":
        self.over.clear()
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = _Server(("127.0.0.1", 0), handler)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def storage(self) -> str:
        """URL of the blobs: the same server under another host name, which must never receive a token."""
        return f"http://localhost:{self.port}"

    # ------------------------------------------------------------------------------------ used by tests
    def add_user(self, name: str, role: str = "write") -> str:
        """Add a user and return their token; ``role`` is ``read`` or ``write``."""
        token = "hf_" + hashlib.sha256(f"{name} {role}".encode()).hexdigest()[:34]
        self.users[token] = (name, role)
        return token

    def create_repo(self, repo_id: str, private: bool = False, gated: bool = False) -> Repository:
        repository = self.repositories[repo_id] = Repository(repo_id, private, gated)
        attributes = self.store(b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n", large=False)
        repository.add({".gitattributes": attributes}, "initial commit", "main")
        return repository

    def commit(self, repo_id: str, files: dict[str, bytes], revision: str = "main", title: str = "files") -> str:
        """Add files to a branch without a client and return the commit. Create the repository if it is missing."""
        repository = self.repositories.get(repo_id) or self.create_repo(repo_id)
        head = repository.find(revision) or repository.find("main")
        stored = {path: self.store(content, path.endswith(LARGE)) for path, content in files.items()}
        return repository.add({**head.files, **stored}, title, revision).oid

    def files(self, repo_id: str, revision: str = "main") -> dict[str, Optional[bytes]]:
        """Return a revision's contents by path; None for content that only hf_xet can read."""
        return {path: self.blobs.get(file.sha256) for path, file in
                self.repositories[repo_id].find(revision).files.items()}

    def fail(
            self, what: Union[int, str], path: str = "", method: Optional[str] = None, times: Optional[int] = None,
            after: int = 0, code: Optional[str] = None,
    ) -> Fault:
        """Make requests fail until :meth:`heal`.

        Args:
            what: A status (401: bad token, 403: missing rights, 429: retry after a minute), ``"cut"`` (the connection
                ends within the content of the answer or of an upload) or ``"silence"`` (no answer).
            path: Regular expression that is searched in the path; "" matches every path. The content of large files
                comes from ``/blobs/``, not from ``/resolve/``.
            method: HTTP method; None for all.
            times: Number of requests that fail; None for all.
            after: For ``"cut"``: number of bytes that arrive.
            code: ``X-Error-Code``: RepoNotFound, RevisionNotFound, EntryNotFound or GatedRepo.
        """
        fault = Fault(what, method, path, times, after, code)
        self.faults.append(fault)
        return fault

    def heal(self) -> None:
        self.over.set()
        self.over = threading.Event()
        self.faults.clear()

    def empty(self) -> None:
        """Remove everything except the users."""
        self.heal()
        for held in (self.repositories, self.blobs, self.requests):
            held.clear()

    def leaks(self, token: str) -> list[str]:
        """Return requests with a token outside the authorization header, or in a request to another host."""
        found = []
        for request in self.requests:
            headers = " ".join(v for k, v in request.headers.items() if k != "authorization")
            if token in request.path + headers or token.encode() in request.body:
                found.append(f"{request.method} {request.path}")
            if request.token == token and request.host != urlsplit(self.endpoint).netloc:
                found.append(f"{request.method} http://{request.host}{request.path}")
        return found

    # ----------------------------------------------------------------------------------------- content
    def store(self, content: bytes, large: bool) -> File:
        sha256 = hashlib.sha256(content).hexdigest()
        self.blobs[sha256] = content
        return _file(content, sha256, len(content), large and self.uploads != "regular")

    def uploaded(self, sha256: str, size: int) -> Optional[File]:
        """Return a large file if its upload, by LFS or xet, is complete."""
        if sha256 in self.blobs and len(self.blobs[sha256]) == size:
            return _file(None, sha256, size, True)
        xet = self.xet_files().get(sha256)
        return xet and replace(_file(None, sha256, size, True), xet=xet)

    def xet_files(self) -> dict[str, str]:
        """Return ``{SHA-256: xet hash}`` of the files that hf_xet's simulator has completed."""
        shards = self.folder.glob("xet/xorbs/shards/*.mdb")
        return dict(pair for shard in sorted(shards) for pair in _files_of_shard(shard.read_bytes()))

    def take_fault(self, method: str, path: str) -> Optional[Fault]:
        with self.lock:
            for fault in self.faults:
                if fault.concerns(method, unquote(path)):
                    fault.times = fault.times and fault.times - 1
                    return fault
        return None


def _file(content: Optional[bytes], sha256: str, size: int, large: bool) -> File:
    pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()
    blob = pointer if large else content
    return File(size, sha256, hashlib.sha1(b"blob %d\0" % len(blob) + blob).hexdigest(), large)


def _files_of_shard(shard: bytes) -> Iterator[tuple[str, str]]:
    """Yield (SHA-256, xet hash) of each file in a xet shard.

    A shard consists of a header of 48 bytes and records of 48 bytes. The first record of a file contains its hash, its
    flags and its number of segments. One record per segment follows. If bit 31 of the flags is set, one verification
    record per segment comes next. If bit 30 is set, the last record begins with the SHA-256. A hash of ones ends the
    list.
    """
    size, at = 48, 48
    while shard[at:at + 32] != b"\xff" * 32:
        flags, segments = struct.unpack_from("<II", shard, at + 32)
        end = at + size * (1 + segments * (2 if flags >> 31 else 1))
        if flags >> 30 & 1:
            yield _hash(shard[end:end + 32]), _hash(shard[at:at + 32])
            end += size
        at = end


def _hash(stored: bytes) -> str:
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", stored))


# -------------------------------------------------------------------------------------------------- HTTP
class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore disconnected clients; show every other error, which is a bug of this server."""
        import sys
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class _Answer(Exception):
    """An error answer, raised anywhere while a request is handled."""

    def __init__(self, status: int, message: str, code: Optional[str] = None, **headers: str) -> None:
        super().__init__(message)
        self.status, self.message, self.headers = status, message, dict(headers)
        if code:
            self.headers["X-Error-Code"] = code


_ERRORS = {
    401: "Invalid credentials in Authorization header",
    403: "You do not have the rights for this",
    404: "Not found",
    429: "Too many requests",
    500: "Internal server error",
    503: "Service unavailable",
}

ROUTES: list[tuple[str, "re.Pattern[str]", Callable]] = []
_REPO = r"(?P<repo>[^/]+/[^/]+)"
_REV = r"(?P<revision>[^/]+)"


def route(methods: str, pattern: str) -> Callable[[Callable], Callable]:
    def keep(function: Callable) -> Callable:
        ROUTES.extend((method, re.compile(pattern), function) for method in methods.split())
        return function
    return keep


class _Handler(BaseHTTPRequestHandler):
    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def _serve(self) -> None:
        parts = urlsplit(self.path)
        self.query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        self.fault = self.hub.take_fault(self.command, parts.path)
        headers = {key.lower(): value for key, value in self.headers.items()}
        self.record = Recorded(self.command, headers.get("host", ""), self.path, headers)
        with self.hub.lock:
            self.hub.requests.append(self.record)
        try:
            self._read_body()
            self._act(parts.path)
        except _Answer as answer:
            self._error(answer)
        except OSError:
            self.close_connection = True

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _serve

    def _read_body(self) -> None:
        is_cut = self.fault and self.fault.what == CUT and self.command in ("POST", "PUT")
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            while (size := int(self.rfile.readline().split(b";")[0], 16)) > 0:
                self.record.body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            length = int(self.headers.get("Content-Length") or 0)
            self.record.body = self.rfile.read(min(length, self.fault.after) if is_cut else length)
        if is_cut:
            raise ConnectionResetError("cut")

    def _act(self, path: str) -> None:
        if self.fault and self.fault.what == SILENCE:
            self.hub.over.wait()
            raise ConnectionResetError("silence is over")
        if self.fault and isinstance(self.fault.what, int):
            more = {"Retry-After": "60"} if self.fault.what == 429 else {}
            raise _Answer(self.fault.what, _ERRORS.get(self.fault.what, "Refused"), self.fault.code, **more)
        for method, pattern, function in ROUTES:
            match = method == self.command and pattern.fullmatch(path)
            if match:
                function(self, **{key: unquote(value) for key, value in match.groupdict().items()})
                return
        raise _Answer(404, f"this Hub has no {self.command} {path}")

    @property
    def body(self) -> bytes:
        return self.record.body

    # ------------------------------------------------------------------------------------------ answers
    def send(self, status: int, content: bytes = b"", **headers: str) -> None:
        """Send an answer. A ``cut`` announces the full length and sends the first bytes only."""
        self.send_response(status)
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            content = b""
        if self.fault and self.fault.what == CUT:
            self.wfile.write(content[:self.fault.after])
            self.wfile.flush()
            raise ConnectionResetError("cut")
        self.record.status = status
        self.wfile.write(content)

    def json(self, value: Any, status: int = 200, **headers: str) -> None:
        self.send(status, json.dumps(value).encode(), Content_Type="application/json", **headers)

    def _error(self, answer: _Answer) -> None:
        self.json({"error": answer.message}, answer.status, **{"X-Error-Message": answer.message, **answer.headers})

    # ------------------------------------------------------------------------------------------- rights
    def user(self) -> Optional[tuple[str, str]]:
        """Return name and role of the user, or None without a token."""
        given = self.headers.get("Authorization")
        if given is None:
            return None
        user = self.hub.users.get(given.removeprefix("Bearer "))
        if user is None:
            raise _Answer(401, _ERRORS[401])
        return user

    def repository(self, repo: str, content: bool = False) -> Repository:
        """Return a repository that the user may see and, with ``content``, read."""
        user, found = self.user(), self.hub.repositories.get(repo)
        if found is None or (found.private and (user is None or user[0] != found.owner)):
            raise _Answer(404 if user else 401, "Repository not found", "RepoNotFound")
        if content and found.gated and (user is None or user[0] != found.owner):
            raise _Answer(403 if user else 401, f"Access to model {repo} is restricted", "GatedRepo")
        return found

    def writable(self, repo: str) -> Repository:
        found, user = self.repository(repo), self.user()
        if user is None:
            raise _Answer(401, "Invalid username or password")
        if user != (found.owner, "write"):
            raise _Answer(403, _ERRORS[403])
        return found

    def at(self, repository: Repository, revision: str) -> Commit:
        found = repository.find(revision)
        if found is None:
            raise _Answer(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return found

    def given(self) -> Any:
        return json.loads(self.body)


# ------------------------------------------------------------------------------------- the Hub as a whole
@route("GET", "/api/agent-harnesses")
def _harnesses(http: _Handler) -> None:
    http.json({"standardEnvVars": [], "harnesses": {}})


@route("POST", "/api/validate-yaml")
def _validate(http: _Handler) -> None:
    text = http.given()["content"]
    errors = [] if text.startswith("---\n") else [{"message": "the card has no metadata"}]
    http.json({"errors": errors, "warnings": []}, 400 if errors else 200)


@route("POST", "/api/repos/create")
def _create(http: _Handler) -> None:
    user, given = http.user(), http.given()
    if user is None:
        raise _Answer(401, "Invalid username or password")
    owner = given.get("organization") or user[0]
    if user != (owner, "write"):
        raise _Answer(403, _ERRORS[403])
    repo_id = f"{owner}/{given['name']}"
    existed = repo_id in http.hub.repositories
    if not existed:
        private = given.get("private", given.get("visibility") == "private")
        http.hub.create_repo(repo_id, private=bool(private))
    described = {"url": f"{http.hub.endpoint}/{repo_id}", "name": repo_id, "id": repo_id}
    if existed:
        described["error"] = "You already created this model repo"
    http.json(described, 409 if existed else 200)


# ------------------------------------------------------------------------------------------ a repository
@route("GET", f"/api/models/{_REPO}")
@route("GET", f"/api/models/{_REPO}/revision/{_REV}")
def _info(http: _Handler, repo: str, revision: str = "main") -> None:
    repository = http.repository(repo)
    commit = http.at(repository, revision)
    http.json({
        "id": repo, "modelId": repo, "sha": commit.oid, "private": repository.private,
        "gated": "manual" if repository.gated else False, "tags": [], "downloads": 0, "likes": 0,
        "siblings": [{"rfilename": path} for path in sorted(commit.files)],
    })


@route("POST", f"/api/models/{_REPO}/branch/{_REV}")
def _branch(http: _Handler, repo: str, revision: str) -> None:
    repository = http.writable(repo)
    if revision in repository.branches:
        raise _Answer(409, f"Reference refs/heads/{revision} already exists")
    start = http.given().get("startingPoint", "main") if http.body else "main"
    repository.branches[revision] = http.at(repository, start).oid
    http.json({})


# ---------------------------------------------------------------------------------------------- uploads
@route("POST", f"/api/models/{_REPO}/preupload/{_REV}")
def _preupload(http: _Handler, repo: str, revision: str) -> None:
    files = http.at(http.writable(repo), revision).files

    def mode(path: str, size: int) -> str:
        large = path.endswith(LARGE) or size > 10_000_000
        return "lfs" if large and http.hub.uploads != "regular" else "regular"

    rows = [{"path": given["path"], "uploadMode": mode(given["path"], given["size"]), "shouldIgnore": False}
            for given in http.given()["files"]]
    for row in rows:
        if row["path"] in files:
            row["oid"] = files[row["path"]].etag
    http.json({"files": rows})


@route("GET", f"/api/models/{_REPO}/xet-(?P<kind>read|write)-token/{_REV}")
def _xet_token(http: _Handler, repo: str, kind: str, revision: str) -> None:
    http.repository(repo, content=True) if kind == "read" else http.writable(repo)
    if http.hub.uploads != "xet":
        raise _Answer(404, "this repository has no xet storage")
    address, expires = f"local://{http.hub.folder}", int(time.time()) + 3600
    http.json({"accessToken": "xet", "exp": expires, "casUrl": address}, **{
        "X-Xet-Cas-Url": address, "X-Xet-Access-Token": "xet", "X-Xet-Token-Expiration": str(expires)})


@route("POST", rf"/{_REPO}\.git/info/lfs/objects/batch")
def _lfs_batch(http: _Handler, repo: str) -> None:
    http.writable(repo)
    objects = [_lfs_actions(http.hub, repo, row["oid"], row["size"]) for row in http.given()["objects"]]
    http.json({"transfer": "basic", "objects": objects})


def _lfs_actions(hub: HubServer, repo: str, oid: str, size: int) -> dict[str, Any]:
    described: dict[str, Any] = {"oid": oid, "size": size}
    if hub.uploaded(oid, size):
        return described
    upload: dict[str, Any] = {"href": f"{hub.storage}/blobs/{oid}"}
    verify = {"href": f"{hub.endpoint}/{repo}.git/info/lfs/verify"}
    return {**described, "authenticated": True, "actions": {"upload": upload, "verify": verify}}


@route("PUT", "/blobs/(?P<oid>[0-9a-f]{64})")
def _put(http: _Handler, oid: str) -> None:
    _keep_blob(http.hub, oid, http.body)
    http.send(200)


def _keep_blob(hub: HubServer, oid: str, content: bytes) -> None:
    if hashlib.sha256(content).hexdigest() != oid:
        raise _Answer(400, "the content does not have the announced SHA-256")
    hub.blobs[oid] = content


@route("POST", rf"/{_REPO}\.git/info/lfs/verify")
def _verify(http: _Handler, repo: str) -> None:
    http.writable(repo)
    given = http.given()
    if http.hub.uploaded(given["oid"], given["size"]) is None:
        raise _Answer(404, "the object was not uploaded")
    http.json({})


@route("POST", f"/api/models/{_REPO}/commit/{_REV}")
def _commit(http: _Handler, repo: str, revision: str) -> None:
    with http.hub.lock:
        repository = http.writable(repo)
        opens = http.query.get("create_pr") == "1"
        lines = [json.loads(line) for line in http.body.splitlines() if line]
        files, title = dict(http.at(repository, revision).files), "commit"
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                title = value["summary"]
                if value.get("parentCommit", repository.branches.get(revision)) != repository.branches.get(revision):
                    raise _Answer(412, "A commit has happened since")
            else:
                _apply(http.hub, files, line["key"], value)
        number = 1 + sum(name.startswith("refs/pr/") for name in repository.branches)
        commit = repository.add(files, title, f"refs/pr/{number}" if opens else revision)
    answer = {"success": True, "commitOid": commit.oid, "commitUrl": f"{http.hub.endpoint}/{repo}/commit/{commit.oid}"}
    if opens:
        answer["pullRequestUrl"] = f"{http.hub.endpoint}/{repo}/discussions/{number}"
    http.json(answer)


def _apply(hub: HubServer, files: dict[str, File], key: str, value: dict[str, Any]) -> None:
    """Apply one line of a commit to the files of its parent."""
    path = value["path"]
    if key == "file":
        files[path] = hub.store(base64.b64decode(value["content"]), large=False)
    elif key == "lfsFile":
        file = hub.uploaded(value["oid"], value["size"])
        if file is None:
            raise _Answer(400, f"the upload of {path} is not complete")
        files[path] = file
    elif key == "deletedFile":
        if files.pop(path, None) is None:
            raise _Answer(404, "A file with this name doesn't exist", "EntryNotFound")
    elif key == "deletedFolder":
        for name in [name for name in files if name.startswith(path.rstrip("/") + "/")]:
            del files[name]
    else:
        raise _Answer(400, f"unknown line {key!r} in a commit")


# -------------------------------------------------------------------------------------------- downloads
@route("HEAD GET", f"/{_REPO}/resolve/{_REV}/(?P<path>.+)")
def _resolve(http: _Handler, repo: str, revision: str, path: str) -> None:
    commit = http.at(http.repository(repo, content=True), revision)
    file = commit.files.get(path)
    if file is None:
        raise _Answer(404, "Entry not found", "EntryNotFound", **{"X-Repo-Commit": commit.oid})
    described = {"X-Repo-Commit": commit.oid, "Accept-Ranges": "bytes"}
    if not file.large:
        _send_blob(http, file, ETag=f'"{file.oid}"', **described)
        return
    described |= {"X-Linked-Etag": f'"{file.etag}"', "X-Linked-Size": str(file.size)}
    if file.xet:
        refresh = f"{http.hub.endpoint}/api/models/{repo}/xet-read-token/{quote(commit.oid)}"
        described |= {"X-Xet-Hash": file.xet, "Link": f'<{refresh}>; rel="xet-auth"'}
    http.send(302, Location=f"{http.hub.storage}/blobs/{file.sha256}", **described)


@route("HEAD GET", "/blobs/(?P<oid>[0-9a-f]{64})")
def _get_blob(http: _Handler, oid: str) -> None:
    if oid not in http.hub.blobs:
        raise _Answer(501, "a file that was uploaded by xet can be read by xet only")
    _send_blob(http, _file(None, oid, len(http.hub.blobs[oid]), True), ETag=f'"{oid}"')


def _send_blob(http: _Handler, file: File, **headers: str) -> None:
    content = http.hub.blobs[file.sha256]
    match = re.fullmatch(r"bytes=(\d+)-(\d*)", http.headers.get("Range", ""))
    if match is None:
        http.send(200, content, **headers)
        return
    first, last = int(match[1]), min(int(match[2] or file.size - 1), file.size - 1)
    if first >= file.size:
        raise _Answer(416, "Range not satisfiable", **{"Content-Range": f"bytes */{file.size}"})
    http.send(206, content[first:last + 1], **headers, **{"Content-Range": f"bytes {first}-{last}/{file.size}"})
