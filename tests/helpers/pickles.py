"""Files that create another file when they are unpickled, in place of code that does harm."""
import io
import pickle
from contextlib import contextmanager
from pathlib import Path

import torch


class Evil:
    """An object that creates the file `mark` when it is unpickled."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return open, (str(self.mark), "w")


@contextmanager
def never_unpickled(path, write=torch.save):
    """Write a pickle, and check at the end that the block did not unpickle it, although unpickling leaves a trace."""
    mark = Path(path).with_suffix(".executed")
    write(Evil(mark), path)
    yield str(path)
    assert not mark.exists(), f"{path} was unpickled"
    content = Path(path).read_bytes()
    (torch.load(io.BytesIO(content), weights_only=False) if write is torch.save else pickle.loads(content)).close()
    assert mark.exists()  # so `not mark.exists()` above can fail


def plain_pickle(value, path):
    Path(path).write_bytes(pickle.dumps(value))
