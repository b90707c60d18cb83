"""What has to be settled before the first test is imported: where the Triton kernels run."""
import os

import pytest
import torch

if not torch.cuda.is_available():
    # Triton's interpreter runs the kernels on the CPU. Triton asks for this variable when it is imported, which timm
    # does and torch does not: hence here, before any test imports timm. A value that is there already is left alone.
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
