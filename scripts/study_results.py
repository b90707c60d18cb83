"""Put finished studies into the project: reports, figures, numbers, and the list in docs/evidence.md.

    python scripts/study_results.py FOLDER ...    output folders of timm-ortho study; adds or replaces them
    python scripts/study_results.py --unfinished FOLDER ...    their finished runs, so that another machine can go on
    python scripts/study_results.py --again       every report anew, from what model_cards/results/studies holds
    python scripts/study_results.py               the list alone

A study goes to ``model_cards/results/studies/NAME-DATASET-SCALE/``: ``report.md`` with ``figures/``, and
``results.json`` with the commit that was checked out when it began. Nothing but what the runs gave is in them; of a
study of many runs not all of that, to keep the repository small, see :func:`lean`.
"""
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Mapping, Sequence

from marked import replaced

from timm_ortho.lab.folder import read_lines
from timm_ortho.lab.planning.design import shipped
from timm_ortho.lab.planning.plan import read
from timm_ortho.lab.reporting import report

ROOT = Path(__file__).parents[1]
MANY = 24  # runs
BEGIN, END = "<!-- studies: made by scripts/study_results.py -->", "<!-- end of studies -->"


def main(folders: Sequence[Path], root: Path = ROOT) -> None:
    for folder in folders:
        publish(folder, root / "model_cards" / "results" / "studies")
    page = root / "docs" / "evidence.md"
    page.write_text(replaced(page, BEGIN, END, listing(root / "model_cards"))[1], encoding="utf-8")


def publish(folder: Path, results: Path) -> None:
    values = json.loads(_elsewhere((folder / "results.json").read_text(encoding="utf-8"), folder))
    study = values["study"]
    if values["unfinished"]:
        raise SystemExit(f"{folder} has unfinished runs: {', '.join(values['unfinished'])}")
    study["versions"] = {**study.get("versions", {}), "commit": commit_before(folder / "study.yaml")}
    if len(values["runs"]) > MANY and study.get("kind", "training") == "training":
        values["runs"] = [lean(run) for run in values["runs"]]
    name = "-".join(filter(None, [study["name"], (study["dataset"] or "").replace("/", "_"), study["scale"]]))
    write(values, results / name)


def keep(folder: Path, unfinished: Path) -> int:
    """The finished runs, how many there are: what a report and the other runs need of them, see :func:`lean`."""
    target = unfinished / read(folder)["study"]["name"]
    finished = sorted(path.parent for path in folder.glob("*/result.json"))
    for run in finished:
        (target / run.name).mkdir(parents=True, exist_ok=True)
        for path in (run / "run.yaml", run / "result.json", *run.rglob("summary.csv")):
            there = target / run.name / path.relative_to(run)
            there.parent.mkdir(exist_ok=True)
            there.write_text(_elsewhere(path.read_text(encoding="utf-8"), folder), encoding="utf-8")
        lines = {name: read_lines(run / f"{name}.jsonl") for name in ("probe", "records")}
        epochs = json.loads((run / "result.json").read_text(encoding="utf-8"))["epochs"]
        less = lean({"epochs": epochs, "probe": lines["probe"], "dynamics": lines["records"]})
        for name, rows in (("probe", less["probe"]), ("records", less["dynamics"])):
            if rows:
                text = "".join(json.dumps(row) + "\n" for row in rows)
                (target / run.name / f"{name}.jsonl").write_text(text, encoding="utf-8")
    (target / "study.yaml").write_text(_elsewhere((folder / "study.yaml").read_text(encoding="utf-8"), folder))
    return len(finished)


def _elsewhere(text: str, folder: Path) -> str:
    """Without the paths of this machine."""
    text = text.replace(str(folder.resolve()), f"output/{folder.name}").replace(f"{sys.prefix}/bin/", "")
    text = re.sub(r"[/\w.-]*/timm_ortho/__main__\.py", "timm-ortho", text)
    return re.sub(r"(--data-dir\s+|data_dir: )[/\w.-]+", r"\1DIR", text)


