"""costs/cost_report.py and cost_tables.py: `timm-ortho cost` puts measured costs beside the paper's numbers."""
import pytest
import torch
from helpers.made_up_runs import OVERHEAD, ROWS, runs_of, study_of
from helpers.reports import rewrite, side_by_side, tables_of, texts, write

from timm_ortho import bench, cli
from timm_ortho.lab import LabError
from timm_ortho.lab.costs import cost_report, measure
from timm_ortho.lab.planning import study_file

pytestmark = pytest.mark.usefixtures("undrawn_module")


@pytest.mark.parametrize("scale", study_file.SCALES)
def test_arguments_are_accepted_by_the_measurements(scale):
    for name in ("parameters", "gamma"):
        assert list(cost_report.load(name, scale)[1]) == ["models"]
    _, arguments = cost_report.load("overhead", scale)
    models = [f"{name}_ortho" for name in arguments["models"]]
    assert bench.resolve({**arguments, "models": models, "device": "cpu"}).models  # raises for unknown names


def test_changes_of_scale_small():
    study, _ = cost_report.load("overhead", "small")
    assert {"batch_size: 8 here; not set at scale paper",
            "dtypes: float32 here; bfloat16 at scale paper"} <= set(study["changed"])
    assert cost_report.load("overhead", "paper")[0]["changed"] == cost_report.load("gamma", "small")[0]["changed"] == []


def test_rows_of_each_table(monkeypatch):
    models = ["vit_small", "resnet18"]
    rows = measure.rows("parameters", {"models": models})
    assert {row["model"] for row in rows if "paper" in row["connection"]} == {"vit_small"}  # Table 1a is of ViTs
    assert {row["model"] for row in rows if "extra_parameters" in row} == {*models}
    monkeypatch.setattr(measure, "overhead", lambda **given: [given])
    assert measure.rows("overhead", {"models": models}, "cpu") == [{"models": models, "device": "cpu"}]


def test_the_command_measures_and_reports(tmp_path, capsys):
    output = tmp_path / "out"
    assert cli.main(["cost", "gamma", "--scale", "smoke", "--output", str(output)]) == 0
    assert capsys.readouterr().out.endswith(f"report: {output / 'report.html'}\n")
    assert side_by_side(output)[("ViT-S",), "γ"] == ("64.00", "64.00")
    assert "timm-ortho cost gamma --scale smoke" in texts(output)[1]
    assert cli.main(["study", "report", str(output / "results.json"), "--output", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "report.md").read_text() == (output / "report.md").read_text()


def test_threads_are_set_during_the_measurement_only(tmp_path, monkeypatch):
    seen, before = [], torch.get_num_threads()
    monkeypatch.setattr(measure, "rows", lambda *_: seen.append(torch.get_num_threads()) or [])
    torch.set_num_threads(3)
    try:
        for threads in (None, 2):
            cost_report.cost("overhead", threads=threads, output=tmp_path)
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
    assert seen == [3, 2]
    with pytest.raises(LabError, match="--threads must be at least 1, got 0"):
        cost_report.cost("overhead", threads=0)


@pytest.mark.parametrize(("name", "scale", "message"), [
    ("gama", "small", "there is no table of costs 'gama': choose overhead, parameters, gamma"),
    ("gamma", "huge", "there is no scale 'huge': choose smoke, small, paper")])
def test_unknown_tables_and_scales(name, scale, message):
    with pytest.raises(LabError, match=message):
        cost_report.load(name, scale)


def test_a_table_of_costs_cannot_be_combined_with_a_study(tmp_path):
    costs, trained = ((study_of(name), runs_of(name), []) for name in ("gamma", "dynamics"))
    keys = ("study", "runs", "unfinished")
    parts = [dict(zip(keys, part, strict=True)) for part in (costs, trained)]
    with pytest.raises(LabError, match="the table of costs 'gamma' cannot be in a report of several studies"):
        rewrite({"parts": parts}, tmp_path)


def test_overhead_beside_table_1b(tmp_path):
    twice = [*ROWS["overhead"], {**OVERHEAD, "dtype": "bfloat16"}]
    for rows, name in ((ROWS["overhead"], "ViT-S"), (twice, "ViT-S, tokens, float32, eager"),
                       ([{**OVERHEAD, "model": "vit_small(img_size=64)"}], "ViT-S"),
                       ([{**OVERHEAD, "model": "vit_small(img_size=64, depth=2)"}], "ViT-S (depth=2)")):
        write(study_of("overhead"), rows, [], tmp_path)
        found = side_by_side(tmp_path)
        assert found[(name,), "overhead, %"][1] == "2.50"  # 100 (1 - 975 / 1000), by the paper's definition
        assert found[(name,), "overhead by repetition, %"][1] == "2.00 [1.00, 3.50]"
        assert found[(name,), "Linear, images/s"][1] == "1,000.0"
    write(study_of("overhead"), twice, [], tmp_path)
    found = side_by_side(tmp_path)
    assert found[("ResNetV2-34",), "overhead, %"] == ("5.94", "not measured")
    assert found[("ViT-S, tokens, bfloat16, eager",), "overhead, %"][0] == "0.28"
    assert found[("ViT-B",), "Orthogonal-F, images/s"] == ("1,246.2", "not run")
    for said in ("out of memory", "| device | AMD EPYC, 2 cores, 2 threads |", "20 % and 80 % quantiles"):
        assert said in texts(tmp_path)[1]


def test_flops_and_gamma_beside_their_tables(tmp_path):
    text = write(study_of("parameters"), ROWS["parameters"], [], tmp_path)
    found, column = side_by_side(tmp_path), "FLOPs of module and connection in ViT-S, s = 10, d = 4"
    assert found[("Attention", "Orthogonal, the paper's algorithm"), column] == (
        "8sd² + 4s²d + sd + 6sd + 2s = 3,180", "3,180")
    assert found[("Attention", "Orthogonal-F, this package"), column] == ("not in the paper", "3,210")
    assert [row[-2:] for row in tables_of(tmp_path)[1][1:]] == [["260", "260"], ["290", "260"]]
    assert tables_of(tmp_path)[2][2][-1] == "0.348"
    assert "3,180" in text
    write(study_of("gamma"), ROWS["gamma"], [], tmp_path)
    found = side_by_side(tmp_path)
    assert found[("ViT-S",), "γ"] == ("64.00", "64.00")
    assert found[("ResNet-1001",), "width"] == ("37.33", "not run")
    assert found[("deit_tiny_patch16_224",), "blocks"] == ("not in the paper", "12")
