"""Test that files of another person run no code."""
import json
import pickle
import re
import sys
import tarfile
from argparse import Namespace
from contextlib import nullcontext

import numpy as np
import pytest
import timm
import torch
import yaml
from helpers.pickles import Evil, never_unpickled, plain_pickle
from helpers.tiny_study import change_run, compared, one_run, planned
from helpers.trained_runs import timm_run
from safetensors.torch import save_file
from timm.data.readers.reader_image_in_tar import extract_tarinfos

from timm_ortho import cli, connections, hub
from timm_ortho._text import UserError
from timm_ortho.lab import LabError
from timm_ortho.lab.data import check_shards
from timm_ortho.lab.folder import Variant, read_study
from timm_ortho.lab.image_folder import check_sources
from timm_ortho.lab.planning import design
from timm_ortho.lab.reporting import report
from timm_ortho.lab.running import launcher, run
from timm_ortho.lab.running.loop import build_model
from timm_ortho.run_folder import read_run
from timm_ortho.weights import WeightsError
from timm_ortho.weights.files import load_checkpoint, load_state_dict, load_weights

CALLS = "cannot be read as a checkpoint (it is a pickle that calls "


def test_a_checkpoint_is_read_as_timm_reads_it(tmp_path):
    model = timm.create_model("vit_test_ortho")
    weights = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    ema = {name: tensor + 1 for name, tensor in weights.items()}
    torch.save({"state_dict": weights, "state_dict_ema": ema, "args": Namespace(lr=0.1)}, tmp_path / "a.pth")
    save_file(weights, tmp_path / "a.safetensors")
    torch.save({"model": weights}, tmp_path / "model.pth")
    for name, use_ema in (("a.pth", True), ("a.pth", False), ("a.safetensors", True), ("model.pth", True)):
        with torch.serialization.safe_globals([Namespace]):
            expected = timm.models.load_state_dict(str(tmp_path / name), use_ema, weights_only=True)
        read = load_state_dict(tmp_path / name, use_ema)
        assert read.keys() == expected.keys() == model.state_dict().keys()
        assert all(torch.equal(read[key], expected[key]) for key in read)
    assert load_checkpoint(tmp_path / "a.pth")["args"].lr == 0.1
    load_weights(model, tmp_path / "a.pth")
    assert torch.equal(model.state_dict()["head.bias"], ema["module.head.bias"])


@pytest.mark.parametrize("content", [
    b"", b"half", pickle.dumps({"state_dict": Evil("executed")}), {"state_dict": Evil("executed")}, [1],
    {"state_dict": 3}, {"head.bias": "text"}, {3: torch.zeros(1)}])
@pytest.mark.parametrize("name", ["a.pth", "a.npy", "a.safetensors"])
def test_a_file_without_weights_is_a_one_line_error(tmp_path, monkeypatch, content, name):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / name
    path.write_bytes(content) if isinstance(content, bytes) else torch.save(content, path)
    with pytest.raises(WeightsError, match=rf"{name} cannot be read as a checkpoint \([^\n]*\)$"):
        load_state_dict(path)
    assert [file.name for file in tmp_path.iterdir()] == [name]


def test_a_flipped_bit_is_found(tmp_path):
    """`torch.load` compares no checksums."""
    path, weights = tmp_path / "a.pth", torch.arange(100.0)
    torch.save(weights, path)
    content = bytearray(path.read_bytes())
    content[content.index(weights.numpy().tobytes()) + 7] ^= 1
    path.write_bytes(content)
    assert not torch.equal(torch.load(path), weights)
    with pytest.raises(WeightsError, match=r"a.pth cannot be read as a checkpoint \(it is damaged or not a checkp"):
        load_checkpoint(path)


@pytest.fixture
def without_checksums():
    torch.serialization.set_crc32_options(False)
    yield
    torch.serialization.set_crc32_options(True)


def test_a_file_without_checksums_is_read_with_a_warning(tmp_path, without_checksums):
    torch.save(torch.ones(3), tmp_path / "a.pth")
    with pytest.warns(UserWarning, match=r"a.pth was saved without checksums, so damage to it would not be noticed$"):
        assert torch.equal(load_checkpoint(tmp_path / "a.pth"), torch.ones(3))