def lean(run: Mapping) -> dict:
    """A run with its first and last probe, and the records of its last epoch."""
    records = run.get("dynamics") or []
    begin = (1 - 1 / max(1, run["epochs"])) * max((row["step"] for row in records), default=0)
    probes = run.get("probe") or []
    return {**run, "dynamics": [row for row in records if row["step"] > begin],
            "probe": probes if len(probes) < 2 else [probes[0], probes[-1]]}


def again(cards: Path = ROOT / "model_cards") -> None:
    for path in sorted((cards / "results" / "studies").glob("*/results.json")):
        values = json.loads(path.read_text(encoding="utf-8"))
        shutil.rmtree(path.parent / "figures", ignore_errors=True)
        write(values, path.parent)


def write(values: Mapping, folder: Path) -> None:
    """The report without its page, which says the same as report.md."""
    report.write(values["study"], values["runs"], values["unfinished"], folder, values.get("recorded"))
    (folder / "report.html").unlink()


def commit_before(file: Path) -> str:
    """The commit that was checked out when a file was last written."""
    command = ["git", "rev-list", "-1", f"--before={int(file.stat().st_mtime)}", "HEAD"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()[:12]


def listing(cards: Path) -> str:
    """The results of all studies: a sentence, a table in the order in which the package has them, a plot of each."""
    order = list(shipped())
    found = [(path, json.loads(path.read_text(encoding="utf-8")))
             for path in sorted((cards / "results" / "studies").glob("*/results.json"))]
    found.sort(key=lambda item: order.index(item[1]["study"]["name"]))
    compared, apart, adjusted = map(sum, zip(*(counts(values) for _, values in found), strict=True))
    lines = [
        f"Of {compared} differences to a baseline with a 95 % confidence interval, {apart} have an interval that "
        f"excludes zero, and {adjusted} are detected after Holm's adjustment within each study. By chance alone about "
        "one interval in twenty excludes zero.", "",
        "| study | in the paper | run on | interval excludes zero | of differences | after Holm |", "| --- " * 6 + "|"]
    lines += [_line(f"../model_cards/{path.parent.relative_to(cards)}", values) for path, values in found]
    for path, values in found:
        plot = path.parent.relative_to(cards) / "figures" / "differences.svg"
        if (cards / plot).is_file():
            title = f"{values['study']['title']} {_where(values['study'])}"
            lines += [
                "", f"<details><summary>{title}</summary>", "", f"![differences](../model_cards/{plot})", "",
                "</details>"]
    return "\n".join(lines)


def counts(values: Mapping) -> tuple[int, int, int]:
    """How many differences have an interval, an interval that excludes zero, and an adjusted p of at most 0.05."""
    found = [entry["difference"] for entry in values["summary"] if entry["difference"]]
    found = [difference for difference in found if difference["half_width"] is not None]
    return (len(found), sum(difference["reading"] in ("higher", "lower") for difference in found),
            sum(difference["p_holm"] <= 0.05 for difference in found))


def _where(study: Mapping) -> str:
    return f"{study['dataset']}, {study['scale']}, {len(study['seeds'])} seeds" if study["dataset"] else "-"


def _line(folder: str, values: Mapping) -> str:
    study = values["study"]
    compared, apart, adjusted = counts(values)
    said = f"{apart} | {compared} | {adjusted}" if compared else "- | - | -"
    return f"| [{study['title']}]({folder}/report.md) | {study['paper'] or '-'} | {_where(study)} | {said} |"


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments == ["--again"]:
        again()
        arguments = []
    if arguments[:1] == ["--unfinished"]:
        for argument in arguments[1:]:
            print(keep(Path(argument), ROOT / "model_cards" / "results" / "unfinished"), "finished runs of", argument)
        arguments = []
    main([Path(argument) for argument in arguments])
