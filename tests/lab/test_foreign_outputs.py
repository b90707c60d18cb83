"""Test that outputs of another person name no paths to write, and that large files are refused in one line."""
import gzip
import json
import math
import os
import re
import shutil

import pytest
import yaml
from helpers.laughs import LAUGHS
from helpers.made_up_runs import run_of, study_of
from helpers.tiny_study import change_run, compared, one_run, request, trained, unfinish, written

from timm_ortho import cli
from timm_ortho._text import UserError, csv_text
from timm_ortho.lab import LabError, commands as study
from timm_ortho.lab.folder import Variant, read_study, state
from timm_ortho.lab.reporting import published, report
from timm_ortho.lab.running import run

SITE = {"layer": 0, "kind": "mlp", "name": "a", **dict.fromkeys(("stream", "parallel", "orthogonal", "cosine"), 1)}
pytestmark = pytest.mark.usefixtures("undrawn")
OUTSIDE = "../../victim/logo"


def files_in(folder):
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def contents(folder):
    return {path: (folder / path).read_bytes() for path in files_in(folder)}


def test_names_of_a_published_study_are_not_paths(tmp_path):
    """The names of studies, data sets and plots become parts of file names."""
    runs = [run_of(connection, seed) for connection in ("linear", "feature") for seed in (0, 1)]
    plots = {"plots": [{"points": {"name": f"../{OUTSIDE}", "x": "connection"}}]}
    values = study_of("mine", name=OUTSIDE, dataset=f"x/{OUTSIDE}", report=plots)
    published.write(tmp_path / "theirs", values, runs)
    study.report_on([tmp_path / "theirs"], tmp_path / "mine" / "report")
    assert {path.split("/")[0] for path in files_in(tmp_path)} == {"theirs", "mine"}
    assert {path.rpartition("/")[0] for path in files_in(tmp_path / "mine")} == {"report", "report/figures"}
    assert any("victim_logo" in path for path in files_in(tmp_path / "mine"))
    assert "/" not in published.folder_name(values)


@pytest.mark.parametrize("place", ["../elsewhere/linear-seed0", "/elsewhere", ".."])
def test_a_run_outside_of_the_study_is_refused(tmp_path, place, error_of):
    values = {"settings": {}, "study": study_of("accuracy", axes={}), "left_out": [],
              "places": [{"run": place, "cell": {}, "connection": "linear", "seed": 0}]}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(values))
    for command in ("report", "status"):
        error = error_of("study", command, tmp_path)
        assert f"has a run outside its folder, '{place}': correct the key 'places'" in error


