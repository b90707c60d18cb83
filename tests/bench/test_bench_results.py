"""bench/results.py: metrics computed from known times, and the files and tables of `timm-ortho bench`."""
from contextlib import nullcontext

import pytest
from helpers.bench_runs import read

from timm_ortho import bench, cli
from timm_ortho.bench import results
from timm_ortho.bench.results import METRICS, Result, quantiles, rows, write_rows


def group(**candidates):
    """Return the row of each candidate. Each argument lists a candidate's milliseconds, one value per repetition."""
    results = [Result(name, moved=6_000_000, ms=ms) for name, ms in candidates.items()]
    measured = rows({"what": "operator", "step": "both"}, 8, results)
    return {row["candidate"]: row for row in measured}


def test_quantiles():
    assert quantiles([11, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]) == [3, 6, 9]
    assert quantiles([5.0]) == [5, 5, 5]


def test_ratios_are_taken_within_a_repetition():
    # The machine becomes up to ten times slower. In each repetition, torch takes twice as long as linear.
    measured = group(linear=[1.0, 10.0, 2.0, 5.0], torch=[2.0, 20.0, 4.0, 10.0])
    assert [measured["torch"][f"ratio_{q}"] for q in ("p20", "p50", "p80")] == [2.0, 2.0, 2.0]
    assert [measured["linear"][f"ratio_{q}"] for q in ("p20", "p50", "p80")] == [1.0, 1.0, 1.0]
    # The median of the ratios is 1.5. The ratio of the medians would be 3.
    assert group(linear=[1.0, 2.0, 10.0], torch=[9.0, 3.0, 6.0])["torch"]["ratio_p50"] == 1.5


def test_metrics_of_known_times():
    row = group(linear=[2.0, 2.0], appendix=[8.0, 8.0], torch=[3.0, 3.0], copy=[1.5, 1.5])["torch"]
    assert (row["ms_p50"], row["repeats"]) == (3.0, 2)
    assert row["appendix_ratio_p50"] == pytest.approx(0.375)
    assert row["gb_per_s"] == pytest.approx(2.0)  # 6 MB in 3 ms
    assert row["share_of_copy"] == pytest.approx(0.5)
    assert row["images_per_s"] == pytest.approx(8 / 3e-3)
    assert row["baseline"] == "linear"


def test_memory_ratios_are_relative_to_linear():
    results = [Result("linear", once={"peak_memory": 100, "saved_bytes": 40}, ms=[1.0]),
               Result("ortho", once={"peak_memory": 110, "saved_bytes": 50}, ms=[1.0])]
    row = rows({"what": "models", "step": "training"}, 1, results)[1]
    assert (row["peak_ratio"], row["saved_ratio"]) == (1.1, 1.25)
    results[0] = Result("linear", note="no memory")
    row = rows({"what": "models", "step": "training"}, 1, results)[1]
    assert (row["peak_memory"], row["peak_ratio"], row["saved_ratio"]) == (110, None, None)


def test_failed_metrics_are_none_and_inapplicable_metrics_are_empty():
    results = [Result("linear", ms=[1.0]), Result("appendix", ms=[2.0]), Result("torch", ms=[], note="no memory")]
    linear, appendix, torch_row = rows({"what": "operator", "step": "backward"}, 0, results)
    assert all(torch_row[metric] is None for metric in METRICS)
    assert torch_row["note"] == "no memory"
    assert appendix["ratio_p50"] == ""  # the backward pass of linear computes nothing, so there is no ratio to linear
    assert linear["peak_memory"] is None
    assert linear["images_per_s"] == linear["gb_per_s"] == ""
    results[0].note = "no memory either"
    appendix = rows({"what": "operator", "step": "both"}, 0, results)[1]
    assert (appendix["ms_p50"], appendix["ratio_p50"]) == (2.0, None)


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(("error", "finished"), [
    (KeyboardInterrupt, 0), (KeyboardInterrupt, 2), (RuntimeError("a bug"), 1)])
def test_an_interrupted_run_writes_the_finished_groups(tmp_path, monkeypatch, capsys, error, finished):
    measured = []

    def interrupted(candidates, *_, **__):
        if len(measured) == finished:
            raise error
        measured.append(candidates)
        return [Result(one.name, ms=[1.0]) for one in candidates]

    monkeypatch.setattr(bench, "measure", interrupted)
    arguments = ["bench", "--device", "cpu", "--what", "operator", "--no-compile", "--shapes", "1x2x3", "--output",
                 str(tmp_path / "out")]
    with nullcontext() if error is KeyboardInterrupt else pytest.raises(RuntimeError, match="a bug"):
        assert cli.main(arguments) == 130
    if finished:  # the file is written after each group, so a killed process leaves it, too
        steps = ("forward", "backward")[:finished]
        assert list(dict.fromkeys(row["step"] for row in read(tmp_path / "out"))) == [*steps]
    else:
        assert capsys.readouterr().out == "no group was finished\n"


def test_the_file_is_written_atomically(tmp_path, monkeypatch):
    measured = rows({"what": "operator", "step": "both"}, 0, [Result("linear", ms=[1.0])])
    (tmp_path / "victim").write_text("precious")
    (tmp_path / ".bench.csv.partial").symlink_to(tmp_path / "victim")  # another person may have made the folder
    write_rows(tmp_path, measured)
    assert (tmp_path / "victim").read_text() == "precious"
    before = (tmp_path / "bench.csv").read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(results.os, "replace", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            write_rows(tmp_path, measured * 2)
    assert (tmp_path / "bench.csv").read_bytes() == before
