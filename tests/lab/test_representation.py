"""Test effective rank, spectral entropy, standard deviation and CKA on known values and on batches from a loader."""
import math

import pytest
import timm
import torch
from torch import nn

import timm_ortho  # registers the variants
from timm_ortho.lab import representation


def randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orthogonal(size, seed=0):
    return torch.linalg.qr(randn(size, size, seed=seed))[0]


def isotropic(dimension, width=None):
    """Return the unit vectors of the first axes and their negatives as rows. The variance along these axes is equal."""
    return torch.cat([torch.eye(dimension, width or dimension), -torch.eye(dimension, width or dimension)])


# ------------------------------------------------------------------------------------------- known values
@pytest.mark.parametrize("dimension", [1, 2, 5, 64])
def test_an_isotropic_covariance_has_its_dimension(dimension):
    for features in (isotropic(dimension), isotropic(dimension, width=100) @ orthogonal(100).float() + 3):
        assert representation.spectral_entropy(features) == pytest.approx(math.log(dimension), abs=1e-5)
        assert representation.effective_rank(features) == pytest.approx(dimension, rel=1e-5)


def test_entropy_of_two_known_eigenvalues():
    features = isotropic(2) * torch.tensor([3.0, 1.0])  # the variances have the ratio 9 to 1
    expected = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1))
    assert representation.spectral_entropy(features) == pytest.approx(expected)
    assert representation.effective_rank(features) == pytest.approx(math.exp(expected))


def test_effective_rank_is_invariant_to_rotation_scale_and_offset():
    features = randn(50, 6) * torch.tensor([5.0, 3, 2, 1, 1, 0.1])
    expected = representation.effective_rank(features)
    assert 1 < expected < 6
    assert representation.effective_rank(features @ orthogonal(6) * 7 - 2) == pytest.approx(expected)


def test_feature_std():
    features = torch.tensor([[1.0, 0.0], [3.0, 0.0], [5.0, 6.0]])
    # The squared deviations sum to 8 and 24. Divided by n - 1 = 2, the variances are 4 and 12.
    assert representation.feature_std(features) == pytest.approx((2 + math.sqrt(12)) / 2)
    assert representation.feature_std(randn(40, 9)) == pytest.approx(randn(40, 9).std(0).mean().item())


def test_cka_is_invariant_to_rotation_scale_and_offset():
    x, y = randn(30, 8), randn(30, 5, seed=1)
    expected = representation.linear_cka(x, y)
    assert 0 < expected < 1
    assert representation.linear_cka(x, x) == pytest.approx(1)
    assert representation.linear_cka(y, x) == pytest.approx(expected)
    assert representation.linear_cka(x @ orthogonal(8) * 3 + 1, y @ orthogonal(5) * 0.1 - 4) == pytest.approx(expected)
    stretched = x * torch.tensor([9.0, 1, 1, 1, 1, 1, 1, 1])  # CKA is not invariant to this linear map
    assert abs(representation.linear_cka(stretched, x) - 1) > 0.1


def test_cka_of_orthogonal_features_is_0():
    columns = torch.linalg.qr(torch.cat([torch.ones(30, 1), randn(30, 9)], dim=1))[0][:, 1:]  # orthonormal, with mean 0
    x, y = columns[:, :4] @ randn(4, 4), columns[:, 4:] @ randn(5, 5)
    assert representation.linear_cka(x, y) == pytest.approx(0, abs=1e-10)


def test_cka_is_the_ratio_of_gram_matrices():
    """Compare with CKA from n x n Gram matrices (Kornblith et al. 2019, Eq. 3 and 4), which the package avoids."""
    x, y = randn(30, 8) + 5, (randn(30, 8).relu() @ randn(8, 5, seed=1))
    centre = torch.eye(30) - 1 / 30

    def hsic(u, v):
        return torch.trace(u @ u.T @ centre.double() @ v @ v.T @ centre.double())

    assert representation.linear_cka(x, y) == pytest.approx((hsic(x, y) / (hsic(x, x) * hsic(y, y)).sqrt()).item())


def test_constant_features_are_nan():
    constant = torch.ones(10, 4)
    assert math.isnan(representation.effective_rank(constant))
    assert representation.feature_std(constant) == 0
    assert math.isnan(representation.linear_cka(constant, randn(10, 3)))


def test_non_finite_features_are_nan():
    metrics = representation.summary(torch.full((10, 4), math.nan))
    assert all(math.isnan(value) for value in metrics.values())


@pytest.mark.parametrize(("call", "message"), [
    (lambda: representation.effective_rank(torch.ones(2, 3, 4)),
     r"features must have the shape \[images, width\] with at least 2 images, got \[2, 3, 4\]"),
    (lambda: representation.feature_std(torch.ones(1, 3)), r"features .* with at least 2 images, got \[1, 3\]"),
    (lambda: representation.linear_cka(torch.ones(3, 3), torch.ones(4, 3)),
     "x and y must have the same number of images, got 3 and 4"),
    (lambda: representation.features(nn.Identity(), []), "the loader has no batches"),
])
def test_bad_features(call, message):
    with pytest.raises(ValueError, match=f"^{message}$"):
        call()


# ------------------------------------------------------------------------------------- batches and loaders
def test_half_precision_is_computed_in_double():
    features = (randn(4096, 3) + 100).half()
    assert representation.feature_std(features) == pytest.approx(features.double().std(0).mean().item(), rel=1e-9)


def vit(seed, **arguments):
    torch.manual_seed(seed)
    return timm.create_model(
        "vit_small_ortho", img_size=16, patch_size=8, num_heads=2, depth=2, num_classes=3,
        **{"embed_dim": 32, **arguments})


@pytest.fixture
def loader():
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(50, 3, 16, 16), torch.zeros(50))
    return torch.utils.data.DataLoader(data, batch_size=16)


def test_features_are_the_classifiers_input(loader):
    model = vit(0).eval()
    seen = []
    model.head.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    with torch.no_grad():
        for images, _ in loader:
            model(images)
    assert torch.equal(representation.features(model, loader), torch.cat(seen))


@pytest.mark.parametrize("name", ["resnetv2_18_cifar_ortho", "resnetv2_50_ortho", "test_vit_ortho", "vit_base_ortho"])
def test_every_family_has_features(name):
    with torch.device("meta"):
        model = timm.create_model(name)
    size = model.pretrained_cfg["input_size"]
    with torch.no_grad():
        assert representation.pooled(model, torch.ones(2, *size, device="meta")).shape == (2, model.num_features)


def test_models_are_unchanged(loader):
    model = vit(0, drop_path_rate=0.5).train()
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    recorder = timm_ortho.record(model, every=1)
    one, two = (representation.features(model, loader, extract=extract) for extract in (representation.pooled,) * 2)
    assert torch.equal(one, two)  # DropPath is inactive in evaluation mode
    assert not one.requires_grad
    assert [module.training for module in model.modules()] == modes
    assert recorder.step == 0
    with pytest.raises(ZeroDivisionError):
        representation.features(model, [torch.ones(1, 3, 16, 16)], extract=lambda *_: 1 / 0)
    assert [module.training for module in model.modules()] == modes


def test_a_loader_may_yield_only_images(loader):
    model = vit(0)
    only_images = [images for images, _ in loader]
    assert torch.equal(representation.features(model, only_images), representation.features(model, loader))


def test_a_model_with_its_own_extract_function(loader):
    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 5))
    result = representation.features(model, loader, extract=lambda model, images: model[0](images)[:, :9])
    assert result.shape == (50, 9)
    with pytest.raises(TypeError, match="Sequential is not a timm model; pass extract"):
        representation.features(model, loader)
