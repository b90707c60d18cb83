"""Regenerate the tables of coverage, connections and speed, and the cards of weights, or check that they are current.

    python -m scripts.pages [NAME ...]            write them
    python -m scripts.pages --check [NAME ...]    write nothing; print the files that differ; exit status 1 if any do

Plots are checked only for existence, because their bytes depend on the version of matplotlib. `python -m
scripts.evidence` writes the results of the hypotheses.
"""
import argparse
import sys
from pathlib import Path

from timm_ortho.connections import CONNECTIONS, arguments_of
from timm_ortho.models import coverage

from . import cards, speed
from .marked import replaced, table

ROOT = Path(__file__).resolve().parents[2]


def coverage_texts(root: Path) -> dict[Path, str]:
    """Return docs/coverage.md with the table of architectures, from the file that `scripts.checks.survey` writes."""
    rows = coverage.timm_modules()
    covered, left_out = sum(len(row.covered) for row in rows), sum(len(row.left_out) for row in rows)
    total = (f"The package covers {covered:,} of the {covered + left_out:,} architectures of timm "
             f"{coverage.load()['timm']}:")
    page = root / "docs" / "coverage.md"
    made = table(coverage.COLUMNS, map(coverage.cells, rows))
    return {page: replaced(page, {"coverage": f"{total}\n\n{made}"})}


def connection_texts(root: Path) -> dict[Path, str]:
    """Return docs/arguments.md with the table of the registered connections."""
    rows = []
    for name, make in CONNECTIONS.items():
        summary = make.__doc__.splitlines()[0].replace("|", "\\|")
        rows.append((f"`{name}`", summary, ", ".join(f"`{argument}`" for argument in arguments_of(name))))
    page = root / "docs" / "arguments.md"
    made = table(("connection", "sum y of the stream x and the branch output f", "arguments"), rows)
    return {page: replaced(page, {"connections": made})}


# Each function maps paths below the root of a checkout to the texts that the files should have.
TEXTS = {"coverage": coverage_texts, "connections": connection_texts, "speed": speed.texts, "cards": cards.texts}


def main(arguments: list[str], root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.pages", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(TEXTS)} (default: all)")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a page differs")
    parsed = parser.parse_args(arguments)
    names = parsed.names or list(TEXTS)
    if not TEXTS.keys() >= set(names):
        parser.error(f"NAME is any of {', '.join(TEXTS)}, not {' '.join(names)}")
    differing = []
    for path, text in (item for name in names for item in TEXTS[name](root).items()):
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            differing.append(path)
            if not parsed.check:
                path.write_text(text, encoding="utf-8")
    for path, draw in cards.drawings(root).items() if "cards" in names else ():
        if not parsed.check:
            draw(path)
        elif not path.is_file():
            differing.append(path)
    for path in differing:
        print(path.relative_to(root).as_posix())
    if parsed.check and differing:
        print("these differ from their sources: run python -m scripts.pages", file=sys.stderr)
    return int(parsed.check and bool(differing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
