"""Studies of the package with made-up runs, for the tests of reports."""
import random

from timm_ortho.lab.planning import design, study_file

SITES = [(layer, kind) for layer in range(2) for kind in ("attention", "mlp")]
STUDIES = [*study_file.shipped()]
DATA = {  # a study's `data`
    "classes": 10, "validation": 360, "train": 1437, "channels": 1, "image_size": [8, 8], "first_image": [8, 8],
    "validation_split": "test"}


def study_of(name, /, **changes):
    """Return a shipped study at scale `smoke` on digits, or another study without grid, with made-up properties."""
    keys = ("table", "axes", "baseline", "report", "connections")
    found = design.load(name, "smoke") if name in STUDIES else design.Design(name, "smoke", "")
    return {
        "name": name, "title": f"What about {name}?", "paper": "Table 0" if found.table else "", "scale": "small",
        "dataset": "digits", "model": "vit_small", "seeds": [0, 1, 2], **{key: getattr(found, key) for key in keys},
        "changed": ["epochs: 3 here; 300 in the paper"] if found.table else [],
        "command": f"timm-ortho study run {name}", **changes}


def run_of(connection, seed, cell=None, *, top1=90.0, epochs=3, **changes):
    """Return the results of a run of the lab's loop."""
    history = [{
        "epoch": epoch, "train_loss": 2.0 / (epoch + 1), "eval_loss": 1.0 / (epoch + 1), "lr": 1e-3,
        "eval_top1": top1 - 10.0 * (epochs - 1 - epoch), "eval_top5": 99.0, "seconds": 2.0} for epoch in range(epochs)]
    return {
        "cell": cell or {}, "connection": connection, "seed": seed, "top1": top1, "top5": 99.0, "loss": 0.5,
        "best_top1": top1, "best_epoch": epochs - 1, "peak_memory": 2**30, "epochs": epochs, "parameters": 1234,
        "model": "vit_small_ortho", "device": "cpu", "history": history,
        "probe": [{"epochs_done": epochs, "sites": [
            {"layer": layer, "kind": kind, "name": f"blocks.{layer}.{kind}", "stream": 4.0 + epochs, "parallel": 1.0,
             "orthogonal": 3.0, "cosine": 0.1 if connection == "linear" else None} for layer, kind in SITES]}],
        "dynamics": [], "representation": None, **changes}


def train_py_run(connection, seed, cell=None, *, top1=90.0, epochs=3):
    """Return the results of a run of timm's train.py, as read from its summary.csv and args.yaml."""
    history = [{"epoch": epoch, "train_loss": 1.0, "eval_loss": 1.0, "eval_top1": top1 - epochs + epoch + 1,
                "eval_top5": 99.0, "lr": 1e-3} for epoch in range(epochs)]
    return {"cell": cell or {}, "connection": connection, "seed": seed, "top1": top1, "top5": 99.0, "loss": 1.0,
            "trainer": "train.py", "dataset": "torch/cifar10", "history": history, "made_with": {
                "timm-ortho": "9.9", "timm": "1.0.31", "torch": "2.15.0", "commit": "abc123", "host": f"node{seed}",
                "gpu": "H200", "driver": "580.1", "begin": f"2026-11-2{seed}T10:00", "end": f"2026-11-2{seed}T11:00",
                "continued": ["2026-11-20T10:30"] if seed else []}}


def recorded(connection, seed, steps=6):
    """Return recorded rows. Until step 20, the streams and cosines of all connections differ by noise only.

    After step 20, they diverge between linear and all other connections.
    """
    rows = []
    for index in range(steps):
        apart = max(0, index - 2) * (1.0 if connection == "linear" else -1.0)
        for layer, kind in SITES:
            noise = random.Random(f"{connection} {seed} {index} {layer} {kind}").gauss(0, 0.01)
            rows.append({
                "step": 10 * index, "layer": layer, "kind": kind, "name": f"blocks.{layer}.{kind}",
                "stream": 50.0 + 5 * apart + noise, "parallel": 1.0 + index, "orthogonal": 3.0, "parallel_share": 0.02,
                "orthogonal_share": 0.06, "cosine": -0.1 * apart + noise, "s": -0.02 * apart + noise,
                "s_added": -0.02 * apart + noise if connection == "linear" else 0.0,
                "rho": 1.0 + 0.1 * index if connection == "hybrid" else None,
                "theta": 0.2 * layer if connection == "hybrid" else None})
    return rows


def runs_of(name, seeds=(0, 1, 2), **changes):
    """Return a run for each seed and each variant of a shipped study at scale `smoke`, or of `timm-ortho compare`."""
    study = design.load(name, "smoke") if name in STUDIES else None
    variants = study.variants({"dataset": "digits", "device": "cpu"}) if study else ()
    pairs = [(variant.cell, variant.connection) for variant in variants] or [({}, "linear"), ({}, "feature")]
    return [run_of(connection, seed, cell, top1=80.0 + seed + index, **{
        "dynamics": recorded(connection, seed) if study and study.record else [],
        "representation": {"effective_rank": 10.0 + seed, "spectral_entropy": 2.0, "feature_std": 0.5,
                           "linear_cka": None if connection == "linear" else 0.6} if name == "representation" else None,
        **changes}) for seed in seeds for index, (cell, connection) in enumerate(pairs)]


def accuracy(top1, **changes):
    """Return the accuracy study of ViT-S on digits and its runs; ``top1`` is {connection: top-1 of each seed}."""
    runs = [run_of(connection, seed, top1=value, epochs=1)
            for connection, values in top1.items() for seed, value in enumerate(values)]
    seeds = list(range(max(map(len, top1.values()))))
    return study_of("accuracy", **{"axes": {}, "seeds": seeds, "connections": list(top1), **changes}), runs
