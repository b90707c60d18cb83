"""Models of several timm modules train and can be exported. `scripts/checks/modules.py` checks all modules."""
import pytest
import torch
from helpers.module_checks import compiles, exports, model_of, runs_as_onnx, trains
from helpers.small_models import of_modules

import timm_ortho
from timm_ortho.functional import plain_update

# The blocks of these models add in different ways: to the output of a submodule, inside an `if`, in place, before an
# activation, or to several streams.
TRAINED = [
    ("eva", "global"), ("convnext", "feature"), ("resnet", "global"), ("mlp_mixer", "global"),
    pytest.param("swin_transformer", "feature", marks=pytest.mark.slow),
    pytest.param("crossvit", "feature", marks=pytest.mark.slow),
]
EXPORTED = [
    ("vision_transformer", "feature"), ("beit", "global"), ("convnext", "global"), ("resnet", "feature"),
    ("mlp_mixer", "feature"), ("metaformer", "global"), ("hiera", "feature"), ("naflexvit", "global"),
]


def slow_but(quick):
    return [case if case[0] in quick else pytest.param(*case, marks=pytest.mark.slow) for case in EXPORTED]


@pytest.mark.parametrize(("module", "connection"), TRAINED)
def test_trains_on_digits(module, connection):
    trains(of_modules()[module], connection)


@pytest.mark.parametrize(("module", "connection"), EXPORTED)
def test_same_outputs_exported(module, connection):
    exports(of_modules()[module], connection)


@pytest.mark.parametrize(("module", "connection"), slow_but(("beit", "resnet")))
def test_same_outputs_compiled(module, connection):
    compiles(of_modules()[module], connection)


@pytest.mark.skipif(torch.__version__.startswith("2.6."), reason="torch 2.6 cannot export timm's ResNets")
@pytest.mark.parametrize(("module", "connection"), slow_but(("beit",)))
def test_same_outputs_in_onnxruntime(module, connection):
    for package in ("onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    runs_as_onnx(of_modules()[module], connection)


@pytest.mark.parametrize("module", [
    pytest.param(name, marks=pytest.mark.whole if number % 3 else ()) for number, name in enumerate(of_modules())])
def test_the_operator_rounds_as_the_plain_formula_at_every_site(module):
    """Compare each site on its own inputs. Otherwise, rounding differences would grow from site to site."""
    model, size = model_of(of_modules()[module], "feature")
    reached = []

    def compare(connection, inputs, y):
        x, f = inputs
        plain = plain_update(x, f, 0.0, 1.0, connection.dims, connection.eps)
        assert torch.equal(plain, y)
        assert laid_out(plain) == laid_out(y)
        reached.append(connection)

    for site in timm_ortho.sites(model.eval()):
        site.connection.register_forward_hook(compare)
    with torch.inference_mode():
        model(torch.randn(2, 3, size, size))
    assert reached


def laid_out(x):
    return [stride for stride, length in zip(x.stride(), x.shape, strict=True) if length > 1]