def test_checkpoints_of_the_lab_have_checksums(tmp_path, without_checksums):
    folder = one_run(tmp_path / "out", epochs=1)
    run.run(folder)
    load_checkpoint(folder / "last.pth.tar")  # without a warning


def overlay(**changes):
    return {"pretrained": True, "pretrained_cfg_overlay": changes}


# ------------------------------------------------------------------------------------------- weights
def test_show_does_not_unpickle_a_checkpoint(tmp_path, error_of):
    with never_unpickled(tmp_path / "evil.pth") as path:
        error = error_of("show", "vit_test_ortho", "--checkpoint", path)
        assert error.startswith(f"timm-ortho: error: {path} {CALLS}")


@pytest.mark.parametrize("changes", [{}, {"custom_load": True}, {"source": "timm"}])
def test_a_variant_does_not_unpickle_its_file(tmp_path, changes):
    with never_unpickled(tmp_path / "evil.pth") as path, pytest.raises(WeightsError, match="it is a pickle that calls"):
        timm.create_model("vit_test_ortho", **overlay(file=path, **changes))


def test_a_variant_reads_tensors_of_a_pickle(tmp_path):
    model = timm.create_model("vit_test_ortho", num_classes=7)
    torch.save({"state_dict": model.state_dict()}, tmp_path / "a.pth")
    changes = overlay(file=str(tmp_path / "a.pth"), num_classes=7)
    loaded = timm.create_model("vit_test_ortho", num_classes=7, **changes)
    assert all(torch.equal(one, other) for one, other in zip(loaded.parameters(), model.parameters(), strict=True))
    assert loaded.pretrained_cfg["file"] == changes["pretrained_cfg_overlay"]["file"]
    assert "state_dict" not in loaded.pretrained_cfg
    with pytest.raises(WeightsError, match=r"none\.pth cannot be read \(No such file or directory\)$"):
        timm.create_model("vit_test_ortho", **overlay(file=str(tmp_path / "none.pth")))


def test_weights_of_which_timms_filter_makes_no_sense(tmp_path):
    save_file({"patch_embed.proj.weight": torch.zeros(7)}, tmp_path / "a.safetensors")
    with pytest.raises(WeightsError, match=r"a\.safetensors: not a checkpoint of vit_test_ortho: shape .* is invalid"):
        timm.create_model("vit_test_ortho", **overlay(file=str(tmp_path / "a.safetensors")))


def test_a_numpy_file_is_refused(tmp_path):
    mark, path = tmp_path / "executed", tmp_path / "evil.npz"
    np.savez(path, **{"embedding/kernel": np.array([Evil(mark)], dtype=object)})
    with pytest.raises(WeightsError, match=r"evil.npz cannot be read as a checkpoint"):
        timm.create_model("vit_small_patch16_224_ortho", **overlay(file=str(path)))
    assert not mark.exists()


def test_weights_at_a_url_are_not_read(tmp_path):
    """timm reads a URL a second time, without `weights_only`, if the first attempt raises a TypeError."""
    with never_unpickled(tmp_path / "evil.pth") as path, pytest.raises(WeightsError, match="download the file"):
        timm.create_model("vit_small_patch16_224_ortho", **overlay(url=f"file://{path}"))


@pytest.mark.parametrize("kind", ["checkpoint_path", "pretrained"])
def test_a_run_does_not_unpickle_weights_that_its_options_name(tmp_path, error_of, kind):
    folder = timm_run(tmp_path / "run")
    with never_unpickled(tmp_path / "evil.pth") as path:
        named = {"checkpoint_path": path} if kind == "checkpoint_path" else overlay(file=path)
        change(folder / "args.yaml", model_kwargs=named)
        assert f"got multiple values for keyword argument '{kind}'" in error_of("show", folder)
        with pytest.raises(UserError, match="got multiple values for keyword argument"):
            hub.export(folder, tmp_path / "out", "me/model")


