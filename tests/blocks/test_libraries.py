"""Residual blocks of torchvision and transformers: connect, disconnect, pickle and compile.

test_text_models.py tests the models of transformers that read only text.
"""
import copy
import inspect

import pytest
import torch
import torchvision
from helpers.branches import branches
from helpers.library_models import MODELS
from helpers.small_models import host
from helpers.text_models import TEXT, made as text_model
from torchvision.models import detection, segmentation

from timm_ortho import UnsupportedModelError, cli, connect, disconnect, sites
from timm_ortho.blocks import routed, spec_of, specs
from timm_ortho.blocks.lookup import SPECS
from timm_ortho.models import coverage

QUICK = {f"transformers {name}" for name in ("vit", "swin", "convnext", "resnet_basic", "cvt")}
QUICK |= {f"torchvision {name}" for name in ("vit", "resnet50", "convnext", "efficientnet_b0", "regnet_y_400mf", "r3d")}
ALL = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MODELS]
COMPILED = [pytest.param(name, marks=pytest.mark.slow if index % 6 == 0 else pytest.mark.whole)
            if name != "torchvision convnext" else name for index, name in enumerate(MODELS)]


def made(name):
    if name.startswith("transformers"):
        transformers = pytest.importorskip("transformers", minversion="5")
        transformers.logging.set_verbosity_error()
    model, inputs = MODELS[name]()
    for parameter in model.parameters():
        if not parameter.any():  # a head whose weights are zero would hide differences in the blocks
            torch.nn.init.normal_(parameter, std=0.1)
    return model, inputs


def output(result):
    """Return the logits of a model, or the last hidden state of a model without a head."""
    return result if torch.is_tensor(result) else result[0]


def scopes(model):
    """Return the scopes that a model supports. A model that reads text has blocks of a language model."""
    return ("feature",) if "input_ids" in inspect.signature(model.forward).parameters else ("feature", "global")


def step(model, inputs):
    """Return the logits in training, the gradients by name, and the logits in evaluation."""
    torch.manual_seed(0)
    y = output(model.train()(*inputs))
    model.zero_grad()
    y.square().mean().backward()
    with torch.no_grad():
        evaluated = output(model.eval()(*inputs))
    return y.detach(), {name: p.grad for name, p in model.named_parameters()}, evaluated


@pytest.mark.parametrize("name", ALL)
def test_linear_is_the_librarys_model_and_other_connections_train(name):
    host, inputs = made(name)
    classes, keys = [type(module) for module in host.modules()], list(host.state_dict())
    expected = step(copy.deepcopy(host), inputs)
    linear = step(connect(copy.deepcopy(host), "linear"), inputs)
    assert torch.equal(linear[0], expected[0])
    assert torch.equal(linear[2], expected[2])
    for key, gradient in expected[1].items():
        assert gradient is linear[1][key] is None or torch.equal(linear[1][key], gradient), key
    supported = scopes(host)
    if "global" not in supported:
        with pytest.raises(ValueError, match=r"but \S+ is a .*language model.*: use 'feature'"):
            connect(host, "global")
    for scope in supported:
        model = connect(copy.deepcopy(host), scope)
        y, gradients, _ = step(model, inputs)
        assert not torch.equal(y, expected[0]), scope
        assert y.isfinite().all()
        missing = [key for key, grad in expected[1].items() if grad is not None and gradients[key] is None]
        assert missing == []
    assert list(model.state_dict()) == keys
    disconnect(model)
    assert [type(module) for module in model.modules()] == classes
    assert sites(model) == []
    model.load_state_dict(host.state_dict())
    assert torch.equal(step(model, inputs)[0], expected[0])


@pytest.mark.parametrize("name", ALL)
def test_streams_of_other_libraries_have_the_width_in_the_table(name):
    """Check at every site that stream and branch output have the table's width on the channel axis.

    Skip transforms are created for this width. `branches` checks at each site that the stream does not depend
    on the branch output.
    """
    model, inputs = made(name)
    branches(connect(model, scopes(model)[-1], skip="orthogonal_tp"))
    reached = {}
    for site in sites(model):
        def hook(module, inputs, name=site.name):
            reached[name] = {tensor.shape[module.dim] for tensor in inputs} == {module.skip.width}
        site.connection.register_forward_pre_hook(hook)
    model.train()(*inputs)
    assert reached == {site.name: True for site in sites(model)}


