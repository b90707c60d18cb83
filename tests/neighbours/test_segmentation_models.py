"""Variants are encoders of segmentation_models_pytorch, with the prefix `tu-`, and take connection arguments."""
import pytest
import torch

import timm_ortho

smp = pytest.importorskip("segmentation_models_pytorch")


def unet(encoder, **arguments):
    torch.manual_seed(0)
    return smp.Unet(f"tu-{encoder}", encoder_weights=None, classes=2, **arguments).eval()


@pytest.mark.parametrize(("base", "suffix", "kind", "size"), [
    ("resnetv2_18", "_ortho", "FeatureConnection", 64),
    ("convnext_atto", "_orthog", "GlobalConnection", 64),
    pytest.param("swin_tiny_patch4_window7_224", "_ortho", "FeatureConnection", 224, marks=pytest.mark.slow),
])
def test_variants_as_encoders(base, suffix, kind, size):
    model, linear, plain = unet(base + suffix), unet(base + suffix, connection="linear"), unet(base)
    for name, parameter in model.named_parameters():  # timm initializes a branch's last norm or LayerScale near zero
        is_scale = parameter.dim() == 1 and not name.endswith("bias")
        torch.nn.init.normal_(parameter, mean=float(is_scale), std=0.1)
    for other in (linear, plain):
        other.load_state_dict(model.state_dict())
    assert {type(site.connection).__name__ for site in timm_ortho.sites(model)} == {kind}
    images = torch.randn(1, 3, size, size)
    with torch.no_grad():
        masks = model(images)
        assert masks.shape == (1, 2, size, size)
        assert torch.equal(linear(images), plain(images))
        assert not torch.allclose(masks, plain(images), rtol=1e-3, atol=1e-3)


def test_learned_connections_of_an_encoder_train():
    model = unet("resnetv2_18_ortho", connection="hybrid").train()
    model(torch.randn(2, 3, 32, 32)).square().mean().backward()
    assert all(site.connection.rho.grad is not None for site in timm_ortho.sites(model))
