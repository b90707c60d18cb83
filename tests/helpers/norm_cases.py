"""Norms, and the update with the norm after it, computed in one step and in two."""
import functools

import torch
from timm.layers import LayerNorm, RmsNorm
from torch import nn

from timm_ortho.functional import plain_update, update_with_norm

from .kernel_cases import DEVICE, EPS, SINGLE

NORMS = {
    "LayerNorm": nn.LayerNorm,
    "without bias": functools.partial(nn.LayerNorm, bias=False),
    "without affine": functools.partial(nn.LayerNorm, elementwise_affine=False),
    "timm's LayerNorm": LayerNorm,
    "RMSNorm": functools.partial(nn.RMSNorm, eps=1e-5),
    "timm's RmsNorm": RmsNorm,
}


def made(name, width, dtype=SINGLE):
    norm = NORMS[name](width).to(DEVICE, dtype)
    for seed, parameter in enumerate(norm.parameters()):
        nn.init.normal_(parameter, mean=1.0, generator=torch.Generator(DEVICE).manual_seed(seed))
    return norm


def in_two_steps(x, f, norm, update=plain_update):
    y = update(x, f, 0.0, 1.0, [-1], EPS)
    return y, norm(y)


def in_one_step(backend):
    def both(x, f, norm):
        results = update_with_norm(x, f, norm, EPS, backend)
        assert results is not None
        return results
    return both