def test_the_lab_does_not_unpickle_initial_weights(tmp_path, capsys):
    folder = one_run(tmp_path / "out")
    with never_unpickled(tmp_path / "evil.pth") as path:
        change_stage(folder, initial_checkpoint=path)
        assert run.main([str(folder)]) == run.REFUSED
        assert f"timm-ortho: option 'initial_checkpoint': {path} {CALLS}" in capsys.readouterr().err
        for key, value in dict(pretrained_cfg_overlay={"file": path}, cache_dir=str(tmp_path / "cache")).items():
            folder = one_run(tmp_path / key)
            change_stage(folder, pretrained=True, model_kwargs={key: value})
            assert run.main([str(folder)]) == run.REFUSED
            assert f"choose the source of weights ({key})" in capsys.readouterr().err
        folder = one_run(tmp_path / "plain")
        change_stage(folder, model="hf-hub:me/my-model")
        assert run.main([str(folder)]) == run.REFUSED
        assert "trains 'hf-hub:me/my-model', which is no variant" in capsys.readouterr().err
        folder = one_run(tmp_path / "other")
        change_stage(folder, pretrained=True, pretrained_path=path)
        assert run.main([str(folder)]) != 0
        assert f"{path} {CALLS}" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["initial_checkpoint", "pretrained_path"])
def test_timms_script_gets_no_pickle(tmp_path, capsys, key):
    folder = one_run(tmp_path / "out")
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('started')")
    change_plan(folder, trainer=str(script))
    with never_unpickled(tmp_path / "evil.pth") as path:
        change_stage(folder, **{key: path})
        assert run.main([str(folder), "--train-py", str(script)]) == run.REFUSED
        assert f"option '{key}' of {folder}: {path} {CALLS}" in capsys.readouterr().err


def test_initial_weights_of_the_lab(tmp_path):
    model = timm.create_model("vit_test_linear")
    torch.save({"state_dict": model.state_dict()}, tmp_path / "a.pth")
    folder = one_run(tmp_path / "out")
    options = options_of(folder)
    options |= {"model": "vit_test_ortho", "initial_checkpoint": str(tmp_path / "a.pth"), "model_kwargs": {}}
    built = build_model(Namespace(**options), 10, 3)
    assert torch.equal(built.head.weight, model.head.weight)
    with pytest.raises(LabError, match=r"option 'initial_checkpoint': the weights in .* do not fit the model.*; for "
                                       "other classes, use weights in its place"):
        build_model(Namespace(**options), 3, 3)


@pytest.fixture(scope="module")
def three_classes(tmp_path_factory):
    """Return a file with the weights of a linear model of three classes, and these weights."""
    folder = tmp_path_factory.mktemp("three")
    trained = build_model(Namespace(**{**options_of(one_run(folder / "run", "linear")), "seed": 7}), 3, 1).state_dict()
    torch.save({"state_dict": trained}, folder / "three.pth")
    return str(folder / "three.pth"), trained


def test_weights_of_other_classes_in_the_lab(tmp_path, three_classes):
    """All connections start from the weights in the file, with the same new classifier."""
    file, trained = three_classes
    request = compared(tmp_path / "out", ["linear", "feature", "hybrid"], weights=file,
                       model_kwargs={"connection_start": "linear"})
    heads = []
    for name in planned(request).runs:
        state = build_model(Namespace(**options_of(tmp_path / "out" / name)), 10, 1).state_dict()
        heads.append(state["head.weight"])
        assert all(torch.equal(state[key], value) for key, value in trained.items() if "head." not in key)
    assert heads[0].shape == (10, 16)
    assert torch.equal(heads[0], heads[1])
    assert torch.equal(heads[0], heads[2])
    said = next(report.of_data(report.layout_of(read_study(tmp_path / "out")["study"])))
    assert said == f"The runs start from the weights of {file} with a new classifier."
    options = options_of(tmp_path / "out" / "linear-seed0")
    with pytest.raises(TypeError, match="multiple values"):
        build_model(Namespace(**{**options, "model_kwargs": {"pretrained_cfg_overlay": {}}}), 10, 1)
    with pytest.raises(LabError, match="pretrained_path has no effect without pretrained: set pretrained to true, too"):
        one_run(tmp_path / "other", pretrained_path=file)


