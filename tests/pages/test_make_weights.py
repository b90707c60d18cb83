"""Test that scripts/make_weights.py reproduces the weights in the package from the folder of their comparison."""
import json

import pytest
import timm
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file

from scripts import make_weights
from scripts.pages import cards
from timm_ortho.convert import SUFFIXES
from timm_ortho.lab.reporting import published
from timm_ortho.weights.pretrained import weights_file


@pytest.fixture
def comparison(tmp_path, monkeypatch):
    """Return the output folder of a comparison. Its runs with the first seed have the package's weights."""
    monkeypatch.setattr(make_weights, "weights_file", lambda name: tmp_path / weights_file(name).name)
    study, runs, _ = published.read(cards.comparison_of("vit_test_ortho.digits"))
    (tmp_path / "results.json").write_text(json.dumps({"study": study, "runs": runs}))
    for suffix, connection in SUFFIXES.items():
        run = tmp_path / f"{connection}-seed0"
        run.mkdir()
        (run / "args.yaml").write_text(yaml.safe_dump(study["options"]))
        model = timm.create_model(f"vit_test{suffix}.digits", pretrained=True)
        torch.save({"state_dict": model.state_dict()}, run / "last.pth.tar")
    return tmp_path


def test_the_weights_of_the_package(comparison):
    make_weights.main("digits", comparison)
    for suffix in SUFFIXES:
        shipped = weights_file(f"vit_test{suffix}.digits")
        written = comparison / shipped.name
        for file in (shipped, shipped.with_suffix(".tensors.safetensors")):
            expected, tensors = load_file(file), load_file(comparison / file.name)
            assert tensors.keys() == expected.keys()
            for name, tensor in tensors.items():
                torch.testing.assert_close(tensor, expected[name], atol=1e-4, rtol=1e-4)
        about, stored = (safe_open(file, "pt").metadata() for file in (written, shipped))
        for key in ("model", "connection", "data", "seed", "top1", "epochs"):
            assert about[key] == stored[key]
        study = json.loads((comparison / "results.json").read_text())["study"]
        assert about["commit"] == study["versions"]["commit"][:12]


@pytest.mark.parametrize(("options", "classes", "message"), [
    ({"model_kwargs": {"connection": "linear", "embed_dim": 64}}, 10,
     r"linear-seed0 has model_kwargs {'embed_dim': 64}, which an entry cannot store: .* --recipe vit_test_digits, or "
     "use timm-ortho push"),
    ({"model_kwargs": {"connection": "linear"}}, 7,
     r"linear-seed0 does not fit timm.create_model\('vit_test_linear.digits'\): change num_classes .*: size mismatch "
     r"for head.bias"),
])
def test_weights_that_need_arguments(comparison, options, classes, message):
    run = comparison / "linear-seed0"
    (run / "args.yaml").write_text(yaml.safe_dump({**yaml.safe_load((run / "args.yaml").read_text()), **options}))
    model = timm.create_model("vit_test_linear", num_classes=classes)
    torch.save({"state_dict": model.state_dict()}, run / "last.pth.tar")
    with pytest.raises(SystemExit, match=message) as raised:
        make_weights.main("digits", comparison)
    assert "\n" not in str(raised.value)
