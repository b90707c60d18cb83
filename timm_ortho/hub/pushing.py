"""Publishing on the Hugging Face Hub.

All files travel in one commit: an upload that breaks off leaves the repository as it was, and the same call again sends
what is missing.
"""
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Optional, Union

from huggingface_hub import CommitInfo, HfApi, constants, get_token
from huggingface_hub.utils import RepositoryNotFoundError
from torch import nn

from ..runs.folders import PublishError, checkpoint_file
from .repository import Model, check_id, export, scrubbed, short

__all__ = ["PublishError", "export", "push"]

TIMEOUT = 5  # seconds that the Hub has for its first answer


def push(
        model: Model,
        repo_id: str,
        *,
        ema: bool = False,
        labels: Optional[Sequence[str]] = None,
        license: Optional[str] = None,
        private: Optional[bool] = None,
        revision: Optional[str] = None,
        create_pr: bool = False,
        commit_message: str = "Add model",
        token: Union[str, bool, None] = None,
) -> CommitInfo:
    """Publish a model in a repository on the Hub, which is made where there is none.

    Args:
        model: A model; or a checkpoint or the folder of one run, of `timm-ortho compare`, `study` or timm's `train.py`.
            The card has figures only then: they are read from the run's files.
        repo_id: `owner/name`.
        ema: The EMA weights of the run.
        labels: Names of the classes; None for those that the run or its data set knows.
        license: As the Hub names licences (`apache-2.0`); None leaves it open.
        private: Whether a repository that is made is private; None for the owner's default.
        revision: The branch, made where there is none; None for main.
        create_pr: Propose the commit instead of making it.
        commit_message: The commit's title.
        token: None for the one of `hf auth login` or HF_TOKEN, False for none.

    Returns:
        The commit, with `commit_url` and `pr_url`.

    Raises:
        PublishError: It cannot be published; the message is one line and says what to do.
    """
    check_id(repo_id)
    if not isinstance(model, nn.Module):
        checkpoint_file(Path(model))  # what is wrong on this machine is told first
    api = HfApi(token=token, library_name="timm-ortho")
    secret = get_token() if token is None else token or None
    existing = _asking(api, repo_id, secret, lambda: _existing(api, repo_id), "cannot be reached", "check the network")
    if private and existing is not None and not existing.private:
        raise PublishError(f"{repo_id} is there already and public, so what is pushed would be too: make it private on "
                           "its settings page, or choose another name; nothing was sent")
    with TemporaryDirectory() as scratch:
        folder = Path(scratch, "repository")
        export(model, folder, repo_id, ema=ema, labels=labels, license=license, revision=revision, token=secret)
        return _asking(
            api, repo_id, secret,
            lambda: _upload(api, folder, repo_id, private, revision, create_pr, commit_message),
            "broke off the upload", f"{repo_id} is as it was, and the same command again completes it",
        )


def _existing(api: HfApi, repo_id: str) -> Any:
    """What the Hub says about a repository; None where it is not there, or not for this token."""
    try:
        return api.model_info(repo_id, timeout=TIMEOUT)
    except RepositoryNotFoundError:
        return None


def _upload(
        api: HfApi,
        folder: Path,
        repo_id: str,
        private: Optional[bool],
        revision: Optional[str],
        create_pr: bool,
        message: str,
) -> CommitInfo:
    api.create_repo(repo_id, exist_ok=True, **({} if private is None else {"private": private}))
    if revision is not None and not create_pr and not revision.startswith("refs/"):
        api.create_branch(repo_id, branch=revision, exist_ok=True)
    return api.upload_folder(
        repo_id=repo_id, folder_path=str(folder), revision=revision, create_pr=create_pr, commit_message=message)


def _asking(
        api: HfApi,
        repo_id: str,
        token: Optional[str],
        call: Callable[[], Any],
        failure: str,
        advice: str,
) -> Any:
    """What the call returns; whatever the client raises becomes one line with the real cause.

    `failure` and `advice` are for a Hub that gives no answer; what an answer means is in `_REFUSALS`.
    """
    if constants.HF_HUB_OFFLINE:
        raise PublishError(f"HF_HUB_OFFLINE is set, and {repo_id} is on the Hub: unset it, or use --dry-run")
    try:
        return call()
    except _client_errors() as error:
        chain = _causes(error)
        statuses = [link.response.status_code for link in chain if getattr(link, "response", None) is not None]
        if statuses:
            line = _refusal(statuses[0], api.endpoint, repo_id, token, error)
        else:
            line = f"the Hub at {api.endpoint} {failure} ({type(chain[-1]).__name__}: {short(chain[-1])}): {advice}"
        raise PublishError(scrubbed(line, token)) from None


# status: what the Hub does, and what to do; 500 stands for all of its own failures
_REFUSALS = {
    401: ("does not know {who}", "log in with hf auth login, or set HF_TOKEN to a token with write access"),
    403: ("does not let the token write to {repo}", "use one with write access, or propose it with --create-pr"),
    404: ("has no {repo} for this token, or not that revision", "check both names"),
    409: ("has somebody else writing to {repo}", "give the same command again"),
    429: ("asks to slow down", "wait some minutes and give the same command again"),
    500: ("has a failure of its own", "try again later; {repo} is as it was"),
}


def _refusal(status: int, endpoint: str, repo_id: str, token: Optional[str], error: Exception) -> str:
    names = dict(repo=repo_id, who="the token" if token else "who is asking")
    if min(status, 500) not in _REFUSALS:
        return f"the Hub refuses what it is sent ({status} from {endpoint}): {short(error)}"
    what, advice = (text.format(**names) for text in _REFUSALS[min(status, 500)])
    return f"the Hub {what} ({status} from {endpoint}): {advice}"


def _client_errors() -> tuple[type[Exception], ...]:
    """What the installed client raises: of its own, of the operating system and of the HTTP library beneath it."""
    libraries = [sys.modules[name] for name in ("httpx", "httpx2") if name in sys.modules]
    return (OSError, RuntimeError, ValueError, *(library.TransportError for library in libraries))


def _causes(error: BaseException) -> list[BaseException]:
    """An error, what it came from, and so on to the first."""
    chain = [error]
    while (inner := chain[-1].__cause__ or chain[-1].__context__) is not None and inner not in chain:
        chain.append(inner)
    return chain
