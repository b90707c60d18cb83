"""connect() and disconnect() convert models of supported blocks. Errors leave the model unchanged."""
import copy
import pickle
import warnings

import numpy as np
import pytest
import timm
import torch
from helpers.messages import taking
from timm.models import resnetv2, vision_transformer as vit
from timm.optim import create_optimizer_v2
from torch import nn

from timm_ortho import (
    Connection,
    LinearConnection,
    RoutingError,
    UnsupportedModelError,
    connect,
    create_connection,
    disconnect,
    sites,
)
from timm_ortho.blocks import specs, written_class
from timm_ortho.connections import CONNECTIONS

TINY_VIT = dict(img_size=32, patch_size=16, embed_dim=48, depth=2, num_heads=2, num_classes=5)


def tiny_resnet(preact=True, basic=False, **kwargs):
    return resnetv2.ResNetV2(
        layers=(1, 2), channels=(32, 64), num_classes=5, stem_chs=16, preact=preact, basic=basic,
        norm_layer=timm.layers.BatchNormAct2d, **kwargs)


def tiny_vit(**kwargs):
    return vit.VisionTransformer(**{**TINY_VIT, **kwargs})


BLOCKS = {  # one model per block class of vision_transformer.py and resnetv2.py
    "Block": tiny_vit,
    "ResPostBlock": lambda: tiny_vit(block_fn=vit.ResPostBlock),
    "ParallelScalingBlock": lambda: tiny_vit(block_fn=vit.ParallelScalingBlock),
    "ParallelThingsBlock": lambda: tiny_vit(block_fn=vit.ParallelThingsBlock),
    "DiffParallelScalingBlock": lambda: tiny_vit(block_fn=vit.DiffParallelScalingBlock),
    "PreActBasic": lambda: tiny_resnet(basic=True),
    "PreActBottleneck": tiny_resnet,
    "Bottleneck": lambda: tiny_resnet(preact=False),
}


def test_every_block_of_the_papers_families_has_a_model_here():
    modules = ("timm.models.vision_transformer", "timm.models.resnetv2")  # blocks/test_timm.py tests other families
    names = [spec.name.rpartition(".") for spec in specs("timm")]
    assert {block for module, _, block in names if module in modules} <= set(BLOCKS)


def build(block):
    torch.manual_seed(0)
    return BLOCKS[block]()


def images(n=3):
    return torch.randn(n, 3, 32, 32, generator=torch.Generator().manual_seed(1))


