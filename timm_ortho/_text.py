"""Format text: columns, file names, suggestions, errors in one line, CSV, JSON and SVG. Define the users' error."""
import csv
import difflib
import io
import math
import re
import sys
from itertools import islice
from typing import Any, AnyStr, Dict, Iterable, List, Mapping, Optional, Sequence

_OTHER_WORDS = {  # words from the papers and other libraries -> names of this package and of timm
    "orthogonal": "feature", "identity": "linear", "learning_rate": "lr", "image_size": "img_size", "optimizer": "opt",
    "scheduler": "sched", "label_smoothing": "smoothing",
}


class UserError(Exception):
    """The user's input cannot be used. The message is one line with the problem and the remedy.

    Its subclasses are ValueErrors too. UserError itself is not, because argparse replaces the message of a ValueError.
    """


# The errors of constructors of timm and torch, which check few of their arguments.
CONSTRUCTOR_ERRORS = (
    ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def did_you_mean(name: Any, known: Iterable[Any], count: int = 1, listed: bool = False) -> str:
    """Return text to append to a message about an unknown name: up to ``count`` similar known names, or "".

    If none is similar and ``listed`` is true, the text lists up to twelve known names. Words in ``_OTHER_WORDS`` count
    as the names that they replace.

    >>> did_you_mean("vit_smal", ["vit_small", "vit_base"]), did_you_mean("learning_rat", ["lr", "lr_base"])
    ("; did you mean 'vit_small'?", "; did you mean 'lr'?")
    """
    names = {str(each): str(each) for each in known}
    words = {**{word: meant for word, meant in _OTHER_WORDS.items() if meant in names}, **names}
    similar = dict.fromkeys(words[word] for word in difflib.get_close_matches(str(name), words, n=count))
    if similar:
        return f"; did you mean {' or '.join(map(repr, similar))}?"
    return f"; known are {', '.join(names)}" if listed and len(names) <= 12 else ""


def aligned(rows: Sequence[Sequence[str]], sides: str = "") -> List[str]:
    """Return rows of cells as lines with aligned columns. ``sides`` has ``<`` (default) or ``>`` for each column."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = sides or "<" * len(widths)
    return ["  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)).rstrip()
            for row in rows]


def file_name(name: Any) -> str:
    """Return a name as the name of a file or folder, which is never a path.

    >>> file_name("lr=0.1-linear-seed0"), file_name("../../logo"), file_name("..")
    ('lr=0.1-linear-seed0', '_.._logo', '_')
    """
    return re.sub(r"[^\w.,=+-]", "_", str(name)).lstrip(".") or "_"


def error_text(error: BaseException, named: bool = False) -> str:
    """Return the text of an error in one line of at most 300 characters, or the name of its class if it has no text.

    The name of the class precedes the text of a KeyError, which is only a key, and all texts if ``named`` is true.
    """
    name, text = type(error).__name__, " ".join(str(error).split())
    text = text if len(text) <= 300 else f"{text[:297]}..."
    return f"{name}: {text}" if text and (named or isinstance(error, KeyError)) else text or name


def printable(text: str) -> str:
    """Return text for a terminal, with escapes in place of characters that control it, except tabs and newlines.

    >>> printable("\\x1b[2J")
    '\\\\x1b[2J'
    """
    return "".join(each if each.isprintable() or each in "\t\n" else each.encode("unicode_escape").decode()
                   for each in text)


def plain_lines(value: Any) -> Any:
    """Return a copy of nested dicts and lists in which each text is one line of printable characters.

    Beyond 2,000 characters, " ... " replaces the middle.

    >>> plain_lines({"title": "a\\n\\x1b[2J"})
    {'title': 'a \\\\x1b[2J'}
    """
    if isinstance(value, str):
        line = re.sub(r"\s*[^\S ]\s*", " ", value).strip()  # a path may contain several spaces
        line = line if line.isprintable() else printable(line)  # the first case is fast, for records of many steps
        return line if len(line) <= 2000 else f"{line[:1000]} ... {line[-1000:]}"
    if isinstance(value, dict):
        return {plain_lines(key): plain_lines(inner) for key, inner in value.items()}
    return list(map(plain_lines, value)) if isinstance(value, (list, tuple)) else value


def print_text(text: str) -> None:
    """Print a document that may contain text of other people."""
    print(printable(text), flush=True)


def print_line(text: str) -> None:
    """Print a message that may contain text of other people, as one line of stderr."""
    print(plain_lines(text), file=sys.stderr, flush=True)


def escaped(text: str) -> str:
    """Return text as a paragraph of Markdown or a part of one, with backslashes before characters with a meaning.

    >>> escaped("a|b"), escaped("# a"), escaped("1. a")
    ('a\\\\|b', '\\\\# a', '1\\\\. a')
    """
    line = re.sub(r"([\\`*_\[\]<>|&~])", r"\\\1", plain_lines(text))
    return re.sub(r"^(\d*)([-+=#.)])(?=\s|\2|$)", r"\1\\\2", line)


def whole_lines(content: AnyStr) -> AnyStr:
    """Return the content of a file without a last line that has no newline. Its writer was stopped within this line.

    >>> whole_lines("1,16.1\\n2,1")
    '1,16.1\\n'
    """
    return content[:content.rfind("\n" if isinstance(content, str) else b"\n") + 1]


def finite(value: Optional[float]) -> bool:
    """Return whether a value is a finite number. None, which :func:`without_nan` uses for NaN, is not finite."""
    return value is not None and math.isfinite(value)


def without_nan(value: Any) -> Any:
    """Return a copy of nested dicts and lists with None in place of NaN and infinities, which JSON does not allow."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(k): without_nan(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(v) for v in value]
    return value


def csv_text(rows: Sequence[Mapping[str, Any]], columns: Optional[Sequence[str]] = None) -> str:
    """Return rows as CSV below a header, by default with all keys in the order in which they first occur."""
    text = io.StringIO()
    columns = list(dict.fromkeys(key for row in rows for key in row)) if columns is None else columns
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


ROWS, FIELDS = 2**18, 2**23  # the largest table of this project has 9,505 rows and 13 columns


def csv_rows(text: str) -> List[Dict[Any, Any]]:
    """Return the rows of CSV below its header, as texts by column. The column "" has the rest of a row that is longer.

    Raises:
        UserError: There are more than `ROWS` rows, or rows times columns are more than `FIELDS`. They fill the memory.
        csv.Error: The text is not CSV.
    """
    reader = csv.DictReader(io.StringIO(text, newline=""), restkey="")
    columns = len(reader.fieldnames or ())
    most = min(ROWS, FIELDS // max(1, columns))
    rows = list(islice(reader, most + 1))
    if len(rows) > most:
        raise UserError(f"it has more than {most:,} rows of {columns:,} columns")
    return rows


def svg_text(figure: Any, salt: str) -> str:
    """Return a figure of matplotlib as SVG with selectable text. Equal figures with equal salts have equal bytes."""
    from matplotlib import rc_context  # a slow import, and only the lab needs matplotlib

    buffer = io.StringIO()
    with rc_context({"svg.hashsalt": salt, "svg.fonttype": "none"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()
