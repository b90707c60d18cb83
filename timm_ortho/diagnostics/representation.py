"""What a model's features are like: effective rank, spectral entropy, spread, and linear CKA between two models.

With F the features, one row for each of n images, and C their covariance matrix (Oh et al. 2025, final version, notes
to Table 4)::

    p_i = lambda_i / sum_j lambda_j                  lambda: eigenvalues of C
    spectral entropy H = -sum_i p_i log p_i          in nats
    effective rank     = exp(H)                      1 for a line, d for a ball in d dimensions
    feature std        = (1 / d) sum_k std(F_k)      std with n - 1

    linear CKA         = |X^T Y|_F^2 / (|X^T X|_F |Y^T Y|_F)      X, Y: centred features of the same images

the last from "Similarity of Neural Network Representations Revisited" (Kornblith et al. 2019, Section 3). The paper's
own figures for ViT-B do not fit its definitions: exp(6.512) is 673 and not 572.9, so its spectral entropy and its
effective rank cannot be of the same eigenvalues.

Everything follows from sums over the images, kept by :class:`Moments` in float64: means and products of features, d x d
numbers however many images there are. Each function takes features ``[n, d]``, or moments where they are too many.

    rank = representation.effective_rank(features)
    rank = representation.effective_rank(representation.moments(model, loader))
    both = representation.compare(model, other, loader)
"""
import math
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Union

import torch
from torch import Tensor, nn

from .dynamics import evaluation

Extract = Callable[[nn.Module, Tensor], Tensor]


class Moments:
    """Count, mean and scatter of features that come batch by batch, in float64, as if they had come at once.

    The scatter of a batch is taken around its own mean and then moved (Chan et al. 1979), so that features far from
    zero lose no digits.

    Attributes:
        count: Rows so far, n.
        mean: ``[d]``.
        scatter: Sum of the outer products of the centred rows, ``[d, d]``: (n - 1) times the covariance.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = self.scatter = torch.zeros(0)

    def update(self, features: Tensor) -> "Moments":
        """Add rows ``[n, d]``; returns itself.

        Raises:
            ValueError: There is not one row for each image, or the width is not that of the rows before.
        """
        if features.dim() != 2 or (self.count and features.shape[1] != len(self.mean)):
            wanted = f"images, {len(self.mean) if self.count else 'width'}"
            raise ValueError(f"features must have the shape [{wanted}], got {list(features.shape)}")
        if not len(features):
            return self
        rows = features.detach().to("cpu" if features.device.type == "mps" else features.device)  # has no float64
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
        """The moments of some columns."""
        part = Moments()
        part.count, part.mean, part.scatter = self.count, self.mean[begin:end], self.scatter[begin:end, begin:end]
        return part


# ------------------------------------------------------------------------------------------- the figures
def spectral_entropy(features: Union[Tensor, Moments]) -> float:
    """Entropy of the normalised eigenvalues of the covariance, in nats; NaN where no feature varies.

    Args:
        features: ``[n, d]`` with n of at least 2, or moments.
    """
    scatter = _moments(features).scatter
    if not scatter.isfinite().all():  # of a model that diverged; eigvalsh raises there
        return math.nan
    eigenvalues = torch.linalg.eigvalsh(scatter).clamp(min=0.0)
    shares = eigenvalues / eigenvalues.sum()
    return -torch.special.xlogy(shares, shares).sum().item() + 0.0  # not -0.0


def effective_rank(features: Union[Tensor, Moments]) -> float:
    """exp of :func:`spectral_entropy`: between 1 and the width."""
    return math.exp(spectral_entropy(features))


def feature_std(features: Union[Tensor, Moments]) -> float:
    """Standard deviation of a feature over the images, the mean of all features."""
    moments = _moments(features)
    return (moments.scatter.diagonal() / (moments.count - 1)).sqrt().mean().item()


def linear_cka(x: Tensor, y: Tensor) -> float:
    """Linear CKA of two representations of the same images, between 0 and 1; NaN where one does not vary.

    Args:
        x: ``[n, d]``.
        y: ``[n, e]``, of the same images in the same order.

    Raises:
        ValueError: The numbers of images differ.
    """
    if x.dim() == y.dim() == 2 and len(x) != len(y):
        raise ValueError(f"both must be of the same images, got {len(x)} and {len(y)}")
    return _cka(_moments(torch.cat([x, y.to(x.device)], dim=-1)), x.shape[-1])


def summary(features: Union[Tensor, Moments]) -> Dict[str, float]:
    """``effective_rank``, ``spectral_entropy`` and ``feature_std`` by name."""
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
    """Of the first ``width`` columns and the others."""
    xx, xy, yy = (joint.scatter[:width, :width], joint.scatter[:width, width:], joint.scatter[width:, width:])
    return (xy.square().sum() / (xx.norm() * yy.norm())).item()


# ------------------------------------------------------------------------------------- models and loaders
def pooled(model: nn.Module, images: Tensor) -> Tensor:
    """What the classifier of a timm model receives, ``[images, width]``: pooled and normalised, before the head."""
    timms: Any = model
    if not hasattr(timms, "forward_head"):
        raise TypeError(f"{type(model).__name__} is no model of timm's: give extract, which takes it and images")
    return timms.forward_head(timms.forward_features(images), pre_logits=True)


def features(model: nn.Module, loader: Iterable[Any], extract: Extract = pooled) -> Tensor:
    """The features of all images of a loader, ``[n, d]``, on the CPU.

    Args:
        model: Any timm model, or any other that ``extract`` knows. It runs in evaluation mode, where its parameters
            are, in whatever autocast surrounds the call; afterwards its modes are as they were.
        loader: Of images, or of tuples that begin with images.
        extract: Takes model and images and returns their features.
    """
    return torch.cat([batch.cpu() for batch, in _batches([model], loader, extract)])


def moments(model: nn.Module, loader: Iterable[Any], extract: Extract = pooled) -> Moments:
    """The same as ``Moments().update(features(...))``, batch by batch: for data of any size. Arguments as there."""
    total = Moments()
    for batch, in _batches([model], loader, extract):
        total.update(batch)
    return total


def compare(model: nn.Module, other: nn.Module, loader: Iterable[Any], extract: Extract = pooled) -> Dict[str, Any]:
    """Both models' :func:`summary` and the linear CKA between them, in one pass. Arguments as :func:`features`.

    Returns:
        ``{"model": summary, "other": summary, "linear_cka": float, "images": int}``.
    """
    joint, width = Moments(), 0
    for one, two in _batches([model, other], loader, extract):
        width = one.shape[-1]
        joint.update(torch.cat([one, two.to(one.device)], dim=-1))
    joint = _moments(joint)
    return {
        "model": summary(joint.part(0, width)),
        "other": summary(joint.part(width)),
        "linear_cka": _cka(joint, width),
        "images": joint.count,
    }


def _batches(models: List[nn.Module], loader: Iterable[Any], extract: Extract) -> Iterator[List[Tensor]]:
    """For each batch the features by each model, without gradients and in evaluation mode."""
    for batch in loader:
        images = batch[0] if isinstance(batch, (tuple, list)) else batch
        found = []
        for model in models:
            device = next(model.parameters(), images).device
            with evaluation(model), torch.no_grad():
                found.append(extract(model, images.to(device)))
        yield found
