"""Measure the overhead of launching operations, with one CPU thread: on 32 elements, and in a ViT of width 64."""
from argparse import Namespace
from functools import partial

import torch

from ..connections import FeatureConnection
from ..functional import choose_backend
from .clock import Candidate, Group
from .models import model_group
from .operator import PASTED, tensors, timed
from .options import MODEL_STEPS, architecture, shape_label

# TINY is the shape of a tensor. SMALL contains the model arguments of `timm-ortho compare` for 32 x 32 images.
TINY = (1, 1, 32)
SMALL, SMALL_BATCHES = dict(img_size=32, patch_size=8, embed_dim=64, num_heads=4), (1, 32)


def launch_groups(options: Namespace) -> list[Group]:
    """Return one group for each step on the tiny tensors, then one for each batch size and step of the small model.

    >>> from timm_ortho.bench import resolve
    >>> [group.labels["shape"] for group in launch_groups(resolve(dict(device="cpu", what=["launch"])))][::2]
    ['1x1x32', '1x3x32x32', '32x3x32x32']
    """
    if "launch" not in options.what:
        return []
    labels = dict(what="launch", shape=shape_label(TINY), layout="tokens", dtype="float32", mode="eager")
    tiny = [Group({**labels, "step": step}, 0, partial(_tiny_candidates, options.device, step)) for step in MODEL_STEPS]
    models = [architecture("vit_small_ortho", batch, None, SMALL)._replace(pasted=True) for batch in SMALL_BATCHES]
    return tiny + [model_group("launch", options.device, model, "tokens", "float32", "eager", step)
                   for model in models for step in MODEL_STEPS]


def _tiny_candidates(device: torch.device, step: str) -> list[Candidate]:
    operator_step = "both" if step == "training" else "forward"
    x, f, g = tensors(device, TINY, "tokens", "float32", operator_step)
    pasted = {name: partial(formula, dim=-1) for name, formula in PASTED.items()}
    plain = [Candidate(name, *timed(update, x, f, g, operator_step))
             for name, update in {"linear": torch.add, **pasted}.items()]
    ours = timed(FeatureConnection(), x, f, g, operator_step)
    return [*plain, Candidate("ortho", *ours, backend=partial(choose_backend, x, f))]