@pytest.mark.parametrize("name", COMPILED)
def test_compiles_if_the_original_model_does(name):
    torch._dynamo.reset()
    host, inputs = made(name)
    host.eval()
    try:
        torch.compile(copy.deepcopy(host), fullgraph=True, backend="eager")(*inputs)
    except Exception as error:  # noqa: BLE001 the compiler raises exceptions of many types
        pytest.skip(f"the untouched model does not compile as one graph: {type(error).__name__}")
    torch._dynamo.reset()
    model = connect(host, scopes(host)[-1])
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    logits = []
    for form in (compiled, model):
        torch.manual_seed(0)  # ViT-MAE drops random patches
        logits.append(output(form(*inputs)))
    torch.testing.assert_close(*logits)


@pytest.mark.slow
@pytest.mark.parametrize("library", ["torchvision", "transformers"])
def test_every_row_of_a_table_has_a_model(library):
    pytest.importorskip(library)
    models = [made(name)[0] for name in MODELS if name.startswith(library)]
    if library == "transformers":
        models += [text_model(name) for name in TEXT]  # test_text_models.py tests these
    covered = {spec.name for model in models for module in model.modules()
               if (spec := spec_of(module)) and routed.route(routed.host_class(module), spec).reached(module)}
    without = {spec.name for spec in specs(library) if host(spec)} - covered
    assert without == set(), "each row needs a model in tests/helpers"


def test_each_kind_is_used_once_in_a_row():
    """A second use would overwrite the connection of the first one."""
    kinds = {spec.name: [kind for kind in spec.kinds if kind] for spec in SPECS.values()}
    assert [name for name, of in kinds.items() if len(set(of)) < len(of)] == []


@pytest.mark.parametrize("build", [
    detection.retinanet_resnet50_fpn, detection.ssdlite320_mobilenet_v3_large, detection.fasterrcnn_resnet50_fpn,
    segmentation.lraspp_mobilenet_v3_large])
def test_detectors_and_segmentation_networks_of_torchvision(build):
    """Additions outside the backbone are not sites."""
    with torch.device("meta"):
        model = build(weights=None, weights_backbone=None)
    assert len(sites(connect(model))) == len(sites(connect(model.backbone))) > 0


def test_blip_writes_captions():
    """The text decoder of BLIP is causal and uses the key-value cache. Its cross-attention has a site of its own."""
    host, (images, _) = made("transformers blip")
    model = connect(copy.deepcopy(host), "linear").eval()
    assert [site.kind for site in sites(model)] == ["attention", "mlp"] * 2 + ["attention", "attention", "mlp"] * 2
    options = dict(do_sample=False, max_new_tokens=8, min_new_tokens=8)
    assert torch.equal(model.generate(images, **options), host.eval().generate(images, **options))
    connect(model, "feature")
    cached, recomputed = (model.generate(images, use_cache=cache, **options) for cache in (True, False))
    assert torch.equal(cached, recomputed)
    connect(model, "global", layers=[0, 1])
    assert {site.connection.name: "vision" in site.name for site in sites(model)} == {"global": True, "linear": False}


def test_timm_ortho_list_prints_the_installed_libraries(capsys, monkeypatch):
    assert cli.main(["list", ""]) == 0
    printed = capsys.readouterr().out
    assert cli.main(["list"]) == 0
    assert capsys.readouterr().out == printed
    _, _, text = printed.partition(f"\ntorchvision {torchvision.__version__.partition('+')[0]}")
    lines = text.splitlines()
    assert "resnet              BasicBlock, Bottleneck" in lines
    counts = {title.split()[0]: sum(map(len, blocks.values())) for title, blocks in coverage.libraries().items()}
    assert counts == {library: len(specs(library)) for library in counts}
    monkeypatch.setattr(coverage, "find_spec", lambda name: None)
    assert coverage.libraries() == {}


WITHOUT_STREAM = ("alexnet", "densenet", "googlenet", "inception", "shufflenet", "squeezenet", "vgg")


@pytest.mark.slow
def test_every_classification_network_of_torchvision_is_covered():
    for name in torchvision.models.list_models(module=torchvision.models):
        reads_numbers = name.startswith("regnet")  # its constructor reads values, which meta tensors lack
        if reads_numbers and name != "regnet_y_400mf":
            continue
        arguments = dict(init_weights=False) if name in ("googlenet", "inception_v3") else {}
        with torch.device("cpu" if reads_numbers else "meta"):
            model = torchvision.models.get_model(name, weights=None, **arguments)
        if name.startswith(WITHOUT_STREAM):
            with pytest.raises(UnsupportedModelError, match="no residual block found"):
                connect(model)
        else:
            assert sites(connect(model)), name
