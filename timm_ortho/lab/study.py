"""`timm-ortho study`: the paper's experiments, each one YAML file, run as grids of the lab's runs and reported.

A study is a grid of cells x connections x seeds. Runs with one seed are a pair: same start, same batches. The grid goes
seed by seed, so that an interrupted study holds whole pairs; runs that several cells share are trained once.

The output folder:

    study.yaml      the settings; a folder that has others, or those of another version, is refused
    <run>/          one folder for each run, see `training`; `<axis>=<value>-<connection>-seed<k>`
    rows.json       instead of runs, the rows of a study that trains nothing
    results.json, report.html, report.md

What the report is given, `study_report.write(study, runs, unfinished, folder) -> str`:

    study = {
        "name": "layer_pattern", "title": "Which blocks carry ...", "paper": "Table 4",
        "table": "layer_pattern",           # key of lab/paper.json
        "kind": "training",                 # or "overhead", "parameters", "gamma": nothing is trained, runs are rows
        "scale": "small", "dataset": "digits", "model": "vit_small",
        "axes": {"layers": ["none", "0,1", ...]},    # each axis of the grid and its values, in order; {} for none
        "connections": ["linear", "feature"],        # all that occur, in order
        "seeds": [0, 1, 2],
        "baseline": {"layers": "none"},     # what differences are to: the run whose cell and connection are changed to
                                            # these values, all else and the seed the same; {"connection": "linear"}
        "changed": ["epochs: 15 here, 300 in the paper", ...],    # what this scale and data set changed
        "versions": {"timm-ortho": ..., "torch": ..., "timm": ...},
        "command": "timm-ortho study run layer_pattern",
    }
    runs = [{
        "cell": {"layers": "0,1"},          # axis -> value, numbers or text; in a switch study {"switch": "LO"}
        "connection": "feature",            # what the run ends with; for LO that is feature
        "seed": 0,
        "top1", "top5", "loss", "best_top1", "best_epoch", "images_per_second", "peak_memory", "seconds", "epochs",
        "parameters", "model", "device",    # result.json; numbers that JSON does not have are None
        "history": [{"epoch", "train_loss", "eval_loss", "eval_top1", "eval_top5", "lr", "images_per_second",
                     "seconds", "peak_memory"}, ...],
        "probe": [{"epochs_done", "sites": [{"layer", "kind", "name", "stream", "parallel", "orthogonal",
                   "cosine"}, ...]}, ...],  # one validation batch, before training and after each epoch
        "dynamics": [{"step", "layer", "kind", "name", "stream", "parallel", "orthogonal", "parallel_share",
                      "orthogonal_share", "cosine", "rho", "theta"}, ...],    # [] where the study does not record
        "representation": {"effective_rank", "spectral_entropy", "feature_std",
                           "linear_cka"} or None,    # linear_cka: with the baseline's run; None for the baseline itself
    }, ...]
    unfinished = ["layers=0,1-feature-seed2", ...]

For the other kinds `runs` are rows of plain columns, as `cost` makes them, and `unfinished` is empty.
"""
