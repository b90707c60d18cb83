"""Studies and runs with made-up numbers for the tests of reports."""
import itertools
import random

from timm_ortho.lab.planning import study_file

SITES = [(layer, kind) for layer in range(2) for kind in ("attention", "mlp")]
GRIDS = {  # name of a study: key of the paper's table, axes of the grid, baseline
    "accuracy": ("accuracy", {"model": ["vit_s", "resnetv2_18"]}, {"connection": "linear"}),
    "cifar_vit_small": ("accuracy", {"model": ["vit_s"]}, {"connection": "linear"}),
    "switch_reinitialised": ("connection_switch_reinitialised", {"switch": ["LL", "LO", "OL", "OO"]}, {"switch": "LL"}),
    "switch_kept": ("connection_switch_continuous", {"switch": ["LL", "LO", "OL", "OO"]}, {"switch": "LL"}),
    "layer_pattern": ("layer_pattern", {"layers": ["none", "0,1", "all"]}, {"layers": "none"}),
    "branch_kinds": ("", {"branches": ["none", "attention", "mlp", "both"]}, {"branches": "none"}),
    "probability": ("probability", {"probability": [0.0, 0.5, 1.0]}, {"probability": 0.0}),
    "epsilon": ("epsilon", {"connection_eps": [1e-8, 1e-6]}, {"connection_eps": 1e-6}),
    "learning_rate": ("learning_rate_sweep", {"lr": [1e-3, 5e-4]}, {"connection": "linear"}),
    "initialisation": ("initialisation", {"initialisation": ["xavier"]}, {"connection": "linear"}),
    "head_norm": ("final_layer_norm", {"norm": ["without", "with"]}, {"connection": "linear"}),
    "hybrid": ("hybrid", {"start": ["fixed", "orthogonal", "linear"]}, {"start": "fixed", "connection": "linear"}),
    "dynamics": ("dynamics", {}, {"connection": "linear"}),
    "representation": ("representation", {}, {"connection": "linear"}),
    **{name: (name, {"depth": [20], "skip": ["identity", "orthogonal_tp"]}, {"skip": "identity"})
       for name in ("skips_single", "skips_branch4", "skips_depthwise")},
    "skip_rank": ("skip_rank", {"rank": [0.0, 1.0]}, {"rank": 1.0}),
    "families": ("", {"family": ["swin", "resnet"]}, {"connection": "linear"}),  # no table of a paper
    "fine_tuning": ("", {"pretraining": ["a"], "arm": ["linear", "feature"]}, {"arm": "linear"}),
    "fine_tuning_rates": ("", {"pretraining": ["a"], "arm": ["linear"], "lr": [3e-4, 6e-4]}, {"arm": "linear"}),
    "fine_tuning_imagenet": ("", {"arm": ["linear", "feature"]}, {"arm": "linear"}),
    "fine_tuning_imagenet_rates": ("", {"arm": ["linear"], "lr": [3e-4, 1e-3]}, {"arm": "linear"}),
    "compare": ("", {}, {"connection": "linear"}),  # made by `timm-ortho compare`, without a YAML file
}
RECORDED = [name for name in GRIDS if name in study_file.shipped() and study_file.read(name).get("record")]
DATA = {  # a study's `data`
    "classes": 10, "validation": 360, "train": 1437, "channels": 1, "image_size": [8, 8], "size_from": "recipe digits",
    "first_image": [8, 8], "validation_split": "test"}


def study_of(name, /, **changes):
    """Return a study with made-up properties. A study of the package, of the name `changes["name"]`, has its layout."""
    table, axes, baseline = GRIDS.get(name, (name, {}, {"connection": "linear"}))
    shipped = changes.get("name", name) in study_file.shipped()
    return {
        "name": name, "title": f"What about {name}?", "paper": "Table 0" if table else "", "table": table,
        "scale": "small", "dataset": "digits", "model": "vit_small",
        "axes": axes, "connections": ["linear", "feature"], "seeds": [0, 1, 2], "baseline": baseline,
        "report": study_file.read(name).get("report") if shipped else None,
        "changed": ["epochs: 3 here; 300 in the paper"] if table else [],
        "command": f"timm-ortho study run {name}", **changes}


