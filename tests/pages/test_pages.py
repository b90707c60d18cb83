"""Test the length, commands and code of README and docs. `mkdocs build --strict` checks their links."""
import argparse
import importlib.util
import itertools
import re
import shlex
from pathlib import Path

import pytest
import timm
import yaml

import timm_ortho
from timm_ortho import cli
from timm_ortho.convert import variant_arguments
from timm_ortho.lab.planning import recipe, study_file
from timm_ortho.lab.train_options import known_options

ROOT = Path(__file__).parents[2]

BY_HAND = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "model_cards" / "README.md"])


def ids(path):
    return path.relative_to(ROOT).as_posix()


def text_of(path):
    return path.read_text(encoding="utf-8")


def without_blocks(text):
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def targets(path):
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "`", without_blocks(text_of(path))))


# -------------------------------------------------------------------------------------------------- the pages
def without_generated(path):
    return re.sub(r"<!-- (\w+): written by.*?<!-- end of \1 -->", "", text_of(path), flags=re.DOTALL)


def words(path):
    return len(without_generated(path).split())


def test_pages_are_short():
    assert len(text_of(ROOT / "README.md").split()) <= 900
    assert words(ROOT / "CONTRIBUTING.md") <= 1500
    tasks = {ROOT / "docs" / f"{name}.md" for name in ("train", "fine_tune", "distributed", "diagnostics")}
    assert sum(map(words, tasks)) <= 2000
    assert sum(map(words, {*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")} - tasks)) <= 17_000


def test_named_tests_and_scripts_exist():
    named = {file for path in BY_HAND for file in re.findall(r"(?:tests|scripts)/[\w/]+\.(?:py|sh)", text_of(path))}
    assert len(named) > 5
    assert [file for file in sorted(named) if not (ROOT / file).is_file()] == []


def test_products_are_no_html_tags():
    """The site would drop `<x, f>` outside code."""
    code = re.compile(r"^ {4}.*$|`[^`]*`|<!--.*?-->", re.DOTALL | re.MULTILINE)
    for path in BY_HAND:
        assert re.findall(r"<\w+, .*?>", code.sub("", without_blocks(text_of(path)))) == [], path


def test_every_page_is_in_the_navigation():
    navigation = text_of(ROOT / "mkdocs.yml").partition("\nnav:\n")[2]
    pages = {ids(path) for path in [*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md")]}
    linked = set(re.findall(r": (\S+\.md)$", navigation, re.MULTILINE))
    assert linked == pages | {"docs/commands.md", "docs/quickstart.md", "model_cards/README.md"}


def test_every_argument_is_listed_with_its_default():
    page = text_of(ROOT / "docs" / "arguments.md")
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| .* \| ([^|]+) \|$", page, re.MULTILINE)
    defaults = {name: value for each in timm_ortho.CONNECTIONS for name, value in variant_arguments(each).items()}
    assert {argument: of_connect for argument, of_connect, _ in rows} == {
        name: name if name == "connection" else name.removeprefix("connection_") for name in defaults}
    for argument, _, text in rows[1:]:  # rows[0] is `connection`; its default depends on the variant
        default = defaults[argument]
        assert default is None or yaml.safe_load(text.strip(" `").replace("1e-6", "1.0e-6")) == default, argument


def test_model_kwargs_of_train_py():
    """The arguments are parsed with timm's argparse action, as in train.py."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-kwargs", nargs="*", default={}, action=timm.utils.ParseKwargs)
    options_used = parser.parse_args([
        "--model-kwargs", "connection=hybrid", "connection_start=linear", "connection_layers=[0,2]",
        "connection_kinds=mlp", "connection_eps=1e-3", "connection_groups=2", "skip=scaled"]).model_kwargs
    model = timm.create_model("vit_test_ortho", **options_used)
    learned = [site for site in timm_ortho.sites(model) if site.connection.name == "hybrid"]
    assert [(site.layer, site.kind) for site in learned] == [(0, "mlp"), (2, "mlp")]
    assert {site.connection.groups for site in learned} == {2}
    for site in learned:
        assert (site.connection.start, site.connection.eps, site.connection.skip.name) == ("linear", 1e-3, "scaled")


def test_every_page_is_one_click_from_readme():
    linked = {(ROOT / target.partition("#")[0]).resolve() for target in targets(ROOT / "README.md")}
    assert {path for path in BY_HAND if path.name != "README.md"} <= linked


def test_the_website_describes_every_public_name():
    pages = "\n".join(text_of(path) for path in ROOT.glob("docs/api/*.md"))
    described = set(re.findall(r"^::: (\S+)$", pages, re.MULTILINE))
    public = {f"{module.__name__}.{name}" for module in (timm_ortho, timm_ortho.hub) for name in module.__all__}
    elsewhere = {"timm_ortho.hub", "timm_ortho.variants", "timm_ortho.hub.pull"}  # modules, and timm_ortho.pull
    assert public - described == elsewhere
    assert {f"timm_ortho.functional.{name}" for name in ("choose_backend", "plain_update", "use_backend")} <= described


# ------------------------------------------------------------------------------------------------ commands
def commands(path):
    """Return the commands in code blocks, indented lines and backticks. Shell comments are removed."""
    text = without_generated(path)  # generated tables have commands of earlier commits
    prose = without_blocks(text)
    blocks = "".join(re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    blocks += "".join(re.findall(r"^ {4}\S.*\n(?: {4}.*\n)*", prose, re.MULTILINE))
    lines = [line.strip() for line in blocks.replace("\\\n", " ").splitlines()]
    inline = [" ".join(span.split()) for span in re.findall(r"`([^`]+ --[^`]+)`", prose)]
    return [re.sub(r"\s+#.*", "", line) for line in lines + inline]


def arguments_of(command):
    """Return the arguments of timm-ortho in a command, or None."""
    command = command.partition(" > ")[0]
    matches = re.search(r"(?:^|&& |^torchrun .*-m )(?:python -m timm_ortho|timm-ortho|timm_ortho) (.*)", command)
    return shlex.split(matches[1]) if matches else None


def test_commands_are_parsed():
    """Every option, study, recipe and script that a command names exists."""
    parser, options = cli._parser(), known_options()
    found = list(itertools.chain(*map(commands, BY_HAND)))
    assert sum(arguments_of(command) is not None for command in found) > 30
    for command in found:
        arguments = arguments_of(command)
        if arguments and arguments[0] != "run" and "--help" not in arguments:
            parsed = vars(parser.parse_args(arguments))
            if arguments[:2] in (["study", "run"], ["study", "plan"]):
                assert parsed["name"] in study_file.shipped(), command
        for name in re.findall(r"(?:timm-ortho recipe|--recipe) ([a-z]\w+)(?![\w.])", command):
            assert name in recipe.shipped(), command
        if re.search(r"(^|\s)train\.py ", command):
            options_used = re.findall(r"--([a-z][\w-]*)", command.partition("train.py ")[2])
            assert {name.removeprefix("no-").replace("-", "_") for name in options_used} <= {
                *options, *(name.removeprefix("no_") for name in options)}, command
        for script in re.findall(r"\b((?:scripts|tests)/[\w./]+)", command):
            assert (ROOT / script).is_file(), command


# ------------------------------------------------------------------------------------------------------ snippets
X_AND_F = "x, f = torch.randn(2, 5, 8), torch.randn(2, 5, 8)"
BEFORE = {  # code that a reader must run before the snippets of a page
    "README.md": X_AND_F,
    "docs/coverage.md":  # the names of the quantizers are stand-ins; tests/models/test_low_precision.py runs them
        f"{X_AND_F}; valid = torch.ones(2, 5, dtype=torch.bool); from unittest.mock import MagicMock\n"
        "model = timm.create_model('vit_test_ortho', exportable=True).eval(); images = torch.zeros(1, 3, 8, 8)\n"
        "quantizer, reader, quantize_static = MagicMock(), MagicMock(), MagicMock()",
    "docs/transformations.md": "model = timm.create_model('vit_test_linear')",
    "docs/hub.md":
        "import transformers\n"
        "torch.save(timm.create_model('vit_test_linear', num_classes=7).state_dict(), 'last.pth.tar')\n"
        "config = transformers.ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=32)\n"
        "timm_ortho.connect(transformers.ViTForImageClassification(config), 'hybrid').save_pretrained('my-folder')\n"
        "new_model = transformers.ViTForImageClassification(config)",
    "docs/neighbours.md":
        "timm_ortho.hub.export(timm.create_model('resnetv2_18_ortho'), 'my-exported-model', 'me/my-model')",
    "docs/diagnostics.md":
        "model, other = (timm.create_model(f'vit_test_{name}', pretrained=True) for name in ('linear', 'ortho'))\n"
        "features, x, y = torch.randn(9, 4), torch.randn(9, 4), torch.randn(9, 4)\n"
        "loader = [(torch.randn(8, 3, 8, 8), torch.zeros(8, dtype=torch.long))]\n"
        "from unittest.mock import MagicMock\nwriter, wandb = MagicMock(), MagicMock()",
}


def snippets(path):
    return re.findall(r"^```python\n(.*?)^```", text_of(path), re.DOTALL | re.MULTILINE)


def test_every_page_with_snippets_is_run():
    """Other tests run the snippets of five pages: tests/blocks, tests/lab, and test_task_pages.py."""
    with_snippets = {ids(path) for path in BY_HAND if snippets(path)}
    elsewhere = ("own_blocks", "text_models", "your_own_data", "train", "fine_tune")
    assert with_snippets == {*BEFORE, *(f"docs/{name}.md" for name in elsewhere)}


@pytest.mark.parametrize("name", BEFORE)
def test_snippets_run(name, server, client, tmp_path):
    """Run the snippets of a page in a process that uses the mock Hub. Large weights are not loaded."""
    path = ROOT / name
    begin = f"import os, timm, timm_ortho, torch; os.chdir({str(tmp_path)!r})"
    parts = [part for part in snippets(path) if "opacus" not in part or importlib.util.find_spec("opacus")]
    code = "\n".join([begin, BEFORE[name], *parts])
    code = re.sub(r'("vit_base_\w+"), pretrained=True', r"\1", code)
    code = code.replace("timm_ortho.hub.push(", "model = timm.create_model('vit_test_ortho')\ntimm_ortho.hub.push(")
    file = tmp_path / "snippets.py"
    file.write_text(code, encoding="utf-8")
    if name.endswith(("hub.md", "neighbours.md")):
        pytest.importorskip("transformers", minversion="5")
    if name.endswith("neighbours.md"):
        pytest.importorskip("segmentation_models_pytorch")
    if name.endswith("hub.md"):
        for revision in ("main", "v1"):
            pushed = client.run("timm_ortho.hub.push(timm.create_model('vit_test_ortho'), 'me/my-model', "
                                f"revision={revision!r})")
            assert pushed.error is None, pushed.output
    result = client.run(f"answer(sorted(runpy.run_path({str(file)!r})))")
    assert result.error is None, result.output
    assert "timm_ortho" in result.answer
