"""Test scripts/pages/speed.py, which writes the tables of costs in README and docs/speed.md."""
import csv

import pytest

from scripts.pages import speed
from timm_ortho.bench.results import COLUMNS


def fake_csv(folder, name, rows):
    common = dict(device="cpu", cpu="Some CPU, 2 cores, 2 threads", torch="2.9", triton="3.5", timm="1.0.31", driver="",
                  commit="0123456789abcdef-dirty", date="2026-01-02T03:04:05+00:00", command="timm-ortho bench",
                  baseline="linear")
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / name, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows({**common, **row} for row in rows)


def model_row(step, mode, p50, **more):
    row = dict(what="models", model="vit_small", shape="16x3x224x224", layout="tokens", dtype="float32",
               candidate="ortho", step=step, mode=mode,
               ratio_p20=p50 - 0.01, ratio_p50=p50, ratio_p80=p50 + 0.02, saved_ratio="1.0042")
    return {**row, **more}


def operator_row(step, candidate, **more):
    return dict(what="operator", shape="16x197x384", layout="tokens", dtype="float32", scope="global", step=step,
                candidate=candidate, **more)


def lines_of(results, on):
    text = speed.section(speed.rows_of(results))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()
            if line.startswith(f"| {on} ")]


def test_the_tables_of_speed(tmp_path):
    fake_csv(tmp_path, "bench_cpu.csv", [
        model_row("training", "eager", 1.3), model_row("training", "compiled", 0.98, saved_ratio="1.137"),
        model_row("training", "eager", 1.0, candidate="linear"),
        operator_row("both", "torch", ratio_p50="1.5", appendix_ratio_p50="0.4"),
        operator_row("forward", "torch", share_of_copy="0.61"), operator_row("backward", "torch", share_of_copy="0.7"),
        operator_row("both", "triton", note="no GPU"),
    ])
    model, operator = lines_of(tmp_path, "CPU, Some CPU")
    on = "CPU, Some CPU"
    assert model == [on, "vit_small_ortho, 16", "tokens, float32", "1.300 [1.290, 1.320]", "0.980 [0.970, 1.000]",
                     *["not measured"] * 2, "1.004", "1.137", "not measured"]
    assert operator[:3] == ["CPU, Some CPU", "16x197x384, tokens", "float32, global"]
    cells = dict(zip(speed.FORMULAS, operator[3:-1], strict=True))
    assert (cells["torch"], cells["triton"], operator[-1]) == ("1.50 (61%, 70%)", "not measured", "2.5 (torch)")
    assert speed.unmeasured(speed.rows_of(tmp_path)) == "Not measured on a GPU: models and operator."
    assert ("* CPU, Some CPU: `timm-ortho bench`; Some CPU, 2 cores, 2 threads; torch 2.9, triton 3.5, timm 1.0.31; "
            "commit 0123456789ab with changes, 2026-01-02") in speed.section(speed.rows_of(tmp_path))


def test_the_opening_of_speed_has_the_ranges_of_the_rows(tmp_path):
    assert speed.opening(speed.rows_of(tmp_path)) == (
        "On a GPU: not measured with the present code.\n\nOn a CPU: not measured with the present code.")
    fake_csv(tmp_path, "bench_cpu.csv", [
        model_row("training", "eager", 1.3), model_row("training", "eager", 1.1, layout="nchw", model="resnetv2_50"),
        model_row("training", "eager", 1.074, layout="channels_last", model="resnetv2_50"),
        model_row("training", "compiled", 0.98), model_row("inference", "eager", 3.0),
        model_row("training", "eager", 1.0, candidate="linear"), model_row("training", "eager", 2.0, model="vit_base"),
        dict(what="launch", model="vit_small", shape="1x3x32x32", step="training", candidate="ortho",
             ratio_p50="1.2", appendix_ratio_p50="0.9")])
    assert speed.opening(speed.rows_of(tmp_path)).splitlines() == [
        "On a GPU: not measured with the present code.",
        "",
        "Time of a training step on a CPU (Some CPU), relative to the same model with plain addition:",
        "",
        "* ViT-S (`vit_small`): +30 % in eager mode and -2 % under `torch.compile`",
        "* ResNetV2-50 (`resnetv2_50`): +7 to +10 % in eager mode",
        "* ViT of width 64, training and inference: 1.20 times plain addition, 0.90 times the code of the paper's "
        "Appendix F",
    ]


def test_duplicate_rows_are_an_error(tmp_path):
    for name in ("bench_a.csv", "bench_b.csv"):
        fake_csv(tmp_path, name, [model_row("training", "eager", 1.3)])
    with pytest.raises(SystemExit, match="2 rows of vit_small measure the same case"):
        speed.section(speed.rows_of(tmp_path))


def table_of(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]


def test_readmes_table_of_costs(tmp_path):
    gpu = dict(device="NVIDIA H100", model="vit_small_patch16_224", peak_ratio="1.0021", dtype="amp bfloat16")
    fake_csv(tmp_path, "bench_cpu.csv", [model_row("training", "eager", 1.3)])
    assert table_of(speed.costs(speed.rows_of(tmp_path))) == [  # without columns that have no values
        ["on", "model, batch", "training, eager", "memory kept for backward, eager"], ["---"] * 4,
        ["CPU, Some CPU", "`vit_small`, 16", "1.300 [1.290, 1.320]", "1.004"]]
    fake_csv(tmp_path, "bench_h100.csv", [
        model_row("training", "eager", 1.01, shape="128x3x224x224", **gpu),
        model_row("training", "eager", 1.4, shape="64x3x224x224", **{**gpu, "model": "vit_tiny"}),
        model_row("training", "eager", 1.0, shape="64x3x224x224", candidate="linear", **gpu),
        model_row("training", "eager", 1.02, shape="256x3x224x224", **gpu),
        model_row("training", "eager", 1.03, shape="256x3x224x224", **{**gpu, "dtype": "float32"})])
    assert table_of(speed.costs(speed.rows_of(tmp_path)))[2:] == [
        ["NVIDIA H100", "`vit_small_patch16_224`, 128", "1.010 [1.000, 1.030]", "1.004", "1.002"],
        ["NVIDIA H100", "`vit_small_patch16_224`, 256", "1.020 [1.010, 1.040]", "1.004", "1.002"]]
