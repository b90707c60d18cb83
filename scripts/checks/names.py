"""List names that are used twice, and words that have a plainer replacement.

    python -m scripts.checks.names

Each line of the output is a finding: a class name that is defined twice, a file name that several folders use, or a
word of `WORDS` in a docstring, a comment, a Markdown page or the name of a function, class or variable. A file name
counts without its ending. `REASONS` excludes findings. The exit status is 1 if there are findings, or if a reason
excludes nothing.
"""
import argparse
import ast
import io
import re
import sys
import tokenize
from pathlib import Path
from typing import Dict, Iterator, List, Mapping, Tuple

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("timm_ortho", "scripts")
SHARED = ("__init__", "__main__")  # file names that every folder may use

WORDS = {  # regular expression -> replacement
    r"(?<!decimal )(?<!in )(?<!in-)(?<!last )(?<!its )places?": "the noun: path, cell, index or folder",
    r"\w+ less (?:linear|the identity)": "a difference: F − linear",
    r"likewise|whatever|(?:that|those) (?:of )?which|those that|the others": "the noun",
    r"what (?:is|was) given": "the argument",
    r"says?|said|tells?|told|asks?|asked": "a verb for things: contains, returns, requires",
    r"stands? (?:in|for|at)|hands? (?:on|over)|gone on": "is, returns, continues",
}

REASONS = {  # file, `file: class` or `file: word` -> reason
    "scripts/checks/names.py": "not part of the package",
}


def prose(path: Path) -> Iterator[Tuple[int, str]]:
    """Yield the text of a file with line numbers: docstrings, comments and names, or the lines of a Markdown page.

    Code in Markdown is omitted. Names are split at underscores, as in `in place` for `in_place`.
    """
    source = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        is_code = False
        for number, line in enumerate(source.splitlines(), 1):
            is_code ^= line.lstrip().startswith("```")
            if not is_code and not line.startswith("    "):
                yield number, re.sub(r"`[^`]*`", "", line)
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            for number, line in enumerate(node.body[0].value.value.splitlines(), node.body[0].lineno):
                yield number, line
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield node.lineno, node.name.replace("_", " ")
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg.replace("_", " ")
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id.replace("_", " ")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def findings(root: Path, reasons: Mapping[str, str]) -> List[str]:
    """Return the findings of a checkout that have no reason, and the reasons that exclude nothing."""
    modules = sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py"))
    pages = sorted(path for pattern in ("*.md", "docs/*.md") for path in root.glob(pattern))
    named: Dict[Tuple[str, str], List[str]] = {}  # kind and name -> keys of `reasons`
    for path in modules:
        key = path.relative_to(root).as_posix()
        if path.stem not in SHARED:
            named.setdefault(("file name", path.stem), []).append(key)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                named.setdefault(("class", node.name), []).append(f"{key}: {node.name}")
    found, used = [], set()
    for (kind, name), keys in named.items():
        if len(keys) > 1:
            used.update(keys)
            if len(set(keys) - reasons.keys()) > 1:
                found.append(f"{kind} {name} is used {len(keys)} times: {', '.join(keys)}")
    words = re.compile("|".join(rf"\b({pattern})\b" for pattern in WORDS), re.IGNORECASE)
    for path in [*modules, *pages]:
        for number, line in sorted(set(prose(path))):
            for match in words.finditer(line):
                key = f"{path.relative_to(root).as_posix()}: {match[0].lower()}"
                used.add(key)
                if key not in reasons:
                    plain = list(WORDS.values())[match.lastindex - 1]
                    found.append(f"{path.relative_to(root).as_posix()}:{number}: {match[0]!r}; write {plain}")
    return found + [f"{key} has a reason in REASONS, which excludes nothing" for key in reasons if key not in used]


if __name__ == "__main__":
    argparse.ArgumentParser(prog="python -m scripts.checks.names", description=__doc__.partition("\n")[0]).parse_args()
    found = findings(ROOT, REASONS)
    for each in found:
        print(each)
    sys.exit(bool(found))
