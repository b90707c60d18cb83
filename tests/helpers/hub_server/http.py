"""Receive the mock Hub's requests, check rights, and simulate failures. `routes.py` computes the answers."""
import json
import re
import sys
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Callable, Optional, Union
from urllib.parse import parse_qs, unquote, urlsplit

from .store import Commit, Repository

SILENCE, CUT = "silence", "cut"


@dataclass
class Recorded:
    """A received request. ``status`` is the status of its answer, or 0 if the answer is missing or incomplete."""

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
    after: int
    code: Optional[str]

    def concerns(self, method: str, path: str) -> bool:
        if self.what == CUT and method == "HEAD":  # its answer has no content to cut
            return False
        return self.method in (None, method) and re.search(self.path, path) is not None


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore disconnected clients. Any other error is a bug of this server and is shown."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class Answer(Exception):
    """An exception that ends the handling of a request with an error answer."""

    def __init__(self, status: int, message: str, code: Optional[str] = None, **headers: str) -> None:
        super().__init__(message)
        self.status, self.message, self.headers = status, message, dict(headers)
        if code:
            self.headers["X-Error-Code"] = code


ERRORS = {
    401: "Invalid credentials in Authorization header",
    403: "You do not have the rights for this",
    404: "Not found",
    429: "Too many requests",
    500: "Internal server error",
    503: "Service unavailable",
}

ROUTES: list[tuple[str, "re.Pattern[str]", Callable]] = []


def route(methods: str, pattern: str) -> Callable[[Callable], Callable]:
    def keep(function: Callable) -> Callable:
        ROUTES.extend((method, re.compile(pattern), function) for method in methods.split())
        return function
    return keep


class Handler(BaseHTTPRequestHandler):
    hub: Any  # HubServer
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
        except Answer as answer:
            self._error(answer)
        except OSError:
            self.close_connection = True

    do_GET = do_HEAD = do_POST = do_PUT = _serve

    def _read_body(self) -> None:
        is_cut = self.fault and self.fault.what == CUT and self.command in ("POST", "PUT")
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
            raise Answer(self.fault.what, ERRORS.get(self.fault.what, "Refused"), self.fault.code, **more)
        for method, pattern, function in ROUTES:
            match = method == self.command and pattern.fullmatch(path)
            if match:
                function(self, **{key: unquote(value) for key, value in match.groupdict().items()})
                return
        raise Answer(404, f"the mock Hub has no route {self.command} {path}")

    @property
    def body(self) -> bytes:
        return self.record.body

    # ------------------------------------------------------------------------------------------ answers
    def send(self, status: int, content: bytes = b"", **headers: str) -> None:
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

    def json(self, value: Any, status: int = 200, **headers: str) -> None:
        self.send(status, json.dumps(value).encode(), Content_Type="application/json", **headers)

    def _error(self, answer: Answer) -> None:
        self.json({"error": answer.message}, answer.status, **{"X-Error-Message": answer.message, **answer.headers})

    # ------------------------------------------------------------------------------------------- rights
    def user(self) -> Optional[tuple[str, str]]:
        """Return the name and role of the user, or None if the request has no token."""
        given = self.headers.get("Authorization")
        if given is None:
            return None
        user = self.hub.users.get(given.removeprefix("Bearer "))
        if user is None:
            raise Answer(401, ERRORS[401])
        return user

    def repository(self, repo: str, content: bool = False) -> Repository:
        """Return a repository that the user may see. If ``content`` is true, the user must also have file access."""
        user, found = self.user(), self.hub.repositories.get(repo)
        if found is None or (found.private and (user is None or user[0] != found.owner)):
            raise Answer(404 if user else 401, "Repository not found", "RepoNotFound")
        if content and found.gated and (user is None or user[0] != found.owner):
            raise Answer(403 if user else 401, f"Access to model {repo} is restricted", "GatedRepo")
        return found

    def writable(self, repo: str) -> Repository:
        found, user = self.repository(repo), self.user()
        if user is None:
            raise Answer(401, "Invalid username or password")
        if user != (found.owner, "write"):
            raise Answer(403, ERRORS[403])
        return found

    def at(self, repository: Repository, revision: str) -> Commit:
        found = repository.find(revision)
        if found is None:
            raise Answer(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return found

    def given(self) -> Any:
        return json.loads(self.body)
