"""`timm-ortho bench --what operator`: candidates, tensors, metrics, columns that describe the machine, plot, table."""
import io
import subprocess
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import timm
import torch
from helpers.bench_runs import TRACED, run

from timm_ortho import bench, run_folder as provenance
from timm_ortho.bench import operator, options
from timm_ortho.bench.results import COLUMNS, METRICS
from timm_ortho.functional import plain_update

ROOT = Path(__file__).parents[2]
FORMULAS = ["linear", "plain", "appendix", "compiled", "torch", "torch-compiled", "triton", "copy"]


@pytest.mark.parametrize("dim", [-1, 1, None])
def test_the_appendix_is_the_same_update(dim):
    x, f = (torch.randn(3, 5, 4, 6, dtype=torch.float64) for _ in range(2))
    expected = plain_update(x, f, 0.0, 1.0, None if dim is None else [dim], operator.EPS)
    torch.testing.assert_close(operator.appendix_update(x, f, dim), expected, rtol=1e-6, atol=1e-6)


@pytest.fixture(scope="module")
def operator_run(tmp_path_factory):
    folder, output = tmp_path_factory.mktemp("operator"), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(output):
        patch.setattr(operator, "compiled", TRACED)
        patch.setitem(options.DEFAULTS["cpu"], "scopes", ("feature",))
        rows = run(folder, "--what", "operator", "--shapes", "2x5x16", "--repeats", "4")
    return folder, rows, output.getvalue()


def test_operator_rows(operator_run):
    _, rows, _ = operator_run
    assert list(rows[0]) == list(COLUMNS)
    assert [(row["step"], row["candidate"]) for row in rows] == [
        (step, name) for step in ("forward", "backward", "both") for name in FORMULAS]
    for row in rows:
        assert (row["what"], row["shape"], row["layout"], row["dtype"], row["scope"]) == (
            "operator", "2x5x16", "tokens", "float32", "feature")
        for name in ("ms", "ratio", "appendix_ratio"):
            quantiles = [row[f"{name}_{q}"] for q in ("p20", "p50", "p80")]
            assert all(quantiles) or not any(quantiles)
            if all(quantiles):
                assert 0 < float(quantiles[0]) <= float(quantiles[1]) <= float(quantiles[2])


def test_operator_metrics(operator_run):
    by = {(row["step"], row["candidate"]): row for row in operator_run[1]}
    assert float(by["forward", "linear"]["ratio_p50"]) == 1.0
    for step, tensors in (("forward", 3), ("backward", 5), ("both", 8)):
        row = by[step, "torch"]
        assert float(row["gb_per_s"]) == pytest.approx(tensors * 640 / float(row["ms_p50"]) / 1e6, rel=1e-4)
        assert float(row["share_of_copy"]) < 1
        assert bool(row["ratio_p50"]) == (step != "backward")
        assert row["backend"] == "torch"
        assert float(by[step, "appendix"]["appendix_ratio_p50"]) == 1.0
        copy = by[step, "copy"]
        assert float(copy["share_of_copy"]) == 1.0
        assert float(copy["gb_per_s"]) == pytest.approx(2 * 2**20 / float(copy["ms_p50"]) / 1e6, rel=1e-4)
    assert by["backward", "linear"]["gb_per_s"] == ""
    assert by["both", "linear"]["saved_bytes"] == "0"
    # For the backward pass, the update keeps x and y (640 bytes each), and two tensors with one number for each of 10
    # tokens (40 bytes per tensor, or 64 with padding). The plain formula keeps x, f and further tensors.
    assert 2 * 640 <= int(by["both", "torch"]["saved_bytes"]) <= 2 * 640 + 2 * 64
    assert int(by["both", "plain"]["saved_bytes"]) > 2 * 640


def test_an_unavailable_backend_has_a_note(operator_run):
    for row in operator_run[1]:
        if row["candidate"].startswith("triton"):
            assert row["note"]
            assert not any(row[metric] for metric in METRICS)
        else:
            assert row["note"] == ""


def test_machine_columns(operator_run):
    folder, rows, _ = operator_run
    row = rows[0]
    assert row["command"] == (f"timm-ortho bench --device cpu --output {folder} --what operator "
                              "--shapes 2x5x16 --repeats 4")
    assert (row["device"], row["threads"]) == ("cpu", str(torch.get_num_threads()))
    assert (row["torch"], row["timm"]) == (provenance.environment()["torch"], timm.__version__)
    assert all(row[name] for name in ("cpu", "python", "system", "date", "timm_ortho", "triton"))
    if (ROOT / ".git").exists():
        head = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
        assert row["commit"] in (head, f"{head}-dirty")