def test_cells_of_a_study_start_from_their_own_weights(tmp_path, three_classes):
    file, _ = three_classes
    (tmp_path / "study.yaml").write_text(yaml.safe_dump({
        "title": "Which weights?", "connections": ["linear"], "scales": {"smoke": {"seeds": 1}},
        "grid": {"start": {"file": {"weights": file}, "none": {"weights": ""}, "random": {}}}}))
    variants = design.load(str(tmp_path / "study.yaml"), "smoke").variants({"dataset": "digits", "device": "cpu"})
    assert [variant.options.pretrained_path for variant in variants] == [file, None, None]
    assert [variant.options.pretrained for variant in variants] == [True, False, False]


@pytest.mark.parametrize(("case", "message"), [
    ("missing", r"a.pth cannot be read \(No such file or directory\)"), ("pickle", re.escape(CALLS)),
    ("deeper", "the weights do not fit vit_small_ortho: surplus: blocks.2"),
    ("test_vit", "not a checkpoint of vit_small_ortho")])
def test_a_file_of_weights_that_cannot_be_used_is_one_line(tmp_path, capsys, three_classes, case, message):
    file = tmp_path / "a.pth"
    if case == "deeper":
        torch.save({**three_classes[1], "blocks.2.attn.qkv.weight": torch.zeros(3)}, file)
    elif case == "test_vit":
        torch.save(timm.create_model("test_vit").state_dict(), file)
    elif case == "pickle":
        torch.save({"state_dict": Evil(tmp_path / "ran")}, file)
    with pytest.raises(LabError, match=f"^option 'weights': [^\n]*{message}[^\n]*$"):
        one_run(tmp_path / "out", "linear", weights=str(file))
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out").exists()


def options_of(folder):
    return yaml.safe_load((folder / "args.yaml").read_text())


# --------------------------------------------------------------------------------- data sets, modules, scripts
def change(file, model_kwargs=None, **changes):
    values = yaml.safe_load(file.read_text())
    values["model_kwargs" if model_kwargs else "ignored"] = {**values.get("model_kwargs", {}), **(model_kwargs or {})}
    values.pop("ignored", None)
    file.write_text(yaml.safe_dump({**values, **changes}))


def change_stage(folder, model_kwargs=None, **options):
    change(folder / "args.yaml", model_kwargs, **options)


def change_plan(folder, **changes):
    change_run(folder, plan={**read_run(folder).plan, **changes})


# Options, and the message that refuses them in a file and, if the third value is true, on the command line too.
REFUSED = [
    (dict(class_map="{}/evil.pkl"), "evil.pkl is not a text file: write one class name on each line of a .txt", True),
    (dict(dataset="hfds/x", dataset_trust_remote_code=True), "code of data sets is never run: remove the option", True),
    (dict(dataset="hfds/x"), "would write files: if you trust it, name it on the command line (--dataset hf", False),
    (dict(dataset="TFDS/x"), "would write files: if you trust it, name it on the command line (--dataset TF", False),
    (dict(dataset="torch/inaturalist"), "would write files: if you trust it, name it on the command line", False),
    (dict(dataset="torch/mnist", dataset_download=True), "set it on the command line (--option dataset_", False),
    (dict(kd_model_name="hf-hub:a/b"), "teacher: if you trust it, set it on the command line (--option kd_", False),
    (dict(log_wandb=True), "sends metrics to a service: if you trust it, set it on the command line (--o", False),
    (dict(model="vit_base_ortho", pretrained=True), "may download weights: if you trust it, set it on the", False),
]


@pytest.mark.parametrize(("options", "text", "always"), REFUSED)
def test_options_that_run_code_or_download_are_refused(tmp_path, capsys, options, text, always):
    options = {key: value.format(tmp_path) if isinstance(value, str) else value for key, value in options.items()}
    options |= {"data_dir": str(tmp_path / "data")}
    (tmp_path / "data").mkdir()
    folder, planned_run = timm_run(tmp_path / "run", **options), one_run(tmp_path / "out")
    with never_unpickled(tmp_path / "evil.pkl", plain_pickle):
        hub.export(folder, tmp_path / "export", "me/model")
        change_stage(planned_run, **options)
        assert run.main([str(planned_run)]) == run.REFUSED
        assert text in capsys.readouterr().err
        (tmp_path / "recipe.yaml").write_text(yaml.safe_dump({"model": "vit_small", **options}))
        with pytest.raises(UserError, match=re.escape(text)):
            planned(compared(tmp_path / "other", recipe=str(tmp_path / "recipe.yaml")))
    with pytest.raises(UserError, match=re.escape(text)) if always else nullcontext():
        check_sources(options, "the command line", options)
    assert not [*(tmp_path / "data").iterdir()]


