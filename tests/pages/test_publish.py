"""Test scripts/publish.py, which publishes the numbers of finished studies."""
import itertools
import json

import pytest
from helpers.made_up_runs import runs_of, study_of
from helpers.reports import write

from scripts import evidence, publish
from scripts.pages import __main__ as pages
from timm_ortho.lab.reporting import published, report
from timm_ortho.run_folder import PRIVATE


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Return the root of an empty checkout. `publish` writes results into it, but no pages."""
    for module in (evidence, pages):
        monkeypatch.setattr(module, "main", lambda arguments, root: 0)
    (tmp_path / "checkout").mkdir()
    return tmp_path / "checkout"


def finished(folder, study, runs, unfinished=()):
    write({**study, "versions": {"commit": "0123456789ab"}}, runs, list(unfinished), folder)
    return folder


def rounded(value, digits):
    if isinstance(value, (list, dict)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        kept = {key: rounded(item, digits) for key, item in items if key not in published.LEFT_OUT}
        return kept if isinstance(value, dict) else list(kept.values())
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize("many", [True, False])
def test_published_runs_have_fewer_digits(root, tmp_path, monkeypatch, many):
    runs = runs_of("dynamics")
    monkeypatch.setattr(publish, "MANY", len(runs) - many)
    made = finished(tmp_path / "run", study_of("dynamics"), runs)
    publish.main([str(made)], root)
    whole = json.loads((made / "results.json").read_text())
    (folder,) = (root / "model_cards" / "results" / "studies").iterdir()
    study, kept, recorded = published.read(folder)
    assert (folder.name, study["versions"]["commit"]) == ("dynamics-digits-small", "0123456789ab")
    assert recorded == whole["recorded"] != {}
    assert json.loads(json.dumps(report.Part.of(study, kept, [], recorded).json["summary"])) == whole["summary"]
    for less, more in zip(kept, whole["runs"], strict=True):
        assert less["history"] == rounded(more["history"], published.DIGITS["history"])
        assert less["probe"] == rounded(more["probe"], published.DIGITS["probe"])
        last = max(row["step"] for row in more["dynamics"])
        rows = [row for row in more["dynamics"] if not many or row["step"] > last * (1 - 1 / more["epochs"])]
        assert less["dynamics"] == rounded(rows, published.DIGITS["records"])
        assert len(rows) < len(more["dynamics"]) or not many
        for key in ("top1", "loss", "seed", "cell", "connection"):
            assert less[key] == more[key]


@pytest.mark.usefixtures("undrawn")
def test_a_comparison_has_a_name(root, tmp_path):
    study = study_of("compare", options={"data_dir": "/home/me/data", "lr": 0.1})
    publish.main(["--name", "mine", str(finished(tmp_path / "run", study, runs_of("compare")))], root)
    study, _, _ = published.read(root / "model_cards" / "results" / "comparisons" / "mine")
    assert study["options"] == {"data_dir": "DIR", "lr": 0.1}
    for name, arguments in (("compare", []), ("dynamics", ["--name", "mine"])):
        made = finished(tmp_path / name, study_of(name), runs_of(name))
        with pytest.raises(SystemExit, match=f"{name}: a comparison needs --name NAME, and a study takes no --name"):
            publish.main([*arguments, str(made)], root)


def test_paths_and_processes_are_left_out(tmp_path):
    text = f"{tmp_path}/run --data-dir /home/me/data /usr/lib/timm_ortho/__main__.py"
    assert publish.anonymous(text, tmp_path / "run") == "output/run --data-dir DIR timm-ortho"
    text = "[\"--data-dir=/home/me/data\", \"--data-dir '/home/of me/data' -j 2\"]"
    assert publish.anonymous(text, tmp_path) == '["--data-dir=DIR", "--data-dir DIR -j 2"]'
    text = """["--weights /home/me/a.pth -o x=/b/c.txt 'y=[2, /d]'", "/home/of me/e", "-o '/of me/f'", "T-shirt/top"]"""
    assert publish.anonymous(text, tmp_path) == (
        """["--weights a.pth -o x=c.txt 'y=[2, d]'", "e", "-o 'f'", "T-shirt/top"]""")
    session = {"pid": 7, "host": "node7", "job": "12", "command": "timm-ortho run X", "cpu": "a CPU"}
    run = {"epochs": 1, "made_with": {**session, "continued": [session]}}
    assert publish.lean(run, many=True)["made_with"] == {"cpu": "a CPU", "continued": [{"cpu": "a CPU"}]}


def test_an_unfinished_study_is_refused(root, tmp_path):
    made = finished(tmp_path / "run", study_of("dynamics"), runs_of("dynamics"), ["lr=1-linear-seed0"])
    with pytest.raises(SystemExit, match="unfinished runs: lr=1-linear-seed0"):
        publish.main([str(made)], root)
    assert not (root / "model_cards").exists()


@pytest.mark.usefixtures("undrawn")
def test_outputs_of_one_study_are_joined(root, tmp_path):
    def outputs(name, **changes):
        for seed in range(2):
            study = study_of(name, seeds=[seed], command=f"--seeds {seed},", weights=["a"], **changes)
            yield str(finished(tmp_path / f"{name}{seed}{len(changes)}", study, runs_of(name, [seed])))

    publish.main(list(outputs("head_norm")), root)
    (folder,) = (root / "model_cards" / "results" / "studies").iterdir()
    study, runs, recorded = published.read(folder)
    assert (study["seeds"], study["weights"], study["command"]) == ([0, 1], ["a"], "--seeds 0, && --seeds 1,")
    assert [run["seed"] for run in runs] == [0] * (len(runs) // 2) + [1] * (len(runs) // 2)
    assert len(recorded["last_branch"]) == len(runs) > 2
    one, _ = outputs("head_norm")
    _, other = outputs("head_norm", validation="hold-out")
    with pytest.raises(SystemExit, match="the outputs of head_norm differ in validation: publish one of them"):
        publish.main([one, other], root)
    with pytest.raises(SystemExit, match="two outputs of head_norm have the same run: publish one of them"):
        publish.main([one, one], root)
    with pytest.raises(SystemExit, match="transition points of dynamics cannot be joined"):
        publish.main(list(outputs("dynamics")), root)


# ------------------------------------------------------------------------------------------- published results
def test_published_results_are_small():
    size = sum(path.stat().st_size for path in evidence.RESULTS.rglob("*") if path.is_file())
    assert size < 4e6


def test_published_archives():
    """They contain the accuracy of the last epoch, no paths and no hosts."""
    folders = sorted(path.parent for path in evidence.RESULTS.glob("*/*/study.json"))
    assert len(folders) > 30
    for folder in folders:
        for run in published.read(folder)[1]:
            assert len(run["history"]) == run["epochs"], folder
            assert run["history"][-1]["eval_top1"] == pytest.approx(run["top1"], abs=1e-4), folder
        text = (folder / published.STUDY).read_text(encoding="utf-8")
        assert publish.anonymous(text, folder) == text
        assert not all_keys(json.loads(text)) & PRIVATE, folder
        assert '"data_dir": "/' not in text, folder


def all_keys(value):
    """Return all keys of nested dicts and lists."""
    if isinstance(value, dict):
        return {*value, *itertools.chain(*map(all_keys, value.values()))}
    return {*itertools.chain(*map(all_keys, value))} if isinstance(value, list) else set()
