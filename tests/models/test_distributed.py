"""Training with DDP or FSDP2 gives the losses and weights of a single process. `connect` works on sharded models."""
import os
from datetime import timedelta
from functools import cache

import pytest
import timm
import torch
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import timm_ortho
from timm_ortho.functional import use_backend
from timm_ortho.update import backend

STEPS, BATCH = 4, 4
VIT = dict(img_size=16, patch_size=4, embed_dim=32, depth=3, num_heads=2, num_classes=5)
CASES = {
    "resnet": dict(connection="global", resnet=True),
    **{connection: dict(connection=connection, checkpointing=connection != "global")
       for connection in timm_ortho.CONNECTIONS if connection != "linear"},
}
if backend.why_not_triton("cpu") is None:  # the update with its norm, in Triton's interpreter
    CASES["kernels"] = dict(connection="feature", backend="triton", checkpointing=True)
WRAPPERS = ("DDP", "FSDP2")


def create(connection, checkpointing=False, resnet=False, backend=None):
    """Return a ViT or a ResNet in float64, where the order of sums hardly affects results. Kernels need float32."""
    torch.manual_seed(0)
    name, sizes = ("resnetv2_18_cifar_ortho", dict(width_factor=0.25)) if resnet else ("vit_small_ortho", VIT)
    model = timm.create_model(name, connection=connection, connection_eps=1e-3, **sizes)
    model = model.float() if backend else model.double()
    model.set_grad_checkpointing(checkpointing)
    return model.train(not resnet)  # BatchNorm in training mode would depend on the size of the local batch


def train(model, rank=0, size=1):
    """Train on this process's share of each batch and return the losses of the whole batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    generator = torch.Generator().manual_seed(1)
    losses = []
    dtype = next(model.parameters()).dtype
    for _ in range(STEPS):
        images = torch.randn(BATCH, 3, 16, 16, generator=generator, dtype=torch.float64).to(dtype)
        targets = torch.randint(5, (BATCH,), generator=generator)
        mine = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
        loss = nn.functional.cross_entropy(model(images[mine]), targets[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    losses = torch.stack(losses)
    if size > 1:
        distributed.all_reduce(losses)
    return losses / size


def parallel(model, wrapper):
    """Wrap ``model`` in DDP, or shard its blocks or stages and then the model with FSDP2."""
    if wrapper == "DDP":
        return DistributedDataParallel(model)
    for block in model.blocks if hasattr(model, "blocks") else model.stages:
        fully_shard(block)
    return fully_shard(model)


def work(rank, folder):
    """Train in one of two processes. The first process writes losses and full checkpoints to ``folder``."""
    torch.set_num_threads(1)
    store, timeout = f"file://{folder}/store", timedelta(minutes=2)
    distributed.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timeout)
    for name, arguments in CASES.items():
        for wrapper in WRAPPERS:
            model = parallel(create(**arguments), wrapper)
            with use_backend(arguments.get("backend", "torch")):
                losses = train(model, rank, 2)
            assert bool(backend.plans) == ("backend" in arguments)
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            shares = sum(p.to_local().numel() if wrapper == "FSDP2" else p.numel() for p in model.parameters())
            weights = get_model_state_dict(model, options=options)
            if rank == 0:
                torch.save({"losses": losses, "weights": weights, "share": shares}, f"{folder}/{wrapper} {name}")
    distributed.barrier()
    # Gloo's threads may abort if Python exits normally (github.com/pytorch/pytorch/pull/179291).
    os._exit(0)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distributed")
    torch.multiprocessing.spawn(work, args=(str(folder),), nprocs=2)
    return lambda wrapper, name: torch.load(folder / f"{wrapper} {name}", weights_only=True)


@cache
def alone(name):
    """Train in one process; return losses and model."""
    model = create(**CASES[name])
    return train(model), model


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_same_losses_as_one_process(results, wrapper, name):
    losses, model = alone(name)
    two = results(wrapper, name)
    rtol, atol = (1e-9, 1e-11) if losses.dtype == torch.float64 else (1e-4, 1e-5)
    torch.testing.assert_close(two["losses"], losses, rtol=rtol, atol=atol)
    assert losses[0] != losses[-1]
    whole = sum(parameter.numel() for parameter in model.parameters())
    assert two["share"] == whole if wrapper == "DDP" else two["share"] < 0.6 * whole


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_checkpoint_loads_into_one_process(results, wrapper, name):
    """The checkpoint has timm's parameter names. Weights and logits equal those of a model trained in one process."""
    model, (_, expected) = create(**CASES[name]).eval(), alone(name)
    model.load_state_dict(results(wrapper, name)["weights"], strict=True)
    dtype = next(model.parameters()).dtype
    rtol, atol = (1e-7, 1e-9) if dtype == torch.float64 else (1e-2, 2e-3)
    for (parameter, loaded), weight in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(
            loaded, weight, rtol=rtol, atol=atol, msg=lambda message, parameter=parameter: f"{parameter}: {message}")
    images = torch.randn(2, 3, 16, 16, dtype=dtype)
    torch.testing.assert_close(model(images), expected.eval()(images), rtol=rtol, atol=atol)


