"""Download files of the Hub, and report errors of huggingface_hub in one line with the cause.

huggingface_hub repeats a failed download for 23 seconds, or for minutes if the server does not answer. It then reports
"check your connection" for every cause. Here, a request for the file's metadata fails first, without repetitions.
"""
import re
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator, Optional, Tuple, Type, Union

from huggingface_hub import (
    constants,
    get_hf_file_metadata,
    get_token,
    hf_hub_download,
    hf_hub_url,
    try_to_load_from_cache,
)

from .._text import error_text
from . import WeightsError

CacheDir = Union[str, Path, None]


def split_revision(hf_hub_id: str) -> Tuple[str, Optional[str]]:
    """Split timm's ``owner/name@revision`` into repository and revision. None means the default branch.

    >>> split_revision("me/my-model@v1"), split_revision("me/my-model")
    (('me/my-model', 'v1'), ('me/my-model', None))
    """
    repo_id, _, revision = hf_hub_id.partition("@")
    return repo_id, revision or None


def cached(hf_hub_id: str, filename: str, cache_dir: CacheDir = None) -> Optional[Path]:
    """Return the path of a file in the cache, or None. Does not use the network."""
    repo_id, revision = split_revision(hf_hub_id)
    path = try_to_load_from_cache(repo_id, filename, cache_dir=cache_dir, revision=revision)
    return Path(path) if isinstance(path, str) else None  # an object means that the repository has no such file


def fetch(hf_hub_id: str, filename: str, cache_dir: CacheDir = None, *, newest: bool = False) -> Path:
    """Return the local path of a file of a repository, and download the file if it is not cached.

    If ``newest``, the file is requested from the Hub first, and a cached file is used if this fails. A file that is
    neither in the cache nor on the Hub raises a WeightsError.
    """
    repo_id, revision = split_revision(hf_hub_id)
    problem = f"hf-hub:{hf_hub_id}: {filename} cannot be downloaded from {constants.ENDPOINT}"
    with client_errors_as(WeightsError, problem):
        path = cached(hf_hub_id, filename, cache_dir)
        if path and not newest:
            return path
        if path is None:  # this request is not repeated
            url = hf_hub_url(repo_id, filename, revision=revision)
            get_hf_file_metadata(url, timeout=constants.HF_HUB_ETAG_TIMEOUT)
        return Path(hf_hub_download(repo_id, filename, revision=revision, cache_dir=cache_dir))


@contextmanager
def client_errors_as(error_class: Type[Exception], problem: str) -> Iterator[None]:
    """Raise any error of huggingface_hub as ``error_class``, in one line: the problem, and the cause.

    The cause is the Hub's answer. Without an answer, it is the first error, such as a refused connection.
    """
    try:
        yield
    except Exception as error:  # noqa: BLE001  raised again without the client's traceback
        chain = [error]
        while (inner := chain[-1].__cause__ or chain[-1].__context__) is not None and inner not in chain:
            chain.append(inner)
        answers = [link for link in chain if getattr(link, "response", None) is not None]
        cause = error_text([*answers, chain[-1]][0], named=True)
        raise error_class(without_tokens(f"{problem}: {cause}")) from None


def without_tokens(text: str, token: Optional[str] = None) -> str:
    """Replace the tokens in use, strings that look like tokens, and credentials in addresses with ``***``.

    >>> without_tokens("https://me:secret@host/")
    'https://***@host/'
    """
    for secret in filter(None, (token, get_token())):
        text = text.replace(secret, "***")
    text = re.sub(r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}", "***", text)
    return re.sub(r"(?<=://)[^/@\s]+@", "***@", text)
