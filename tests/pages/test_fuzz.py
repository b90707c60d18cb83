"""scripts/checks/fuzz.py: planted errors are found, named and repeated; correct code passes; coverage of the cases."""
import warnings
from types import SimpleNamespace

import pytest
import torch

from scripts.checks import fuzz
from timm_ortho.functional import residual_update

CPU = torch.device("cpu")
FEW = ["--device", "cpu", "--elements", "400"]


def planted(change):
    """Return `residual_update` with an error: `change` receives the result and the arguments."""
    return lambda x, f, **kwargs: change(residual_update(x, f, **kwargs), x, f, kwargs)


def cases(count=400):
    return [fuzz.Case.of(seed, 2000) for seed in range(count)]


def test_the_present_code_passes(capsys):
    assert fuzz.main([*FEW, "--seconds", "1"]) == 0
    assert capsys.readouterr().out.endswith("cases with torch; 0 failed\n")


WRONG = {
    "a wrong sign": lambda y, x, f, _: 2 * (x + f) - y,
    "a small error": lambda y, x, f, _: y * (1 + 1e-4) if y.dtype == torch.float64 else y,
    "a wrong dtype": lambda y, x, f, _: y.float(),
    "no gradient of the weights": lambda y, x, f, kwargs: y.detach() + (x + f) - (x + f).detach() + sum(
        0.0 * kwargs[name] for name in ("parallel", "orthogonal")),
    "padding that is not zero": lambda y, x, f, kwargs: y if kwargs["mask"] is None else y + 1,
    "an error at dim 0": lambda y, x, f, kwargs: y + 1 if kwargs["dim"] in (0, -x.dim()) else y,
    "an error": lambda y, x, f, _: y.no_such_attribute,
    "a warning": lambda y, x, f, _: warnings.warn("replaced", RuntimeWarning, stacklevel=1) or y,
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_a_planted_error_is_reported_with_the_command_that_repeats_it(monkeypatch, capsys, change):
    monkeypatch.setattr(fuzz, "residual_update", planted(change))
    assert fuzz.main([*FEW, "--seconds", "2", "--show", "1"]) == 1
    found, text, command, count = capsys.readouterr().out.splitlines()
    assert found.startswith("FAILED ")
    assert text.strip().startswith("x, f [")
    assert not count.endswith(" 0 failed")
    words = command.split()
    assert words[:3] == ["python", "-m", "scripts.checks.fuzz"]
    assert fuzz.main(words[3:]) == 1
    assert capsys.readouterr().out.splitlines()[0] == found
    monkeypatch.undo()
    assert fuzz.main(words[3:]) == 0


def test_a_wrong_gradient_is_named(monkeypatch):
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            return 2 * g

    monkeypatch.setattr(fuzz, "residual_update", lambda x, f, **kwargs: residual_update(x, Doubled.apply(f), **kwargs))
    found = [fuzz.problem(case, CPU, "torch") for case in cases(40)]
    assert any(text.startswith("dL/df has error") for text in found)
    assert not any("y has error" in text or "dL/dx" in text for text in found)


def test_no_case_is_a_failure(capsys):
    assert fuzz.main([*FEW, "--seconds", "-1"]) == 1
    assert capsys.readouterr().out == "fuzz on cpu: no case was run; 0 failed\n"


def test_jobs_share_the_cases():
    options = SimpleNamespace(case=None, first=7, jobs=3)
    shares = [fuzz._seeds(options, job) for job in range(3)]
    assert sorted(next(share) for _ in range(4) for share in shares) == list(range(7, 19))
    assert list(fuzz._seeds(SimpleNamespace(case=5), 0)) == [5]


@pytest.mark.slow  # each process imports torch
def test_several_processes(capsys):
    assert fuzz.main([*FEW, "--seconds", "1", "--jobs", "2"]) == 0
    assert capsys.readouterr().out.endswith("cases with torch; 0 failed\n")


def test_an_unusable_device_ends_the_job(monkeypatch):
    def lost(case, device, backend):
        if case.seed == 2:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return ""

    monkeypatch.setattr(fuzz, "problem", lost)
    monkeypatch.setattr(fuzz.torch, "ones", lambda *_, **__: torch.zeros(1))
    options = SimpleNamespace(
        device="cuda", seconds=5, case=None, first=0, jobs=1, elements=9, backend=None)
    outcome = fuzz.run(options)
    assert [(case.seed, text.split(": ")[0]) for case, text in outcome.failures] == [
        (2, "the device is unusable afterwards")]
    assert outcome.lost == "job 0 stopped at case 2; --first 3 continues"
    assert outcome.backends == {"torch": 2}


def test_cases_cover_the_arguments():
    drawn = cases()
    assert {len(case.shape) for case in drawn} == {2, 3, 4, 5}
    assert {layout for case in drawn for layout in case.layouts} == set(fuzz.LAYOUTS)
    assert {dtype for case in drawn for dtype in case.dtypes} == set(fuzz.DTYPES)
    assert any(case.dtypes[0] != case.dtypes[1] for case in drawn)
    assert {type(case.dim) for case in drawn} == {int, tuple, type(None)}
    assert any(isinstance(case.dim, tuple) and 0 in case.dim for case in drawn)
    assert any(case.dim == 0 for case in drawn)
    assert {case.keep for case in drawn} == {"output", "branch"}
    assert {case.masked for case in drawn} == {True, False}
    assert {case.needed for case in drawn} == {"xf", "x", "f", ""}
    assert {weight for case in drawn for weight in case.weights} >= {"learned", "tensor", 0.0, 1.0}
    assert any(0 in case.shape for case in drawn)
    assert max(size for case in drawn for size in case.shape) > 1000
    assert all(max(1, len(case.shape)) and abs(torch.Size(case.shape).numel()) <= 2000 for case in drawn)


@pytest.mark.parametrize("layout", fuzz.LAYOUTS)
def test_layouts(layout):
    t = torch.randn(3, 4, 5, 6)
    placed = fuzz.laid_out(t, layout, 1)
    assert placed.shape == t.shape
    assert torch.equal(placed, t) == (layout != "expanded")
    expected = {
        "contiguous": placed.is_contiguous() and placed.storage_offset() == 0,
        "channels-last": placed.is_contiguous(memory_format=torch.channels_last),
        "transposed": not placed.is_contiguous(),
        "expanded": 0 in placed.stride(),
        "sliced": not placed.is_contiguous(),
        "unaligned": placed.storage_offset() == 1,
    }
    assert expected[layout]
