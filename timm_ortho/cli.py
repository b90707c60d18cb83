"""Parse the command line, call the package and print.

An error in the user's input prints one line and returns 2. Errors that argparse finds, such as an unknown option, also
print the usage, and exit with status 2.
"""
import argparse
import ast
import json
import os
import runpy
import shlex
import sys
from pathlib import Path
from typing import Any, Sequence

from . import __version__
from ._text import CONSTRUCTOR_ERRORS, UserError, aligned, error_text, print_line, print_text

_EXTRA = ("matplotlib", "tqdm", "sklearn", "scipy", "filelock")  # modules of the extra `lab`


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `timm-ortho` or `python -m timm_ortho`, and return the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        for argument in arguments:
            if argument.encode(errors="ignore").decode() != argument:
                raise UserError(f"{argument!a} is not UTF-8: rename the file or folder")
        # argparse is not used here, because all words after SCRIPT belong to the script, including --help
        if arguments[:1] == ["run"] and len(arguments) > 1 and not arguments[1].startswith("-"):
            return run_script(arguments[1], arguments[2:])
        parsed = _parser().parse_args(arguments)
        parsed.command_line = shlex.join(["timm-ortho", *arguments])
        if not getattr(parsed, "quick", False):
            from . import _api  # noqa: F401 registers the variants
        return parsed.call(parsed)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # for example, head closes the pipe in `timm-ortho list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # at exit Python flushes stdout again
        return 1
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA or arguments[:1] == ["run"]:
            raise
        print(f'timm-ortho: error: {arguments[0]} needs {error.name}: pip install "timm-ortho[lab]"', file=sys.stderr)
        return 2
    except (UserError, OSError) as error:  # OSError: for example a full disk, or a folder without permission
        if arguments[:1] == ["run"] and type(error) is not UserError:  # an error of the script
            raise
        print_line(f"timm-ortho: error: {error if isinstance(error, UserError) else error_text(error)}")
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="timm-ortho", description="Orthogonal residual connections for timm's models.")
    parser.add_argument("--version", action="version", version=f"timm-ortho {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_compare(commands)
    _add_study(commands)
    _add_cost(commands)
    _add_bench(commands)
    _add_recipe(commands)
    _add_push(commands)
    _add_list(commands)
    _add_show(commands)
    env = commands.add_parser("env", help="print versions, device and backend for a bug report")
    env.set_defaults(call=_env)
    run = commands.add_parser(
        "run", help="run a script with the variants registered", usage="timm-ortho run SCRIPT [ARGS ...]",
        description="Registers the variants and runs SCRIPT as __main__, for example timm's validate.py, "
                    "benchmark.py or onnx_export.py. With torchrun: torchrun -m timm_ortho run SCRIPT ARGS ...")
    run.set_defaults(call=lambda parsed: run.error("the script is missing"))
    return parser


# ----------------------------------------------------------------------------------------- compare, study
def _shared(output: str) -> argparse.ArgumentParser:
    """Return the options that compare and study share. `output` is the folder below output/ of their runs."""
    parser = argparse.ArgumentParser(add_help=False)
    add = parser.add_argument
    add("--data-dir", metavar="DIR", help="folder of the data set; an image folder has train/CLASS/ and val/CLASS/")
    add("--device", metavar="NAME", help="default: cuda if available, otherwise cpu")
    add("--device-images", action=argparse.BooleanOptionalAction,
        help="decode all images once, keep them on the device and augment whole batches there (default: yes on a GPU "
             "if they need less than a quarter of its memory)")
    add("--option", "-o", action="append", default=[], type=_assignment, metavar="KEY=VALUE",
        help="any other option of timm's train.py, except those that a study varies")
    _add_modules(parser)
    add("--parallel", type=int, default=1, metavar="N", help="simultaneous runs (default: 1)")
    add("--output", metavar="DIR", help=f"default: a folder in output/{output}/, named after the settings")
    return parser


def _add_compare(commands: Any) -> None:
    parser = commands.add_parser(
        "compare", parents=[_shared("compare")],
        help="train one architecture with different connections on the same data, and report",
        description="Trains the same architecture with different connections on the same data, and compares runs with "
                    "the same seed in pairs. Ctrl-C and SIGTERM write a report of the finished runs. To continue, "
                    "run the same command again.")
    add = parser.add_argument
    add("--model", metavar="NAME", help="architecture without the suffix of a variant: vit_small, resnetv2_50, ...")
    add("--dataset", metavar="NAME", help="digits, a data set's name in timm (torch/cifar10, ...), or '' for an "
                                          "image folder (default: digits, or '' if --data-dir is set)")
    add("--recipe", metavar="FILE", help="YAML file for timm's train.py, or the name of a shipped recipe")
    add("--weights", metavar="FILE", help="file of weights to start from, with a new classifier (default: random)")
    add("--connections", nargs="+", default=["linear", "feature", "global"], metavar="NAME",
        help="connections to compare (default: linear feature global)")
    add("--seeds", nargs="+", default=["3"], metavar="N",
        help="number of seeds (default: 3), or several seeds: 0 4 7 (one: 7,)")
    add("--epochs", type=int, metavar="N", help="default: the recipe's")
    add("--batch-size", "-b", type=int, metavar="N", help="images per update of the weights (default: the recipe's)")
    add("--img-size", type=int, metavar="N", help="height and width in pixels (default: the recipe's or the model's)")
    add("--lr", type=float, metavar="LR", help="learning rate (default: the recipe's)")
    add("--workers", "-j", type=int, metavar="N", help="processes that load images (default: the recipe's)")
    add("--threads", type=int, metavar="N",
        help="CPU threads of each run (default: 1 for a small model, otherwise PyTorch's default)")
    add("--amp", action="store_true", default=None, help="mixed precision")
    add("--amp-dtype", choices=["float16", "bfloat16"],
        help="data type of --amp (default: float16 on a GPU, bfloat16 on a CPU)")
    add("--compile", dest="torchcompile", nargs="?", const="inductor", metavar="BACKEND", help="use torch.compile")
    add("--model-kwargs", nargs="+", type=_assignment, metavar="KEY=VALUE", help="arguments of the model")
    add("--open", dest="opened", action="store_true", help="open the report in the browser at the end")
    parser.set_defaults(call=_compare)


def _compare(parsed: argparse.Namespace) -> int:
    from .lab import commands as lab

    names = ("model weights dataset data_dir epochs batch_size img_size lr workers device amp amp_dtype torchcompile "
             "device_modules device_images")
    options = {**dict(parsed.option), **_requested(parsed, names)}
    if parsed.model_kwargs:
        options["model_kwargs"] = dict(parsed.model_kwargs)
    request = lab.Request(
        lab.comparison(_words(parsed.connections), parsed.recipe), options, seeds=_seeds(parsed.seeds),
        output=parsed.output, command=parsed.command_line)
    return lab.run(request, parallel=parsed.parallel, threads=parsed.threads, opened=parsed.opened)


def _add_study(commands: Any) -> None:
    parser = commands.add_parser(
        "study", help="plan, run and report the papers' experiments, or a study of your own")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    actions.add_parser("list", help="list the studies").set_defaults(call=_study_list, quick=True)
    planned = [_shared("study"), _study_options()]
    plan = actions.add_parser(
        "plan", parents=planned, help="write the folders of a study's runs, and print the commands",
        description="Writes a folder with the options of each run, prints the commands, and trains nothing.")
    plan.set_defaults(act=lambda lab, parsed: lab.make_plan(_request(lab, parsed), parsed.threads) and 0)
    run = actions.add_parser(
        "run", parents=planned, help="train the runs of a study, and report",
        description="Trains the runs of a study, compares runs with the same seed in pairs, and writes a report. "
                    "Ctrl-C and SIGTERM write a report of the finished runs. To continue, run the same command again.")
    run.set_defaults(act=lambda lab, parsed: lab.run(
        _request(lab, parsed), parallel=parsed.parallel, threads=parsed.threads, slurm=lab.Slurm(
            parsed.parallel, parsed.threads or 1, parsed.minutes, dict(parsed.slurm)
        ) if parsed.launcher == "slurm" else None))
    status = actions.add_parser("status", help="print the state of each run of a study")
    status.add_argument("folder", type=Path, metavar="FOLDER", help="output folder of the study")
    status.set_defaults(act=lambda lab, parsed: print_text(lab.status(parsed.folder)))
    report = actions.add_parser(
        "report", help="report finished runs, without training",
        description="Writes the report of a study, finished or not, and adds runs that you trained with timm's "
                    "train.py with the same settings as a run of the study.")
    report.add_argument("folders", nargs="+", type=Path, metavar="FOLDER",
                        help="the output of the study, and then folders of runs of train.py")
    report.add_argument("--output", type=Path, metavar="DIR", help="default: the output of the study")
    report.add_argument("--open", dest="opened", action="store_true", help="open the report in the browser")
    report.set_defaults(act=lambda lab, parsed: print_text(
        lab.report_on(parsed.folders, parsed.output, parsed.opened)))
    parser.set_defaults(call=_study)


def _study_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    add = parser.add_argument
    add("name", metavar="NAME", help="a name from timm-ortho study list, or a YAML file")
    add("--dataset", metavar="NAME",
        help="digits, cifar10, cifar100, svhn, tiny_imagenet, imagenet1k, a data set's name in timm "
             "(torch/fashion_mnist, ...), or '' for an image folder (default: the data set of the study or "
             "of its recipe; if neither has one, '' with --data-dir, otherwise digits)")
    add("--scale", default="small", metavar="SCALE", help="size of the study: smoke, small (default) or paper")
    add("--seeds", nargs="+", metavar="N",
        help="number of seeds (default: depends on --scale), or several seeds: 0 4 7 (one: 7,)")
    add("--only", action="append", default=[], type=lambda text: text.partition("=")[::2],
        metavar="AXIS=VALUE[,VALUE]",
        help="restrict the study to runs with these values: model=vit_b, connection=linear,feature")
    add("--threads", type=int, metavar="N", help="CPU threads of each run (default: 1)")
    add("--train-py", type=Path, metavar="FILE",
        help="train with this copy of timm's train.py instead of the package's own loop; --scale paper always "
             "trains with a train.py, by default $TIMM_DIR/train.py")
    add("--gpus", type=int, default=0, metavar="N", help="GPUs per node of each run of train.py (default: 0)")
    add("--nodes", type=int, default=1, metavar="N", help="nodes for each run of train.py (default: 1)")
    add("--launcher", default="local", choices=["local", "slurm"],
        help="where to start the runs; slurm submits them and returns (default: local)")
    add("--minutes", type=int, default=1440, metavar="N",
        help="time limit of a Slurm job, which is requeued when it reaches the limit (default: 1440)")
    add("--slurm", action="append", default=[], type=_sbatch_option, metavar="KEY=VALUE",
        help="option of sbatch: partition=gpu, account=me, exclusive=true")
    return parser


def _study_list(parsed: argparse.Namespace) -> int:
    from .lab.planning.study_file import listing

    print(listing())
    return 0


def _study(parsed: argparse.Namespace) -> int:
    from .lab import commands

    return parsed.act(commands, parsed) or 0


def _request(lab: Any, parsed: argparse.Namespace) -> Any:
    train_py = parsed.train_py
    if train_py is None and parsed.scale == "paper" and os.environ.get("TIMM_DIR"):
        train_py = Path(os.environ["TIMM_DIR"], "train.py")
    return lab.Request(
        lab.load(parsed.name, parsed.scale),
        {**dict(parsed.option),
         **_requested(parsed, "dataset data_dir device device_modules device_images")},
        seeds=None if parsed.seeds is None else _seeds(parsed.seeds),
        output=parsed.output,
        only=parsed.only,
        train_py=train_py,
        gpus=parsed.gpus,
        nodes=parsed.nodes,
        slurm=parsed.launcher == "slurm",
        command=parsed.command_line,
    )


def _requested(parsed: argparse.Namespace, names: str) -> dict[str, Any]:
    """Return the options that the user set. `names` lists options, separated by spaces."""
    return {name: getattr(parsed, name) for name in names.split() if getattr(parsed, name) is not None}


def _words(values: Sequence[str]) -> list[str]:
    return [word for value in values for word in value.split(",") if word]


def _seeds(values: Sequence[str]) -> list[int] | int:
    """Parse seeds: `3` means three seeds, `0 4 7` means these seeds, and `7,` means seed 7 alone."""
    words = _words(values)
    if not words or not all(word.isdecimal() for word in words):
        raise UserError(f"--seeds takes whole numbers of at least 0, not '{' '.join(values)}'")
    return int(words[0]) if len(words) == 1 and "," not in values[0] else [int(word) for word in words]


# ------------------------------------------------------------------------------------------------- cost
def _add_cost(commands: Any) -> None:
    parser = commands.add_parser(
        "cost", help="print one of the paper's tables of costs, without training",
        description="Prints a table beside the paper's numbers. overhead: throughput (Table 1b), measured. parameters: "
                    "parameters and FLOPs (Table 1a), counted. gamma: width divided by depth (Table 11).")
    add = parser.add_argument
    add("name", choices=["overhead", "parameters", "gamma"])
    add("--device", metavar="NAME", help="device for overhead (default: cuda if available, otherwise cpu)")
    parser.set_defaults(call=_cost)


def _cost(parsed: argparse.Namespace) -> int:
    from .lab.costs import TABLES

    print(TABLES[parsed.name](**({"device": parsed.device} if parsed.name == "overhead" else {})))
    return 0


# ------------------------------------------------------------------------------------------------ bench
def _add_bench(commands: Any) -> None:
    parser = commands.add_parser(
        "bench", help="measure time and memory of the orthogonal update on this machine",
        description="Measures the orthogonal update alone and in whole models, alternating with linear "
                    "connections. Writes bench.csv. Ctrl-C prints the finished measurements.")
    add = parser.add_argument
    add("--what", nargs="+", choices=["operator", "models"], help="parts to measure (default: both)")
    add("--models", nargs="+", metavar="NAME",
        help="variants (vit_small_ortho), or architectures (vit_small) for both variants; NAME:N sets the batch size "
             "(default: two models, three on a GPU)")
    add("--model-kwargs", nargs="+", type=_assignment, default=[], metavar="KEY=VALUE", help="arguments of the models")
    add("--img-size", type=_positive, metavar="N", help="default: the size of each architecture")
    add("--batch-size", "-b", type=_positive, metavar="N",
        help="batch size of all models (default: NAME:N of --models, otherwise 128 on a GPU and 8 on a CPU)")
    add("--shapes", nargs="+", metavar="SHAPE", help="shapes of tensors for the operator: 16x197x384 (tokens), "
                                                     "8x256x56x56 (NCHW, measured in both memory formats)")
    add("--dtypes", nargs="+", choices=["float32", "bfloat16", "float16", "mixed"],
        help="models use bfloat16 and float16 in autocast; the operator also has mixed for tokens: a float32 stream "
             "and a bfloat16 branch output (default: float32, on a GPU bfloat16)")
    add("--device", metavar="NAME", help="cpu, cuda or cuda:1 (default: cuda if available)")
    add("--compile", action=argparse.BooleanOptionalAction,
        help="also measure with torch.compile (default: yes on a CPU; on a GPU no, because it adds several minutes)")
    add("--modes", nargs="+", choices=["eager", "compiled"], help="modes of the models (default: see --compile)")
    add("--repeats", type=_positive, metavar="N", help="repetitions of each measurement (default: 11, on a GPU 20)")
    add("--output", type=Path, default=Path("bench"), metavar="DIR", help="default: bench/")
    parser.set_defaults(call=_bench)


def _bench(parsed: argparse.Namespace) -> int:
    from .bench import bench

    options = _requested(parsed, "what models img_size batch_size shapes dtypes device compile modes repeats")
    options["model_kwargs"] = dict(parsed.model_kwargs)
    return bench(options, parsed.output, parsed.command_line)


# ----------------------------------------------------------------------------------------------- recipe
def _add_recipe(commands: Any) -> None:
    parser = commands.add_parser(
        "recipe", help="print or write the papers' recipes, for timm's train.py -c and for compare --recipe",
        description="Prints a recipe with its sources, writes it as a YAML file, or lists all recipes.")
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("name", nargs="?", metavar="NAME")
    group.add_argument("--list", action="store_true", help="list all recipes, each with its table in the paper and the "
                                                         "paper's top-1 accuracy in %%")
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the recipe to this file")
    parser.set_defaults(call=_recipe)


def _recipe(parsed: argparse.Namespace) -> int:
    from .lab.planning import recipe

    text = recipe.listing() if parsed.list else recipe.text(parsed.name)
    if parsed.output:
        parsed.output.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    return 0


# ------------------------------------------------------------------------------------------------- push
def _add_push(commands: Any) -> None:
    parser = commands.add_parser(
        "push", help="publish a trained model on the Hugging Face Hub",
        description="Publishes the weights of one run as safetensors, with a config.json and a model card. Before the "
                    "upload, the files are loaded, and the outputs of the loaded model are compared with those of the "
                    "trained model. Log in with hf auth login, or set HF_TOKEN.")
    add = parser.add_argument
    add("model", metavar="CHECKPOINT_OR_RUN", help="a checkpoint, or the folder of one run, from timm's train.py, "
                                                   "timm-ortho compare or timm-ortho study")
    add("repo_id", metavar="REPO_ID", help="owner/name")
    add("--ema", action="store_true", help="publish the EMA weights")
    add("--labels", type=_lines, metavar="FILE",
        help="file with one class name per line (default: the class names of the run)")
    add("--license", metavar="NAME", help="the Hub's name of the license: apache-2.0, mit, ... "
                                          "(default: none, or the share-alike license of the initial weights)")
    add("--private", action="store_true", default=None, help="make a new repository private")
    add("--revision", metavar="BRANCH", help="branch; created if missing, unless --create-pr is set (default: main)")
    add("--create-pr", action="store_true", help="open a pull request instead of committing")
    add("--message", dest="commit_message", default="Add model", metavar="TEXT", help="the commit's title")
    add("--dry-run", action="store_true", help="write the folder and print the card, without uploading")
    add("--output", metavar="DIR", help="folder of a dry run (default: output/push/OWNER--NAME)")
    _add_modules(parser)
    parser.set_defaults(call=_push)


def _push(parsed: argparse.Namespace) -> int:
    from .hub import export, push
    from .run_folder import import_modules

    contents = _requested(parsed, "ema labels license revision")
    import_modules(parsed.device_modules)
    if parsed.dry_run:
        folder = Path(parsed.output or Path("output", "push", parsed.repo_id.replace("/", "--")))
        print_text(str(export(parsed.model, folder, parsed.repo_id, **contents)))
        print(f"dry run: nothing was uploaded; the files are in {folder}", file=sys.stderr)
        return 0
    commit = push(parsed.model, parsed.repo_id, **contents, **_requested(parsed, "private create_pr commit_message"))
    print(commit.pr_url or commit.commit_url)
    return 0


def _add_modules(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device-modules", nargs="+", metavar="MODULE",
                        help="modules to import first, for example with your own connections; a file's or folder's own "
                             "device_modules are imported only if they are named here too")


def _lines(file: str) -> list[str]:
    try:
        return Path(file).read_text(encoding="utf-8-sig").rstrip().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read: {error.strerror if isinstance(error, OSError) else error}") from None


# ------------------------------------------------------------------------------------------- list, env
def _add_list(commands: Any) -> None:
    parser = commands.add_parser("list", help="list the registered variants")
    parser.add_argument("pattern", nargs="?", help="pattern of names, as for timm.list_models: 'vit_small*' (default: "
                                                    "list the coverage of each of timm's modules, and the supported "
                                                    "blocks of torchvision and transformers)")
    parser.add_argument("--weights", action="store_true", help="list variants with weights, their size and source")
    parser.set_defaults(call=_list)


def _list(parsed: argparse.Namespace) -> int:
    import timm

    from .convert import is_variant
    from .models import coverage

    pattern = parsed.pattern or "*"
    if parsed.weights:
        names = [name for name in timm.list_pretrained(pattern) if is_variant(name)]
        if not names:
            raise UserError(f"no variant that matches '{pattern}' has weights: see timm-ortho list --weights")
        print("\n".join(aligned([("name", "size", "from", "on this machine"), *map(_weights, names)], "<><<")))
    elif not parsed.pattern:
        print("\n".join(aligned([coverage.COLUMNS, *map(coverage.cells, coverage.timm_modules())])))
        for library, modules in coverage.libraries().items():
            print(f"\n{library}, for timm_ortho.connect: residual blocks by module")
            print("\n".join(aligned([(module, ", ".join(blocks)) for module, blocks in modules.items()])))
    else:
        names = [name for name in timm.list_models(pattern) if is_variant(name)]
        if not names:
            raise UserError(f"no variant matches '{pattern}'{coverage.similar_variants(pattern)}")
        width = max(map(len, names))
        print(f"{'name':{width}}  {'parameters':>14}  sites  connection  weights")
        for name in names:
            print(_described(name, width), flush=True)
    return 0


def _weights(name: str) -> tuple[str, ...]:
    """Return the row of a variant with weights, without network access. 4 bytes per parameter for an absent file."""
    from .weights.pretrained import weights

    entry = weights(name)
    size = entry.file.stat().st_size if entry.file else 4 * _parameters(_model_on_meta(name))
    unit, text = (1e6, "MB") if size >= 1e6 else (1e3, "kB")
    return entry.name, f"{size / unit:.0f} {text}", entry.source, "yes" if entry.file else "no"


def _described(name: str, width: int) -> str:
    import timm

    from .model_sites import sites

    model = _model_on_meta(name)
    used = sorted({site.connection.name for site in sites(model)})
    weights = "yes" if timm.is_model_pretrained(name) else "none"
    return f"{name:{width}}  {_parameters(model):>14,}  {len(sites(model)):>5}  {', '.join(used):10}  {weights}"


def _model_on_meta(name: str) -> Any:
    import timm
    import torch

    with torch.device("meta"):
        return timm.create_model(name)


def _parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _add_show(commands: Any) -> None:
    parser = commands.add_parser(
        "show", help="print a model's residual additions, and their norms on one batch",
        description="Prints a line for each residual addition of a model, with block, kind and connection. The numbers "
                    "are measured on one batch: squared norms of the stream and of both components of the branch "
                    "output, and the cosine of stream and branch output.")
    add = parser.add_argument
    add("model", metavar="MODEL", help="a variant (vit_small_patch16_224_ortho), a checkpoint, the folder of one "
                                       "run, or a repository on the Hub (hf-hub:me/my-model)")
    add("--model-kwargs", nargs="+", type=_assignment, default=[], metavar="KEY=VALUE", help="arguments of the model")
    weights = parser.add_mutually_exclusive_group()
    weights.add_argument("--pretrained", action="store_true", help="load the weights of a variant")
    weights.add_argument("--checkpoint", default="", metavar="FILE",
                         help="load the weights of this checkpoint into a variant")
    add("--ema", action="store_true", help="load the EMA weights of a run")
    add("--image", type=Path, metavar="FILE", help="image to measure on (default: four images of noise)")
    add("--svg", type=Path, metavar="FILE", help="also draw a plot")
    _add_modules(parser)
    parser.set_defaults(call=_show)


def _show(parsed: argparse.Namespace) -> int:
    from .diagnostics import show
    from .run_folder import image_config, import_modules

    if parsed.svg and parsed.svg.suffix != ".svg":
        raise UserError(f"--svg writes SVG, so the file's name must end in .svg, not '{parsed.svg.name}'")
    try:
        import_modules(parsed.device_modules)
        model, options = _shown(parsed, dict(parsed.model_kwargs))
        measured = show.measured_sites(model, show.batch(model, parsed.image, image_config(model, options)))
        if parsed.svg:
            show.as_svg(measured, parsed.svg, parsed.model)
    except CONSTRUCTOR_ERRORS as error:
        raise UserError(error_text(error)) from None
    try:
        show.as_text(measured).encode(sys.stdout.encoding or "utf-8")
        print(show.as_text(measured))
    except UnicodeEncodeError:
        print(show.as_text(measured, ascii_only=True))
    return 0


def _shown(parsed: argparse.Namespace, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the model that `show` prints, and the options that describe the model's input images."""
    import timm
    from timm.layers import to_2tuple

    from .convert import is_variant
    from .hub import pull
    from .models.coverage import similar_variants
    from .run_folder import BY_HAND, CheckpointRun, NoRunError, run_model
    from .weights.files import load_weights

    name, checkpoint, size = parsed.model, parsed.checkpoint, kwargs.get("img_size")
    options = {} if size is None else {"input_size": (3, *to_2tuple(size))}
    names_variant, is_repository = is_variant(name), name.startswith(("hf-hub:", "local-dir:"))
    if not names_variant and (checkpoint or parsed.pretrained):
        raise UserError(f"--pretrained and --checkpoint are for variants, and there is no variant '{name}'")
    if "checkpoint_path" in kwargs:
        raise UserError("pass --checkpoint FILE instead of checkpoint_path=FILE")
    if parsed.ema and (is_repository or (names_variant and not checkpoint)):
        raise UserError(f"--ema is for runs and their checkpoints, not for '{name}': omit --ema")
    if is_repository:
        return pull(name, **kwargs), options
    if not names_variant and not os.path.exists(name):
        raise UserError(f"there is no variant '{name}'{similar_variants(name)}")
    if names_variant and not checkpoint:
        return timm.create_model(name, pretrained=parsed.pretrained, **kwargs), options
    if checkpoint and not os.path.isfile(checkpoint):
        raise UserError(f"there is no checkpoint '{checkpoint}'")
    try:
        run = CheckpointRun(Path(checkpoint or name), parsed.ema)
    except NoRunError as error:
        if not names_variant:
            advice = f"to show weights alone: timm-ortho show MODEL --checkpoint {name}"
            raise UserError(str(error).replace(BY_HAND, advice)) from None
        if parsed.ema:
            raise UserError(f"--ema needs a checkpoint with the options of its run, and {checkpoint} has none: omit "
                            "--ema") from None
        model = timm.create_model(name, **kwargs)
        load_weights(model, checkpoint, use_ema=False)
        return model, options
    return run_model(run, name if names_variant else None, **kwargs), {**run.options, **options}


def _env(parsed: argparse.Namespace) -> int:
    from .run_folder import environment

    for key, value in environment().items():
        print(f"{key:16} {value}")
    return 0


# ------------------------------------------------------------------------------------------ key=value
_JSON = {"true": True, "false": False, "null": None}


def _assignment(text: str) -> tuple[str, Any]:
    """Parse `key=value` as timm's `--model-kwargs` does, as a Python literal or text, but read `true` as a value.

    Literals that JSON cannot store, such as sets, are text.
    """
    key, value = _parts(text)
    try:
        read = ast.literal_eval(value)
        json.dumps(read)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):  # the last two: thousands of lists
        return key, _JSON.get(value, value)
    return key, read


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got '{text}'")
    return int(text)


def _sbatch_option(text: str) -> tuple[str, Any]:
    """Parse `key=value` for sbatch. Values are text, except `true`, which makes the option a flag without a value."""
    key, value = _parts(text)
    return key, value.lower() == "true" or value


def _parts(text: str) -> tuple[str, str]:
    key, sign, value = text.partition("=")
    if not sign:
        raise UserError(f"'{text}' is not of the form key=value")
    return key.strip(), value.strip()


# -------------------------------------------------------------------------------------------------- run
def run_script(script: str, arguments: Sequence[str]) -> int:
    """Register the variants, then do the same as `python SCRIPT ARGS...`."""
    from . import _api  # noqa: F401 registers the variants

    if not os.path.isfile(script):
        raise UserError(f"there is no script '{script}'")
    sys.argv = [script, *arguments]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    runpy.run_path(script, run_name="__main__")
    return 0