def test_a_stage_outside_of_the_run_is_refused(tmp_path):
    folder = one_run(tmp_path / "out")
    plan = (folder / "run.json").read_text()
    (folder / "run.json").write_text(plan.replace('"folder": "."', f'"folder": "{tmp_path / "victim"}"'))
    with pytest.raises(UserError, match=r"run.json cannot be read \(it.plan.stages\[0\].folder is '/"):
        Variant.read(folder)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The output of `timm-ortho compare` with one finished run, `linear-seed0`."""
    return trained(compared(tmp_path_factory.mktemp("lab") / "out", ["linear"], epochs=1))


@pytest.fixture
def theirs(finished, tmp_path):
    """A copy of `finished`, and the file `victim/precious` outside it."""
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "precious").write_text("precious")
    yield shutil.copytree(finished, tmp_path / "theirs")
    assert files_in(tmp_path / "victim") - files_in(finished / "linear-seed0") == {"precious"}
    assert (tmp_path / "victim" / "precious").read_text() == "precious"


def link(path, target):
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    path.symlink_to(target, target_is_directory=target.is_dir())


@pytest.mark.parametrize("file", ["report.html", "report.md", "results.json", ".report.html.{}.partial"])
def test_a_report_does_not_follow_the_links_of_its_folder(theirs, file):
    """A link in place of a file is replaced by the file, and a link in place of a temporary file is removed."""
    path = theirs / file.format(os.getpid())
    link(path, theirs.parent / "victim" / "precious")
    study.report_on([theirs])
    assert not path.is_symlink()
    assert path.name.startswith(".") or path.is_file()


@pytest.mark.parametrize("name", [
    "figures", "figures/training.svg", "linear-seed0", "linear-seed0/run.json", "linear-seed0/switched"])
def test_a_report_refuses_links_in_the_folders_of_plots_and_runs(theirs, name, error_of):
    victim = theirs.parent / "victim"
    (theirs / "figures").mkdir()
    if name.startswith("linear"):  # a folder that can be read as a run
        for path in (theirs / "linear-seed0").iterdir():
            shutil.copy(path, victim)
    link(theirs / name, victim / ("run.json" if name.endswith("json") else "precious") if "." in name else victim)
    before = contents(theirs.parent)
    assert error_of("study", "report", theirs) == (
        f"timm-ortho: error: {theirs / name} is a link, and nothing is written through links: replace it by what it "
        "links to\n")
    assert contents(theirs.parent) == before


@pytest.mark.parametrize("name", ["log.txt", "summary.csv", "records.jsonl", "probe.jsonl", "features.npy", ".lock"])
def test_training_does_not_write_through_links(theirs, name):
    """These files are appended to, cut off or locked."""
    folder = theirs / "linear-seed0"
    unfinish(folder)
    link(folder / name, theirs.parent / "victim" / "precious")
    with pytest.raises(LabError, match=f"{name} is a link, and nothing is written through links"):
        run.run(folder)


@pytest.mark.parametrize("name", [".slurm", "linear-seed0/job"])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_plan_does_not_write_through_links(theirs, name, seed):
    """The plan of seed 1 contains the earlier run of seed 0, too."""
    link(theirs / name, theirs.parent / "victim")
    before = contents(theirs)
    with pytest.raises(LabError, match=f"{name} is a link, and nothing is written through links"):
        study.make_plan(compared(theirs, ["linear"], [seed], epochs=1))
    assert contents(theirs) == before


def test_the_state_of_a_run_does_not_lock_through_a_link(theirs, monkeypatch):
    """Releases of filelock before 3.20.1 truncate the file that a link names."""
    folder = theirs / "linear-seed0"
    unfinish(folder)
    link(folder / ".lock", theirs.parent / "victim" / "precious")
    monkeypatch.setattr("timm_ortho.lab.folder.FileLock", lambda path, **_: path.write_text(""))
    assert state(folder)[0] == "stopped"


def test_the_users_own_link_to_an_output_is_followed(theirs, capsys):
    mine = theirs.parent / "mine"
    mine.symlink_to(theirs)
    for command in ("status", "report"):
        assert cli.main(["study", command, str(mine)]) == 0
    assert f"report: {mine / 'report.html'}" in capsys.readouterr().out
    assert (theirs / "report.html").is_file()
    unfinish(mine / "linear-seed0")
    assert run.run(mine / "linear-seed0")["epochs"] == 1


def test_the_error_of_a_run_is_one_line(theirs, capsys, monkeypatch):
    error = "a\n\nlinear-seed9  finished\x1b[2J" + 5000 * "b"
    change_run(theirs / "linear-seed0", result=None, sessions=[{"error": error}])
    monkeypatch.setattr("timm_ortho.lab.running.launcher.local", lambda *_: {})
    assert cli.main(["study", "status", str(theirs)]) == 0
    assert cli.main(["study", "report", str(theirs)]) == 0
    assert study.run(compared(theirs, ["linear"], epochs=1)) == 0
    shown = [line for line in capsys.readouterr().out.split("\n") if r"a linear-seed9  finished\x1b[2Jbbb" in line]
    assert len(shown) == 3
    assert max(map(len, shown)) < 2100


def test_aliases_are_refused_in_one_line(tmp_path):
    path = written(tmp_path)
    with open(path, "a", encoding="utf-8") as file:
        file.write(LAUGHS)
    with pytest.raises(LabError, match=r"study 'tiny' is not YAML: aliases \(\*name\) are not supported"):
        request(path)
    (tmp_path / "study.yaml").write_text(LAUGHS)
    with pytest.raises(LabError, match=r"study.yaml cannot be read \(.*aliases \(\*name\) are not supported"):
        read_study(tmp_path)


def test_own_files_have_no_aliases(tmp_path):
    """Options from a recipe with one list in two places are stored without an alias."""
    shared = [0.5, 0.5, 0.5]
    folder = one_run(tmp_path / "out", mean=shared, std=shared)
    for file in (folder / "args.yaml", folder.parent / "study.yaml"):
        assert "&id" not in file.read_text()


@pytest.mark.parametrize(("file", "changes", "reason"), [
    ("study.yaml", {"places": [{}]}, r"it.places\[0\] has an unknown key, or lacks one: 'cell'"),
    ("study.yaml", {"places": None}, "it.places is None"),
    ("study.yaml", {"places": [{"run": "linear-seed0", "cell": {}, "connection": "linear"}]}, "lacks one: 'seed'"),
    ("study.yaml", {"places": [{"run": "linear-seed0", "cell": {"x": []}, "connection": "linear", "seed": 0}]},
     r"it.places\[0\].cell.x is \[\], but must be text, a number from -1e100 to 1e100, true, false or null"),
    ("study.yaml", {"places": [{"run": "linear-seed0", "cell": {"x": 1}, "connection": "linear", "seed": 0}]},
     "a run has the cell {'x': 1}, but must have one of the study's values for each axis"),
    ("study.yaml", {"title": {1, 2}}, "could not determine a constructor for the tag 'tag:yaml.org,2002:set'"),
    ("study.yaml", {"study": {}}, "it.study has an unknown key, or lacks one: 'name'"),
    ("linear-seed0/args.yaml", {"model_kwargs": {}}, "lacks the option 'connection'"),
    ("linear-seed0/args.yaml", {"epochs": "many"}, "option 'epochs' is 'many', but must be a whole number"),
    ("linear-seed0/probe.jsonl", "{}\n", r"row\[0\] has an unknown key, or lacks one: 'epochs_done'"),
    ("linear-seed0/probe.jsonl", "[" * 200_000 + "\n", "RecursionError"),
    ("linear-seed0/probe.jsonl", json.dumps({"epochs_done": 1, "sites": [{**SITE, "stream": -5}]}) + "\n",
     r"row\[0\].sites\[0\].stream is -5, but must be a number from 0 to 1e100"),
    ("linear-seed0/records.jsonl", '{"step": 0, "sites": []}\n', "unknown key, or lacks one: 'layer'"),
    ("linear-seed0/records.jsonl", json.dumps({"step": 0, **SITE, "s": "a"}) + "\n", r"s is 'a', but must be a number"),
    ("linear-seed0/records.jsonl", "".join(json.dumps({"step": 0, **SITE, "kind": f"a{i}"}) + "\n" for i in range(17)),
     "it has 17 sites of 17 kinds, but at most 512 sites of 16 kinds are allowed")])
def test_files_of_other_forms_are_refused_in_one_line(theirs, error_of, file, changes, reason):
    text = changes
    if isinstance(changes, dict):
        text = yaml.safe_dump({**yaml.safe_load((theirs / file).read_text()), **changes})
    (theirs / file).write_text(text)
    error = error_of("study", "report", theirs)
    assert re.match(f"timm-ortho: error: {theirs / file} cannot be read \\(.*{reason}", error)


@pytest.mark.parametrize(("file", "path", "value", "reason"), [
    ("study.yaml", ["study", "data", "train"], 10**400, "must be a whole number of at least 0, and at most 2"),
    ("study.yaml", ["study", "axes"], {True: [1]}, "it.study.axes has the key True, but a key must be text"),
    ("study.yaml", ["study", "axes"], {"x": [math.inf]}, r"axes.x\[0\] is inf, but must be text, a number from"),
    ("study.yaml", ["study", "versions"], {"timm": 1}, "it.study.versions.timm is 1, but must be text"),
    ("linear-seed0/run.json", ["result", "peak_memory"], 10**400, "must be a whole number of at least 0, and"),
    ("linear-seed0/run.json", ["result", "top1"], 101, "it.result.top1 is 101, but must be a number from 0 to 100"),
    ("linear-seed0/run.json", ["result", "loss"], -1.7e308, "must be a number from -1e100 to 1e100")])
def test_values_out_of_range_are_refused_in_one_line(theirs, error_of, file, path, value, reason):
    values = inner = yaml.safe_load((theirs / file).read_text())
    *parents, key = path
    for parent in parents:
        inner = inner[parent]
    inner[key] = value
    (theirs / file).write_text(json.dumps(values) if file.endswith("json") else yaml.safe_dump(values))
    error = error_of("study", "report", theirs)
    assert re.match(f"timm-ortho: error: {theirs / file} cannot be read \\(.*{reason}", error)


def test_versions_of_a_study_may_be_null():
    assert list(report.document(report.Part.of(study_of("mine", versions=None), [run_of("linear", 0)], [])))


@pytest.mark.parametrize(("content", "reason"), [
    (gzip.compress(b"run,epoch\n" + 10_000 * b"0,0\n", mtime=0),
     "ValueError: it unpacks to more than 1,000 bytes"),
    (b"no gzip", "BadGzipFile: Not a gzipped file"),
    (gzip.compress(b"run,epoch\n0,0\n", mtime=0)[:-9], "EOFError: Compressed file ended before"),
    (gzip.compress(b"run,epoch\n0,\xff\n", mtime=0), "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff"),
    (gzip.compress(b"epoch\n0\n", mtime=0), "row[0] has an unknown key, or lacks one: 'run'"),
    (gzip.compress(b"run,epoch\n0,0,0\n", mtime=0), "row[0]. is ['0'], but must be a number"),
    (gzip.compress(b"run,epoch\n" + 101 * b"0,0\n", mtime=0), "it has more than 100 rows of 2 columns"),
    (gzip.compress(b"run" + 151 * b"\n0", mtime=0), "it has more than 150 rows of 1 columns"),
    (gzip.compress(b"run,epoch" + 99 * b",a" + 2 * b"\n0,0", mtime=0), "it has more than 1 rows of 101 columns"),
    *((gzip.compress(b"run,epoch\n0," + epoch + b"\n", mtime=0), f"row[0].epoch is {shown}, but must be a whole number")
      for epoch, shown in ((b"abc", "'abc'"), (b"", "None"), (b"1e999", "inf"), (b"9" * 400, "9" * 60),
                           (b"[" * 900, "'" + "[" * 59))),
    (gzip.compress(b"run,epoch,eval_top1\n0,0,nan\n", mtime=0), "row[0].eval_top1 is nan, but must be a number from 0"),
])
def test_a_table_that_is_too_large_or_damaged(tmp_path, monkeypatch, error_of, content, reason):
    monkeypatch.setattr("timm_ortho._text.FIELDS", 200)
    monkeypatch.setattr("timm_ortho._text.ROWS", 150)
    values, runs = study_of("accuracy", axes={}), [run_of("linear", 0, epochs=1)]
    published.write(tmp_path, values, runs)
    assert published.read(tmp_path)[1] == runs
    monkeypatch.setattr(published, "LARGEST", 1000)
    (tmp_path / "history.csv.gz").write_bytes(content)
    error = error_of("study", "report", tmp_path, "--output", tmp_path / "out")
    assert f"{tmp_path / 'history.csv.gz'} cannot be read ({reason}" in error


@pytest.mark.parametrize(("column", "value"), [("step", "[1]"), ("kind", "5"), ("stream", "-1"), ("rho", "1e101")])
def test_a_table_of_records_has_the_kinds_of_records(tmp_path, error_of, column, value):
    published.write(tmp_path, study_of("accuracy", axes={}), [run_of("linear", 0)])
    row = {"run": 0, "step": 0, **SITE, column: value}
    (tmp_path / "records.csv.gz").write_bytes(gzip.compress(csv_text([row]).encode()))
    error = error_of("study", "report", tmp_path, "--output", tmp_path / "out")
    assert f"{tmp_path / 'records.csv.gz'} cannot be read (row[0].{column} is " in error


@pytest.mark.parametrize(("content", "reason"), [
    ("{", "JSONDecodeError: Expecting property name"),
    ('{"a": 1}', "it has an unknown key, or lacks one: 'a'"), ("[1]", "it is [1], but must be a mapping"),
    ('{"study": {}, "runs": [], "recorded": {}}', "it.study has an unknown key, or lacks one: 'name'"),
    (json.dumps({"study": study_of("accuracy"), "runs": [{**run_of("linear", 0), "top1": "high"}], "recorded": {}}),
     "it.runs[0].top1 is 'high', but must be a number"),
    *((json.dumps({"study": study_of("accuracy", axes={}), "runs": [run_of("linear", 0, **run)], "recorded": recorded}),
       reason) for run, recorded, reason in [
          ({"made_with": {"begin": 5}}, {}, "it.runs[0].made_with.begin is 5, but must be text"),
          ({"cell": {"x": 1}}, {}, "a run has the cell {'x': 1}, but must have one of the study's values for"),
          ({}, {"transitions": 5}, "it.recorded.transitions is 5, but must be a list"),
          ({}, {"transitions": [{}]}, "it.recorded.transitions[0] has an unknown key, or lacks one: 'layer'"),
          ({}, {"last_branch": [{"first": "a", "highest": 1, "last": 1}]}, "first is 'a', but must be a number")]),
    (json.dumps({"study": study_of("accuracy", data={"classes": 0}), "runs": [], "recorded": {}}),
     "it.study.data has an unknown key, or lacks one: 'validation_split'"),
    ("[" * 200_000, "RecursionError")])
def test_results_that_are_damaged_or_foreign(tmp_path, error_of, content, reason):
    (tmp_path / "study.json").write_text(content)
    error = error_of("study", "report", tmp_path, "--output", tmp_path / "out")
    assert error.startswith(f"timm-ortho: error: {tmp_path / 'study.json'} cannot be read (")
    assert reason in error
    assert not (tmp_path / "out").exists()


def test_a_report_that_cannot_be_written_is_a_one_line_error(tmp_path):
    (tmp_path / "results.json").mkdir()
    with pytest.raises(LabError, match=r"results.json cannot be written \(Is a directory\): free disk space"):
        report.write(report.Part.of(study_of("accuracy", axes={}), [], []), tmp_path)


def test_names_of_classes_that_are_not_utf8(tmp_path):
    """Python reads the byte 0xe9 in the name of a class folder as a surrogate, which UTF-8 cannot encode."""
    labels = [os.fsdecode(b"caf\xe9"), "thé"]
    runs = [{**run_of("linear", 0, epochs=1), "labels": labels}]
    report.write(report.Part.of(study_of("accuracy", axes={}), runs, []), tmp_path)
    text = (tmp_path / "results.json").read_text(encoding="utf-8")
    assert '"labels": ["caf\\udce9", "thé"]' in text
    assert json.loads(text)["runs"][0]["labels"] == labels
