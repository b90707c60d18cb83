"""What a call costs before it touches data: 32 elements, and a ViT 64 wide, with one thread."""
from argparse import Namespace
from functools import partial

import torch

from ..backends import choose_backend
from ..connections import FeatureConnection
from .clock import Candidate, Group
from .models import model_group
from .operator import PASTED, tensors, timed
from .options import MODEL_STEPS, architecture, times

# The model is that of `timm-ortho compare` on images of 32 x 32, by batch size.
TINY = (1, 1, 32)
SMALL, SMALL_BATCHES = dict(img_size=32, patch_size=8, embed_dim=64, num_heads=4), (1, 32)


def launch_groups(options: Namespace) -> list[Group]:
    """A group for each step of the smallest tensors, then for each batch size and step of the small model."""
    if "launch" not in options.what:
        return []
    labels = dict(what="launch", shape=times(TINY), layout="tokens", dtype="float32", mode="eager")
    tiny = [Group({**labels, "step": step}, 0, partial(_tiny_candidates, options.device, step)) for step in MODEL_STEPS]
    small = [architecture("vit_small_ortho", batch, None, SMALL)._replace(pasted=True) for batch in SMALL_BATCHES]
    return tiny + [model_group("launch", options.device, one, "tokens", "float32", "eager", step)
                   for one in small for step in MODEL_STEPS]


def _tiny_candidates(device: torch.device, step: str) -> list[Candidate]:
    of_operator = "both" if step == "training" else "forward"
    x, f, g = tensors(device, TINY, "tokens", "float32", of_operator)
    pasted = {name: partial(formula, dim=-1) for name, formula in PASTED.items()}
    updates = {"linear": torch.add, **pasted, "ortho": FeatureConnection()}
    return [Candidate(name, *timed(update, x, f, g, of_operator), partial(choose_backend, x, f))
            for name, update in updates.items()]
