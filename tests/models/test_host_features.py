"""Copies, pickles, state dicts, autocast, memory and tracebacks of a ViT and a ResNetV2 variant."""
import copy
import itertools
import pickle
import subprocess
import sys
from functools import partial
from importlib.util import find_spec

import pytest
import timm
import torch
from helpers import library_models

from timm_ortho import Connection, connect
from timm_ortho.bench.clock import saved_bytes

MODELS = {
    "vit": dict(
        model_name="vit_small_ortho", img_size=32, patch_size=16, embed_dim=48, depth=2, num_heads=2, num_classes=5),
    "resnetv2": dict(
        model_name="resnetv2_18_cifar_orthog", layers=(2, 1), channels=(16, 32), stem_chs=16, num_classes=5),
}
CONNECTIONS = [{}, {"connection": "hybrid"}, {"connection_prob": 0.5}]


@pytest.fixture(params=MODELS)
def arguments(request):
    return MODELS[request.param]


def create(arguments, **kwargs):
    torch.manual_seed(0)
    return timm.create_model(**arguments, **kwargs).eval()


def images(n=2):
    return torch.randn(n, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("connection", CONNECTIONS, ids=str)
def test_deepcopy(arguments, connection):
    model = create(arguments, **connection)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(images()), model(images()))
    assert not {id(m) for m in twin.modules()} & {id(m) for m in model.modules()}
    shadow = timm.utils.ModelEmaV3(model, decay=0.0)
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    shadow.update(model)
    assert torch.equal(shadow.module.eval()(images()), model(images()))


@pytest.mark.slow
def test_pickle_in_a_fresh_process(tmp_path):
    """Loading imports timm_ortho and derives the classes of blocks, also of torchvision and transformers."""
    models = [(create(arguments, **connection), (images(),))
              for arguments, connection in itertools.product(MODELS.values(), CONNECTIONS)]
    names = ["torchvision resnet18", *["transformers vit"] * (find_spec("transformers") is not None)]
    for name in names:
        model, inputs = library_models.MODELS[name]()
        models.append((connect(model, "feature").eval(), inputs))
    expected = [model(*inputs) for model, inputs in models]
    assert torch.equal(pickle.loads(pickle.dumps(models[0][0]))(images()), expected[0])
    for number, saved in enumerate(models):
        torch.save(saved, tmp_path / f"{number}.pt")
    code = """
import sys, torch
torch.set_num_threads(1)
models = [torch.load(f"{sys.argv[1]}/{number}.pt", weights_only=False) for number in range(int(sys.argv[2]))]
outputs = [model(*inputs) for model, inputs in models]
torch.save([y if torch.is_tensor(y) else y[0] for y in outputs], sys.argv[3])
"""
    subprocess.run([sys.executable, "-c", code, tmp_path, str(len(models)), tmp_path / "y"], check=True)
    expected = [y if torch.is_tensor(y) else y[0] for y in expected]
    torch.testing.assert_close(torch.load(tmp_path / "y"), expected, rtol=0, atol=0)


@pytest.mark.parametrize("arguments", [  # timm cannot extract features of ViTs with FX
    MODELS["resnetv2"],
    dict(model_name="resnetv2_18_ortho", layers=(1, 1, 1, 1), channels=(8, 16, 16, 32), stem_chs=8),
], ids=lambda arguments: arguments["model_name"])
def test_fx_features_of_timm(arguments):
    features, expected = (create(arguments, features_only=True, feature_cls=feature_cls, out_indices=(1, 2))(images())
                          for feature_cls in ("fx", "list"))
    assert [len(feature) for feature in features] == [2, 2]
    torch.testing.assert_close(features, expected)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
def test_models_train_under_autocast(arguments, half):
    model = create(arguments).train()
    with torch.autocast("cpu", half):
        loss = model(images(4)).float().square().mean()
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize(("arguments", "shortcuts", "most"), [
    (dict(model_name="vit_small_ortho", img_size=64), 0, 1.001),
    (dict(model_name="resnetv2_50_ortho"), 4, 1.08),
], ids=["vit", "resnetv2"])
def test_autograd_keeps_projected_shortcuts_and_two_numbers_per_projection(arguments, shortcuts, most):
    ours, x = timm.create_model(**arguments).train(), torch.randn(2, 3, 64, 64)
    linear = connect(timm.create_model(**arguments).train(), "linear")
    projected, projections = [], []
    for name, module in ours.named_modules():
        if name.endswith("downsample"):  # a linear connection does not keep this output for backward
            module.register_forward_hook(lambda module, inputs, output: projected.append(output.numel()))
        if isinstance(module, Connection):
            module.register_forward_hook(
                lambda module, inputs, output: projections.append(output.numel() // output.shape[module.dim]))
    expected, measured = (saved_bytes(partial(model, x), [*model.parameters()]) for model in (linear, ours))
    assert len(projected) == shortcuts
    assert measured == expected + 4 * sum(projected) + 2 * 4 * sum(projections)
    assert expected < measured <= most * expected
