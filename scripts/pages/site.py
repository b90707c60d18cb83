"""Hook of mkdocs: pages keep the paths that they have in the repository, and each command has a section.

Links between README, docs, model cards and source files are relative paths. They work on GitHub and on the site,
because the site contains these files at the same paths. `docs/commands.md` is the help of all commands, and
`docs/quickstart.md` the notebook.
"""
import argparse
import base64
import json
import os
import re
from pathlib import Path
from typing import Any, Iterator

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[2]
GENERATED = "[notebook](docs/quickstart.md), [help of the commands](docs/commands.md)"
LINK = re.compile(r"\[([^]]+)\]\(([^)#]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Return the files of the site: the files of the theme and of the repository, and the page of commands."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.*"), *(ROOT / "model_cards").rglob("*.*")]
    found += [path for folder in ("scripts", "timm_ortho") for path in (ROOT / folder).rglob("*.py")]
    pages = [File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path))
             for path in sorted(found)]
    pages.append(File.generated(config, "docs/commands.md", content=commands()))
    pages.append(File.generated(config, "docs/quickstart.md", content=notebook(ROOT / "docs" / "quickstart.ipynb")))
    return Files([*files.css_files(), *files.javascript_files(), *pages])


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    """Return a page without links to folders, which the site does not list, and with links to its generated pages."""
    folder = (ROOT / page.file.src_uri).parent
    markdown = markdown.replace("[notebook](docs/quickstart.ipynb)", GENERATED)
    return LINK.sub(lambda link: link[1] if (folder / link[2]).is_dir() else link[0], markdown)


def notebook(path: Path) -> str:
    """Return a notebook as Markdown: its cells, with text and plots of their outputs."""
    parts = []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            text = "".join(output.get("text", data.get("text/plain", ())))
            parts.append(f"````text\n{text.rstrip()}\n````")  # four, because a model card contains three
            if "image/svg+xml" in data:
                svg = base64.b64encode("".join(data["image/svg+xml"]).encode()).decode()
                parts[-1] = f'<img alt="plot" src="data:image/svg+xml;base64,{svg}">'
    return "\n\n".join(parts)


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
