"""Check that a small model of a timm module trains, compiles and can be exported.

The arguments of each check are the name of a model in `small_models.py` and a connection (None for timm's plain x + f).
A failed check raises an AssertionError.
"""
from functools import cache

import torch
from helpers.small_models import build
from timm.layers import set_exportable
from torch.nn import functional

from timm_ortho import connect


def model_of(name, connection):
    """Return a small model and its image size."""
    model, size = build(name)
    return (connect(model, connection) if connection else model), size


def trains(name, connection, steps=30, batch=16):
    """Check that the loss falls. Parameters that have a gradient in timm's model must also have a gradient here."""
    losses, idle = train(*model_of(name, connection), steps, batch)
    if idle:
        idle -= train(*model_of(name, None), steps, batch)[1]
    assert not idle, f"{name}: no gradient for {', '.join(sorted(idle))}"
    first, last = (sum(some) / len(some) for some in (losses[:5], losses[-5:]))
    assert last < first, f"{name}: the loss went from {first:.3f} to {last:.3f}"


def train(model, size, steps, batch):
    """Train with AdamW; return the losses and the parameters whose gradient was always zero."""
    images, labels = digits()
    images = functional.interpolate(images, size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses, idle = [], {name for name, _ in model.named_parameters()}
    torch.manual_seed(0)
    for at in (torch.arange(batch) + step * batch for step in range(steps)):
        heads = outputs(model.train(), images[at % len(labels)])
        loss = sum(functional.cross_entropy(head, labels[at % len(labels)]) for head in heads) / len(heads)
        optimizer.zero_grad()
        loss.backward()
        idle -= {name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()}
        optimizer.step()
        losses.append(loss.item())
    return losses, idle


@cache
def digits(count=64):
    """Return scikit-learn's first digits below 5: images ``[B, 3, 8, 8]`` from -1 to 1, and classes ``[B]``."""
    from sklearn.datasets import load_digits

    images, labels = map(torch.tensor, load_digits(return_X_y=True))
    few = (labels < 5).nonzero().flatten()[:count]
    return (images[few].float().view(-1, 1, 8, 8) / 8 - 1).expand(-1, 3, -1, -1), labels[few]


def exports(name, connection):
    """Check that the program that torch.export returns has the outputs of the model."""
    model, size = model_of(name, connection)
    same(model, size, lambda x: torch.export.export(model, (x,)).module())


def compiles(name, connection):
    """Check that torch.compile compiles the forward pass without graph breaks and does not change the outputs.

    Gradients are enabled, so that the backward pass is traced too, but it does not run.
    """
    model, size = model_of(name, connection)
    torch._dynamo.reset()
    same(model, size, lambda x: torch.compile(model, fullgraph=True, backend="aot_eager"), grad=True)
    torch._dynamo.reset()


def runs_as_onnx(name, connection):
    """Check the ONNX export in onnxruntime."""
    import onnxruntime

    with set_exportable(True):  # disables fused attention, as in timm's onnx_export.py
        model, size = model_of(name, connection)

    def converted(x):
        program = torch.onnx.export(model, (x,), dynamo=True, verbose=False)
        session = onnxruntime.InferenceSession(program.model_proto.SerializeToString())
        first = session.get_inputs()[0].name
        return lambda x: tuple(torch.from_numpy(y) for y in session.run(None, {first: x.numpy()}))

    same(model, size, converted)


def same(model, size, convert, grad=False):
    """Check that a converted model has the outputs of ``model``. ``convert(x)`` converts the model for an input x."""
    x = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))
    expected = outputs(model.eval(), x, grad)
    for ours, theirs in zip(outputs(convert(x), x, grad), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4 * max(1.0, theirs.abs().max().item()))


def outputs(model, x, grad=True):
    """Return a tuple of the outputs of all heads."""
    with torch.set_grad_enabled(grad):
        y = model(x)
    return tuple(y) if isinstance(y, (tuple, list)) else (y,)