# --------------------------------------------------------------------------------- one process, sharded blocks
@pytest.fixture
def group():
    distributed.init_process_group("gloo", rank=0, world_size=1, store=distributed.HashStore())
    yield
    distributed.destroy_process_group()


def connections(model):
    return [(site.layer, site.kind, site.name, type(site.connection).__name__) for site in timm_ortho.sites(model)]


@pytest.mark.usefixtures("group")
def test_a_sharded_model_keeps_its_sites():
    model = create("feature", checkpointing=False)
    before = connections(model)
    with timm_ortho.record(parallel(model, "FSDP2"), every=1) as recorder:
        model(torch.randn(2, 3, 16, 16, dtype=torch.float64))
    assert connections(model) == before
    assert [(row["layer"], row["kind"], row["name"]) for row in recorder.rows] == [site[:3] for site in before]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(("before", "after"), [("feature", "global"), ("hybrid", "linear")])
def test_connecting_a_sharded_model_keeps_it_sharded(before, after):
    """Losses before and after `connect`, and the last weights, equal those of a model that is not sharded."""
    models = create(before, checkpointing=False), parallel(create(before, checkpointing=False), "FSDP2")
    classes = [type(module) for module in models[1].modules() if not isinstance(module, timm_ortho.Connection)]
    losses = []
    for model in models:
        first = train(model)
        timm_ortho.connect(model, after, eps=1e-3)
        losses.append(torch.cat([first, train(model)]))
    assert [type(module) for module in models[1].modules() if not isinstance(module, timm_ortho.Connection)] == classes
    assert connections(models[1]) == connections(models[0])
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-9, atol=1e-11)
    assert losses[0][0] != losses[0][STEPS]
    for (name, weight), sharded in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(sharded.full_tensor(), weight, rtol=1e-7, atol=1e-9, msg=name)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(("name", "connection", "blocks"), [
    ("vit_small_patch16_224", "feature", True),  # connect would change the classes of blocks
    ("vit_small_ortho", "hybrid", True),  # FSDP would neither shard the new parameters nor average their gradients
    ("vit_small_ortho", "hybrid", False),
])
def test_connections_that_sharding_rules_out_are_refused(name, connection, blocks):
    model = timm.create_model(name, **VIT)
    model = parallel(model, "FSDP2") if blocks else fully_shard(model)
    before = [type(module) for module in model.modules()]
    with pytest.raises(timm_ortho.UnsupportedModelError, match=r"sharded.*. Connect first, then wrap") as error:
        timm_ortho.connect(model, connection)
    assert "\n" not in str(error.value)
    assert [type(module) for module in model.modules()] == before


@pytest.mark.usefixtures("group")
def test_new_and_removed_parameters_in_a_ddp_model_are_refused():
    model, hybrid = (DistributedDataParallel(timm.create_model("vit_small_ortho", connection=connection, **VIT))
                     for connection in ("feature", "hybrid"))
    for change in (lambda: timm_ortho.connect(model, "hybrid"), lambda: timm_ortho.connect(hybrid, "feature"),
                   lambda: timm_ortho.disconnect(hybrid)):
        with pytest.raises(timm_ortho.UnsupportedModelError, match="inside DistributedDataParallel, which"):
            change()
    assert {site.connection.name for site in timm_ortho.sites(hybrid)} == {"hybrid"}
    for site in timm_ortho.sites(hybrid):
        site.connection.requires_grad_(False)  # DistributedDataParallel expects no gradients of frozen parameters
    timm_ortho.connect(hybrid, "feature")
    assert {site.connection.name for site in timm_ortho.sites(timm_ortho.connect(model, "global"))} == {"global"}


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("dim", [-1, None])
def test_sharded_tokens(dim):
    """Sequence parallelism divides the tokens among processes. With `dim=None`, the sums still run over all tokens."""
    x, f = torch.randn(2, 2, 5, 8, dtype=torch.float64, requires_grad=True).unbind()
    plain = timm_ortho.residual_update(x, f, dim=dim)
    mesh = init_device_mesh("cpu", (1,))
    shares = [distribute_tensor(whole.detach(), mesh, [Shard(1)]).requires_grad_() for whole in (x, f)]
    update = timm_ortho.residual_update(*shares, dim=dim)
    torch.testing.assert_close(update.full_tensor(), plain)
    update.square().sum().backward()
    for share, gradient in zip(shares, torch.autograd.grad(plain.square().sum(), (x, f)), strict=True):
        torch.testing.assert_close(share.grad.full_tensor(), gradient)
