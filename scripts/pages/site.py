"""Hook of mkdocs: pages keep the paths that they have in the repository, and each command has a section.

Links between README, docs, model cards and source files are relative paths. They work on GitHub and on the site,
because the site contains these files at the same paths. `docs/commands.md` is the help of all commands.
"""
import argparse
import os
import re
from pathlib import Path
from typing import Any, Iterator

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[([^]]+)\]\(([^)#]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Return the files of the site: the files of the theme and of the repository, and the page of commands."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.*"), *(ROOT / "model_cards").rglob("*.*")]
    found += [path for folder in ("scripts", "timm_ortho") for path in (ROOT / folder).rglob("*.py")]
    pages = [File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path))
             for path in sorted(found)]
    pages.append(File.generated(config, "docs/commands.md", content=commands()))
    return Files([*files.css_files(), *files.javascript_files(), *pages])


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Return a page without its links to folders, which the site does not list."""
    folder = (ROOT / page.file.src_uri).parent
    return LINK.sub(lambda link: link[1] if (folder / link[2]).is_dir() else link[0], markdown)


def commands() -> str:
    """Return a page with the help of each command."""
    os.environ["COLUMNS"] = "100"  # the width of argparse's help
    from timm_ortho import cli

    sections = [f"## {parser.prog}\n\n```text\n{parser.format_help()}```\n" for parser in _parsers(cli._parser())]
    return "\n".join(["# Commands\n", *sections])


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from _parsers(child)
