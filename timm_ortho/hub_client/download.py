"""A file from the Hub, or within seconds the one reason why it cannot be had.

The cache comes first, then the flag for offline work, then one request for the file's metadata; a download follows only
where that was answered.
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

from .errors import LIMIT, WeightsError, told, within_patience

CacheDir = Union[str, Path, None]


def split_revision(hf_hub_id: str) -> Tuple[str, Optional[str]]:
    """Repository and revision of ``organisation/name@revision``, as timm writes them; None for the default branch."""
    repo_id, _, revision = hf_hub_id.partition("@")
    return repo_id, revision or None


def cached(hf_hub_id: str, filename: str, cache_dir: CacheDir = None) -> Optional[Path]:
    """Where a file of a repository lies in the cache, None if it does not. Asks no network."""
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
    repo_id, revision = split_revision(hf_hub_id)
    what = f"hf-hub:{hf_hub_id}: {filename}"
    if constants.HF_HUB_OFFLINE:
        raise WeightsError(
            f"{what} is not in the cache, and HF_HUB_OFFLINE forbids to download it; unset that, or run "
            f"`hf download {repo_id} {filename}` where there is a network and bring the cache here")
    why = f"{what} cannot be had: "
    absent = "; pickles, such as pytorch_model.bin, are never read" if filename.endswith(".safetensors") else ""
    asking = partial(told, WeightsError, repo_id, revision, begin=why, absent=absent, token=get_token())
    with asking():
        url = hf_hub_url(repo_id, filename, revision=revision)
        metadata = within_patience(lambda: get_hf_file_metadata(url, timeout=LIMIT))
    if metadata.commit_hash is None or metadata.etag is None:
        raise WeightsError(
            f"{why}{constants.ENDPOINT} answers, but not as a Hugging Face Hub does; check HF_ENDPOINT, the proxy and "
            "the firewall")
    with asking(transfer=_BROKE_OFF):
        return Path(hf_hub_download(repo_id, filename, revision=revision, cache_dir=cache_dir, etag_timeout=LIMIT))


_BROKE_OFF = ("the download broke off ({cause}); nothing of it is kept, try again, and see that the network lets the "
              "Hub's storage through")
