"""A local mock of the Hugging Face Hub. The real huggingface_hub client can push to it and pull from it.

    with HubServer(folder) as hub:                              # a client needs HF_ENDPOINT=hub.endpoint
        token = hub.add_user("me")
        hub.create_repo("me/model", private=True)
        hub.commit("me/model", {"config.json": b"{}"})
        hub.fail(503, path="model.safetensors")                 # for the requests of this file
        hub.files("me/model"), hub.requests

The mock has repositories with branches, tags and pull requests, private and gated repositories, and read and write
tokens. It supports uploads by LFS and by xet, commits, and downloads. It can simulate failures. All data is in memory,
except the files that hf_xet writes to ``folder``. `hub_client.py` runs the client.

A client uploads large files before the commit. With HF_HUB_DISABLE_XET=1 it uses PUT, as for Git LFS. Without, hf_xet
writes them to ``folder``, because the mock's xet URL is ``local://FOLDER``. Only hf_xet can read these files, because
their chunks are compressed.

As on the real Hub, the contents of large files have another host name (``localhost``) than the API (``127.0.0.1``). A
token that is sent to ``localhost`` has leaked. Status codes and headers follow the client's source. They were not
compared with the real Hub.
"""
import hashlib
import threading
from dataclasses import replace
from pathlib import Path
from typing import Optional, Union
from urllib.parse import unquote, urlsplit

from . import routes  # noqa: F401  registers the routes
from .http import Fault, Handler, Recorded, Server
from .store import LARGE, File, Repository, describe, files_of_shard


class HubServer:
    """Serve the Hub in a thread of this process, inside a ``with`` statement. The module's docstring has an example.

    Args:
        folder: Folder to which hf_xet writes large files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder).resolve()
        self.repositories: dict[str, Repository] = {}
        self.users: dict[str, tuple[str, str]] = {}  # token -> user, role
        self.blobs: dict[str, bytes] = {}  # SHA-256 -> content
        self.requests: list[Recorded] = []
        self.faults: list[Fault] = []
        self.lock = threading.RLock()
        self.over = threading.Event()  # set to end requests that wait without an answer

    def __enter__(self) -> "HubServer":
        self.over.clear()
        handler = type("Handler", (Handler,), {"hub": self})
        self._server = Server(("127.0.0.1", 0), handler)
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
        """Return the URL of the contents of large files. Requests to its host name must not contain a token."""
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
        """Add files to a branch without a client and return the commit's hash. Create a missing repository."""
        repository = self.repositories.get(repo_id) or self.create_repo(repo_id)
        head = repository.find(revision) or repository.find("main")
        stored = {path: self.store(content, path.endswith(LARGE)) for path, content in files.items()}
        return repository.add({**head.files, **stored}, title, revision).oid

    def files(self, repo_id: str, revision: str = "main") -> dict[str, Optional[bytes]]:
        """Return ``{path: content}`` of a revision. Content that only hf_xet can read is None."""
        return {path: self.blobs.get(file.sha256) for path, file in
                self.repositories[repo_id].find(revision).files.items()}

    def fail(
            self, what: Union[int, str], path: str = "", method: Optional[str] = None, after: int = 0,
            code: Optional[str] = None,
    ) -> None:
        """Make requests fail until :meth:`heal`.

        Args:
            what: A status (401: bad token, 403: missing rights, 429: retry after a minute), ``"cut"`` (the connection
                ends during a download or an upload) or ``"silence"`` (no answer).
            path: Regular expression that is searched in the path; "" matches every path. The name of a large file
                matches ``/resolve/``, which only redirects. To match the download of the content, use ``/blobs/``.
            method: HTTP method; None for all.
            after: For ``"cut"``: number of bytes that arrive.
            code: Value of the header ``X-Error-Code``: RepoNotFound, RevisionNotFound, EntryNotFound or GatedRepo.
        """
        self.faults.append(Fault(what, method, path, after, code))

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
        """Return requests that contain the token outside the authorization header, or send it to the blobs' host."""
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
        return describe(content, sha256, len(content), large)

    def uploaded(self, sha256: str, size: int) -> Optional[File]:
        """Return a large file if its upload by LFS or xet is complete, otherwise None."""
        if sha256 in self.blobs and len(self.blobs[sha256]) == size:
            return describe(None, sha256, size, True)
        xet = self.xet_files().get(sha256)
        return xet and replace(describe(None, sha256, size, True), xet=xet)

    def xet_files(self) -> dict[str, str]:
        """Return ``{SHA-256: xet hash}`` of the files that hf_xet has completely written to the folder."""
        shards = self.folder.glob("xet/xorbs/shards/*.mdb")
        return dict(pair for shard in sorted(shards) for pair in files_of_shard(shard.read_bytes()))

    def take_fault(self, method: str, path: str) -> Optional[Fault]:
        return next((fault for fault in self.faults if fault.concerns(method, unquote(path))), None)
