"""Test scripts/checks/names.py: findings in files, pages and names, and reasons that exclude them."""
import pytest

from scripts.checks.names import findings

FILES = {
    "timm_ortho/one.py": "class Run:\n    pass\n\n\nclass Part:\n    pass\n",
    "timm_ortho/lab/one.py": "class Inner:\n    class Run:\n        pass\n",
    "timm_ortho/__init__.py": "",
    "scripts/__init__.py": "",
}


@pytest.fixture
def checkout(tmp_path):
    def write(files):
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return tmp_path

    return write


def test_classes_and_files_of_the_same_name(checkout):
    root = checkout(FILES)
    assert findings(root, {}) == [
        "file name one is used 2 times: timm_ortho/lab/one.py, timm_ortho/one.py",
        "class Run is used 2 times: timm_ortho/lab/one.py: Run, timm_ortho/one.py: Run"]
    assert findings(root, {"timm_ortho/one.py": "a reason", "timm_ortho/lab/one.py: Run": "a reason"}) == []
    checkout({"scripts/one.py": ""})
    assert len(findings(root, {"timm_ortho/one.py": "a reason", "timm_ortho/lab/one.py: Run": "a reason"})) == 1


def test_reasons_that_exclude_nothing(checkout):
    root = checkout({"timm_ortho/one.py": "class Run:\n    pass\n"})
    reasons = {"timm_ortho/one.py": "", "timm_ortho/one.py: Run": "", "timm_ortho/one.py: place": ""}
    assert findings(root, reasons) == [f"{key} has a reason in REASONS, which excludes nothing" for key in reasons]


@pytest.mark.parametrize(("name", "text", "line"), [
    ("timm_ortho/a.py", '"""A file.\n\nIt says why.\n"""\n', 3),
    ("timm_ortho/a.py", "def f():\n    '''Likewise.'''\n", 2),
    ("timm_ortho/a.py", "x = 1  # F less linear\n", 1),
    ("timm_ortho/a.py", "def place_of(x):\n    pass\n", 1),
    ("timm_ortho/a.py", "def f(\n        place):\n    pass\n", 2),
    ("timm_ortho/a.py", "places = 1\n", 1),
    ("docs/a.md", "```\ncode\n```\nThe others.\n", 4),
    ("README.md", "It stands for x.\n", 1),
])
def test_words(checkout, name, text, line):
    root = checkout({name: text})
    found, = findings(root, {})
    assert found.startswith(f"{name}:{line}: ")
    word = found.split("'")[1].lower()
    assert findings(root, {f"{name}: {word}": "a reason"}) == []


@pytest.mark.parametrize(("name", "text"), [
    ("timm_ortho/a.py", 'x = "It says why."  # in place, decimal places\nlayer.in_place = f(place=1)\n'),
    ("docs/a.md", "```\nsays\n```\n    says\n`says`\n"),
    ("tests/a.py", "# It says why.\n"),
])
def test_code_and_plain_words_are_no_findings(checkout, name, text):
    assert findings(checkout({name: text}), {}) == []
