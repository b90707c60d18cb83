"""A local mock of the Hugging Face Hub, to which the real huggingface_hub client can push and from which it can pull.

    with HubServer() as hub:                                    # a client needs HF_ENDPOINT=hub.endpoint
        token = hub.add_user("me")
        hub.create_repo("me/model", private=True)
        hub.commit("me/model", {"config.json": b"{}"})
        hub.fail(503, path="model.safetensors")                 # for the requests of this file
        hub.files("me/model"), hub.requests

The mock has repositories with branches, tags and pull requests, private and gated repositories, and read and write
tokens. Large files are uploaded before the commit by Git LFS (HF_HUB_DISABLE_XET=1). All data is in memory.

As on the real Hub, the contents of large files have another host name (``localhost``) than the API (``127.0.0.1``). A
token that is sent to ``localhost`` has leaked. Status codes and headers follow the client's source. They were not
compared with the real Hub.
"""
import base64
import hashlib
import json
import re
import sys
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

LARGE = (".safetensors", ".bin", ".pth", ".npz")  # such files are uploaded before the commit
SILENCE, CUT = "silence", "cut"
ERRORS = {401: "Invalid credentials in Authorization header", 403: "You do not have the rights for this",
          503: "Service unavailable"}
ROUTES = []
REPO, REV = r"(?P<repo>[^/]+/[^/]+)", r"(?P<revision>[^/]+)"


# --------------------------------------------------------------------------------------------------- content
@dataclass(frozen=True)
class File:
    """Description of a file in a commit. `HubServer.blobs` contains the content."""

    size: int
    sha256: str
    oid: str  # hash of the blob in git; a large file's blob is its LFS pointer
    large: bool

    @classmethod
    def of(cls, content, large):
        sha256 = hashlib.sha256(content).hexdigest()
        pointer = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {len(content)}\n".encode()
        blob = pointer if large else content
        return cls(len(content), sha256, hashlib.sha1(b"blob %d\0" % len(blob) + blob).hexdigest(), large)

    @property
    def etag(self):
        return self.sha256 if self.large else self.oid


@dataclass(frozen=True)
class Commit:
    oid: str
    title: str
    files: dict


@dataclass
class Repository:
    id: str
    private: bool = False
    gated: bool = False
    commits: dict = field(default_factory=dict)
    branches: dict = field(default_factory=dict)  # name -> commit
    tags: dict = field(default_factory=dict)

    @property
    def owner(self):
        return self.id.split("/")[0]

    def find(self, revision):
        """Return the commit of a branch, a tag, ``refs/pr/N`` or a commit hash, or None."""
        return self.commits.get(self.branches.get(revision) or self.tags.get(revision) or revision)

    def add(self, files, title, branch):
        described = json.dumps([self.branches.get(branch, ""), title, {path: file.oid for path, file in files.items()}])
        oid = hashlib.sha1(f"{self.id} {len(self.commits)} {described}".encode()).hexdigest()
        self.commits[oid] = Commit(oid, title, files)
        self.branches[branch] = oid
        return self.commits[oid]


