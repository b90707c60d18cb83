"""scripts/checks/fuzz.py: planted errors are found, named and repeated; correct code passes; coverage of the cases."""
import warnings

import pytest
import torch

from scripts.checks import fuzz
from timm_ortho.functional import residual_update

CPU = torch.device("cpu")
FEW = ["--device", "cpu", "--elements", "400"]


def planted(change):
    """Return `residual_update` with an error: `change` receives the result and the arguments."""
    return lambda x, f, **kwargs: change(residual_update(x, f, **kwargs), x, f, kwargs)


WRONG = {
    "a wrong sign": lambda y, x, f, _: 2 * (x + f) - y,
    "a small error": lambda y, x, f, _: y * (1 + 1e-4) if y.dtype == torch.float64 else y,
    "no gradient of the weights": lambda y, x, f, kwargs: y.detach() + (x + f) - (x + f).detach() + sum(
        0.0 * kwargs[name] for name in ("parallel", "orthogonal")),
    "padding that is not zero": lambda y, x, f, kwargs: y if kwargs["mask"] is None else y + 1,
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
    assert capsys.readouterr().out.endswith("cases with torch; 0 failed\n")
