"""Measure models relative to the same architecture with linear connections and the same weights."""
from argparse import Namespace
from contextlib import nullcontext
from functools import partial
from itertools import product

import timm
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from ..connections import LinearConnection
from ..convert import connect
from ..functional import choose_backend
from ..model_sites import sites
from .clock import Candidate, Group, compiled
from .options import DTYPES, MODEL_STEPS, Architecture, shape_label


def model_groups(options: Namespace) -> list[Group]:
    """Return one group for each architecture, layout, precision, mode and step.

    In the mode `compiled`, the whole model is under torch.compile.

    >>> from timm_ortho.bench import resolve
    >>> groups = model_groups(resolve(dict(device="cpu", models=["vit_small_ortho"], compile=False)))
    >>> [(group.labels["mode"], group.labels["step"]) for group in groups]
    [('eager', 'training'), ('eager', 'inference')]
    """
    groups = []
    dtypes = [dtype for dtype in options.dtypes if dtype in DTYPES]  # only the operator has mixed dtypes
    for model in options.models:
        for layout, dtype, mode, step in product(model.layouts, dtypes, options.modes, MODEL_STEPS):
            labels = dict(what="models", model=model.label, shape=shape_label(model.batch), layout=layout,
                          dtype=dtype if dtype == "float32" else f"amp {dtype}", mode=mode, step=step)
            build = partial(_model_candidates, model, options.device, layout, DTYPES[dtype], mode, step)
            groups.append(Group(labels, model.batch[0], build))
    return groups


def _model_candidates(
        architecture: Architecture, device: torch.device, layout: str, dtype: torch.dtype, mode: str, step: str,
) -> list[Candidate]:
    memory_format = torch.channels_last if layout == "channels_last" else torch.contiguous_format
    images = torch.randn(architecture.batch, generator=torch.Generator().manual_seed(0))
    images = images.to(device, memory_format=memory_format)
    return [_model_candidate(name, model.to(device, memory_format=memory_format).train(step == "training"), images,
                             dtype, mode)
            for name, model in _models(architecture).items()]


def _models(architecture: Architecture) -> dict[str, nn.Module]:
    """Return the models of a group by name. `linear` is the first. All models have the same weights."""
    def seeded(variant: str) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return timm.create_model(variant, **architecture.arguments)

    return {"linear": connect(seeded(f"{architecture.base}_ortho"), "linear"),
            **{name: seeded(variant) for name, variant in architecture.variants.items()}}


def _model_candidate(name: str, model: nn.Module, images: Tensor, dtype: torch.dtype, mode: str) -> Candidate:
    labels = torch.zeros(len(images), dtype=torch.long, device=images.device)
    forward = compiled(model) if mode == "compiled" else model

    def logits() -> Tensor:
        autocast = torch.autocast(images.device.type, dtype) if dtype != torch.float32 else nullcontext()
        with autocast:
            return forward(images)

    def loss() -> Tensor:
        return cross_entropy(logits().float(), labels)

    def infer(_: None) -> Tensor:
        with torch.inference_mode():
            return logits()

    parameters = list(model.parameters())
    held = sum(tensor.nbytes for tensor in (*parameters, *model.buffers(), images, labels))
    is_torch = mode == "compiled" or all(isinstance(site.connection, LinearConnection) for site in sites(model))
    backend = "torch" if is_torch else _chosen_backend(images.device, model.training)
    if not model.training:
        return Candidate(name, infer, backend=backend, held=held)
    return Candidate(name, lambda _: loss().backward(), model.zero_grad, backend, keep=loss, parameters=parameters,
                     held=held)


def _chosen_backend(device: torch.device, training: bool) -> str:
    """Return the backend that connections use for tensors on this device in eager code."""
    with torch.inference_mode(not training):
        x = torch.ones(1, 1, device=device, requires_grad=training)
        return choose_backend(x, x)
