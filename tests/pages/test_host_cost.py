"""The time that Python needs for one residual addition, measured without launches."""
import pytest
import torch
from helpers.kernel_cases import needs_triton

pytestmark = [needs_triton, pytest.mark.skipif(torch.cuda.is_available(), reason="measures tensors on the CPU")]


def test_rows_and_ratios(capsys):
    from scripts.checks import host_cost

    ratios = host_cost.main(["--repeats", "3", "--calls", "2"])
    assert set(ratios) == {"connection", "connection with norm"}
    assert all(ratio > 1 for ratio in ratios.values())
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["forward", "and", "backward", "of", "us", "ratio"]
    assert [row[:24].strip() for row in rows] == ["add", "connection", "add, norm", "connection with norm"]
