"""Download files of the Hub into huggingface_hub's cache.

Before a download, the offline flag is checked and the file's metadata are requested with a timeout, so that most errors
are raised within seconds.
"""
from functools import partial
from pathlib import Path
from typing import Optional, Tuple, Union

from huggingface_hub import (
    constants,
    get_hf_file_metadata,
    get_token,
    hf_hub_download,
    hf_hub_url,
    try_to_load_from_cache,
)

from .errors import REQUEST_TIMEOUT, WeightsError, client_errors_as, with_timeout

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
    return Path(path) if isinstance(path, str) else None  # a sentinel object means that the repository has no such file


def fetch(hf_hub_id: str, filename: str, cache_dir: CacheDir = None, *, newest: bool = False) -> Path:
    """Return the local path of a file of a repository, and download the file if necessary.

    Args:
        hf_hub_id: ``owner/name`` or ``owner/name@revision``.
        filename: Path in the repository.
        cache_dir: Cache folder, huggingface_hub's by default.
        newest: Request the file from the Hub first, and use a cached file only if the request fails. By default a
            cached file is used without a request.

    Raises:
        WeightsError: The file is not in the cache and cannot be downloaded.
    """
    path = cached(hf_hub_id, filename, cache_dir)
    if path and not newest:
        return path
    try:
        return _download(hf_hub_id, filename, cache_dir)
    except WeightsError:
        if path:
            return path
        raise


def _download(hf_hub_id: str, filename: str, cache_dir: CacheDir) -> Path:
    repo_id, revision = split_revision(hf_hub_id)
    source = f"hf-hub:{hf_hub_id}: {filename}"
    if constants.HF_HUB_OFFLINE:
        command = f"hf download {repo_id} {filename}" + (f" --revision {revision}" if revision else "")
        raise WeightsError(
            f"{source} is not in the cache, and HF_HUB_OFFLINE forbids downloads; unset it, or run "
            f"`{command}` on a machine with a network and copy the cache here")
    prefix = f"{source} cannot be downloaded: "
    if_absent = "; pickles, such as pytorch_model.bin, are never read" if filename.endswith(".safetensors") else ""
    as_weights_error = partial(
        client_errors_as, WeightsError, repo_id, revision, prefix=prefix, if_absent=if_absent, token=get_token())
    with as_weights_error():
        url = hf_hub_url(repo_id, filename, revision=revision)
        metadata = with_timeout(lambda: get_hf_file_metadata(url, timeout=REQUEST_TIMEOUT))
    if metadata.commit_hash is None or metadata.etag is None:
        raise WeightsError(
            f"{prefix}{constants.ENDPOINT} does not answer like a Hugging Face Hub; check HF_ENDPOINT, the proxy and "
            "the firewall")
    with as_weights_error(if_interrupted=_INTERRUPTED):
        return Path(hf_hub_download(
            repo_id, filename, revision=revision, cache_dir=cache_dir, etag_timeout=REQUEST_TIMEOUT))


_INTERRUPTED = ("the download was interrupted ({cause}) and nothing was kept; try again, and check that the network "
                "allows access to the Hub's storage")
