"""Models of timm's modules train and can be exported. The marker `whole` adds the modules outside the sample."""
import pytest
import torch
from helpers.module_checks import compiles, exports, model_of, runs_as_onnx, trains
from helpers.small_models import of_modules

import timm_ortho
from timm_ortho.functional import plain_update

# The blocks of these models add in different ways: to the output of a submodule, inside an `if`, in place, before an
# activation, or to several streams.
TRAINED = {"eva": "global", "convnext": "feature"}
TRAINED_SLOWLY = {"resnet": "global", "mlp_mixer": "global", "swin_transformer": "feature", "crossvit": "feature"}
EXPORTED = {"beit": "global", "resnet": "feature"}
EXPORTED_SLOWLY = {**EXPORTED, "convnext": "global", "naflexvit": "global", "vision_transformer": "feature",
                   "mlp_mixer": "feature", "metaformer": "global", "hiera": "feature"}


def modules(sample, slow=()):
    """Return test cases with each module of timm and both connections; cases in neither dict are marked whole."""
    return [
        pytest.param(module, connection, marks=() if (module, connection) in sample.items() else
                     pytest.mark.slow if (module, connection) in dict(slow).items() else pytest.mark.whole)
        for module in of_modules() for connection in ("feature", "global")]


def unless_timm_fails(check, module, connection):
    """Run a check. If it fails, skip the test if the check fails for timm's own model too."""
    try:
        check(of_modules()[module], connection)
    except Exception:  # exporters raise any exception
        try:
            check(of_modules()[module], None)
        except Exception as error:  # noqa: BLE001
            pytest.skip(f"timm's model fails too: {type(error).__name__}")
        raise


@pytest.mark.parametrize(("module", "connection"), modules(TRAINED, TRAINED_SLOWLY))
def test_trains_on_digits(module, connection):
    trains(of_modules()[module], connection)


@pytest.mark.parametrize(("module", "connection"), modules(EXPORTED, EXPORTED_SLOWLY))
def test_same_outputs_exported(module, connection):
    unless_timm_fails(exports, module, connection)


@pytest.mark.parametrize(("module", "connection"), modules({}, EXPORTED_SLOWLY))
def test_same_outputs_compiled(module, connection):
    unless_timm_fails(compiles, module, connection)


@pytest.mark.parametrize(("module", "connection"), modules({}, EXPORTED_SLOWLY))
def test_same_outputs_in_onnxruntime(module, connection):
    for package in ("onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    unless_timm_fails(runs_as_onnx, module, connection)


@pytest.mark.parametrize("module", [
    pytest.param(name, marks=pytest.mark.whole if number % 8 else ()) for number, name in enumerate(of_modules())])
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
