"""Low precision: models in bfloat16 or with int8 linear layers keep their connections.

Low precision changes their logits about as much as it changes the logits of timm's models.
"""
import copy
from itertools import cycle

import pytest
import timm
import torch
from torch import nn
from torchvision.transforms.functional import to_tensor

from timm_ortho import CONNECTIONS, connect, sites
from timm_ortho.lab.data import Digits

MODELS = ["test_vit", "test_convnext"]


def create(name, connection=None):
    """Return a model of timm, connected if ``connection`` is set. LayerScale is 0.5, so that branches matter."""
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("gamma"):
                parameter.fill_(0.5)
    return (connect(model, connection) if connection else model).eval()


def images():
    """Return low-frequency images, because the logits of noise images would hardly differ between images."""
    return nn.functional.interpolate(torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(1)), size=160)


@torch.no_grad()
def loss_of_precision(model, coarse, dtype=torch.float32):
    """Return the error of the logits relative to their variation between images."""
    expected, logits = model(images()), coarse(images().to(dtype))
    assert logits.dtype == dtype
    return ((logits.float() - expected).norm() / (expected - expected.mean(0)).norm()).item()


def types(model):
    return [type(site.connection) for site in sites(model)]


@pytest.mark.skipif(not hasattr(torch.ao.quantization, "quantize_dynamic"), reason="torch has no quantize_dynamic")
@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("connection", ["feature", "hybrid"])  # without and with parameters
def test_int8(name, connection):
    """Quantize linear layers with torch.ao, because its successor torchao is not a dependency."""
    def quantised(model):
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)

    host, model = create(name), create(name, connection)
    smaller = quantised(model)
    linear = [key for key, module in model.named_modules() if isinstance(module, nn.Linear)]
    assert len(linear) > 4
    assert all(type(smaller.get_submodule(key)).__module__.startswith("torch.ao.nn.quantized") for key in linear)
    assert types(smaller) == types(model) != []
    loss, of_host = loss_of_precision(model, smaller), loss_of_precision(host, quantised(host))
    assert 0 < loss < 1.5 * of_host < 0.3


@pytest.mark.parametrize(("name", "connection"), [*zip(cycle(MODELS), CONNECTIONS, strict=False)])
def test_bfloat16(name, connection):
    def cast(model):
        return copy.deepcopy(model).to(torch.bfloat16)

    host, model = create(name), create(name, connection)
    smaller = cast(model)
    assert types(smaller) == types(model) != []
    loss, of_host = (loss_of_precision(one, cast(one), torch.bfloat16) for one in (model, host))
    assert 0 < loss < 1.5 * of_host < 0.3
    smaller.train()(images().bfloat16()).float().square().mean().backward()
    assert all(p.dtype == p.grad.dtype == torch.bfloat16 and p.grad.isfinite().all() for p in smaller.parameters())


# -------------------------------------------------------------------------- static int8 quantization after export
@torch.no_grad()
def quantized_by_xnnpack(model, some):
    pytest.importorskip("torchao.testing.pt2e._xnnpack_quantizer")  # a private module
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
    from torchao.testing.pt2e._xnnpack_quantizer import XNNPACKQuantizer, get_symmetric_quantization_config

    quantizer = XNNPACKQuantizer().set_global(get_symmetric_quantization_config())
    for site in sites(model):
        quantizer.set_module_type(type(site.connection), None)
    prepared = prepare_pt2e(torch.export.export(model, (some,)).module(), quantizer)
    prepared(some)
    return convert_pt2e(prepared)


def quantized_by_onnxruntime(model, some, folder):
    from onnxruntime import InferenceSession, quantization

    class Reader(quantization.CalibrationDataReader):
        batches = iter([{"x": some.numpy()}])

        def get_next(self):
            return next(self.batches, None)

    program = torch.onnx.export(model, (some,), folder / "model.onnx", input_names=["x"], dynamo=True, verbose=False)
    exact = [node.name for node in program.model_proto.graph.node
             if any("Connection" in entry.value for entry in node.metadata_props)]
    quantization.quantize_static(
        folder / "model.onnx", folder / "int8.onnx", Reader(), activation_type=quantization.QuantType.QInt8,
        nodes_to_exclude=exact, extra_options={"ActivationSymmetric": True})
    session = InferenceSession(folder / "int8.onnx")
    return lambda images: torch.from_numpy(session.run(None, {"x": images.numpy()})[0])


@pytest.mark.filterwarnings("ignore:XNNPACKQuantizer is deprecated:UserWarning")  # ExecuTorch contains the same code
@pytest.mark.parametrize("quantizer", ["XNNPACK", pytest.param("ONNX Runtime", marks=pytest.mark.slow)])
def test_static_int8_without_the_connections(quantizer, tmp_path):
    """The accuracy is within one point of linear's. With quantized connections, it is 95.0 % and 94.2 %."""
    linear, model = (timm.create_model(f"vit_test_{name}.digits", pretrained=True, exportable=True).eval()
                     for name in ("linear", "ortho"))
    mean, std = (model.pretrained_cfg[name][0] for name in ("mean", "std"))
    splits = [Digits(training) for training in (True, False)]
    some, images = (((torch.stack([*map(to_tensor, split.images[:360])]) - mean) / std).expand(-1, 3, -1, -1)
                    for split in splits)
    smaller = quantized_by_xnnpack(model, some) if quantizer == "XNNPACK" else quantized_by_onnxruntime(
        model, some, tmp_path)
    expected, accuracy = ((logits.argmax(1) == torch.tensor(splits[1].targets)).float().mean()
                          for logits in (linear(images), smaller(images)))
    assert accuracy > expected - 0.01
