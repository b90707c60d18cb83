"""Compute effective rank, spectral entropy, standard deviation and linear CKA of a model's features.

F contains one row of features for each of n images, and C is the covariance matrix of the features (Oh et al. 2025,
final version, notes to Table 4)::

    p_i = lambda_i / sum_j lambda_j                  lambda: eigenvalues of C
    spectral entropy H = -sum_i p_i log p_i          in nats
    effective rank     = exp(H)                      1 for a line, d for a ball in d dimensions
    feature std        = (1 / d) sum_k std(F_k)      F_k: column k; std divides by n - 1

    linear CKA         = |X^T Y|_F^2 / (|X^T X|_F |Y^T Y|_F)      X, Y: centred features of the same images

Linear CKA is from "Similarity of Neural Network Representations Revisited" (Kornblith et al. 2019, Section 3), which
centres the features. The formula of Oh et al., who cite it, has X and Y without centring, and their values may differ
from the values here. The values that Oh et al. publish for the linear ViT-B contradict each other under these
definitions: the spectral entropy 6.512 gives the effective rank exp(6.512) = 673, but they publish 572.9.

The metrics accept features ``[n, d]``, and are computed in float64.
"""
import math
from typing import Any, Callable, Dict, Iterable

import torch
from torch import Tensor, nn

from ..diagnostics.dynamics import evaluation

Extract = Callable[[nn.Module, Tensor], Tensor]


# -------------------------------------------------------------------------------------------- the metrics
def spectral_entropy(features: Tensor) -> float:
    """Return the entropy of the normalised eigenvalues of the covariance, in nats.

    Args:
        features: ``[n, d]`` with n >= 2.

    Returns:
        The entropy; NaN for non-finite features, and for constant features, whose covariance is zero.

    >>> round(spectral_entropy(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])), 4)  # log 2
    0.6931
    """
    centred = _centred(features)
    if not centred.isfinite().all():  # a diverged model, for which eigvalsh would raise an error
        return math.nan
    eigenvalues = torch.linalg.eigvalsh(centred.T @ centred).clamp(min=0.0)
    shares = eigenvalues / eigenvalues.sum()
    return -torch.special.xlogy(shares, shares).sum().item() + 0.0  # turns -0.0 into 0.0


def effective_rank(features: Tensor) -> float:
    """Return the exponential of :func:`spectral_entropy`, between 1 and the width d.

    >>> round(effective_rank(torch.tensor([[1.0, 2.0], [2.0, 4.0], [3.0, 6.0]])), 4)  # on a line
    1.0
    """
    return math.exp(spectral_entropy(features))


def feature_std(features: Tensor) -> float:
    """Return the standard deviation over the images, averaged over the features.

    >>> feature_std(torch.tensor([[0.0, 1.0], [2.0, 1.0], [4.0, 1.0]]))  # the mean of 2 and 0
    1.0
    """
    return _centred(features).std(0).mean().item()


def linear_cka(x: Tensor, y: Tensor) -> float:
    """Return the linear CKA of two representations of the same images.

    Args:
        x: Features ``[n, d]``.
        y: Features ``[n, e]`` of the same images in the same order.

    Returns:
        A number between 0 and 1; NaN if the features of x or y are constant.

    Raises:
        ValueError: The numbers of images differ or are below 2, or the features do not have two axes.

    >>> x = torch.randn(10, 4)
    >>> round(linear_cka(x, 3 * x.flip(1)), 4)  # invariant to rotations, reflections and scaling
    1.0
    """
    x, y = _centred(x), _centred(y.to(x.device))
    if len(x) != len(y):
        raise ValueError(f"x and y must have the same number of images, got {len(x)} and {len(y)}")
    return ((x.T @ y).square().sum() / ((x.T @ x).norm() * (y.T @ y).norm())).item()


def summary(features: Tensor) -> Dict[str, float]:
    """Return ``effective_rank``, ``spectral_entropy`` and ``feature_std`` by name.

    >>> sorted(summary(torch.randn(10, 4)))
    ['effective_rank', 'feature_std', 'spectral_entropy']
    """
    entropy = spectral_entropy(features)
    return {"effective_rank": math.exp(entropy), "spectral_entropy": entropy, "feature_std": feature_std(features)}


def _centred(features: Tensor) -> Tensor:
    """Return features in float64 minus their mean over the images."""
    if features.dim() != 2 or len(features) < 2:
        raise ValueError(f"features must have the shape [images, width] with at least 2 images, got "
                         f"{list(features.shape)}")
    rows = features.detach().to("cpu" if features.device.type == "mps" else features.device)  # MPS has no float64
    rows = rows.to(torch.float64)
    return rows - rows.mean(0)


# ------------------------------------------------------------------------------------- models and loaders
def pooled(model: nn.Module, images: Tensor) -> Tensor:
    """Return the input of a timm model's classifier: the features after the pooling and the last norm layer, if any.

    Args:
        model: A timm model.
        images: ``[B, C, H, W]``.

    Returns:
        Features ``[B, d]``.

    Raises:
        TypeError: The model is not a timm model.

    >>> pooled(timm.create_model("vit_test_ortho"), torch.randn(2, 3, 8, 8)).shape
    torch.Size([2, 32])
    """
    timm_model: Any = model
    if not hasattr(timm_model, "forward_head"):
        raise TypeError(f"{type(model).__name__} is not a timm model; pass extract, a function of model and images")
    return timm_model.forward_head(timm_model.forward_features(images), pre_logits=True)


def features(model: nn.Module, loader: Iterable[Any], extract: Extract = pooled) -> Tensor:
    """Return the features of all images of a loader.

    Args:
        model: A timm model, or any model that ``extract`` supports. It runs in evaluation mode on the device of its
            parameters, under the caller's autocast. Its training modes are restored afterwards.
        loader: Yields images, or tuples whose first element is images.
        extract: Function of model and images that returns features ``[B, d]``.

    Returns:
        Features ``[n, d]`` on the CPU.

    Raises:
        ValueError: The loader has no batches.

    >>> features(timm.create_model("vit_test_ortho"), [torch.randn(2, 3, 8, 8)] * 3).shape
    torch.Size([6, 32])
    """
    found = []
    for batch in loader:
        images = batch[0] if isinstance(batch, (tuple, list)) else batch
        device = next(model.parameters(), images).device
        with evaluation(model), torch.no_grad():
            found.append(extract(model, images.to(device)).cpu())
    if not found:
        raise ValueError("the loader has no batches")
    return torch.cat(found)
