"""Use the public interface as a user would. mypy checks this file, which is never run."""
from typing import Callable, List

import timm
from torch import Tensor, nn

import timm_ortho
from timm_ortho.lab import representation, rewrites


class Mine(timm_ortho.Connection):
    def forward(self, x: Tensor, f: Tensor, attn_mask: "Tensor | None" = None) -> Tensor:
        x = self.carried(x)
        parallel, orthogonal = timm_ortho.decompose(x, f, self.dim, self.eps)
        return x + orthogonal + 0.5 * parallel


class Model(nn.Module):
    blocks: nn.ModuleList


def use(model: Model, x: Tensor, f: Tensor) -> List[str]:
    connected: Model = timm_ortho.connect(model, "feature", eps=1e-6, layers=[0, 1])
    connected = timm_ortho.connect(model, Mine)
    plain: Model = timm_ortho.disconnect(connected)
    absorbed: Model = rewrites.absorb(rewrites.diagonalise(plain))
    y: Tensor = timm_ortho.residual_update(x, f, dim=(2, 3), eps=1e-6)
    made: timm_ortho.Connection = timm_ortho.create_connection("hybrid", dim=1, start="linear")
    make: Callable[..., timm_ortho.Connection] = timm_ortho.CONNECTIONS["feature"]
    timm_ortho.register_connection("mine", make)
    timm_ortho.register_skip("unchanged", lambda width, dim: nn.Identity())
    timm_ortho.register_block(Model, stream="x", kinds=("mlp",), dim=-1)
    timm_ortho.not_residual(Model, "an embedding")
    skip: nn.Module | None = timm_ortho.sites(absorbed)[0].connection.skip
    made.skip = skip or timm_ortho.create_skip("scaled", 8, count=2)
    rank: float = representation.effective_rank(y)
    recorder: timm_ortho.Recorder = timm_ortho.record(model, every=10)
    try:
        pulled: nn.Module = timm_ortho.pull("me/model", num_classes=int(rank))
    except timm_ortho.WeightsError:
        pulled = timm.create_model("vit_small_ortho")
    url: str = timm_ortho.hub.push(pulled, "me/model", private=True, token=True).commit_url
    return [url, str(recorder.step), *(site.kind for site in timm_ortho.sites(pulled))]
