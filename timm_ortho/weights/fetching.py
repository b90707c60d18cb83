"""A file from the Hub, or within seconds the one reason why it cannot be had.

huggingface_hub asks again and again before it gives up, 23 seconds for a network that is not there and minutes for a
server that is silent, and then says "check your connection" whatever the cause. Here the cache comes first, then the
flag for offline work, then one request for the file's metadata; a download follows only where that was answered.
"""
import os
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import Callable, Iterator, List, Optional, Tuple, TypeVar, Union

__all__ = ["WeightsError", "cached", "fetch", "split_revision"]

LIMIT = 5.0  # seconds that the Hub has for its answer
PATIENCE = 7.0  # seconds for all around it too: looking up its name, and what the client asks of its own accord

T = TypeVar("T")
CacheDir = Union[str, "os.PathLike[str]", None]


class WeightsError(RuntimeError):
    """Pretrained weights cannot be had or used; one line that says whose, why, and what to do."""


def split_revision(hf_hub_id: str) -> Tuple[str, Optional[str]]:
    """Repository and revision of ``organisation/name@revision``, as timm writes them; None for the default branch."""
    repo_id, _, revision = hf_hub_id.partition("@")
    return repo_id, revision or None


def cached(hf_hub_id: str, filename: str, cache_dir: CacheDir = None) -> Optional[Path]:
    """Where a file of a repository lies in the cache, None if it does not. Asks no network."""
    from huggingface_hub import try_to_load_from_cache

    repo_id, revision = split_revision(hf_hub_id)
    found = try_to_load_from_cache(repo_id, filename, cache_dir=cache_dir, revision=revision)
    return Path(found) if isinstance(found, str) else None  # neither where the cache knows that there is no such file


def fetch(hf_hub_id: str, filename: str, cache_dir: CacheDir = None, *, newest: bool = False) -> Path:
    """A file of a repository on this machine: out of the cache, or downloaded into it.

    Args:
        hf_hub_id: ``organisation/name``, or ``organisation/name@revision``.
        filename: Its path in the repository.
        cache_dir: The cache, if it is not huggingface_hub's own.
        newest: Ask the Hub first and take what is in the cache only if it gives nothing. Without it nobody is asked
            for a file that is in the cache.

    Raises:
        WeightsError: It is not in the cache and cannot be had.
    """
    found = cached(hf_hub_id, filename, cache_dir)
    if found and not newest:
        return found
    try:
        return _download(hf_hub_id, filename, cache_dir)
    except WeightsError:
        if found:
            return found
        raise


def _download(hf_hub_id: str, filename: str, cache_dir: CacheDir) -> Path:
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_download, hf_hub_url

    repo_id, revision = split_revision(hf_hub_id)
    what = f"hf-hub:{hf_hub_id}: {filename}"
    if constants.HF_HUB_OFFLINE:
        raise WeightsError(
            f"{what} is not in the cache, and HF_HUB_OFFLINE forbids to download it; unset that, or run "
            f"`hf download {repo_id} {filename}` where there is a network and bring the cache here")
    url = hf_hub_url(repo_id, filename, revision=revision)
    with _told(what, repo_id, revision):
        metadata = _within(PATIENCE, lambda: get_hf_file_metadata(url, timeout=LIMIT))
    if metadata.commit_hash is None or metadata.etag is None:
        raise WeightsError(
            f"{what} cannot be had: {constants.ENDPOINT} answers, but not as a Hugging Face Hub does; check "
            "HF_ENDPOINT, the proxy and the firewall")
    with _told(what, repo_id, revision, is_download=True):
        return Path(hf_hub_download(repo_id, filename, revision=revision, cache_dir=cache_dir, etag_timeout=LIMIT))


def _within(seconds: float, function: Callable[[], T]) -> T:
    """``function()``, or a TimeoutError: looking up a host's name, for one, takes no limit of its own."""
    results: List[T] = []
    errors: List[BaseException] = []

    def call() -> None:
        try:
            results.append(function())
        except BaseException as error:  # noqa: BLE001  raised below, in the thread that waits
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"nothing within {seconds:g} s")
    return results[0]


# ------------------------------------------------------------------------------------------------- why not
@contextmanager
def _told(what: str, repo_id: str, revision: Optional[str], is_download: bool = False) -> Iterator[None]:
    """Whatever goes wrong with the file ``what`` becomes a WeightsError."""
    try:
        yield
    except Exception as error:
        hint = "; pickles, such as pytorch_model.bin, are never read" if what.endswith(".safetensors") else ""
        raise WeightsError(f"{what} {_reason(error, repo_id, revision, is_download, hint)}") from error


def _reason(error: Exception, repo_id: str, revision: Optional[str], is_download: bool, hint: str) -> str:
    """What an error of the client's means, and what to do: the end of a sentence that begins with the file.

    ``hint`` is for a file that is not there.
    """
    from huggingface_hub.utils import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, GatedRepoError):  # it is a RepositoryNotFoundError too
        return f"is gated ({status}): ask for access at {_page(repo_id)} and {_log_in()}"
    if isinstance(error, RepositoryNotFoundError):
        return (f"cannot be had: there is no such repository, or it is private and not yours ({status}); check the "
                f"name, or {_log_in()}")
    if isinstance(error, RevisionNotFoundError):
        return f"cannot be had: the repository has no revision '{revision}' ({status}); see {_page(repo_id)}/refs"
    if isinstance(error, EntryNotFoundError) and status is not None:
        return f"is not in the repository ({status}), see {_page(repo_id)}/tree/{revision or 'main'}{hint}"
    if isinstance(error, HfHubHTTPError) or status is not None:
        return f"cannot be had: {_status(status, error)}"
    return f"cannot be had: {_no_answer(error, is_download)}"


def _status(status: Optional[int], error: Exception) -> str:
    if status == 401:
        return f"the Hub takes no such token (401); {_log_in()}, or unset HF_TOKEN"
    if status == 403:
        return "your token does not have the rights (403); take one that may read this repository"
    if status == 429:
        wait = error.response.headers.get("Retry-After")
        when = f"in {wait} s" if wait else "later"
        return f"too many requests (429); try again {when}, or {_log_in()} for a higher limit"
    if status is not None and status >= 500:
        return f"the Hub has a fault ({status}); try again later, see https://status.huggingface.co"
    return f"the Hub answered with status {status}"


def _no_answer(error: Exception, is_download: bool) -> str:
    """Where there was no whole answer. By name: each major version of the client has an HTTP library of its own."""
    from huggingface_hub import constants

    names = " ".join(base.__name__ for base in type(error).__mro__)
    cause = f"{type(error).__name__}: {error}".split("\n")[0]
    is_network = any(name in names for name in ("Connect", "Timeout", "Transport", "Proxy", "SSL", "Chunked"))
    if is_download and (is_network or "Consistency check failed" in cause):
        return (f"the download broke off ({cause}); nothing of it is kept, try again, and see that the network lets "
                "the Hub's storage through")
    if "Timeout" in names:
        return f"{constants.ENDPOINT} does not answer within {PATIENCE:g} s; try again later, or check the network"
    if is_network:
        return f"{constants.ENDPOINT} cannot be reached ({cause}); check the network, the proxy and HF_ENDPOINT"
    return cause


def _log_in() -> str:
    from huggingface_hub import get_token

    return "log in as somebody else (`hf auth login`)" if get_token() else "log in (`hf auth login`)"


def _page(repo_id: str) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{repo_id}"
