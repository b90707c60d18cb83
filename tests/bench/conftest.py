import gc

import pytest

from timm_ortho.bench import clock, options


@pytest.fixture(autouse=True, scope="module")
def small():
    """Shrink buffers, exempt existing objects from garbage collection, and unset the backends' variables."""
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(options.DEFAULTS["cpu"], "copy_bytes", 1 << 20)
        patch.setattr(clock, "FLUSHED_BYTES", dict.fromkeys(clock.FLUSHED_BYTES, 1 << 10))
        for name in ("TIMM_ORTHO_BACKEND", "TRITON_INTERPRET"):
            patch.delenv(name, raising=False)
        yield
    gc.unfreeze()