def run_of(connection, seed, cell=None, *, top1=90.0, name="", epochs=3, **changes):
    """Return the results of a run, with the records that runs of the study `name` write."""
    history = [{
        "epoch": epoch, "train_loss": 2.0 / (epoch + 1), "eval_loss": 1.0 / (epoch + 1), "lr": 1e-3,
        "eval_top1": top1 - 10.0 * (epochs - 1 - epoch), "eval_top5": 99.0, "seconds": 2.0} for epoch in range(epochs)]
    cka = None if connection == "linear" else 0.6
    return {
        "cell": cell or {}, "connection": connection, "seed": seed, "top1": top1, "top5": 99.0, "loss": 0.5,
        "best_top1": top1, "best_epoch": epochs - 1, "images_per_second": 100.0, "peak_memory": 2**30, "seconds": 6.0,
        "epochs": epochs, "parameters": 1234, "model": "vit_small_ortho", "device": "cpu", "history": history,
        "probe": [probe(connection, epoch) for epoch in range(epochs + 1)],
        "dynamics": recorded(connection, seed) if name in RECORDED else [],
        "representation": {"effective_rank": 10.0 + seed, "spectral_entropy": 2.0, "feature_std": 0.5,
                           "linear_cka": cka} if name == "representation" else None, **changes}


def train_py_run(connection, seed, cell=None, *, top1=90.0, epochs=3):
    """Return the results of a run of timm's train.py, as read from its summary.csv and args.yaml."""
    history = [{"epoch": epoch, "train_loss": 1.0, "eval_loss": 1.0, "eval_top1": top1 - epochs + epoch + 1,
                "eval_top5": 99.0, "lr": 1e-3} for epoch in range(epochs)]
    return {"cell": cell or {}, "connection": connection, "seed": seed, "top1": top1, "top5": 99.0, "loss": 1.0,
            "trainer": "train.py", "dataset": "torch/cifar10", "history": history, "made_with": {
                "timm-ortho": "9.9", "timm": "1.0.31", "torch": "2.15.0", "commit": "abc123", "host": f"node{seed}",
                "gpu": "H200", "driver": "580.1", "begin": f"2026-11-2{seed}T10:00", "end": f"2026-11-2{seed}T11:00",
                "continued": ["2026-11-20T10:30"] if seed else []}}


def probe(connection, epoch):
    return {"epochs_done": epoch, "sites": [
        {"layer": layer, "kind": kind, "name": f"blocks.{layer}.{kind}", "stream": 4.0 + epoch, "parallel": 1.0,
         "orthogonal": 3.0, "cosine": 0.1 if connection == "linear" else None} for layer, kind in SITES]}


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


def connections_in(name, cell):
    """Return the connections with which the shipped study runs this cell of its grid."""
    if "switch" in cell:
        return ["feature" if cell["switch"][1] == "O" else "linear"]
    unchanged = "none" in (cell.get("layers"), cell.get("branches")) or cell.get("probability") == 0.0
    if unchanged or name.startswith("skip"):
        return ["linear"]
    if name in ("layer_pattern", "branch_kinds", "probability", "epsilon"):
        return ["feature"]
    if cell.get("start") in ("orthogonal", "linear"):
        return ["hybrid"]
    return ["linear", "global" if name == "initialisation" else "feature"]


def runs_of(name, seeds=(0, 1, 2), **changes):
    _, axes, _ = GRIDS[name]
    cells = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    return [run_of(connection, seed, cell, top1=80.0 + seed + index, name=name, **changes)
            for seed in seeds for index, cell in enumerate(cells) for connection in connections_in(name, cell)]


def accuracy(top1, **changes):
    """Return the accuracy study of ViT-S on digits and its runs; ``top1`` is {connection: top-1 of each seed}."""
    runs = [run_of(connection, seed, top1=value, epochs=1)
            for connection, values in top1.items() for seed, value in enumerate(values)]
    seeds = list(range(max(map(len, top1.values()))))
    return study_of("accuracy", **{"axes": {}, "seeds": seeds, "connections": list(top1), **changes}), runs