def step(model):
    """Return output and gradients of one training step."""
    model.zero_grad()
    y = model(images())
    y.square().sum().backward()
    return [y.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("connection", CONNECTIONS)
@pytest.mark.parametrize("block", BLOCKS)
def test_every_site_weights_the_parallel_part(block, connection):
    """Each site adds the parallel part of f with the weight of its connection, and every parameter gets a gradient."""
    model = connect(build(block).double(), connection)
    one = torch.ones(1, 1, dtype=torch.float64)
    weight = create_connection(connection).double()(one, one).item() - 1  # one channel has no orthogonal part
    checked = []

    def check(module, inputs, y):
        x, f = inputs
        dims = module.dims or tuple(range(1, x.ndim))
        lengths = x.square().sum(dims).sqrt() * f.square().sum(dims).sqrt()
        angle = (x * (y - x - weight * f)).sum(dims) / lengths.clamp_min(1e-3)
        checked.append(angle.abs().max().item())

    for site in sites(model):
        site.connection.register_forward_hook(check)
    model(images().double()).square().sum().backward()
    assert len(checked) == len(sites(model)) > 0
    assert max(checked) < 1e-3  # not zero, because eps is 1e-6 and some streams are small
    assert all(p.grad is not None for p in model.parameters())


def test_names_of_sites():
    found = [(s.layer, s.kind, s.name) for s in sites(connect(build("Block"), "feature"))]
    assert found == [(layer, kind, f"blocks.{layer}.connection_{kind}")
                     for layer in (0, 1) for kind in ("attention", "mlp")]
    assert {s.connection.dim for s in sites(connect(build("PreActBasic"), "global"))} == {1}
    assert sites(build("Block")) == []


@pytest.mark.parametrize("block", BLOCKS)
def test_switching_back(block):
    model = build(block)
    keys, expected = list(model.state_dict()), step(build(block))
    connect(model, "hybrid", start="linear")
    assert len(model.state_dict()) == len(keys) + 2 * len(sites(model))
    for connection in (*CONNECTIONS, "linear"):
        connect(model, connection)
        assert {type(s.connection) for s in sites(model)} == {CONNECTIONS[connection]}
    assert list(model.state_dict()) == keys
    assert all(torch.equal(a, b) for a, b in zip(step(model), expected, strict=True))


def test_layers_and_kinds():
    for layers in ([1], {1}, range(1, 2), iter([1]), np.array([1]), 1, np.int64(1)):
        assert names(connect(build("Block"), "feature", layers=layers)) == ["linear"] * 2 + ["feature"] * 2
    for kinds in ("mlp", ["mlp"], {"mlp"}, iter(["mlp"])):
        model = connect(build("Block"), "feature", kinds=kinds)
        assert names(model) == ["linear", "feature"] * 2
    assert names(connect(model, "global", kinds=["attention"], layers=[1])) == ["linear", "linear", "global", "linear"]
    for nothing in (dict(kinds=[]), dict(layers=[])):
        assert names(connect(model, "hybrid", **nothing)) == ["linear"] * 4


def names(model):
    return [site.connection.name for site in sites(model)]


def decayed(model, **options):
    """Return the names of the parameters to which timm's optimizers apply weight decay."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    optimizer = create_optimizer_v2(model, opt="adamw", lr=0.1, weight_decay=0.05, **options)
    groups = [group["params"] for group in optimizer.param_groups if group["weight_decay"]]
    return {names[parameter] for group in groups for parameter in group}


@pytest.mark.parametrize("options", [
    {}, dict(layer_decay=0.7), dict(filter_bias_and_bn=False), dict(filter_bias_and_bn=False, layer_decay=0.7)])
@pytest.mark.parametrize("kind", ["Block", "PreActBasic"])
def test_learned_connections_get_no_weight_decay(kind, options):
    model = build(kind)
    before = decayed(model, **options)
    assert before
    connect(model, "hybrid")
    assert decayed(model, **options) == before
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert decayed(copied, **options) == before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_learned_connections_have_the_dtype_of_a_model_with_one_wide_dtype(dtype):
    for convert in (lambda parameter: parameter.to(dtype), lambda parameter: parameter.to(torch.float8_e4m3fn),
                    lambda parameter: parameter.to(dtype) if parameter.ndim > 1 else parameter):
        model = tiny_vit()
        for parameter in model.parameters():
            parameter.data = convert(parameter.data)
        dtypes = {parameter.dtype for parameter in model.parameters()}
        connect(model, "hybrid")
        assert {site.connection.rho.dtype for site in sites(model)} == {dtype if dtypes == {dtype} else torch.float32}


@pytest.mark.parametrize("connected", [False, True])
def test_an_error_while_a_model_is_changed_leaves_it_unchanged(connected):
    def fails():
        raise KeyError("mine")

    model = tiny_vit()
    if connected:
        connect(model, "feature")
    model.blocks[0].register_forward_hook(print)
    model.no_weight_decay = fails
    before = [(type(module), {**vars(module)}, [*module._modules.items()]) for module in model.modules()]
    with pytest.raises(KeyError, match="mine"):
        connect(model, "hybrid")
    assert [(type(module), {**vars(module)}, [*module._modules.items()]) for module in model.modules()] == before


def test_learned_connections_of_quantized_and_meta_blocks():
    model = tiny_vit()
    model.blocks[0].norm1.weight = nn.Parameter(torch.ones(48, dtype=torch.int8), requires_grad=False)
    connect(model, "hybrid", start="linear")
    assert {site.connection.rho.dtype for site in sites(model)} == {torch.float32}
    made = sites(model)[0].connection
    empty = copy.deepcopy(made).to("meta").to_empty(device="cpu")
    empty.reset_parameters()  # FSDP calls reset_parameters after to_empty
    assert [one.item() for one in empty.parameters()] == [one.item() for one in made.parameters()]


def test_no_weight_decay_of_the_class_is_kept():
    model = tiny_vit()
    own = model.no_weight_decay()
    assert own
    learned = {f"{site.name}.{name}" for site in sites(connect(model, "hybrid")) for name in ("rho", "theta")}
    assert model.no_weight_decay() == own | learned
    model.no_weight_decay().clear()  # no_weight_decay() returns a copy
    connect(model, "hybrid", layers=[1])
    assert model.no_weight_decay() == own | {name for name in learned if name.startswith("blocks.1.")}
    for plain in (connect(model, "feature"), disconnect(connect(model, "hybrid"))):
        assert "no_weight_decay" not in vars(plain)
        assert plain.no_weight_decay() == own
    resnet = connect(tiny_resnet(), "hybrid")  # its class does not define no_weight_decay
    assert len(resnet.no_weight_decay()) == 2 * len(sites(resnet))


def test_switching_keeps_parameters_and_optimizer_state():
    model = connect(build("PreActBasic"), "linear")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    parameters = list(model.parameters())
    for connection in ("linear", "feature", "linear", "global"):
        connect(model, connection)
        step(model)
        optimizer.step()
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert len(optimizer.state) == len(parameters)


# ------------------------------------------------------------------------------ outputs that are changed in place
def step_with_hooks(model, in_place):
    """Return output and gradients of a model with hooks that double the blocks' outputs."""
    def hook(module, inputs, y):
        return y.mul_(2.0) if in_place else 2.0 * y

    handles = [model.get_submodule(name).register_forward_hook(hook) for name in blocks_of(model)]
    try:
        return step(model.train())
    finally:
        for handle in handles:
            handle.remove()


def blocks_of(model):
    return list(dict.fromkeys(site.name.rpartition(".")[0] for site in sites(model)))


@pytest.mark.parametrize("connection", taking("keep"))
# Bottleneck ends with a ReLU, whose backward pass needs the output that the hooks change.
@pytest.mark.parametrize("block", [block for block in BLOCKS if block != "Bottleneck"])
def test_keep_branch_allows_in_place_changes(block, connection):
    model = connect(build(block), connection, keep="branch")
    expected = step_with_hooks(connect(build(block), connection), in_place=False)
    for a, b in zip(step_with_hooks(model, in_place=True), expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("connection", ["feature", "global"])
def test_which_tensor_is_kept(connection):
    model = connect(build("Block"), connection)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step_with_hooks(model, in_place=True)
    keeps = {}
    for keep in ("branch", "output"):
        vits, resnets = (sites(connect(build(block), connection, keep=keep)) for block in ("Block", "Bottleneck"))
        keeps[keep] = [{site.connection.keep for site in of_model} for of_model in (vits, resnets)]
    assert keeps == {"branch": [{"branch"}, {"branch"}], "output": [{"output"}, {"branch"}]}
    connect(model, connection, keep="branch", layers=1)
    assert [site.connection.keep for site in sites(model)[2:]] == ["branch"] * 2
    for site in sites(model):
        site.connection.keep = "branch"  # `keep` can be set after `connect`, too
    step_with_hooks(model, in_place=True)


class WithoutKeep(Connection):
    """A user's connection without an argument `keep`."""

    def __init__(self, dim=-1, eps=1e-6):
        super().__init__(dim, eps)

    def forward(self, x, f, attn_mask=None):
        return self.join(x, f, 0.0, 1.0, attn_mask)


def test_blocks_that_change_their_sum_keep_the_branch_of_every_connection():
    step(connect(build("Bottleneck"), WithoutKeep))  # the block changes its sum in place


# ------------------------------------------------------------------------------------------------- bad input
class Foreign(nn.Linear):
    """A residual block that the tables of `timm_ortho.blocks` do not contain."""

    def __init__(self):
        super().__init__(5, 5)

    def forward(self, x):
        y = super().forward(x)
        return x + y


class Output(nn.Module):
    """A block like BERT's output module. Its forward takes the output of a branch and the stream."""

    def forward(self, hidden_states, input_tensor):
        hidden_states = self.dropout(hidden_states)
        return self.norm(hidden_states + input_tensor)


class Subclass(vit.Block):
    """A subclass with its own forward. The table's row for the base class does not apply to the subclass."""

    def forward(self, x):
        x = x + self.mlp(x)
        return x


def parametrized(model):
    nn.utils.parametrize.register_parametrization(model.stages[0].blocks[0], "gamma", nn.Identity())
    return model


def unchanged(model, *args, **kwargs):
    before, classes = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    with pytest.raises(ValueError) as error:  # noqa: PT011 the caller checks the message
        connect(model, *args, **kwargs)
    assert [type(m) for m in model.modules()] == classes
    assert list(before) == list(model.state_dict())
    return error.value


@pytest.mark.parametrize(("kwargs", "words"), [
    ({"layers": [0, 2]}, ["layers", "[0, 1]", "2"]),
    ({"layers": [-1]}, ["layers", "[0, 1]", "-1"]),
    ({"layers": ["0"]}, ["layers", "'0'"]),
    ({"layers": 2}, ["layers", "[0, 1]", "got 2"]),
    ({"layers": 1.5}, ["layers", "[0, 1]", "got 1.5"]),
    ({"kinds": ["mlp", "attn"]}, ["unknown kind of branch 'attn'", "'attention', 'mlp'"]),
    ({"kinds": 1}, ["unknown kind of branch 1", "'attention', 'mlp'"]),
    ({"connection": "hybrid", "layers": [], "prob": 0.5}, ["unknown argument of connection 'hybrid': 'prob'"]),
    ({"connection": "global", "groups": 6}, ["unknown argument of connection 'global': 'groups'"]),
    ({"groups": 2.0}, ["groups must be a whole number of at least 1, got 2.0"]),
])
def test_bad_arguments_of_connect(kwargs, words):
    for model in (build("Block"), connect(build("Block"), "global")):
        message = str(unchanged(model, **kwargs))
        assert all(word in message for word in words), message


@pytest.mark.parametrize(("model", "words"), [
    (lambda: timm.create_model("vgg11"), ["VGG", "no residual block found", "timm-ortho list"]),
    (lambda: Foreign(), ["Foreign", "supported residual blocks found: none", "not supported: test_convert.Foreign"]),
    (lambda: nn.Sequential(tiny_vit(), Foreign()),
     ["found: timm.models.vision_transformer.Block", "not supported: test_convert.Foreign"]),
    (lambda: nn.Sequential(tiny_vit(), Subclass(48, 2)), ["not supported: test_convert.Subclass"]),
    (lambda: nn.Sequential(tiny_vit(), Output()), ["not supported: test_convert.Output"]),
    (lambda: nn.Sequential(tiny_vit(), nn.TransformerEncoderLayer(8, 1)), ["transformer.TransformerEncoderLayer"]),
    (lambda: nn.Sequential(tiny_vit(), parametrized(timm.create_model("test_convnext"))),
     ["its ParametrizedConvNeXtBlock is sharded or parametrized"]),
], ids=["vgg11", "foreign", "half", "subclass", "two arguments", "torch", "parametrized"])
def test_models_that_cannot_be_converted(model, words):
    with torch.device("meta"):
        model = model()
    error = unchanged(model, "feature")
    assert isinstance(error, UnsupportedModelError)
    assert all(word in str(error) for word in words), error


@pytest.mark.parametrize("call", [connect, disconnect])
def test_what_is_not_a_model_of_python_code(call):
    with pytest.raises(TypeError, match=r"got 'vit_test_ortho': pass timm\.create_model\('vit_test_ortho'\)$"):
        call("vit_test_ortho")
    model = nn.Sequential(connect(tiny_vit(), "feature"), torch.jit.script(tiny_vit()))
    with pytest.raises(UnsupportedModelError, match=r"1 is a scripted or .* call connect before torch\.jit\.script"):
        call(model)
    assert {site.connection.name for site in sites(model)} == {"feature"}


@pytest.mark.parametrize(("part", "name"), [
    (lambda model: model.blocks, "Sequential"), (lambda model: model.blocks[0], "Block"), (lambda model: model, None),
    (lambda model: nn.Sequential(model, nn.Identity()), None), (lambda model: tiny_vit(), None)])
def test_parts_that_timm_does_not_save_warn(part, name):
    model = part(timm.create_model("vit_test_linear"))
    for call in (connect, disconnect):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call(model)
        parts = [str(each.message) for each in caught if "is only a part" in str(each.message)]  # timm < 1.0.31: others
        assert [f"this change of a {name}, which" in part for part in parts] == [True] * bool(name)


class Adapter(nn.Module):
    """An adapter. It adds layer(x) and small(x). It looks residual, because both summands depend on its input x."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.small = layer, nn.Linear(layer.in_features, layer.out_features)

    def forward(self, x):
        return self.layer(x) + self.small(x)


def test_adapters_belong_to_their_branch():
    model = tiny_vit()
    for block in model.blocks:
        block.attn.qkv, block.mlp.fc1 = Adapter(block.attn.qkv), Adapter(block.mlp.fc1)
    for connection in ("feature", "linear"):
        assert len(sites(connect(model, connection))) == 4
    model.head = Adapter(model.head)
    assert "not supported: test_convert.Adapter" in str(unchanged(model, "feature"))


class WithLoss(nn.Module):
    """A model that adds a penalty to its loss."""

    def __init__(self):
        super().__init__()
        self.encoder = tiny_vit()

    def forward(self, x, labels):
        y = self.encoder(x)
        return nn.functional.cross_entropy(y, labels) + y.square().mean()


def test_a_wrapper_that_adds_something_is_refused_and_its_part_is_connected():
    model = WithLoss()
    message = str(unchanged(model, "feature"))
    assert "not supported: test_convert.WithLoss. If " in message
    assert "connect the part with the blocks: timm_ortho.connect(model.encoder, ...). timm-ortho list" in message
    connect(model.encoder, "feature")
    assert next(site.name for site in sites(model)) == "encoder.blocks.0.connection_attention"


def test_a_block_that_a_new_timm_release_has_changed(monkeypatch):
    class Block(vit.Block):
        def forward(self, x):
            return x + self.mlp(x)

    monkeypatch.setattr(vit, "Block", Block)
    model = build("Block")
    Block.__module__, Block.__qualname__ = "timm.models.vision_transformer", "Block"
    model.blocks[0].__class__ = Block
    classes = [type(m) for m in model.modules()]
    with pytest.raises(RoutingError) as error:
        connect(model, "feature")
    for words in ("vision_transformer.Block", "expected 2", "found 1", f"timm {timm.__version__}", "install a release"):
        assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert [type(m) for m in model.modules()] == classes
    assert not sites(model)


@pytest.mark.parametrize("mine", [{"mine"}, lambda: ["mine"]])
def test_no_weight_decay_of_an_instance_is_kept(mine):
    model = tiny_vit()
    model.no_weight_decay = mine
    assert connect(model, "feature").no_weight_decay is mine
    for _ in range(2):
        assert len(connect(model, "hybrid").no_weight_decay()) == 1 + 2 * len(sites(model))
    assert disconnect(model).no_weight_decay is mine


def test_parametrized_blocks():
    """After `connect`, parametrization replaces the block's class with a subclass that it creates at run time."""
    model = connect(timm.create_model("test_convnext"), "feature")
    before, block = len(sites(model)), model.stages[0].blocks[0]
    cls = type(parametrized(model).stages[0].blocks[0])
    assert len(sites(model)) == before
    connect(model, "linear")
    assert {type(site.connection) for site in sites(model)} == {LinearConnection}
    assert type(block) is cls is not written_class(block)
