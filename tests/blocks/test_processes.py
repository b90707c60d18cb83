"""Models whose classes a script defines are sent to other processes, and read by later ones."""
import copy
import pickle
import subprocess
import sys

import pytest
import torch
from helpers.own_block import tokens
from timm.models.vision_transformer import Block
from torch import nn

from timm_ortho import connect, sites

SCRIPT = """
import sys, timm_ortho, torch
from timm.models.vision_transformer import Block
from torch import multiprocessing, nn

class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.f, self.norm, self.g = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x):
        x = x + self.f(x)
        return x + self.g(self.norm(x))

class Larger(Block):
    pass

def work(rank, model, expected):
    y = model(torch.ones(1, 3, 8))
    names = [type(block).__bases__[0].__name__ for block in model]
    print(names, [site.connection.name for site in timm_ortho.sites(model)], torch.allclose(y, expected))
    return model

timm_ortho.register_block(Mine, stream="x", kinds=("attention", "mlp"))
if __name__ == "__main__":
    if sys.argv[1] == "load":
        work(0, *torch.load(sys.argv[2], weights_only=False))
    else:
        model = timm_ortho.connect(nn.Sequential(Mine(), Larger(8, 2)), "feature", kinds="attention")
        arguments = model, model(torch.ones(1, 3, 8)).detach()
        torch.save(arguments, sys.argv[2])
        if sys.argv[1] == "spawn":
            multiprocessing.spawn(work, arguments, nprocs=1)
        else:
            import joblib
            returned = joblib.Parallel(n_jobs=2)([joblib.delayed(work)(0, *arguments)])[0]
            assert type(returned[0]) is type(model[0])
"""


@pytest.mark.slow
@pytest.mark.parametrize("start", ["spawn", "joblib"])
def test_blocks_of_a_script(tmp_path, start):
    if start == "joblib":
        pytest.importorskip("joblib")
    (tmp_path / "script.py").write_text(SCRIPT, encoding="utf-8")
    for action in (start, "load") if start == "spawn" else (start,):
        command = [sys.executable, tmp_path / "script.py", action, tmp_path / "model.pt"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.stdout == "['Mine', 'Larger'] ['feature', 'linear', 'feature', 'linear'] True\n", done.stderr


def test_a_subclass_that_is_defined_again(monkeypatch):
    """A notebook cell that runs twice defines its class twice. Only the present class can be pickled."""
    def cell():
        cls = type("Cell", (Block,), {"__module__": __name__})
        monkeypatch.setattr(sys.modules[__name__], "Cell", cls, raising=False)
        return connect(nn.Sequential(cls(8, 2)), "global", kinds="mlp").eval()

    old, new = cell(), cell()
    assert len(sites(old)) == len(sites(new)) == 2
    for copied in (copy.deepcopy(new), pickle.loads(pickle.dumps(new))):
        assert type(copied[0]) is type(new[0]) is not type(old[0])
        assert torch.equal(copied(tokens()), new(tokens()))
    with pytest.raises(pickle.PicklingError, match="not the same object"):
        pickle.dumps(old)
