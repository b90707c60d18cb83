"""The ViT of Oh et al. in plain PyTorch, with the parameter names of their checkpoints and without timm."""
from pathlib import Path

import torch
from torch import nn

REPOSITORY = "BootsofLagrangian/{}-vit-b-imagenet1k-hf"


class Layer(nn.Module):
    """The parameters of one layer. `AuthorsViT.forward` uses them. The layer's LayerNorms have no parameters."""

    def __init__(self, width):
        super().__init__()
        self.attention = nn.ModuleDict({
            "attention": nn.ModuleDict({part: nn.Linear(width, width) for part in ("query", "key", "value")}),
            "output": nn.ModuleDict({"dense": nn.Linear(width, width)}),
        })
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(width, 4 * width)})
        self.output = nn.ModuleDict({"dense": nn.Linear(4 * width, width)})


class AuthorsViT(nn.Module):
    """The model. ``add(x, f)`` is the residual connection, by default orthogonal over the channels."""

    def __init__(self, size=224, patch=16, width=768, depth=12, heads=12, classes=1000, add=None):
        super().__init__()
        self.add = add or add_orthogonal
        self.heads = heads
        self.vit = nn.Module()
        self.vit.embeddings = nn.Module()
        self.vit.embeddings.cls_token = nn.Parameter(torch.empty(1, 1, width))
        self.vit.embeddings.position_embeddings = nn.Parameter(torch.empty(1, 1 + (size // patch) ** 2, width))
        self.vit.embeddings.patch_embeddings = nn.ModuleDict({"projection": nn.Conv2d(3, width, patch, patch)})
        self.vit.encoder = nn.ModuleDict({"layer": nn.ModuleList([Layer(width) for _ in range(depth)])})
        self.vit.layernorm = nn.LayerNorm(width, eps=1e-6)
        self.classifier = nn.Linear(width, classes)

    def forward(self, images):
        embeddings = self.vit.embeddings
        patches = embeddings.patch_embeddings["projection"](images).flatten(2).transpose(1, 2)
        x = torch.cat([embeddings.cls_token.expand(len(images), -1, -1), patches], 1)
        x = x + embeddings.position_embeddings
        for layer in self.vit.encoder["layer"]:
            x = self.add(x, self.attend(layer.attention, normed(x)))
            hidden = nn.functional.gelu(layer.intermediate["dense"](normed(x)), approximate="tanh")
            x = self.add(x, layer.output["dense"](hidden))
        return self.classifier(self.vit.layernorm(x)[:, 0])

    def attend(self, attention, x):
        batch, tokens, width = x.shape
        q, k, v = (attention["attention"][part](x).view(batch, tokens, self.heads, -1).transpose(1, 2)
                   for part in ("query", "key", "value"))
        weights = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1)
        return attention["output"]["dense"]((weights @ v).transpose(1, 2).reshape(batch, tokens, width))


def normed(x):
    return nn.functional.layer_norm(x, x.shape[-1:], eps=1e-6)


def add_orthogonal(x, f):
    return x + f - (x * f).sum(-1, keepdim=True) / ((x * x).sum(-1, keepdim=True) + 1e-6) * x


def authors_vit(**sizes):
    """Return the model with large random weights, so that attention is not uniform and branches affect the output."""
    with torch.device("meta"):
        model = AuthorsViT(**sizes)
    model.to_empty(device="cpu").requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        limit = 2.5 * (p[0].numel() ** -0.5 if p.ndim > 1 else 0.2)
        p.uniform_(-limit, limit, generator=generator)
    return model.eval()


SMALL = dict(size=64, patch=16, width=48, depth=2, heads=3)
SMALL_ARGUMENTS = dict(img_size=64, patch_size=16, embed_dim=48, depth=2, num_heads=3)


def put_into_cache(home, file, kind="ortho"):
    """Put a weights file into huggingface_hub's cache, as if it had been downloaded from the authors' repository."""
    commit = "0" * 40
    folder = home / "hub" / f"models--{REPOSITORY.format(kind).replace('/', '--')}"
    (folder / "snapshots" / commit).mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    (folder / "snapshots" / commit / "model.safetensors").write_bytes(Path(file).read_bytes())