def test_new_files_make_a_checkout_dirty(tmp_path):
    """A new file, such as a recipe, is part of the package but not of the commit."""
    def git(*arguments):
        subprocess.run(["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *arguments], check=True)

    git("init", "-q")
    git("commit", "-qm", "first", "--allow-empty")
    commit = provenance.commit_of(tmp_path)
    assert len(commit) == 40
    (tmp_path / "recipe.yaml").touch()
    assert provenance.commit_of(tmp_path) == f"{commit}-dirty"


def test_tables(operator_run):
    folder, _, out = operator_run
    lines = out.splitlines()
    assert lines[0].split()[:6] == ["shape", "layout", "scope", "dtype", "step", "candidate"]
    triton = next(line for line in lines if line.split()[5:6] == ["triton"])
    assert triton.count("not measured") == 6
    assert f"written: {folder / 'bench.csv'}\n" in out


def test_convolutional_shapes_have_two_layouts_and_both_scopes():
    options = bench.resolve(dict(what=["operator"], shapes=["2x3x4", "2x3x4x4"], device="cpu", dtypes=["bfloat16"]))
    labels = [one.labels for one in operator.operator_groups(options)]
    mixed = bench.resolve(dict(what=["operator"], shapes=["2x3x4", "2x3x4x4"], device="cpu", dtypes=["mixed"]))
    assert {one.labels["layout"] for one in operator.operator_groups(mixed)} == {"tokens"}
    assert [(one["layout"], one["scope"]) for one in labels if one["step"] == "both"] == [
        (layout, scope) for layout in ("tokens", "nchw", "channels_last") for scope in ("feature", "global")]
    assert bench.model_groups(options) == []


@pytest.mark.parametrize("layout", ["nchw", "channels_last"])
def test_layout_and_dtype_of_the_tensors(layout, monkeypatch):
    seen = []
    monkeypatch.setattr(operator, "plain_update", lambda x, f, dims, **_: seen.append((x, f, dims)) or x + f)
    options = bench.resolve(dict(what=["operator"], device="cpu", compile=False))
    built = operator._operator_candidates(options, (2, 3, 4, 5), layout, "feature", "bfloat16", "both")
    plain = next(one for one in built if one.name == "plain")
    plain.run(plain.prepare())
    (x, f, dims), = seen
    assert dims == [1]
    assert x.dtype == f.dtype == torch.bfloat16
    assert x.is_contiguous(memory_format=torch.channels_last) == (layout == "channels_last")
    assert not torch.equal(x, f)
    assert [one.name for one in built] == ["linear", "plain", "appendix", "torch", "triton", "copy"]


def test_mixed_tensors_and_the_bytes_that_they_move():
    """Under autocast, a ViT's stream and its gradient are float32, and the branch output and its gradient bfloat16."""
    x, f, g = operator.tensors(torch.device("cpu"), (2, 3, 4), "tokens", "mixed", "both")
    assert (x.dtype, f.dtype, g.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    options = bench.resolve(dict(what=["operator"], device="cpu", compile=False, dtypes=["mixed"]))
    for step, numbers in (("forward", (2, 1)), ("backward", (4, 1)), ("both", (6, 2))):  # float32, bfloat16
        built = operator._operator_candidates(options, (2, 3, 4), "tokens", "feature", "mixed", step)
        moved = {one.name: one.moved for one in built}
        assert moved["torch"] == moved["appendix"] == 24 * (4 * numbers[0] + 2 * numbers[1])
        assert moved["linear"] == (0 if step == "backward" else 24 * (4 * 2 + 2))
        ours, appendix = (next(one for one in built if one.name == name) for name in ("torch", "appendix"))
        torch.testing.assert_close(*(one.run(one.prepare()) for one in (ours, appendix)), rtol=1e-2, atol=1e-2)


def test_timed_and_untimed_parts_of_each_step():
    def timed(step):
        tensors = operator.tensors(torch.device("cpu"), (2, 3), "tokens", "float32", step)
        return *tensors, *operator.timed(torch.mul, *tensors, step)

    x, f, _, run, prepare = timed("forward")
    assert prepare() is None
    assert torch.equal(run(None), x * f)
    assert not run(None).requires_grad
    for step in ("backward", "both"):
        x, f, g, run, prepare = timed(step)
        state = prepare()
        assert (state is not None) == (step == "backward")
        assert all(map(torch.equal, run(state), (f * g, x * g)))
        assert x.grad is None
