"""Test that YAML files of another person are read in bounded time, and that the package's own files have no aliases."""
import pytest
from helpers.laughs import LAUGHS

from timm_ortho._text import file_name
from timm_ortho._yaml import YAMLError, dump_yaml, load_yaml


@pytest.mark.parametrize(("text", "reason"), [
    (LAUGHS, r"aliases \(\*name\) are not supported, write the values instead"),
    ("a: &a {b: *a}", r"aliases \(\*name\)"),
    ("a: &a [1]\nb: {<<: *a}", r"aliases \(\*name\)"),
    *((f"a: !!{tag}", "could not determine a constructor") for tag in (
        "binary aGVsbG8=", "set {b, c}", "omap [b: 1]", "pairs [b: 1]", "python/tuple [1]")),
    ("a: !!int x", "a value cannot be read: invalid literal"),
    ("a: !!bool x", "a value cannot be read: 'x'"),
    ("[" * 21 + "]" * 21, "more than 20 levels of lists and mappings"),
    (f"a: {'9' * 5000}", "more than 1,000 characters"),
    (f"a: 1{':1' * 500}", "more than 1,000 characters must be in quotes"),
    (f"a: !!int '1{':1' * 500}'", "more than 1,000 characters"),
    ("[" * 100_000, "nesting|nested|recursion"),
    ("!!python/object/apply:os.getcwd []", "could not determine a constructor"),
])
def test_what_is_not_read(text, reason):
    with pytest.raises(YAMLError, match=reason):
        load_yaml(text)


def test_values_are_read_as_by_pyyaml():
    assert load_yaml(f"'{'1' * 1001}'") == "1" * 1001
    assert str(load_yaml("[" * 20 + "]" * 20)) == "[" * 20 + "]" * 20
    assert load_yaml("a: &unused [1, 2.5, null, yes]\n<<: {b: text}") == {"a": [1, 2.5, None, True], "b": "text"}


def test_dates_are_text():
    """JSON has no dates."""
    assert load_yaml("2026-01-31: [2026-13-01, !!timestamp 2026-01-31]") == {"2026-01-31": ["2026-13-01", "2026-01-31"]}


def test_dumped_yaml_has_no_aliases():
    shared = [1, 2]
    text = dump_yaml({"a": shared, "b": {"c": shared}})
    assert "&" not in text
    assert load_yaml(text) == {"a": shared, "b": {"c": shared}}


@pytest.mark.parametrize("name", [
    "/etc/passwd", "../logo", "..", ".", "", "a/../../b", "C:\\x", "a\0b", "a\nb", ".hidden", "lr=0.1-linear-seed0"])
def test_a_name_is_never_a_path(tmp_path, name):
    made = file_name(name)
    assert (tmp_path / made).parent == tmp_path
    assert (tmp_path / made).resolve().parent == tmp_path.resolve()
    assert file_name(made) == made
