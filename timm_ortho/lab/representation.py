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

The metrics accept features ``[n, d]``. If the features do not fit in memory, pass :class:`Moments` instead, and use
:func:`compare` for linear CKA. All metrics are computed in float64.
"""
import math
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Union

import torch
from torch import Tensor, nn

from ..diagnostics.dynamics import evaluation

Extract = Callable[[nn.Module, Tensor], Tensor]


class Moments:
    """Count, mean and scatter matrix of features, accumulated over batches in float64.

    The scatter matrix of a batch is computed around the batch's own mean and then shifted to the common mean (Chan et
    al. 1979), which keeps precision for features far from zero.

    Attributes:
        count: Number of rows so far, n.
        mean: Mean of the rows, ``[d]``.
        scatter: Sum of the outer products of the centred rows, ``[d, d]``: (n - 1) times the covariance.

    >>> moments = Moments()
    >>> for batch in torch.eye(4).split(2):
    ...     _ = moments.update(batch)
    >>> moments.count, moments.mean.tolist()
    (4, [0.25, 0.25, 0.25, 0.25])
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = self.scatter = torch.zeros(0)

    def update(self, features: Tensor) -> "Moments":
        """Add rows ``[n, d]`` and return this object.

        Raises:
            ValueError: The features do not have two axes, or their width differs from earlier rows.
        """
        if features.dim() != 2 or (self.count and features.shape[1] != len(self.mean)):
            expected = f"images, {len(self.mean) if self.count else 'width'}"
            raise ValueError(f"features must have the shape [{expected}], got {list(features.shape)}")
        if not len(features):
            return self
        rows = features.detach().to("cpu" if features.device.type == "mps" else features.device)  # MPS has no float64
        rows = rows.to(torch.float64)
        mean = rows.mean(0)
        centred = rows - mean
        scatter = centred.T @ centred
        if not self.count:
            self.count, self.mean, self.scatter = len(rows), mean, scatter
            return self
        total, step = self.count + len(rows), mean - self.mean
        self.scatter += scatter + torch.outer(step, step) * (self.count * len(rows) / total)
        self.mean += step * (len(rows) / total)
        self.count = total
        return self

    def part(self, begin: int, end: Optional[int] = None) -> "Moments":
        """Return the moments of a range of columns."""
        part = Moments()
        part.count, part.mean, part.scatter = self.count, self.mean[begin:end], self.scatter[begin:end, begin:end]
        return part


# -------------------------------------------------------------------------------------------- the metrics
def spectral_entropy(features: Union[Tensor, Moments]) -> float:
    """Return the entropy of the normalised eigenvalues of the covariance, in nats.

    Args:
        features: ``[n, d]`` with n >= 2, or moments.

    Returns:
        The entropy; NaN for non-finite features, and for constant features, whose scatter matrix is zero.

    >>> round(spectral_entropy(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])), 4)  # log 2
    0.6931
    """
    scatter = _moments(features).scatter
    if not scatter.isfinite().all():  # a diverged model, for which eigvalsh would raise an error
        return math.nan
    eigenvalues = torch.linalg.eigvalsh(scatter).clamp(min=0.0)
    shares = eigenvalues / eigenvalues.sum()
    return -torch.special.xlogy(shares, shares).sum().item() + 0.0  # turns -0.0 into 0.0


def effective_rank(features: Union[Tensor, Moments]) -> float:
    """Return the exponential of :func:`spectral_entropy`, between 1 and the width d.

    >>> round(effective_rank(torch.tensor([[1.0, 2.0], [2.0, 4.0], [3.0, 6.0]])), 4)  # on a line
    1.0
    """
    return math.exp(spectral_entropy(features))


def feature_std(features: Union[Tensor, Moments]) -> float:
    """Return the standard deviation over the images, averaged over the features.

    >>> feature_std(torch.tensor([[0.0, 1.0], [2.0, 1.0], [4.0, 1.0]]))  # the mean of 2 and 0
    1.0
    """
    moments = _moments(features)
    return (moments.scatter.diagonal() / (moments.count - 1)).sqrt().mean().item()


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
    if x.dim() == y.dim() == 2 and len(x) != len(y):
        raise ValueError(f"x and y must have the same number of images, got {len(x)} and {len(y)}")
    return _cka(_moments(torch.cat([x, y.to(x.device)], dim=-1)), x.shape[-1])


def summary(features: Union[Tensor, Moments]) -> Dict[str, float]:
    """Return ``effective_rank``, ``spectral_entropy`` and ``feature_std`` by name.

    >>> sorted(summary(torch.randn(10, 4)))
    ['effective_rank', 'feature_std', 'spectral_entropy']
    """
    moments = _moments(features)
    entropy = spectral_entropy(moments)
    return {
        "effective_rank": math.exp(entropy), "spectral_entropy": entropy, "feature_std": feature_std(moments)}


def _moments(features: Union[Tensor, Moments]) -> Moments:
    moments = features if isinstance(features, Moments) else Moments().update(features)
    if moments.count < 2:
        raise ValueError(f"a covariance needs at least 2 images, got {moments.count}")
    return moments


def _cka(joint: Moments, width: int) -> float:
    """Return the linear CKA of the first ``width`` columns and the remaining columns."""
    xx, xy, yy = (joint.scatter[:width, :width], joint.scatter[:width, width:], joint.scatter[width:, width:])
    return (xy.square().sum() / (xx.norm() * yy.norm())).item()


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
    batches = [batch.cpu() for batch, in _batches([model], loader, extract)]
    if not batches:
        raise ValueError("the loader has no batches")
    return torch.cat(batches)


def moments(model: nn.Module, loader: Iterable[Any], extract: Extract = pooled) -> Moments:
    """Return the moments of a loader's features without keeping all features in memory. Arguments: :func:`features`.

    >>> moments(timm.create_model("vit_test_ortho"), [torch.randn(2, 3, 8, 8)] * 3).count
    6
    """
    total = Moments()
    for batch, in _batches([model], loader, extract):
        total.update(batch)
    return total


def compare(model: nn.Module, other: nn.Module, loader: Iterable[Any], extract: Extract = pooled) -> Dict[str, Any]:
    """Compare the features of two models in one pass over a loader. See :func:`features` for the arguments.

    Returns:
        ``{"model": summary, "other": summary, "linear_cka": float, "images": int}``, see :func:`summary`.

    >>> model = timm.create_model("vit_test_ortho")
    >>> result = compare(model, model, [torch.randn(4, 3, 8, 8)])
    >>> round(result["linear_cka"], 4), result["images"]
    (1.0, 4)
    """
    joint, width = Moments(), 0
    for x, y in _batches([model, other], loader, extract):
        width = x.shape[-1]
        joint.update(torch.cat([x, y.to(x.device)], dim=-1))
    joint = _moments(joint)
    return {
        "model": summary(joint.part(0, width)),
        "other": summary(joint.part(width)),
        "linear_cka": _cka(joint, width),
        "images": joint.count,
    }


def _batches(models: List[nn.Module], loader: Iterable[Any], extract: Extract) -> Iterator[List[Tensor]]:
    """Yield the features of each model for each batch, without gradients and in evaluation mode."""
    for batch in loader:
        images = batch[0] if isinstance(batch, (tuple, list)) else batch
        batch_features = []
        for model in models:
            device = next(model.parameters(), images).device
            with evaluation(model), torch.no_grad():
                batch_features.append(extract(model, images.to(device)))
        yield batch_features
