"""running/pooling.py: the architecture of the study `confirm_poolformer`."""
import timm
import torch

import timm_ortho
from timm_ortho.lab.planning import design
from timm_ortho.lab.running import pooling

SMALL = dict(depths=[1, 1, 2, 1], dims=[16, 32, 48, 64], num_classes=4)


def test_the_plain_mixer_equals_timms_without_the_subtraction():
    x = torch.randn(2, 8, 6, 6)
    torch.testing.assert_close(pooling.PlainPooling()(x) - x, pooling.Pooling()(x))
    plain, timms = (
        timm.create_model(f"poolformerv2_s12{name}", **SMALL).eval() for name in ("_plain_linear", "_ortho"))
    timm_ortho.connect(timms, "linear")
    for block in timms.modules():
        if isinstance(block, pooling.Pooling):
            block.__class__ = pooling.PlainPooling
    plain.load_state_dict(timms.state_dict())
    images = torch.randn(2, 3, 64, 64)
    assert torch.equal(plain(images), timms(images))


def test_each_cell_has_its_mixer_and_its_sites():
    cells = {}
    for variant in design.load("confirm_poolformer", "small").variants({"dataset": "digits"}):
        model = timm.create_model(variant.options.model, num_classes=10, **variant.options.model_kwargs)
        carrying = {site.kind for site in timm_ortho.sites(model) if site.connection.name == "feature"}
        cells[tuple(variant.cell.values())] = (type(model.stages[0].blocks[0].token_mixer), carrying)
    where = {"nowhere": set(), "both": {"mixer", "mlp"}, "mixer": {"mixer"}, "mlp": {"mlp"}}
    mixers = {"pool(x) - x": pooling.Pooling, "pool(x)": pooling.PlainPooling}
    assert cells == {(mixer, place): (cls, kinds) for mixer, cls in mixers.items() for place, kinds in where.items()}
