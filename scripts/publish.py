"""Add the numbers of finished studies to model_cards/results, and regenerate the pages and decisions.

    python -m scripts.publish FOLDER ...               output folders of timm-ortho study run; outputs of one study with
                                                       other cells, connections or seeds become one archive
    python -m scripts.publish --name NAME FOLDER       the output folder of timm-ortho compare

Studies are stored in the subfolders studies/NAME-DATASET-SCALE, comparisons in comparisons/NAME. Earlier numbers are
replaced. `timm_ortho/lab/reporting/published.py` describes the files. To keep the repository small, studies of more
than 24 runs keep only the norms and angles that were recorded in the last epoch.
"""
import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any, Mapping, Optional, Sequence

from timm_ortho.lab.folder import COMPARISON
from timm_ortho.lab.reporting.layout import grouped
from timm_ortho.lab.reporting.published import folder_name, write
from timm_ortho.run_folder import PRIVATE

ROOT = Path(__file__).resolve().parents[1]
MANY = 24  # studies with more runs than this keep only the records of the last epoch


def main(arguments: Sequence[str], root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.publish", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--name", help="name of a comparison, for example digits")
    parsed = parser.parse_args(arguments)
    if parsed.name and len(parsed.folders) > 1:
        parser.error("pass --name with one folder")
    outputs = [values_of(folder, parsed.name) for folder in parsed.folders]
    results = root / "model_cards" / "results"
    for name, parts in grouped(outputs, lambda values: parsed.name or folder_name(values["study"])).items():
        target = results / ("comparisons" if parsed.name else "studies") / name
        values = joined(parts)
        many = len(values["runs"]) > MANY
        write(target, values["study"], [lean(run, many) for run in values["runs"]], values.get("recorded"))
        print(target.relative_to(root).as_posix())
    from scripts import evidence  # reads the numbers written above
    from scripts.pages import __main__ as pages
    return evidence.main([], root) or pages.main([], root)


def values_of(folder: Path, comparison: Optional[str]) -> dict[str, Any]:
    """Return the values in the `results.json` of a finished study, without paths and with the commit of its runs."""
    values = json.loads(anonymous(results_of(folder), folder))
    study = values["study"]
    if (study.get("options") or {}).get("data_dir"):
        study["options"]["data_dir"] = "DIR"
    if values["unfinished"]:
        raise SystemExit(f"{folder} has unfinished runs: {', '.join(values['unfinished'])}")
    if (study["name"] == COMPARISON) != bool(comparison):
        raise SystemExit(f"{folder}: a comparison needs --name NAME, and a study takes no --name")
    study["versions"] = {**study.get("versions", {}), "commit": commit_of(study, values["runs"], folder)}
    return values


def joined(parts: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the values of one study, whose runs are in several outputs with different cells, connections or seeds."""
    if len(parts) == 1:
        return parts[0]
    first, runs = parts[0]["study"], [run for part in parts for run in part["runs"]]
    united: dict[str, Any] = {
        key: list(dict.fromkeys(value for part in parts for value in part["study"].get(key, [])))
        for key in ("connections", "weights")}
    united["seeds"] = sorted({run["seed"] for run in runs})
    united["command"] = " && ".join(part["study"]["command"] for part in parts)
    for part in parts:
        for key in {**first, **part["study"]}:
            if key not in united and first.get(key) != part["study"].get(key):
                raise SystemExit(f"the outputs of {first['name']} differ in {key}: publish one of them")
        if part["recorded"].get("transitions"):
            raise SystemExit(f"transition points of {first['name']} cannot be joined: train all seeds in one output")
    if len({(*run["cell"].items(), run["connection"], run["seed"]) for run in runs}) < len(runs):
        raise SystemExit(f"two outputs of {first['name']} have the same run: publish one of them")
    recorded = {key: [row for part in parts for row in part["recorded"][key]] for key in parts[0]["recorded"]}
    return {"study": {**first, **united}, "runs": runs, "recorded": recorded}


def results_of(folder: Path) -> str:
    """Return the text of a study's `results.json`."""
    if not (folder / "results.json").is_file():
        raise SystemExit(f"{folder} has no results.json: pass the output folder of timm-ortho compare or study run, "
                         "not that of one of its runs")
    return (folder / "results.json").read_text(encoding="utf-8")


def anonymous(text: str, folder: Path) -> str:
    """Return a text without the path of the data, and with the last component of all other absolute paths."""
    text = text.replace(str(folder.resolve()), f"output/{folder.name}").replace(f"{sys.prefix}/bin/", "")
    text = re.sub(r"[/\w.-]*/timm_ortho/__main__\.py", "timm-ortho", text)
    text = re.sub(r"(--data-dir[\s=]+)('[^']*'|[^\s'\"]+)", r"\1DIR", text)
    text = re.sub(r"""(["'])/(?:[^"']*/)?([^"'/]+)/?(?=\1)""", r"\1\2", text)  # may contain spaces
    return re.sub(r"""(?<=[\s=,\[])/(?:[^\s"']*/)?([^\s"'/]+)""", r"\1", text)


def lean(run: Mapping[str, Any], many: bool) -> dict[str, Any]:
    """Return a run with `made_with` shortened by `public` and, if `many` is true, only the last epoch's records."""
    records = run.get("dynamics") or []
    if many:
        begin = (1 - 1 / max(1, run["epochs"])) * max((row["step"] for row in records), default=0)
        records = [row for row in records if row["step"] > begin]
    return {**run, "dynamics": records, "made_with": public(run.get("made_with") or {})}


def public(made_with: Mapping[str, Any]) -> dict[str, Any]:
    """Return a run's `made_with` and its entries in `continued` without private keys and without `command`.

    study.json has the command of the whole study.
    """
    return {key: list(map(public, value)) if key == "continued" else value
            for key, value in made_with.items() if key not in PRIVATE | {"command"}}


def commit_of(study: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], folder: Path) -> str:
    """Return the commit of the runs, or that of the study if they differ."""
    named = {run["made_with"].get("commit") for run in runs if run.get("made_with")}
    # prefer the commit of the runs to that of the study: another machine may have trained them with an older commit
    commit = (named.pop() if len(named) == 1 else None) or study.get("versions", {}).get("commit")
    if not commit:
        raise SystemExit(f"the runs in {folder} have no common commit: train them in one checkout")
    return f"{commit[:12]}{'-dirty' * commit.endswith('-dirty')}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
