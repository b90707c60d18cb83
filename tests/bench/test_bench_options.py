"""Options of `timm-ortho bench`: defaults, and one-line errors for invalid values."""
import re

import pytest
import torch

from timm_ortho import bench, cli
from timm_ortho.bench import options
from timm_ortho.functional import use_backend


@pytest.mark.parametrize(("arguments", "message"), [
    (["--models", "vit_small_ortho:0"], "--models must be NAME or NAME:BATCH, got 'vit_small_ortho:0'"),
    (["--models", "vit_small_ortho:x"], "--models must be NAME or NAME:BATCH, got 'vit_small_ortho:x'"),
    (["--device", "tpu"], "--device tpu: Expected one of cpu, cuda"),
    (["--device", "meta"], "--device must be cpu or cuda, got meta"),
    (["--shapes", "16x197"], "--shapes must be tokens (16x197x384) or NCHW (8x256x56x56), got '16x197'"),
    (["--shapes", "2x0x4"], "got '2x0x4'"),
    (["--models", "vit_smal_ortho"],
     "no orthogonal variant 'vit_smal_ortho'; did you mean 'vit_small'? (see timm-ortho list)"),
    (["--models", "vit_small", "--model-kwargs", "deptj=2"], "vit_small cannot be built with {'deptj': 2}: "),
    (["--models", "vit_test", "--model-kwargs", "num_heads=0"], "{'num_heads': 0}: integer modulo by zero"),
    (["--models", "vit_test", "--model-kwargs", "act_layer=gelo"], "{'act_layer': 'gelo'}: KeyError: 'gelo'"),
    (["--models", "vit_test_ortho.digits"], "no orthogonal variant 'vit_test_ortho.digits' (see timm-ortho list)"),
    (["--model-kwargs", "depth"], "'depth' is not of the form key=value"),
])
def test_bad_arguments_of_bench(error_of, tmp_path, arguments, message):
    assert message in error_of("bench", "--device", "cpu", "--output", tmp_path / "out", *arguments)
    assert not (tmp_path / "out").exists()


def test_a_number_must_be_positive(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "--repeats", "0"])
    assert "argument --repeats: must be a whole number of at least 1, got '0'" in capsys.readouterr().err


def test_choices_are_those_of_the_measured_cases():
    (commands,) = (action for action in cli._parser()._actions if action.choices)
    choices = {action.dest: action.choices for action in commands.choices["bench"]._actions if action.choices}
    assert {name: tuple(values) for name, values in choices.items()} == {
        "what": options.PARTS, "dtypes": tuple(options.PAIRS), "modes": options.MODES}


def test_an_output_that_is_a_file_is_refused_first(error_of, tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "measure", None)
    file = tmp_path / "file"
    file.touch()
    for output in (file, file / "out" / "bench"):
        assert re.search(r"Not a directory|File exists", error_of("bench", "--device", "cpu", "--output", output))


@pytest.mark.skipif(torch.cuda.is_available(), reason="requires a machine without a CUDA device")
def test_no_gpu(error_of):
    assert error_of("bench", "--device", "cuda").startswith("timm-ortho: error: --device cuda: ")


def test_a_requested_backend_that_cannot_run(error_of, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with use_backend("triton"):
        assert "TIMM_ORTHO_BACKEND" in error_of("bench", "--device", "cpu")


def test_options_are_passed_on(monkeypatch, tmp_path):
    passed = []
    monkeypatch.setattr("timm_ortho.bench.bench", lambda *arguments: passed.extend(arguments) or 0)
    assert cli.main(["bench", "--what", "models", "-b", "4", "--no-compile", "--model-kwargs", "depth=2", "--output",
                     str(tmp_path)]) == 0
    options, output, command = passed
    assert {key: value for key, value in options.items() if value is not None} == {
        "what": ["models"], "batch_size": 4, "compile": False, "model_kwargs": {"depth": 2}}
    assert output == tmp_path
    assert command.startswith("timm-ortho bench --what models -b 4 ")


def test_batch_sizes_and_modes():
    def resolved(**requested):
        options = bench.resolve({"device": "cpu", "what": ["models"], **requested})
        return [(model.base, model.batch[0]) for model in options.models], tuple(options.modes)

    assert resolved() == ([("vit_small", 16), ("resnetv2_50", 8)], ("eager", "compiled"))
    assert resolved(batch_size=2)[0] == [("vit_small", 2), ("resnetv2_50", 2)]
    twice = ["vit_small_ortho:3", "vit_small_ortho:4", "vit_small_ortho"]
    assert resolved(models=twice, compile=False) == ([("vit_small", 3), ("vit_small", 4), ("vit_small", 8)], ("eager",))
    assert resolved(models=twice, batch_size=2, modes=["compiled"]) == ([("vit_small", 2)], ("compiled",))


def test_defaults_of_a_gpu(monkeypatch):
    """The defaults take five minutes, so there is no torch.compile."""
    monkeypatch.setattr(options, "_device", torch.device)
    resolved = bench.resolve({"device": "cuda"})
    assert [(model.base, model.batch[0], [*model.variants]) for model in resolved.models] == [
        ("vit_small_patch16_224", 128, ["ortho"]), ("vit_small_patch16_224", 256, ["ortho"]),
        ("vit_base_patch16_224", 128, ["ortho"]), ("resnetv2_50", 128, ["ortho"])]
    assert (tuple(resolved.modes), tuple(resolved.dtypes), resolved.compile) == (("eager",), ("bfloat16",), False)