SHARD = "p{ipe:touch RAN #,x}.tar"  # webdataset expands braces and then runs the command


@pytest.mark.parametrize(("options", "names"), [
    (dict(train_split=f"{SHARD}|8", val_split="x.tar|8"), []),
    (dict(data_dir="", train_split=f"{SHARD}|8", val_split="x.tar|8"), []),
    (dict(train_split="x.tar|8", val_split="a::pipe:touch RAN #.tar|8"), []),
    (dict(train_split="train", val_split="x.tar|8"), [SHARD]),
    (dict(data_dir="http://x/';touch RAN #", train_split="x.tar|8", val_split="x.tar|8"), []),
    (dict(data_dir=".", train_split="missing.tar|8", val_split="x.tar|8"), []),
])
def test_shards_are_existing_files(tmp_path, monkeypatch, capsys, options, names):
    """These tests need no webdataset: the names are checked before timm opens the data set."""
    monkeypatch.chdir(tmp_path)
    for name in ("x.tar", "a::pipe:touch RAN #.tar"):
        (tmp_path / name).touch()
    splits = {"train": {"filenames": names, "shard_lengths": [8], "num_samples": 8, "name": "train"}}
    (tmp_path / "_info.json").write_text(json.dumps({"splits": splits}))
    options = {"dataset": "wds/x", "data_dir": str(tmp_path), "num_classes": 10, **options}
    folder = one_run(tmp_path / "out")
    change_stage(folder, **options)
    assert run.main([str(folder)]) == run.REFUSED
    refused = "is not a file: data sets wds/|data set 'wds/x' needs --data-dir"
    assert re.search(refused, capsys.readouterr().err)
    with pytest.raises(LabError, match=refused):
        planned(compared(tmp_path / "other", **options))
    assert not (tmp_path / "RAN").exists()


def test_shards_that_may_be_read(tmp_path):
    (tmp_path / "a.tar").touch()
    (tmp_path / "_info.json").write_text(json.dumps({"splits": {"val": {"filenames": ["a.tar"]}}}))
    options = Namespace(dataset="wds/x", data_dir=str(tmp_path), train_split="a.tar|8", val_split="val")
    check_shards(options)
    for content in ("[" * 100_000, "[]", '{"splits": {"val": 1}}'):
        (tmp_path / "_info.json").write_text(content)
        with pytest.raises(LabError, match=r"_info\.json is not timm's description of shards"):
            check_shards(options)


def test_a_description_of_shards_that_is_not_timms(tmp_path):
    (tmp_path / "_info.json").write_text('{"splits": {"val": {"filenames": [5]}}}')
    with pytest.raises(LabError, match=re.escape(f"{tmp_path / '_info.json'} is not timm's description of shards")):
        check_shards(Namespace(dataset="wds/x", data_dir=str(tmp_path), train_split="train", val_split="val"))


def test_timm_refuses_an_index_of_a_tar_file_that_calls_functions(tmp_path):
    """timm reads the index beside a large tar file; here, `cache_tarinfo` makes it read the index of an empty file."""
    tarfile.open(tmp_path / "images.tar", "w").close()
    with (never_unpickled(tmp_path / "_images_tarinfos.pickle", plain_pickle),
          pytest.raises(pickle.UnpicklingError, match="is not permitted")):
        extract_tarinfos(str(tmp_path / "images.tar"), cache_tarinfo=True)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Return a file that a module writes when it is imported. The module is in the import path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "evil_module.py").write_text(
        "from pathlib import Path\nimport timm_ortho\nPath(__file__).with_suffix('.ran').touch()\n"
        "timm_ortho.register_connection('evil', type('Evil', (timm_ortho.FeatureConnection,), {}))\n")
    yield tmp_path / "evil_module.ran"
    sys.modules.pop("evil_module", None)
    connections.CONNECTIONS.pop("evil", None)


