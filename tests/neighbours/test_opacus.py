"""Opacus computes gradients per sample; the lines in docs/neighbours.md add the gradients of hybrid connections."""
import re
from unittest import mock

import pytest
import timm
import torch
from helpers.own_block import Written
from helpers.pages import text_of
from torch import nn

import timm_ortho

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
opacus = pytest.importorskip("opacus")


def blocks():
    model = nn.Sequential(*(Written(timm_ortho.create_connection("hybrid")) for _ in range(2)))
    for block in model:
        nn.init.constant_(block.add.theta, 0.3)
    return model


def assert_gradients_of_samples(model, inputs):
    alone = []
    for sample in inputs.split(1):
        model.zero_grad()
        model(sample).square().sum().backward()
        alone.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    wrapped = opacus.GradSampleModule(model.train(), loss_reduction="sum")
    wrapped(inputs).square().sum().backward()
    for name, parameter in model.named_parameters():
        expected = torch.stack([gradients[name] for gradients in alone])
        torch.testing.assert_close(parameter.grad_sample, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("connection", ["feature", "hybrid"])
def test_a_vit_needs_no_sampler(connection):
    torch.manual_seed(0)
    model = timm.create_model("vit_test_ortho", connection=connection)
    assert_gradients_of_samples(model, torch.randn(3, 3, 8, 8))


@mock.patch.dict(opacus.GradSampleModule.GRAD_SAMPLERS)
def test_the_lines_of_the_page():
    model, inputs = blocks(), torch.randn(3, 5, 8)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'f'"):  # else, no sampler is needed
        assert_gradients_of_samples(model, inputs)
    lines, = re.findall(r"^(from opacus.*?)^```", text_of("neighbours.md"), re.DOTALL | re.MULTILINE)
    exec(lines, {"timm_ortho": timm_ortho})
    assert_gradients_of_samples(blocks(), inputs)
