"""The Trainer of Hugging Face: the lines in docs/neighbours.md exclude the parameters of connections from decay."""
import re

import pytest
from helpers.pages import text_of

import timm_ortho  # noqa: F401  registers the variants

transformers = pytest.importorskip("transformers", minversion="5")
pytest.importorskip("accelerate")

VIT = dict(img_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2, num_classes=3)


def decayed(trainer_class, folder):
    """Return the names of the parameters with weight decay."""
    config = transformers.TimmWrapperConfig(
        architecture="vit_small_ortho", num_labels=3,
        model_args={key: value for key, value in VIT.items() if key != "num_classes"} | {"connection": "hybrid"})
    model = transformers.TimmWrapperForImageClassification(config)
    arguments = transformers.TrainingArguments(folder, weight_decay=0.1, report_to="none", use_cpu=True)
    optimizer = trainer_class(model, arguments).create_optimizer()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)] for group in optimizer.param_groups if group["weight_decay"]
            for parameter in group["params"]}


def test_learned_connections_are_not_decayed(tmp_path):
    namespace = {"transformers": transformers}
    lines, = re.findall(r"^(class Trainer\(.*?)^```", text_of("neighbours.md"), re.DOTALL | re.MULTILINE)
    exec(lines, namespace)
    without, with_lines = (decayed(cls, tmp_path) for cls in (transformers.Trainer, namespace["Trainer"]))
    learned = {f"timm_model.blocks.0.connection_{kind}.{name}" for kind in ("attention", "mlp")
               for name in ("rho", "theta")}
    assert with_lines == without - learned
    assert learned < without  # if this fails, the page's lines are no longer needed
    assert "timm_model.blocks.0.attn.qkv.weight" in with_lines
