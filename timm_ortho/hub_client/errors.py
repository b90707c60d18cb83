"""Why the Hub does not give or take something: within seconds, in one line that says what to do.

huggingface_hub asks again and again before it gives up, 23 seconds for a network that is not there and minutes for a
server that is silent, and then says "check your connection" whatever the cause.
"""
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

from .._checks import short

LIMIT = 5.0  # seconds that the Hub has for its answer
PATIENCE = 7.0  # seconds for all around it too: looking up its name, and what the client asks of its own accord

T = TypeVar("T")


class WeightsError(RuntimeError):
    """Pretrained weights cannot be had or used; one line that says whose, why, and what to do."""


def check_repo_id(repo_id: str, kind: Type[Exception], otherwise: str = "") -> None:
    """Raises ``kind`` unless this is ``owner/name`` by huggingface_hub's rules; ``otherwise`` ends its message."""
    try:
        validate_repo_id(repo_id)
        is_valid = "/" in repo_id
    except HFValidationError:
        is_valid = False
    if not is_valid:
        raise kind(f"'{repo_id}' is not the name of a repository: give it as owner/name, of letters, digits, '-', '_' "
                   f"and '.'{otherwise}")


def within_patience(function: Callable[[], T]) -> T:
    """``function()``, or a TimeoutError after PATIENCE: looking up a host's name takes no limit of its own."""
    answer: Future[T] = Future()

    def call() -> None:
        try:
            answer.set_result(function())
        except BaseException as error:  # noqa: BLE001  raised in the thread that waits
            answer.set_exception(error)

    threading.Thread(target=call, daemon=True).start()
    return answer.result(PATIENCE)


@contextmanager
def told(
        kind: Type[Exception],
        repo_id: str,
        revision: Optional[str] = None,
        *,
        begin: str = "",
        access: str = "read",
        absent: str = "",
        transfer: str = "",
        token: Optional[str] = None,
) -> Iterator[None]:
    """Whatever the client raises is raised as ``kind``, in one line with its cause.

    Args:
        kind: The error's class.
        repo_id, revision: What the client is asked for.
        begin: What the line begins with.
        access: What the token is for: ``read`` or ``write``.
        absent: What is added where the repository has no such file.
        transfer: What is said where a download or an upload breaks off, with ``{cause}``; empty for other requests.
        token: The one in use, if there is one.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001  raised again, without the client's traceback
        chain = _causes(error)
        answered: Any = next((link for link in chain if getattr(link, "response", None) is not None), None)
        if answered is None:
            line = _no_answer(chain, transfer)
        else:
            line = _refusal(answered, repo_id, revision, access, token)
            line += absent if isinstance(answered, EntryNotFoundError) else ""
        raise kind(scrubbed(begin + line, token)) from None


# status: what the Hub does, and what to do; 500 stands for all of its own failures
_REFUSALS = {
    401: ("does not know {who}", "{log_in} and unset HF_TOKEN, or set it to a token with {access} access"),
    403: ("gives the token no {access} access to {repo}", "use one that has it{instead}"),
    404: ("has no {repo} for {who}, or not that revision", "check both names"),
    409: ("has somebody else writing to {repo}", "give the same command again"),
    429: ("asks to slow down", "try again {when}, or {log_in} for a higher limit"),
    500: ("has a failure of its own", "try again later, see https://status.huggingface.co"),
}


def _refusal(error: Any, repo_id: str, revision: Optional[str], access: str, token: Optional[str]) -> str:
    """What an answer of the Hub's means."""
    status, page = error.response.status_code, f"{constants.ENDPOINT}/{repo_id}"
    log_in = "log in as somebody else (`hf auth login`)" if token else "log in (`hf auth login`)"
    if isinstance(error, GatedRepoError):  # it is a RepositoryNotFoundError too
        return f"the repository is gated ({status}); ask for access at {page} and {log_in}"
    if isinstance(error, RepositoryNotFoundError):
        return f"there is no such repository, or it is private and not yours ({status}); check the name, or {log_in}"
    if isinstance(error, RevisionNotFoundError):
        return f"the repository has no revision '{revision}' ({status}); see {page}/refs"
    if isinstance(error, EntryNotFoundError):
        return f"it is not in the repository ({status}); see {page}/tree/{revision or 'main'}"
    if min(status, 500) not in _REFUSALS:
        return f"the Hub refuses it ({status} from {constants.ENDPOINT}); {short(error)}"
    wait = error.response.headers.get("Retry-After")
    words = dict(
        repo=repo_id, access=access, log_in=log_in, who="the token" if token else "who is asking",
        when=f"in {wait} s" if wait else "later",
        instead=", or propose the change with --create-pr" if access == "write" else "")
    what, advice = (text.format(**words) for text in _REFUSALS[min(status, 500)])
    return f"the Hub {what} ({status} from {constants.ENDPOINT}); {advice}"


def _no_answer(chain: List[BaseException], transfer: str) -> str:
    """Where there was no whole answer. By name: each major version of the client has an HTTP library of its own."""
    names = " ".join(base.__name__ for error in chain for base in type(error).__mro__)
    cause = f"{type(chain[-1]).__name__}: {short(chain[-1])}"
    is_network = any(name in names for name in ("Connect", "Timeout", "Transport", "Proxy", "SSL", "Chunked"))
    if transfer and (is_network or "Consistency check failed" in cause):
        return transfer.format(cause=cause)
    if "Timeout" in names:
        return f"{constants.ENDPOINT} does not answer within {PATIENCE:g} s; try again later, or check the network"
    if is_network:
        return f"{constants.ENDPOINT} cannot be reached ({cause}); check the network, the proxy and HF_ENDPOINT"
    return cause


def _causes(error: BaseException) -> List[BaseException]:
    """An error, what it came from, and so on to the first."""
    chain = [error]
    while (inner := chain[-1].__cause__ or chain[-1].__context__) is not None and inner not in chain:
        chain.append(inner)
    return chain


def scrubbed(text: str, token: Optional[str]) -> str:
    """The text without tokens: those in use, what looks like one, and what stands before an @ in an address."""
    for secret in filter(None, (token, get_token())):
        text = text.replace(secret, "***")
    text = re.sub(r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}", "***", text)
    return re.sub(r"(?<=://)[^/@\s]+@", "***@", text)