# ------------------------------------------------------------------------------------------------- the server
class HubServer:
    """Serve the Hub in a thread of this process, inside a ``with`` statement. The module's docstring has an example."""

    def __init__(self):
        self.repositories = {}
        self.users = {}  # token -> user, role
        self.blobs = {}  # SHA-256 -> content
        self.requests = []
        self.faults = []
        self.lock = threading.RLock()
        self.over = threading.Event()  # set to end requests that wait without an answer

    def __enter__(self):
        self._server = Server(("127.0.0.1", 0), type("Handler", (Handler,), {"hub": self}))
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception):
        self.over.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.port}"

    @property
    def storage(self):
        """Return the URL of the contents of large files. Requests to its host name must not contain a token."""
        return f"http://localhost:{self.port}"

    def add_user(self, name, role="write"):
        """Add a user and return their token; ``role`` is ``read`` or ``write``."""
        token = "hf_" + hashlib.sha256(f"{name} {role}".encode()).hexdigest()[:34]
        self.users[token] = (name, role)
        return token

    def create_repo(self, repo_id, private=False, gated=False):
        repository = self.repositories[repo_id] = Repository(repo_id, private, gated)
        attributes = self.store(b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n", large=False)
        repository.add({".gitattributes": attributes}, "initial commit", "main")
        return repository

    def commit(self, repo_id, files):
        """Add files to ``main`` without a client. Create a missing repository."""
        repository = self.repositories.get(repo_id) or self.create_repo(repo_id)
        stored = {path: self.store(content, path.endswith(LARGE)) for path, content in files.items()}
        repository.add({**repository.find("main").files, **stored}, "files", "main")

    def files(self, repo_id, revision="main"):
        """Return ``{path: content}`` of a revision."""
        return {path: self.blobs[file.sha256] for path, file in self.repositories[repo_id].find(revision).files.items()}

    def fail(self, what, path="", method=None, after=0, code=None):
        """Make requests fail until :meth:`heal`.

        Args:
            what: A status (401: bad token, 403: missing rights), ``"cut"`` (the connection ends during a download or
                an upload) or ``"silence"`` (no answer).
            path: Regular expression that is searched in the path; "" matches every path. The name of a large file
                matches ``/resolve/``, which only redirects. To match the download of the content, use ``/blobs/``.
            method: HTTP method; None for all.
            after: For ``"cut"``: number of bytes that arrive.
            code: Value of the header ``X-Error-Code``: RepoNotFound, RevisionNotFound, EntryNotFound or GatedRepo.
        """
        self.faults.append(Fault(what, method, path, after, code))

    def heal(self):
        self.over.set()
        self.over = threading.Event()
        self.faults.clear()

    def empty(self):
        """Remove everything except the users."""
        self.heal()
        for held in (self.repositories, self.blobs, self.requests):
            held.clear()

    def leaks(self, token):
        """Return requests that contain the token outside the authorization header, or send it to the blobs' host."""
        found = []
        for request in self.requests:
            headers = " ".join(v for k, v in request.headers.items() if k != "authorization")
            if token in request.path + headers or token.encode() in request.body:
                found.append(f"{request.method} {request.path}")
            if token in request.headers.get("authorization", "") and request.host != urlsplit(self.endpoint).netloc:
                found.append(f"{request.method} http://{request.host}{request.path}")
        return found

    def store(self, content, large):
        file = File.of(content, large)
        self.blobs[file.sha256] = content
        return file


@dataclass
class Recorded:
    """A received request. ``status`` is the status of its answer, or 0 if the answer is missing or incomplete."""

    method: str
    host: str
    path: str
    headers: dict  # lower-case names
    body: bytes = b""
    status: int = 0


@dataclass
class Fault:
    """A simulated failure, see :meth:`HubServer.fail`."""

    what: "int | str"
    method: "str | None"
    path: str
    after: int
    code: "str | None"

    def concerns(self, method, path):
        if self.what == CUT and method == "HEAD":  # its answer has no content to cut
            return False
        return self.method in (None, method) and re.search(self.path, path) is not None


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, client_address):
        """Ignore disconnected clients. Any other error is a bug of this server and is shown."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class Answer(Exception):
    """An exception that ends the handling of a request with an error answer."""

    def __init__(self, status, message, code=None, **headers):
        super().__init__(message)
        self.status, self.message = status, message
        self.headers = {**headers, **({"X-Error-Code": code} if code else {})}


def route(methods, pattern):
    def keep(function):
        ROUTES.extend((method, re.compile(pattern), function) for method in methods.split())
        return function
    return keep


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def _serve(self):
        parts = urlsplit(self.path)
        self.query = parse_qs(parts.query)
        found = (fault for fault in self.hub.faults if fault.concerns(self.command, unquote(parts.path)))
        self.fault = next(found, None)
        headers = {key.lower(): value for key, value in self.headers.items()}
        self.record = Recorded(self.command, headers.get("host", ""), self.path, headers)
        with self.hub.lock:
            self.hub.requests.append(self.record)
        try:
            self._read_body()
            self._act(parts.path)
        except Answer as answer:
            self.json({"error": answer.message}, answer.status, **{"X-Error-Message": answer.message, **answer.headers})
        except OSError:
            self.close_connection = True

    do_GET = do_HEAD = do_POST = do_PUT = _serve

    def _read_body(self):
        is_cut = self.fault and self.fault.what == CUT and self.command in ("POST", "PUT")
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.record.body = self.rfile.read(min(length, self.fault.after) if is_cut else length)
        if is_cut:
            raise ConnectionResetError("cut")

    def _act(self, path):
        if self.fault and self.fault.what == SILENCE:
            self.hub.over.wait()
            raise ConnectionResetError("silence is over")
        if self.fault and isinstance(self.fault.what, int):
            raise Answer(self.fault.what, ERRORS.get(self.fault.what, "Refused"), self.fault.code)
        for method, pattern, function in ROUTES:
            match = method == self.command and pattern.fullmatch(path)
            if match:
                function(self, **{key: unquote(value) for key, value in match.groupdict().items()})
                return
        raise Answer(404, f"the mock Hub has no route {self.command} {path}")

    def send(self, status, content=b"", **headers):
        """Send an answer. For a ``cut`` fault, the header states the full length, but only the first bytes follow."""
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

    def json(self, value, status=200, **headers):
        self.send(status, json.dumps(value).encode(), Content_Type="application/json", **headers)

    def given(self):
        return json.loads(self.body)

    # ------------------------------------------------------------------------------------------- rights
    def user(self):
        """Return the name and role of the user, or None if the request has no token."""
        given = self.headers.get("Authorization")
        user = self.hub.users.get(given.removeprefix("Bearer ")) if given else None
        if given and user is None:
            raise Answer(401, ERRORS[401])
        return user

    def repository(self, repo, content=False):
        """Return a repository that the user may see. If ``content`` is true, the user must also have file access."""
        user, found = self.user(), self.hub.repositories.get(repo)
        foreign = found is None or user is None or user[0] != found.owner
        if found is None or (found.private and foreign):
            raise Answer(404 if user else 401, "Repository not found", "RepoNotFound")
        if content and found.gated and foreign:
            raise Answer(403 if user else 401, f"Access to model {repo} is restricted", "GatedRepo")
        return found

    def writable(self, repo):
        found, user = self.repository(repo), self.user()
        if user != (found.owner, "write"):
            raise Answer(403 if user else 401, ERRORS[403])
        return found

    def at(self, repository, revision):
        found = repository.find(revision)
        if found is None:
            raise Answer(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return found


# ---------------------------------------------------------------------------------------------------- routes
@route("GET", "/api/agent-harnesses")
def _harnesses(http):
    http.json({"standardEnvVars": [], "harnesses": {}})


@route("POST", "/api/validate-yaml")
def _validate(http):
    errors = [] if http.given()["content"].startswith("---\n") else [{"message": "the card has no metadata"}]
    http.json({"errors": errors, "warnings": []}, 400 if errors else 200)


@route("POST", "/api/repos/create")
def _create(http):
    user, given = http.user(), http.given()
    if user is None:
        raise Answer(401, "Invalid username or password")
    owner = given.get("organization") or user[0]
    if user != (owner, "write"):
        raise Answer(403, ERRORS[403])
    repo_id = f"{owner}/{given['name']}"
    existed = repo_id in http.hub.repositories
    if not existed:
        http.hub.create_repo(repo_id, private=bool(given.get("private", given.get("visibility") == "private")))
    described = {"url": f"{http.hub.endpoint}/{repo_id}", "name": repo_id, "id": repo_id}
    http.json({**described, "error": "You already created this model repo"} if existed else described,
              409 if existed else 200)


@route("GET", f"/api/models/{REPO}")
@route("GET", f"/api/models/{REPO}/revision/{REV}")
def _info(http, repo, revision="main"):
    repository = http.repository(repo)
    commit = http.at(repository, revision)
    http.json({
        "id": repo, "modelId": repo, "sha": commit.oid, "private": repository.private, "downloads": 0, "likes": 0,
        "gated": "manual" if repository.gated else False, "tags": [],
        "siblings": [{"rfilename": path} for path in sorted(commit.files)]})


@route("POST", f"/api/models/{REPO}/branch/{REV}")
def _branch(http, repo, revision):
    repository = http.writable(repo)
    if revision in repository.branches:
        raise Answer(409, f"Reference refs/heads/{revision} already exists")
    start = http.given().get("startingPoint", "main") if http.body else "main"
    repository.branches[revision] = http.at(repository, start).oid
    http.json({})


@route("POST", f"/api/models/{REPO}/preupload/{REV}")
def _preupload(http, repo, revision):
    files = http.at(http.writable(repo), revision).files
    rows = [{"path": row["path"], "shouldIgnore": False,
             "uploadMode": "lfs" if row["path"].endswith(LARGE) or row["size"] > 10_000_000 else "regular"}
            for row in http.given()["files"]]
    http.json({"files": [{**row, "oid": files[row["path"]].etag} if row["path"] in files else row for row in rows]})


@route("POST", rf"/{REPO}\.git/info/lfs/objects/batch")
def _lfs_batch(http, repo):
    http.writable(repo)
    objects = []
    for row in http.given()["objects"]:
        described = {"oid": row["oid"], "size": row["size"]}
        if row["oid"] not in http.hub.blobs:
            verify = {"href": f"{http.hub.endpoint}/{repo}.git/info/lfs/verify"}
            described |= {"authenticated": True, "actions": {
                "upload": {"href": f"{http.hub.storage}/blobs/{row['oid']}"}, "verify": verify}}
        objects.append(described)
    http.json({"transfer": "basic", "objects": objects})


@route("PUT", "/blobs/(?P<oid>[0-9a-f]{64})")
def _put(http, oid):
    if hashlib.sha256(http.body).hexdigest() != oid:
        raise Answer(400, "the content does not have the announced SHA-256")
    http.hub.blobs[oid] = http.body
    http.send(200)


@route("POST", rf"/{REPO}\.git/info/lfs/verify")
def _verify(http, repo):
    http.writable(repo)
    if http.given()["oid"] not in http.hub.blobs:
        raise Answer(404, "the object was not uploaded")
    http.json({})


@route("POST", f"/api/models/{REPO}/commit/{REV}")
def _commit(http, repo, revision):
    with http.hub.lock:
        repository = http.writable(repo)
        opens = http.query.get("create_pr") == ["1"]
        files, title = dict(http.at(repository, revision).files), "commit"
        for line in map(json.loads, filter(None, http.body.splitlines())):
            value = line["value"]
            if line["key"] == "header":
                title = value["summary"]
            elif line["key"] == "file":
                files[value["path"]] = http.hub.store(base64.b64decode(value["content"]), large=False)
            elif line["key"] == "lfsFile" and value["oid"] in http.hub.blobs:
                files[value["path"]] = File.of(http.hub.blobs[value["oid"]], large=True)
            else:
                raise Answer(400, f"{line['key']!r} is unknown, or the upload of {value['path']} is not complete")
        number = 1 + sum(name.startswith("refs/pr/") for name in repository.branches)
        commit = repository.add(files, title, f"refs/pr/{number}" if opens else revision)
    answer = {"success": True, "commitOid": commit.oid, "commitUrl": f"{http.hub.endpoint}/{repo}/commit/{commit.oid}"}
    if opens:
        answer["pullRequestUrl"] = f"{http.hub.endpoint}/{repo}/discussions/{number}"
    http.json(answer)


@route("HEAD GET", f"/{REPO}/resolve/{REV}/(?P<path>.+)")
def _resolve(http, repo, revision, path):
    commit = http.at(http.repository(repo, content=True), revision)
    file = commit.files.get(path)
    if file is None:
        raise Answer(404, "Entry not found", "EntryNotFound", **{"X-Repo-Commit": commit.oid})
    described = {"X-Repo-Commit": commit.oid}
    if file.large:
        http.send(302, Location=f"{http.hub.storage}/blobs/{file.sha256}", **described, **{
            "X-Linked-Etag": f'"{file.etag}"', "X-Linked-Size": str(file.size)})
    else:
        http.send(200, http.hub.blobs[file.sha256], ETag=f'"{file.oid}"', **described)


@route("HEAD GET", "/blobs/(?P<oid>[0-9a-f]{64})")
def _get_blob(http, oid):
    http.send(200, http.hub.blobs[oid], ETag=f'"{oid}"')
