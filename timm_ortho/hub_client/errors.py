"""Report failures of the Hub within seconds, in one line with the cause and a remedy.

huggingface_hub alone retries for 23 seconds without a network, and for minutes if the server does not answer. It then
reports "check your connection" for every cause.
"""
import os
import re
import threading
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Callable, Iterator, List, Optional, Type, TypeVar

from huggingface_hub import constants, get_token
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from .._text import error_text

REQUEST_TIMEOUT = float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or 5.0)  # seconds for one request
TOTAL_TIMEOUT = REQUEST_TIMEOUT + 2.0  # seconds for one call of huggingface_hub, with DNS lookup and repeated requests

T = TypeVar("T")


class WeightsError(RuntimeError):
    """Pretrained weights cannot be downloaded or used. The message names source, cause and remedy in one line."""


def check_repo_id(repo_id: str, error_class: Type[Exception], hint: str = "") -> None:
    """Raise ``error_class`` unless ``repo_id`` is a valid ``owner/name``. The message ends with ``hint``.

    >>> check_repo_id("me/my-model", ValueError)
    """
    try:
        validate_repo_id(repo_id)
        is_valid = "/" in repo_id
    except HFValidationError:
        is_valid = False
    if not is_valid:
        raise error_class(f"'{repo_id}' is not the name of a repository: pass owner/name of letters, digits, '-', '_' "
                          f"and '.'{hint}")


def with_timeout(function: Callable[[], T]) -> T:
    """Return ``function()``, or raise concurrent.futures.TimeoutError after TOTAL_TIMEOUT, even in a DNS lookup."""
    answer: Future[T] = Future()

    def call() -> None:
        try:
            answer.set_result(function())
        except BaseException as error:  # noqa: BLE001  raised in the calling thread
            answer.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return answer.result(TOTAL_TIMEOUT)


@contextmanager
def client_errors_as(
        error_class: Type[Exception],
        repo_id: str,
        revision: Optional[str] = None,
        *,
        prefix: str = "",
        access: str = "read",
        if_absent: str = "",
        if_interrupted: str = "",
        token: Optional[str] = None,
) -> Iterator[None]:
    """Raise any error of the block as ``error_class``, in one line with its cause.

    Args:
        error_class: The class to raise.
        repo_id, revision: The requested repository and revision.
        prefix: Beginning of the line.
        access: The access that the request needs: ``read`` or ``write``.
        if_absent: End of the line if the repository does not have the file.
        if_interrupted: The line for an interrupted upload or download, with the placeholder ``{cause}``; empty
            for other requests.
        token: The token in use, if any.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001  raised again without the client's traceback
        chain = _causes(error)
        answered: Any = next((link for link in chain if getattr(link, "response", None) is not None), None)
        if answered is None:
            line = _connection_failure(chain, if_interrupted)
        else:
            line = _refusal(answered, repo_id, revision, access, token)
            line += if_absent if isinstance(answered, EntryNotFoundError) else ""
        raise error_class(without_tokens(prefix + line, token)) from None


# HTTP status -> the problem and the advice; 500 covers all server errors.
_REFUSALS = {
    401: ("does not accept {who}", "{log_in} and unset HF_TOKEN, or set it to a token with {access} access"),
    403: ("gives {who} no {access} access to {repo}", "use a token with {access} access{instead}"),
    404: ("has no repository {repo} that {who} can read, or the repository has no such revision",
          "check the names of the repository and the revision"),
    409: ("reports another write to {repo}", "repeat the command"),
    429: ("limits the rate of requests", "try again {when}, or {log_in} for a higher limit"),
    500: ("failed", "try again later, see https://status.huggingface.co"),
}


def _refusal(error: Any, repo_id: str, revision: Optional[str], access: str, token: Optional[str]) -> str:
    """Describe a response of the Hub with an error status."""
    status, page = error.response.status_code, f"{constants.ENDPOINT}/{repo_id}"
    log_in = "log in with another account (`hf auth login`)" if token else "log in (`hf auth login`)"
    if isinstance(error, GatedRepoError):  # a subclass of RepositoryNotFoundError
        return f"the repository is gated ({status}); ask for access at {page} and {log_in}"
    if isinstance(error, RepositoryNotFoundError):
        return f"the repository does not exist, or is private and not yours ({status}); check the name, or {log_in}"
    if isinstance(error, RevisionNotFoundError):
        return f"the repository has no revision '{revision}' ({status}); see {page}/refs"
    if isinstance(error, EntryNotFoundError):
        return f"it is not in the repository ({status}); see {page}/tree/{revision or 'main'}"
    if min(status, 500) not in _REFUSALS:
        return f"the Hub refuses the request ({status} from {constants.ENDPOINT}); {error_text(error)}"
    wait = error.response.headers.get("Retry-After")
    words = dict(
        repo=repo_id, access=access, log_in=log_in, who="the token" if token else "requests without a token",
        when=f"in {wait} s" if wait else "later",
        instead=", or propose the change in a pull request (--create-pr, create_pr=True)" if access == "write" else "")
    problem, advice = (text.format(**words) for text in _REFUSALS[min(status, 500)])
    return f"the Hub {problem} ({status} from {constants.ENDPOINT}); {advice}"


def _connection_failure(chain: List[BaseException], if_interrupted: str) -> str:
    """Describe a missing or incomplete response. Error classes of the HTTP library are matched by name."""
    names = " ".join(base.__name__ for error in chain for base in type(error).__mro__)
    cause = f"{type(chain[-1]).__name__}: {error_text(chain[-1])}"
    is_network = any(name in names for name in ("Connect", "Timeout", "Transport", "Proxy", "SSL", "Chunked"))
    if if_interrupted and (is_network or "Consistency check failed" in cause):
        return if_interrupted.format(cause=cause)
    if "Timeout" in names:
        return f"{constants.ENDPOINT} does not answer in time; try again later, or check the network"
    if is_network:
        return f"{constants.ENDPOINT} cannot be reached ({cause}); check the network, the proxy and HF_ENDPOINT"
    return cause


def _causes(error: BaseException) -> List[BaseException]:
    """Return an error and its chain of causes, the root cause last."""
    chain = [error]
    while (inner := chain[-1].__cause__ or chain[-1].__context__) is not None and inner not in chain:
        chain.append(inner)
    return chain


def without_tokens(text: str, token: Optional[str]) -> str:
    """Replace the tokens in use, strings that look like tokens, and credentials in addresses with ``***``.

    >>> without_tokens("https://me:secret@host/", None)
    'https://***@host/'
    """
    for secret in filter(None, (token, get_token())):
        text = text.replace(secret, "***")
    text = re.sub(r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}", "***", text)
    return re.sub(r"(?<=://)[^/@\s]+@", "***@", text)
