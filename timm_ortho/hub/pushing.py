"""Publish models on the Hugging Face Hub.

All files are uploaded in one commit. An interrupted upload changes no file of the repository, and a repeated call
uploads only the missing files.
"""
from collections.abc import Sequence
from functools import partial
from tempfile import TemporaryDirectory
from typing import Optional, Union

from huggingface_hub import CommitInfo, HfApi, ModelInfo, constants
from huggingface_hub.utils import RepositoryNotFoundError

from ..weights.download import client_errors_as
from .repository import Model, PublishError, export


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
    """Publish a model in a repository on the Hub. The repository is created if it does not exist.

    Existing files are replaced, including a README.md that was edited by hand.

    >>> push(model, "me/my-model", license="apache-2.0").commit_url  # doctest: +SKIP
    'https://huggingface.co/me/my-model/commit/...'

    Args:
        model: A classifier from `timm.create_model`, also after `connect`. Or a path: a checkpoint or the folder of one
            run of `timm-ortho compare`, `timm-ortho study` or timm's `train.py`. Only the card of a run contains
            metrics, which are read from the run's files.
        repo_id: `owner/name`.
        ema: Publish the EMA weights of the run.
        labels: Names of the classes. None: names from the run; for a module, from its `pretrained_cfg`.
        license: License identifier of the Hub (`apache-2.0`). None: the license of the weights that
            training started with if it is share-alike, otherwise no license.
        private: Whether a new repository is private. None: the default of the owner's account.
        revision: Branch to commit to. A missing branch is created. None: main.
        create_pr: Open a pull request to the branch `revision` instead of committing. In this case, a missing branch is
            not created.
        commit_message: Title of the commit.
        token: Token for the Hub. None: the token of `hf auth login` or HF_TOKEN. False: no token.

    Returns:
        The commit, with `commit_url` and `pr_url`.

    Raises:
        PublishError: The model cannot be published. The message is one line that names the problem and what to do.
        RunError: The run cannot be read.
    """
    api = HfApi(token=token, library_name="timm-ortho")
    as_publish_error = partial(client_errors_as, PublishError, f"{repo_id} cannot be written at {constants.ENDPOINT}")
    with as_publish_error():
        existing = _existing(api, repo_id)
    if private and existing is not None and not existing.private:
        raise PublishError(f"{repo_id} exists and is public: make it private on its settings page, or choose another "
                           "name; nothing was uploaded")
    with TemporaryDirectory() as folder:
        export(model, folder, repo_id, ema=ema, labels=labels, license=license, revision=revision,
               token=token if isinstance(token, str) else None)
        with as_publish_error():
            api.create_repo(repo_id, private=private, exist_ok=True)
            if revision is not None and not create_pr and not revision.startswith("refs/"):
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            return api.upload_folder(
                repo_id=repo_id, folder_path=folder, revision=revision, create_pr=create_pr,
                commit_message=commit_message)


def _existing(api: HfApi, repo_id: str) -> Optional[ModelInfo]:
    """Return the Hub's description of a repository; None if it does not exist or the token cannot read it.

    Requests without a timeout, such as those of an upload, wait forever for a server that does not answer.
    """
    try:
        return api.model_info(repo_id, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    except RepositoryNotFoundError:
        return None
