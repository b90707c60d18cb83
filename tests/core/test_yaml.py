"""Test that YAML files of another person are read in bounded time, and that the package's own files have no aliases."""
import pytest
from helpers.laughs import LAUGHS

from timm_ortho._text import file_name
from timm_ortho._yaml import YAMLError, dump_yaml, load_yaml


@pytest.mark.parametrize(("text", "reason"), [
    (LAUGHS, r"aliases \(\*name\) are not supported, write the values instead"),
    ("a: &a {b: *a}", r"aliases \(\*name\)"),
    ("a: &a [1]\nb: {<<: *a}", r"aliases \(\*name\)"),
    ("a: 2026-13-01", "month must be in 1..12"),
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
    assert load_yaml("a: &unused [1, 2.5, null, yes]\n<<: {b: text}") == {"a": [1, 2.5, None, True], "b": "text"}


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
