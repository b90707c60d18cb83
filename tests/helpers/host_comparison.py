"""Check that a variant whose connections are linear equals timm's model bit for bit."""
import gc

import timm
import torch
from timm.layers import to_2tuple
from timm.models import get_pretrained_cfg


def model_on_meta(name, **kwargs):
    with torch.device("meta"):
        return timm.create_model(name, **kwargs)


def compare_with_host(base, batch=2):
    """Check that timm's model ``base`` and its variant have the same outputs and gradients in training mode.

    Both models get the same weights: uniform random numbers, but 1 for running variances and 0 for integers. timm's
    initialization of a large model would take longer than its forward and backward pass.
    """
    kwargs, size = small_input(base)
    x = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(0))
    on_cpu = has_unsaved_buffers(model_on_meta(base, **kwargs))  # to_empty would leave these buffers without values
    host = timm.create_model(base, **kwargs) if on_cpu else model_on_meta(base, **kwargs).to_empty(device="cpu")
    torch.manual_seed(0)
    for name, tensor in host.state_dict().items():
        if not tensor.is_floating_point():
            tensor.zero_()
        elif name.endswith("running_var"):
            tensor.fill_(1.0)
        else:
            tensor.uniform_(-0.05, 0.05)
    create = timm.create_model if on_cpu else model_on_meta
    variant = create(base + "_ortho", connection="linear", **kwargs)
    variant.load_state_dict(host.state_dict(), assign=True)
    results = []
    for model in (host, variant):
        torch.manual_seed(0)
        y = model.train()(x)
        outputs = y if isinstance(y, tuple) else (y,)
        sum(out.square().sum() for out in outputs).backward()
        results.append((*outputs, *(p.grad for p in model.parameters())))
    assert any(out.any() for out in results[0])
    for expected, ours in zip(*results, strict=True):
        assert (expected is None and ours is None) or torch.equal(expected, ours), base
    del model, host, variant, results
    gc.collect()


def small_input(name):
    """Return arguments and an image size with which a model runs cheaply at full depth and width."""
    cfg = get_pretrained_cfg(name)
    patch = to_2tuple(getattr(getattr(model_on_meta(name), "patch_embed", None), "patch_size", 0))[0]
    sizes = [3 * patch] * bool(patch) + [64, 96, 112, 128]
    tries = [({}, size) for size in sizes if not cfg.fixed_input_size and size >= 64]
    tries += [({"img_size": size}, size) for size in sizes]
    return next((choice for choice in tries if takes(name, *choice)), ({}, cfg.input_size[-1]))


def takes(name, kwargs, size):
    """Return whether a model with these arguments runs on images of this size."""
    try:
        with torch.device("meta"):
            timm.create_model(name, **kwargs).eval()(torch.empty(2, 3, size, size))
    except (RuntimeError, TypeError, ValueError, AssertionError, IndexError, ZeroDivisionError):
        return False
    return True


def has_unsaved_buffers(model):
    return len(list(model.buffers())) + len(list(model.parameters())) > len(model.state_dict())