NAMES = "names the module 'evil_module', whose code would run: if you trust it, name it too (--device-modules evil_mod"


@pytest.mark.parametrize("command", [
    ["show", "{}/run"], ["push", "{}/run", "me/model", "--dry-run", "--output", "{}/o"]])
def test_modules_of_a_run_are_imported_only_if_the_user_names_them(tmp_path, module, error_of, command):
    """A module that the model does not need is not imported."""
    timm_run(tmp_path / "run", device_modules=["timm_ortho", "evil_module"])
    command = [word.format(tmp_path) for word in command]
    assert cli.main(command) == 0
    assert not module.exists()
    change(tmp_path / "run" / "args.yaml", model_kwargs={"connection": "evil"})
    assert f"option 'device_modules' of {tmp_path / 'run'} {NAMES}" in error_of(*command)
    assert not module.exists()
    assert cli.main([*command, "--device-modules", "evil_module"]) == 0
    assert module.exists()


def test_one_module_may_be_text(tmp_path, monkeypatch, error_of):
    """The letters of the text are not modules."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "t.py").write_text("raise SystemExit('t.py was run')")
    timm_run(tmp_path / "run", device_modules="timm_ortho")
    assert cli.main(["show", str(tmp_path / "run")]) == 0
    timm_run(tmp_path / "other", device_modules="evil_module")
    change(tmp_path / "other" / "args.yaml", model_kwargs={"connection": "evil"})
    assert NAMES in error_of("show", tmp_path / "other")


def test_modules_of_a_planned_run_are_imported_only_if_the_user_names_them(tmp_path, module, capsys):
    folder = one_run(tmp_path / "out", epochs=1)
    change_stage(folder, device_modules=["timm_ortho", "evil_module"])
    assert run.main([str(folder)]) == run.REFUSED
    assert NAMES in capsys.readouterr().err
    assert not module.exists()
    assert run.main([str(folder), "--device-modules", "evil_module"]) == 0
    assert module.exists()


def test_modules_of_a_recipe_are_imported_only_if_the_user_names_them(tmp_path, module, monkeypatch, capsys):
    (tmp_path / "recipe.yaml").write_text("model: vit_small\ndevice_modules: [evil_module]\n")
    with pytest.raises(UserError, match=r"of recipe '.*recipe.yaml' names the module 'evil_m"):
        planned(compared(tmp_path / "out", dataset="digits", recipe=str(tmp_path / "recipe.yaml")))
    assert not module.exists()
    monkeypatch.chdir(tmp_path)
    plan = planned(compared(tmp_path / "out", dataset="digits", recipe="recipe.yaml", device_modules=["evil_module"]))
    assert module.exists()
    assert launcher.words_of(list(plan.runs.values())) == ["--device-modules", "evil_module"]


def test_the_process_of_a_run_is_told_which_downloads_the_user_has_named(tmp_path, monkeypatch):
    monkeypatch.setattr("timm_ortho.lab.planning.plan.check", lambda request, variants: (variants, None, [], 0))
    network = dict(dataset_download=True, kd_model_name="a", pretrained=True, log_wandb=True)
    folder = one_run(tmp_path / "out", dataset="hfds/x", num_classes=10, **network)
    words = launcher.words_of([Variant.read(folder)])
    assert words == "--dataset hfds/x --dataset-download --kd-model-name a --pretrained --log-wandb".split()
    monkeypatch.setattr(run, "_train", lambda plan, folder: {"seed": 0})
    assert run.main([str(folder), *words]) == 0


def test_a_script_is_run_only_if_the_user_names_it(tmp_path, capfd):
    folder = one_run(tmp_path / "out")
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('started')")
    change_plan(folder, trainer=str(script))
    assert run.main([str(folder)]) == run.REFUSED
    printed = capfd.readouterr().err
    assert f"trains with the script {script}: if you trust it, name it too (--train-py {script})" in printed
    assert "started" not in printed
    assert run.main([str(folder), "--train-py", str(script)]) == run.REFUSED
    assert "started" in capfd.readouterr().err
