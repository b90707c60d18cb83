"""Regenerate every generated page, table and plot of the project, or check that the committed ones are current.

    python -m scripts.pages [NAME ...]            write them
    python -m scripts.pages --check [NAME ...]    write nothing; print the pages that differ; exit status 1 if any do

`python scripts/pages` is the same command. Each NAME is a module beside this file. Its `texts(root)` maps paths below
`root` to the text that each file should have. Its `drawings(root)`, if the module has this function, maps paths of
plots to functions that draw them. `--check` tests only whether the plots exist, because their bytes depend on the
version of matplotlib. Files of model_cards that no generator writes also count as different if no NAME is passed.
"""
import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))  # for `python scripts/pages`

from scripts.pages import cards, coverage, evidence, speed, studies  # noqa: E402

GENERATORS = {"coverage": coverage, "speed": speed, "studies": studies, "evidence": evidence, "cards": cards}


def main(arguments: list[str], root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.pages", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"any of {', '.join(GENERATORS)} (default: all)")
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a page differs")
    parsed = parser.parse_args(arguments)
    unknown = set(parsed.names) - GENERATORS.keys()
    if unknown:
        parser.error(f"unknown names: {', '.join(sorted(unknown))}; known names: {', '.join(GENERATORS)}")
    names = parsed.names or list(GENERATORS)
    differing = [path for name in names for path in (check if parsed.check else write)(name, root)]
    unknown_files = [] if parsed.names else strangers(root)
    for path in dict.fromkeys(differing):  # two generators write docs/evidence.md, and two write README.md
        print(path.relative_to(root).as_posix())
    if parsed.check and differing:
        print("these differ from their sources: run python -m scripts.pages", file=sys.stderr)
    for path in unknown_files:
        print(f"no generator writes {path.relative_to(root).as_posix()}: delete it", file=sys.stderr)
    return 1 if parsed.check and (differing or unknown_files) else 0


def check(name: str, root: Path) -> list[Path]:
    """Return the files of a generator that differ, and its plots that are missing."""
    generator = GENERATORS[name]
    differing = [path for path, text in generator.texts(root).items() if read(path) != text]
    return differing + [path for path in getattr(generator, "drawings", lambda root: ())(root) if not path.is_file()]


def write(name: str, root: Path) -> list[Path]:
    """Write the files and plots of a generator, and return the changed ones."""
    generator, changed = GENERATORS[name], []
    for path, text in generator.texts(root).items():
        if read(path) != text:
            path.write_text(text, encoding="utf-8")
            changed.append(path)
    if hasattr(generator, "drawings"):
        for path, draw in generator.drawings(root).items():
            before = path.read_bytes() if path.is_file() else None
            draw(path)
            if path.read_bytes() != before:
                changed.append(path)
    return changed


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def strangers(root: Path) -> list[Path]:
    """Return pages and plots in model_cards that belong to no card and no study."""
    known = {"README", *(path.stem for path in (*cards.texts(root), *studies.pages(root)))}
    files = [path for pattern in ("*.md", "*/*.md", "*/*.png", "*/plots/*.svg")
             for path in (root / "model_cards").glob(pattern)]
    return sorted(path for path in files if path.stem not in known)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
