"""Publishing on the Hugging Face Hub.

All files travel in one commit: an upload that breaks off leaves the repository as it was, and the same call again sends
what is missing.
"""
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Optional, Union

from huggingface_hub import CommitInfo, HfApi, ModelInfo, constants, get_token
from huggingface_hub.utils import RepositoryNotFoundError
from torch import nn

from ..hub_client.errors import REQUEST_TIMEOUT, check_repo_id, client_errors_as, with_timeout
from .errors import PublishError
from .repository import Model, export
from .trained_run import checkpoint_file


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

    Files that it has already are replaced, a README.md that was edited by hand too.

    Args:
        model: A classifier that `timm.create_model` made, connected later or not; or a checkpoint or the folder of one
            run, of `timm-ortho compare`, `study` or timm's `train.py`. The card has figures only of a run: they are
            read from its files.
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
    check_repo_id(repo_id, PublishError)
    if not isinstance(model, nn.Module):
        checkpoint_file(Path(model))  # report local errors first
    api = HfApi(token=token, library_name="timm-ortho")
    secret = token if isinstance(token, str) else None if token is False else get_token()
    if constants.HF_HUB_OFFLINE:
        raise PublishError(f"HF_HUB_OFFLINE is set, and {repo_id} is on the Hub: unset it, or use --dry-run")
    asking = partial(client_errors_as, PublishError, repo_id, revision, access="write", token=secret)
    with asking():
        existing = with_timeout(lambda: _existing(api, repo_id))
    if private and existing is not None and not existing.private:
        raise PublishError(f"{repo_id} is there already and public, so what is pushed would be too: make it private on "
                           "its settings page, or choose another name; nothing was sent")
    with TemporaryDirectory() as scratch:
        folder = Path(scratch, "repository")
        export(model, folder, repo_id, ema=ema, labels=labels, license=license, revision=revision, token=secret)
        with asking(if_interrupted=f"the upload was interrupted ({{cause}}); {repo_id} is unchanged; repeat the "
                                   "command to complete it"):
            api.create_repo(repo_id, private=private, exist_ok=True)
            if revision is not None and not create_pr and not revision.startswith("refs/"):
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            return api.upload_folder(
                repo_id=repo_id, folder_path=str(folder), revision=revision, create_pr=create_pr,
                commit_message=commit_message)


def _existing(api: HfApi, repo_id: str) -> Optional[ModelInfo]:
    """What the Hub says about a repository; None where it is not there, or not for this token."""
    try:
        return api.model_info(repo_id, timeout=REQUEST_TIMEOUT)
    except RepositoryNotFoundError:
        return None
