"""The command line: output and exit status of each command, and one-line errors."""
import errno
import os
import subprocess
import sys
from argparse import Namespace

import pytest
import torch

import timm_ortho
from timm_ortho import cli
from timm_ortho.run_folder import environment
from timm_ortho.update import backend as backends

SCRIPT = """
import sys, pathlib, beside
import timm
print(__name__, sys.argv[1:], beside.HERE, timm.is_model("vit_small_ortho"), pathlib.Path(sys.argv[0]).name)
others = "matplotlib", "sklearn", "tqdm", "timm_ortho.lab", "timm_ortho.bench"
print([name for name in others if name in sys.modules])
sys.exit(7)
"""
OPTIONS = ["--help", "-h", "--output", "x", "--", "list"]


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    path = tmp_path_factory.mktemp("scripts") / "script.py"
    path.with_name("beside.py").write_text("HERE = 'found'")
    path.write_text(SCRIPT)
    return path


def test_list(capsys):
    assert cli.main(["list", "vit_small_[lo]*"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["name", "parameters", "sites", "connection", "weights"]
    rows = {line.split()[0]: line.split()[1:] for line in lines[1:]}
    assert rows["vit_small_ortho"][1:] == ["12", "feature", "none"]
    assert rows["vit_small_orthog"][1:] == ["12", "global", "none"]
    assert rows["vit_small_linear"][1:] == ["12", "linear", "none"]
    assert rows["vit_small_ortho"][0] == rows["vit_small_linear"][0]
    assert int(rows["vit_small_ortho"][0].replace(",", "")) > 10_000_000


def test_version(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["--version"])
    assert (end.value.code, capsys.readouterr().out) == (0, f"timm-ortho {timm_ortho.__version__}\n")
    assert environment()["timm-ortho"] == timm_ortho.__version__


@pytest.mark.parametrize(("words", "answer"), [
    ("-m timm_ortho", True), ("-um timm_ortho list", True), ("-Imtimm_ortho list", True), ("-Im timm_ortho.lab", False),
    ("-m pytest timm_ortho", False)])
def test_the_command_line_is_recognized(monkeypatch, words, answer):
    monkeypatch.setattr(sys, "argv", ["-m"])  # before Python has found the module
    monkeypatch.setattr(sys, "orig_argv", ["python", *words.split()])
    assert timm_ortho._is_command_line() is answer


def test_a_script_named_as_the_command_is_not_the_command(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/home/me/timm-ortho.py"])
    assert not timm_ortho._is_command_line()


@pytest.mark.parametrize(("wanted", "answer"), [
    ("torch", "torch (TIMM_ORTHO_BACKEND=torch)"), ("tritn", "none (unknown TIMM_ORTHO_BACKEND 'tritn'")])
def test_env_prints_the_backend_and_its_reason(capsys, wanted, answer, monkeypatch):
    monkeypatch.setattr(backends._contexts, "active", [[wanted, False]])
    assert cli.main(["env"]) == 0
    values = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert set(values) >= {"timm-ortho", "timm", "torch", "torchvision", "huggingface-hub", "safetensors", "python",
                           "system", "cpu", "gpu", "device", "backend"}
    assert all(values.values())
    assert values["backend"].startswith(answer)


@pytest.mark.slow
def test_run_passes_arguments_and_the_exit_status(script):
    command = [sys.executable, "-m", "timm_ortho", "run", script, *OPTIONS]
    done = subprocess.run(command, capture_output=True, text=True)
    line, imported = done.stdout.splitlines()
    assert line == f"__main__ {OPTIONS} found True script.py", done.stderr
    assert imported in ("[]", "['tqdm']")  # huggingface-hub imports tqdm
    assert done.returncode == 7


@pytest.mark.slow
def test_run_under_torchrun(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import os, sys, timm\n"
                      "line = os.environ['RANK'], timm.is_model('vit_small_ortho'), sys.argv[1:], __name__\n"
                      "sys.stdout.write(f'{line}\\n')\n")  # one write, because two processes share the pipe
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone",
               "-m", "timm_ortho", "run", script, "--flag"]
    done = subprocess.run(command, capture_output=True, text=True)
    expected = [str((str(rank), True, ["--flag"], "__main__")) for rank in range(2)]
    assert sorted(done.stdout.splitlines()) == expected, done.stderr


@pytest.mark.parametrize("options", [["--help"], []])
def test_run_in_this_process(script, capsys, monkeypatch, options):
    monkeypatch.setattr(sys, "argv", ["timm-ortho"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.raises(SystemExit) as caught:
        cli.main(["run", str(script), *options])
    assert caught.value.code == 7
    assert capsys.readouterr().out.startswith(f"__main__ {options} found True script.py\n")
    assert sys.path[0] == str(script.parent)


@pytest.mark.parametrize("error", ["OSError('a')", "timm_ortho.hub.PublishError('a')"])
def test_errors_of_a_script_are_raised(tmp_path, monkeypatch, error):
    monkeypatch.setattr(sys, "argv", ["timm-ortho"])
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "script.py").write_text(f"import timm_ortho\nraise {error}\n")
    with pytest.raises((OSError, timm_ortho.hub.PublishError), match="a"):
        cli.main(["run", str(tmp_path / "script.py")])


def test_run_without_a_script(capsys, error_of):
    assert "there is no script 'nowhere.py'" in error_of("run", "nowhere.py")
    with pytest.raises(SystemExit, match="2"):
        cli.main(["run"])
    assert "the script is missing" in capsys.readouterr().err


def test_every_option_is_explained():
    def parsers(parser):
        yield parser
        for action in parser._actions:
            for child in action.choices.values() if isinstance(action.choices, dict) else ():
                yield from parsers(child)

    found = list(parsers(cli._parser()))
    assert len(found) > 12
    for parser in found:
        parser.format_help()
        unexplained = [action.dest for action in parser._actions if action.option_strings and not action.help]
        assert unexplained == [], parser.prog


@pytest.mark.parametrize(("arguments", "message"), [
    (["--recipe", "nowhere.yaml"], "there is no recipe 'nowhere.yaml'"),
    (["--option", "mixpu=1"], "no option 'mixpu'; did you mean 'mixup'"),
    (["--option", "mixup"], "'mixup' is not of the form key=value"),
    (["--model", "vit_smal"], "no orthogonal variant of 'vit_smal'"),
    (["--connections", "lineer"], "unknown connection 'lineer'"),
    (["--seeds", "two"], "--seeds takes whole numbers of at least 0, not 'two'"),
    (["--dataset", "torch/cifar10", "--data-dir", "/nowhere"], "data set 'torch/cifar10' (split 'train')"),
])
def test_compare_errors(error_of, arguments, message):
    assert message in error_of("compare", *arguments)


def test_other_errors(error_of):
    assert "no variant matches 'resnet18'" in error_of("list", "resnet18")
    assert "no variant that matches 'no_such*' has weights: see" in error_of("list", "--weights", "no_such*")
    for given in ("connection", "connection=", "connection=,"):
        assert "the values of connection are linear; feature" in error_of(
            "study", "run", "probability", "--only", given)
    for command in (["compare", "--data-dir"], ["push"], ["study", "status"], ["show"]):
        error = error_of(*command, os.fsdecode(b"caf\xe9"))  # a YAML file with such a name could not be read again
        assert error == "timm-ortho: error: 'caf\\udce9' is not UTF-8: rename the file or folder\n"


def test_names_in_other_peoples_files_do_not_control_the_terminal(tmp_path, error_of):
    torch.save({"state_dict": {}, "args": Namespace(model="\x1b]0;\x07\u202e")}, tmp_path / "a.pth.tar")
    assert "the model '\\x1b]0;\\x07\\u202e' cannot be built" in error_of("show", tmp_path / "a.pth.tar")
    (tmp_path / "a.yaml").write_text('? "foo\\n\\n\\ebar' + 5000 * "a" + '"')
    error = error_of("compare", "--recipe", tmp_path / "a.yaml")  # has one line
    assert r"accepts no option 'foo \x1bbaraaa" in error
    assert error.endswith(" ... " + 999 * "a" + "'\n")
    assert len(error) < 2100


def test_compare_passes_options(monkeypatch):
    from timm_ortho.lab import commands as study
    given = {}
    monkeypatch.setattr(study, "run", lambda request, **rest: given.update(request=request, **rest) or 0)
    assert cli.main(["compare", "--model", "vit_base", "--amp", "--compile", "--lr", "1e-3", "-b", "64", "--seeds", "4",
                     "--connections", "linear,global", "--model-kwargs", "depth=2", "--option", "mixup=0.8",
                     "--recipe", "digits", "--parallel", "2"]) == 0
    request = given["request"]
    assert request.options == {"model": "vit_base", "amp": True, "torchcompile": "inductor", "lr": 1e-3,
                             "batch_size": 64, "model_kwargs": {"depth": 2}, "mixup": 0.8}
    assert (request.design.connections, request.design.recipe) == (["linear", "global"], "digits")
    assert (request.seeds, given["parallel"], given["threads"]) == (4, 2, None)


@pytest.mark.parametrize(("words", "seeds"), [(["3"], 3), (["3", "5"], [3, 5]), (["3,5"], [3, 5]), (["7,"], [7])])
def test_seeds(words, seeds):
    assert cli._seeds(words) == seeds


def test_missing_extra(error_of, monkeypatch):
    monkeypatch.delitem(sys.modules, "timm_ortho.bench", raising=False)
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert error_of("bench") == 'timm-ortho: error: bench needs tqdm: pip install "timm-ortho[lab]"\n'


@pytest.mark.slow
def test_a_closed_pipe_ends_a_command_without_a_traceback():
    """As in `timm-ortho list "vit_*" | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "timm_ortho", "list", "vit_test_*"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


def test_errors_of_the_operating_system_and_ctrl_c(tmp_path, monkeypatch, error_of):
    """For example a full disk."""
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "report.html")

    monkeypatch.setattr("timm_ortho.lab.commands.report_on", full)
    expected = "timm-ortho: error: [Errno 28] No space left on device: 'report.html'\n"
    assert error_of("study", "report", tmp_path) == expected

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("timm_ortho.lab.commands.report_on", interrupted)
    assert cli.main(["study", "report", str(tmp_path)]) == 130
