"""The time that Python needs for one residual addition, measured without launches."""
import pytest
import torch
from helpers.kernel_cases import needs_triton

from timm_ortho.functional import plain_update, residual_update

pytestmark = [needs_triton, pytest.mark.skipif(torch.cuda.is_available(), reason="measures tensors on the CPU")]


def test_rows_and_ratios(capsys):
    from scripts.checks import host_cost

    ratios = host_cost.main(["--repeats", "3", "--calls", "2"])
    assert set(ratios) == {"connection", "connection with norm"}
    assert all(ratio > 1 for ratio in ratios.values())
    header, *rows = capsys.readouterr().out.splitlines()
    assert header.split() == ["forward", "and", "backward", "of", "us", "ratio"]
    assert [row[:24].strip() for row in rows] == ["add", "connection", "add, norm", "connection with norm"]


def test_no_kernel_is_launched_inside_and_every_kernel_outside():
    from scripts.checks import host_cost

    x, f = torch.randn(2, 2, 3, 8).unbind()
    expected = plain_update(x, f, 0.0, 1.0, [-1], 1e-6)
    with host_cost.without_launches():
        assert not torch.allclose(residual_update(x, f, backend="triton"), expected)  # the memory is not written
    torch.testing.assert_close(residual_update(x, f, backend="triton"), expected)
