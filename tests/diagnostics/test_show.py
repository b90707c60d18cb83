"""Test the table and the plot of `timm-ortho show`, the sources of its models and weights, and its errors."""
import io
import json
import math
import struct
import sys
import xml.etree.ElementTree as ElementTree
import zlib

import pytest
import timm
import torch
from helpers.trained_runs import lab_grid, timm_run
from PIL import Image

import timm_ortho
from timm_ortho import cli, hub
from timm_ortho.diagnostics import record_dynamics, show

TINY = ["--model-kwargs", "img_size=16", "patch_size=8", "embed_dim=16", "depth=2", "num_heads=2"]


def rows(capsys):
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_a_line_for_each_site(capsys):
    assert cli.main(["show", "vit_test_ortho", "--pretrained"]) == 0
    model = timm.create_model("vit_test_ortho", pretrained=True)
    sites = timm_ortho.sites(model)
    measured = record_dynamics(model, show.batch(model), sites)
    header, *lines = rows(capsys)
    assert header == ["block", "site", "connection", "|x|²", "|f∥|²", "|f⊥|²", "cosine", "-1", "0", "1"]
    for line, site, means in zip(lines, sites, measured, strict=True):
        assert line[:3] == [str(site.layer), site.kind, "feature"]
        expected = [means.stream, means.parallel, means.orthogonal, means.cosine]
        assert [float(value) for value in line[3:7]] == pytest.approx(expected, rel=1e-3, abs=1e-3)


@pytest.mark.parametrize("arguments", [
    ["vit_test_ortho", "--model-kwargs", "in_chans=1"], ["resnet18_ortho", "--model-kwargs", "in_chans=1"],
    ["vit_small_ortho", *TINY, "img_size=[16,32]"]])
def test_other_channels_and_image_sizes(arguments, capsys):
    assert cli.main(["show", *arguments]) == 0
    assert all(0 < float(line[3]) < math.inf for line in rows(capsys)[1:])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return timm_run(tmp_path_factory.mktemp("run") / "run", ema=True)


def test_every_source_that_push_accepts(run, tmp_path, capsys):
    """A run's folder, its checkpoint, a variant with the checkpoint's weights and an export give equal tables."""
    hub.export(run, tmp_path / "out", "me/model")
    last = str(run / "last.pth.tar")
    tables = []
    for arguments in ([str(run)], [last], ["vit_small_ortho", "--checkpoint", last], [f"local-dir:{tmp_path / 'out'}"]):
        assert cli.main(["show", *arguments]) == 0, arguments
        tables.append(capsys.readouterr().out)
    assert tables == [tables[0]] * 4
    assert len(tables[0].splitlines()) == 1 + 4
    assert cli.main(["show", str(run / "model_best.pth.tar")]) == 0
    assert capsys.readouterr().out != tables[0]
    assert cli.main(["show", str(run), "--ema"]) == 0
    assert capsys.readouterr().out != tables[0]


def test_a_run_with_another_connection_and_a_folder_of_runs(run, tmp_path, capsys, error_of):
    assert cli.main(["show", "vit_small_linear", "--checkpoint", str(run / "last.pth.tar")]) == 0
    assert {line[2] for line in rows(capsys)[1:]} == {"linear"}
    grid = lab_grid(tmp_path / "compared", seeds=1)
    assert "contains 2 runs: pass one of them" in error_of("show", grid)
    Image.new("L", (40, 30), 200).save(tmp_path / "grey.png")
    assert cli.main(["show", str(grid / "linear-seed0"), "--image", str(tmp_path / "grey.png")]) == 0
    assert {line[2] for line in rows(capsys)[1:]} == {"linear"}


def test_a_damaged_checkpoint(tmp_path, error_of):
    file = tmp_path / "g.safetensors"
    file.write_text("garbage")
    error = error_of("show", "vit_test_ortho", "--checkpoint", file)
    assert error.startswith(f"timm-ortho: error: {file} cannot be read as a checkpoint (")


def test_a_checkpoint_without_arguments_of_a_run(tmp_path, capsys, error_of):
    model, file = timm.create_model("vit_test_linear"), str(tmp_path / "both.pth.tar")
    weights = model.state_dict()
    torch.save({"state_dict": weights, "state_dict_ema": {key: 3 * value for key, value in weights.items()}}, file)
    assert cli.main(["show", "vit_test_linear", "--checkpoint", file]) == 0
    assert capsys.readouterr().out == show.as_text(show.measured_sites(model, show.batch(model))) + "\n"
    error = error_of("show", file)
    assert f"the model of {file} is unknown: the file contains no arguments" in error
    assert f"timm-ortho show MODEL --checkpoint {file}" in error
    expected = f"--ema needs a checkpoint with the options of its run, and {file} has none: omit --ema"
    assert expected in error_of("show", "vit_test_linear", "--checkpoint", file, "--ema")


