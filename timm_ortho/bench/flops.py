"""Count the FLOPs of models and of their connections, by the rules of the paper's Table 1a.

In matrix products and convolutions, a multiplication and its addition count 2 together. In connections, elementwise
operations count 1 per element of the result (2 for `addcmul`), and a sum counts 1 per summed element.

Let the stream x and the branch output f have s tokens of d channels. The orthogonal update in the paper's form takes
7sd + 2s FLOPs, which is 6sd + 2s more than the plain addition x + f. The sums x.x and x.f take 2sd each, and adding eps
and dividing take s each. With c = x.f / (x.x + eps), the three steps c x, f - c x and x + (f - c x) take sd each. This
package computes f + (1 - c) x instead, in 6sd + 3s FLOPs.
"""
from math import prod
from typing import Any, Mapping

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from ..connections import Connection
from ..diagnostics.dynamics import evaluation
from ..functional import decompose
from ..model_sites import sites

aten = torch.ops.aten
Counts = Mapping[str, Mapping[Any, int]]  # name of a module -> operation -> FLOPs


def _of_result(*shapes: Any, out_shape: Any = None, **_: Any) -> int:
    return prod(out_shape)


_ELEMENTWISE = {
    **dict.fromkeys((aten.mul, aten.add, aten.add_, aten.sub, aten.div, aten.div_, aten.sin, aten.cos, aten.clamp),
                    _of_result),
    aten.addcmul: lambda *shapes, out_shape=None, **_: 2 * prod(out_shape),
    aten.sum: lambda shape, *_, **__: prod(shape),
}


class PaperConnection(Connection):
    """The orthogonal update, computed in the steps of the paper's Algorithm 1. Table 1a counts these steps."""

    def forward(self, x: Tensor, f: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        return x + decompose(x, f, self.dim, self.eps)[1]


def count(model: nn.Module) -> Counts:
    """Return the FLOPs of a forward pass of one image, by module and operation. The whole model is the module ''.

    A model on the meta device has the same counts, although it computes no numbers.
    """
    channels, *size = model.pretrained_cfg["input_size"]
    size = getattr(getattr(model, "patch_embed", None), "img_size", None) or size
    image = next(model.parameters()).new_zeros(1, getattr(model, "in_chans", channels), *size)
    with (FlopCounterMode(display=False, custom_mapping=_ELEMENTWISE) as counter, evaluation(model), torch.no_grad(),
          sdpa_kernel(SDPBackend.MATH)):  # MATH: attention as matrix products
        model(image)
    return {name.partition(".")[2]: dict(by_operation) for name, by_operation in counter.get_flop_counts().items()
            if name != "Global"}


def products(counts: Counts, module: str = "") -> int:
    """Return the FLOPs of the matrix products and convolutions of a module."""
    return sum(flops for operation, flops in counts[module].items() if operation in flop_registry)


def updates(model: nn.Module, counts: Counts) -> list[int]:
    """Return the FLOPs of the connection of each site, including the addition to the stream."""
    return [sum(counts[site.name].values()) for site in sites(model)]
