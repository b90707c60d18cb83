"""accelerate's cpu_offload keeps the results of a connected model."""
import pytest
import timm
import torch

from timm_ortho import connect

accelerate = pytest.importorskip("accelerate")


@torch.no_grad()
@pytest.mark.parametrize("connection", ["feature", "hybrid"])
def test_a_connected_model_is_offloaded(connection):
    model = connect(timm.create_model("vit_test_linear"), connection).eval()
    images = torch.randn(2, *model.default_cfg["input_size"])
    expected = model(images)
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    torch.testing.assert_close(model(images), expected, rtol=0, atol=0)