def test_an_image_and_a_plot(tmp_path, capsys):
    Image.new("RGB", (40, 30), "red").save(tmp_path / "red.png")
    arguments = ["show", "vit_small_orthog", *TINY, "--image", str(tmp_path / "red.png")]
    torch.manual_seed(0)
    assert cli.main([*arguments, "--svg", str(tmp_path / "sites.svg")]) == 0
    of_image = rows(capsys)
    torch.manual_seed(0)
    assert cli.main(["show", "vit_small_orthog", *TINY]) == 0
    assert rows(capsys) != of_image
    text = "".join(ElementTree.parse(tmp_path / "sites.svg").getroot().itertext())
    assert "vit_small_orthog" in text
    model = timm.create_model("vit_test_ortho")
    show.as_svg(show.measured_sites(model, show.batch(model)), tmp_path / "a.svg", "runs/$\\frac$_1")
    assert "runs/$\\frac$_1" in "".join(ElementTree.parse(tmp_path / "a.svg").getroot().itertext())


def test_a_grey_image_of_16_bits(tmp_path, error_of):
    """Images with 16-bit values are refused, because Pillow clips the values to 255."""
    path = tmp_path / "g16.png"
    Image.new("I;16", (40, 30), 3000).save(path)
    error = error_of("show", "vit_small_orthog", *TINY, "--image", path)
    assert f"image {path} cannot be used: Pillow clips images of 16 or 32 bits to 255" in error


def test_an_image_that_pillow_refuses_as_too_large(tmp_path, error_of):
    """A PNG of a few kilobytes may have 60,000 x 60,000 pixels."""
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b""))
    around = [(struct.pack(">I", len(data)), struct.pack(">I", zlib.crc32(name + data))) for name, data in chunks]
    packed = b"".join(a + name + data + z for (name, data), (a, z) in zip(chunks, around, strict=True))
    (tmp_path / "bomb.png").write_bytes(b"\x89PNG\r\n\x1a\n" + packed)
    line = error_of("show", "vit_small_orthog", *TINY, "--image", tmp_path / "bomb.png")
    assert f"image {tmp_path / 'bomb.png'} cannot be used: Image size (3600000000 pixels) exceeds limit" in line
    assert line.endswith("make the image smaller first\n")


@pytest.mark.parametrize("crop", [1e-4, -1])
def test_a_configuration_that_enlarges_an_image(tmp_path, error_of, crop):
    """timm resizes the image to the size of the model divided by crop_pct."""
    hub.export(timm.create_model("vit_test_ortho"), tmp_path / "model", "me/model")
    file = tmp_path / "model" / "config.json"
    config = json.loads(file.read_text())
    config["pretrained_cfg"]["crop_pct"] = crop
    file.write_text(json.dumps(config))
    Image.new("L", (8, 8)).save(tmp_path / "x.png")
    error = error_of("show", f"local-dir:{tmp_path / 'model'}", "--image", tmp_path / "x.png")
    assert f"would be resized to more than 16384 pixels: the model's crop_pct is {crop}" in error


@pytest.mark.parametrize(("arguments", "message"), [
    (["vit_small_patch16_224"], "there is no variant 'vit_small_patch16_224'; did you mean 'vit_small_patch16_224_or"),
    (["vgg11_ortho"], "there is no variant 'vgg11_ortho'; vgg11 has no variants: no residual addition"),
    (["vit_smal_ortho"], "there is no variant 'vit_smal_ortho'; did you mean 'vit_small_ortho' or "),
    (["vit_small_ortho", *TINY, "--image", "/nowhere.png"], "image /nowhere.png cannot be read: No such file"),
    (["vit_small_ortho", *TINY, "--svg", "/nowhere/sites.svg"], "No such file or directory: '/nowhere/sites.svg'"),
    (["vit_test_ortho", "--svg", "a.png"], "--svg writes SVG, so the file's name must end in .svg, not 'a.png'"),
    (["vit_small_ortho", *TINY, "--checkpoint", "/nowhere.pth"], "there is no checkpoint '/nowhere.pth'"),
    (["vit_small_ortho", "--model-kwargs", "wide=3"], "wide"),
    (["vit_test_ortho", "--model-kwargs", "num_heads=0"], "integer modulo by zero"),
    (["vit_test_ortho", "--model-kwargs", "act_layer=gelo"], "KeyError: 'gelo'"),
    (["vit_test_ortho", "--model-kwargs", "in_chans=4", "--image", "a.png"],
     "image a.png has 1 or 3 channels, but the model has 4 input channels"),
    (["local-dir:/nowhere"], "local-dir:/nowhere: its config.json is not timm's: FileNotFoundError"),
    (["vit_test_ortho", "--ema"], "--ema is for runs and their checkpoints, not for 'vit_test_ortho': omit --ema"),
    (["hf-hub:me/my-model", "--ema"], "not for 'hf-hub:me/my-model': omit --ema"),
    (["vit_test_ortho", "--model-kwargs", "checkpoint_path=/nowhere.pth"], "pass --checkpoint FILE instead of"),
    (["local-dir:/nowhere", "--pretrained"], "--pretrained and --checkpoint are for variants, and there is no variant"),
])
def test_errors_of_show(arguments, message, error_of):
    assert message in error_of("show", *arguments)


def test_a_model_without_connections():
    with pytest.raises(ValueError, match="the model has no connections"):
        show.measured_sites(torch.nn.Linear(2, 2), torch.zeros(1, 2))


def test_the_table_is_ascii_in_a_latin_1_terminal(monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", terminal)
    assert cli.main(["show", "vit_test_ortho"]) == 0
    terminal.flush()
    assert terminal.buffer.getvalue().decode("ascii").split()[3:6] == ["|x|^2", "|f_par|^2", "|f_orth|^2"]
