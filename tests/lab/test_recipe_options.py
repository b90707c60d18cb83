"""planning/recipe.py: timm's keys, types and defaults, and errors for invalid values."""
import argparse

import pytest
import timm

from timm_ortho import cli
from timm_ortho.lab import LabError
from timm_ortho.lab.planning import recipe
from timm_ortho.lab.planning.check import check_loop_options
from timm_ortho.lab.train_options import DEFAULTS, known_options


def write(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return str(path)


def test_all_defaults_except_two_are_timms():
    options = recipe.resolve({})
    assert {"opt": options.opt, "lr_base": options.lr_base, "smoothing": options.smoothing, "scale": options.scale} == {
        "opt": "sgd", "lr_base": 0.1, "smoothing": 0.1, "scale": [0.08, 1.0]}
    known = known_options()
    assert {key for key, value in vars(options).items() if value != known[key]["default"]} == set(DEFAULTS)


def test_values_get_timms_types(tmp_path):
    # YAML 1.1 reads 1e-3 as text. timm's parser converts it to a number.
    options = recipe.resolve(recipe.load(write(tmp_path, "lr: 1e-3\nepochs: 5.0\nmean: 0.5\nmodel_kwargs: {a: 1}")))
    assert (options.lr, options.epochs, options.mean, options.model_kwargs) == (1e-3, 5, [0.5], {"a": 1})


@pytest.mark.parametrize(("text", "value"), [
    ("1e-6", 1e-6), ("-2.5E+3", -2.5e3), ("1.0e-6", 1e-6), ("3", 3), ("true", True), ("[1, 2]", [1, 2]), ("1e", "1e"),
    ("vit_small", "vit_small"), ("5e3d1ab", "5e3d1ab"), ("(16,16)", (16, 16)), ("None", None), ("0123", "0123"),
    ("16:00", "16:00"), ("on", "on"), ("2026-11-28", "2026-11-28"), ("a=b", "a=b"), ("", ""), ("True", True),
    ("{'file': 'a.pth'}", {"file": "a.pth"}), ("[1, [2, 3]]", [1, [2, 3]]), ("'1'", "1"),
])
def test_assignments_are_read_as_timms_parser_does(text, value):
    key, read = cli._assignment(f"connection_eps={text}")
    assert (key, read, type(read)) == ("connection_eps", value, type(value))
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-kwargs", nargs="*", action=timm.utils.ParseKwargs)
    if text == "true":  # text for timm's parser
        return
    assert parser.parse_args(["--model-kwargs", f"{key}={text}"]).model_kwargs == {key: value}


@pytest.mark.parametrize(("text", "value"), [
    ("true", True), ("false", False), ("null", None), ("[linear, 2]", "[linear, 2]"), ("{0, 1}", "{0, 1}")])
def test_other_assignments(text, value):
    assert cli._assignment(f"a={text}") == ("a", value)


def test_values_for_sbatch_are_text():
    options = "account=0123 begin=16:00 constraint=on comment=1_0 gres=gpu:1 mem=64G exclusive=true".split()
    parsed = cli._parser().parse_args(["study", "run", "accuracy", *(f"--slurm={option}" for option in options)])
    assert dict(parsed.slurm) == {
        "account": "0123", "begin": "16:00", "constraint": "on", "comment": "1_0", "gres": "gpu:1", "mem": "64G",
        "exclusive": True}


@pytest.mark.parametrize(("text", "message"), [
    ("weigth_decay: 0.1",
     "recipe '.*': timm's train.py accepts no option 'weigth_decay'; did you mean 'weight_decay'"),
    ("- a list", "must be a mapping of timm's train.py options, not a list"),
    ("a: [1", "is not YAML"),
])
def test_bad_files(tmp_path, text, message):
    with pytest.raises(LabError, match=message):
        recipe.load(write(tmp_path, text))


def test_color_jitter_is_a_number_or_a_list():
    """train.py's parser accepts one number. A recipe may also contain a list, which timm's transforms accept."""
    assert recipe.resolve({"color_jitter": 0.3}).color_jitter == 0.3
    assert recipe.resolve({"color_jitter": [0.4, 0.4, 0.4, "1e-1"]}).color_jitter == [0.4, 0.4, 0.4, 0.1]
    with pytest.raises(LabError, match="option 'color_jitter' is 'much', but must be a number"):
        recipe.resolve({"color_jitter": [0.4, "much"]})


@pytest.mark.parametrize(("key", "value", "message"), [
    ("lr", "fast", "option 'lr' is 'fast', but must be a number"),
    ("epochs", 1.5, "option 'epochs' is 1.5, but must be a whole number"),
    ("epochs", True, "option 'epochs' is True, but must be a whole number"),
    ("amp", "yes", "option 'amp' is 'yes', but must be true or false"),
    ("model_kwargs", 3, "option 'model_kwargs' is 3, but must be a mapping"),
    ("model_kwargs", {2: 3}, "option 'model_kwargs' is {2: 3}, but must be a mapping"),
    ("scale", 0.5, r"option 'scale' is \[0.5\], but must be 2 numbers"),
    ("rand_augment", [9], r"option 'rand_augment' is \[9\], but must be 2 numbers"),
    ("mixpu", 1, "no option 'mixpu'; did you mean 'mixup'"),
])
def test_bad_values(key, value, message):
    with pytest.raises(LabError, match=message):
        recipe.resolve({key: value})


def test_every_option_of_timm_is_handled():
    """The lab's own loop uses, ignores or refuses an option. train.py accepts all options."""
    other = {"flag": True, "int": 77, "float": 0.77, "str": "other", "dict": {"a": 1}, "any": "other"}
    for key, option in known_options().items():
        choices = [choice for choice in option.get("choices", [other[option["type"]]]) if choice != option["default"]]
        value = choices[0]
        value = [value] * option.get("length", 1) if option.get("list") else value
        options = recipe.resolve({key: value})
        assert vars(options)[key] == value
        if "lab" in option:
            check_loop_options(options)
        else:
            with pytest.raises(LabError, match=f"train.py has '{key}', but the lab's own loop does not: remove the"):
                check_loop_options(options)
