"""timm's optimizers, weights from a file, intermediates, image sizes and distillation."""

import pytest
import timm
import torch
from timm.optim import create_optimizer_v2, param_groups_layer_decay

import timm_ortho
from timm_ortho import hub

VIT = dict(img_size=32, patch_size=8, embed_dim=32, depth=3, num_heads=2)


def vit(**arguments):
    torch.manual_seed(0)
    return timm.create_model("vit_small_ortho", **{**VIT, "num_classes": 5, **arguments})


@pytest.mark.parametrize("frozen", [False, True])
def test_layer_decay_with_learned_connections_and_frozen_blocks(frozen):
    """rho and theta have their block's learning-rate scale and no weight decay. No group contains frozen parameters."""
    model = vit(connection="hybrid")
    if frozen:
        for part in (model.patch_embed, model.blocks[0]):
            part.requires_grad_(False)
    groups = param_groups_layer_decay(
        model, weight_decay=0.05, weight_decay_exclude_1d=False, no_weight_decay_list=model.no_weight_decay(),
        layer_decay=0.5)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    settings = {names[id(parameter)]: (group["lr_scale"], group["weight_decay"])
                for group in groups for parameter in group["params"]}
    assert settings.keys() == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for block in range(frozen, 3):
        scale = 0.5 ** (3 - block)
        assert settings[f"blocks.{block}.attn.qkv.weight"] == (scale, 0.05)
        for kind in ("attention", "mlp"):
            for name in ("rho", "theta"):
                assert settings[f"blocks.{block}.connection_{kind}.{name}"] == (scale, 0.0)


@pytest.mark.parametrize("connection", ["feature", "hybrid"])
def test_weights_from_a_file_with_a_new_classifier(connection, tmp_path):
    """If a checkpoint has no rho and theta, they keep their initial values."""
    source = vit(connection=connection, num_classes=7)
    for site in timm_ortho.sites(source) if connection == "hybrid" else ():
        torch.nn.init.constant_(site.connection.rho, 0.7)
    torch.save(source.state_dict(), tmp_path / "weights.pth")
    model = vit(connection="hybrid", pretrained=True, pretrained_cfg_overlay=dict(file=str(tmp_path / "weights.pth")))
    saved = source.state_dict()
    assert model.head.weight.shape == (5, 32)
    for name, value in model.state_dict().items():
        if name in saved and not name.startswith("head."):
            assert torch.equal(value, saved[name]), name
    expected = 0.7 if connection == "hybrid" else 1.0
    assert [site.connection.rho.item() for site in timm_ortho.sites(model)] == pytest.approx([expected] * 6)


def test_intermediates_under_checkpointing_draw_the_same_connections():
    """The recomputation of a block must repeat the random draws of connection_prob and of DropPath."""
    model, results = vit(connection_prob=0.5, drop_path_rate=0.3).train(), []
    for checkpointing in (False, True):
        model.set_grad_checkpointing(checkpointing)
        model.zero_grad()
        torch.manual_seed(1)
        features, intermediates = model.forward_intermediates(torch.ones(4, 3, 32, 32))
        sum(one.square().mean() for one in (features, *intermediates)).backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        results.append([features, *intermediates, *gradients, torch.get_rng_state()])
    assert len(results[0]) == len(results[1]) > 30
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(("name", "arguments", "size"), [
    ("vit_small_ortho", dict(VIT, img_size=(32, 48)), (32, 48)),
    ("vit_small_ortho", dict(VIT, dynamic_img_size=True), (48, 32)),
    ("swin_tiny_patch4_window7_224_ortho", dict(img_size=(56, 112), embed_dim=24, depths=(1, 1, 1, 1)), (56, 112)),
    ("resnetv2_18_ortho", dict(channels=(8, 8, 8, 8), stem_chs=8), (64, 96)),
])
def test_rectangular_images_after_export(name, arguments, size, tmp_path):
    model = timm.create_model(name, num_classes=5, **arguments).eval()
    hub.export(model, tmp_path, "me/model")
    loaded = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    images = torch.randn(1, 3, *size)
    assert torch.equal(loaded(images), model(images))
    if arguments.get("img_size") == size:
        assert tuple(loaded.pretrained_cfg["input_size"]) == (3, *size)


def test_muon_updates_learned_connections_without_decay():
    model = vit(connection="hybrid")
    optimizer = create_optimizer_v2(model, opt="muon", lr=1e-2, weight_decay=0.5)
    decay = {id(parameter): group["weight_decay"] for group in optimizer.param_groups for parameter in group["params"]}
    assert decay[id(model.blocks[0].attn.qkv.weight)] == 0.5
    learned = [parameter for site in timm_ortho.sites(model) for parameter in site.connection.parameters()]
    assert {decay[id(parameter)] for parameter in learned} == {0.0}
    before = [parameter.item() for parameter in learned]
    model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    optimizer.step()
    changes = [abs(parameter.item() - value) for parameter, value in zip(learned, before, strict=True)]
    assert all(0.0 < change < 1.01e-2 for change in changes)


@pytest.mark.parametrize("name", ["LogitDistillationTask", "FeatureDistillationTask"])
def test_distillation(name):
    task_class = getattr(pytest.importorskip("timm.task"), name)
    student = vit(connection="hybrid")
    teacher = vit(connection="feature")
    task = task_class(student, teacher, criterion=torch.nn.CrossEntropyLoss(), verbose=False)
    task(torch.randn(2, 3, 32, 32), torch.tensor([0, 1]))["loss"].backward()
    found = timm_ortho.sites(student)
    assert len(found) == 6
    assert all(site.connection.rho.grad.any() for site in found)
    assert all(parameter.grad is None for parameter in teacher.parameters())


@pytest.mark.parametrize("arguments", [{}, dict(connection="hybrid"), dict(skip="orthogonal_tp")])
def test_a_model_made_on_the_meta_device(arguments):
    expected, images = vit(**arguments).eval(), torch.randn(2, 3, 32, 32)
    with torch.device("meta"):
        model = vit(**arguments).eval()
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    model.to_empty(device="cpu").load_state_dict(expected.state_dict())
    assert torch.equal(model(images), expected(images))
