"""`timm_ortho.hub.push` and `timm-ortho push`: the real client pushes to the Hub of `hub_server.py`, from processes of
its own, and what it pushed is loaded in others with an empty cache.
"""
import json
import re

import pytest
from helpers.hub_client import SOON, HubClient
from helpers.hub_server import HubServer
from helpers.trained_runs import lab_grid

from timm_ortho import hub

SECRET = "hf_" + "0123456789abcdef" * 2
IMPORTS = """
import json, pathlib, sys, huggingface_hub, timm, torch
import timm_ortho
from timm_ortho import cli, hub

def make(name, **kwargs):
    torch.manual_seed(0)
    return timm.create_model(name, **kwargs).eval()

def tiny(seed=0):
    torch.manual_seed(seed)
    return timm.create_model("vit_small_ortho", img_size=16, patch_size=8, embed_dim=16, depth=1, num_heads=2).eval()

def logits(model, chans=3, size=32):
    with torch.no_grad():
        return model(torch.randn(2, chans, size, size, generator=torch.Generator().manual_seed(1))).tolist()

def pull(name):
    return timm.create_model("hf-hub:" + name, pretrained=True).eval()
"""
MODELS = {  # the first is larger than the 10 MB above which nothing travels inside a commit
    "me/vit": ("vit_small_orthog", dict(img_size=32, patch_size=8, depth=2, num_classes=7, connection_prob=0.5)),
    "me/resnet": ("resnetv2_18_cifar_ortho", dict(
        channels=[16, 16, 32, 32], head_norm=True, num_classes=5, connection_layers=[0, 3])),
}


@pytest.mark.parametrize("uploads", ["regular", "lfs", "xet"])
def test_what_is_pushed_comes_back_to_the_bit(tmp_path, uploads):
    xet = {"HF_HUB_DISABLE_XET": "0" if uploads == "xet" else "1"}
    with HubServer(tmp_path, uploads) as server:
        token = server.add_user("me")
        with HubClient(tmp_path, server.endpoint, token, IMPORTS, **xet) as client:
            for repo_id, (name, kwargs) in MODELS.items():
                pushed = client.run(f"model = make({name!r}, **{kwargs!r}); hub.push(model, {repo_id!r}); answer("
                                    "[logits(model), [repr(site) for site in timm_ortho.sites(model)]])")
                assert pushed.error is None, pushed.output
                client.forget()
                pulled = client.run(f"model = pull({repo_id!r}); answer("
                                    "[logits(model), [repr(site) for site in timm_ortho.sites(model)]])")
                assert pulled.answer == pushed.answer, pulled.output
                assert token not in pushed.output + pulled.output
        sizes = {repo_id: server.repositories[repo_id].find("main").files for repo_id in MODELS}
        assert sizes["me/vit"]["model.safetensors"].size > 10_000_000
        for files in sizes.values():
            assert files.keys() == {".gitattributes", "model.safetensors", "config.json", "README.md"}
        assert server.leaks(token) == []
        large, puts = sizes["me/vit"]["model.safetensors"], [r for r in server.requests if r.method == "PUT"]
        assert (large.large, large.xet is not None, bool(puts)) == {
            "regular": (False, False, False), "lfs": (True, False, True), "xet": (True, True, False)}[uploads]


def test_a_run_from_the_command_line(server, client, tmp_path):
    run = lab_grid(tmp_path / "compared", seeds=2) / "feature-seed0"
    words = ["push", str(run), "me/digits", "--message", "First", "--license", "mit"]
    pushed = client.run(f"answer(cli.main({words!r}))")
    assert pushed.answer == 0, pushed.output
    commit = server.repositories["me/digits"].find("main")
    assert commit.title == "First"
    assert f"{server.endpoint}/me/digits/commit/{commit.oid}\n" in pushed.output
    assert commit.files.keys() >= {"training.png", "README.md"}
    card = server.files("me/digits")["README.md"].decode()
    assert "license: mit" in card
    top1 = json.loads((run / "result.json").read_text())["top1"]
    assert f"| top-1 of these weights, % | {top1:.2f} |" in card
    again = client.run("answer(logits(pull('me/digits'), 1, 16))")
    hub.export(run, tmp_path / "out", "me/digits")
    expected = client.run(f"model = timm.create_model('local-dir:{tmp_path / 'out'}', pretrained=True).eval(); "
                          "answer(logits(model, 1, 16))")
    assert again.answer == expected.answer, again.output


def test_a_repository_is_shown(server, client):
    assert client.run("hub.push(tiny(), 'me/model')").error is None
    shown = client.run("answer(cli.main(['show', 'hf-hub:me/model']))")
    assert shown.answer == 0, shown.output
    expected = client.run("from timm_ortho.diagnostics import show\n"
                          "model = tiny(); print(show.as_text(show.lines(model, torch.randn(4, 3, 16, 16, "
                          "generator=torch.Generator().manual_seed(0)))))")
    assert shown.output.splitlines()[-3:] == expected.output.splitlines()[-3:]


def test_a_revision_is_a_branch_and_main_stays(server, client):
    assert client.run("hub.push(tiny(), 'me/model')").error is None
    pushed = client.run("hub.push(tiny(1), 'me/model', revision='v2'); answer(logits(tiny(1), 3, 16))")
    assert pushed.error is None, pushed.output
    client.forget()
    assert client.run("answer(logits(pull('me/model@v2'), 3, 16))").answer == pushed.answer
    assert client.run("answer(logits(pull('me/model'), 3, 16) == logits(tiny(), 3, 16))").answer is True
    assert 'hf-hub:me/model@v2"' in server.files("me/model", "v2")["README.md"].decode()
    assert client.run("hub.push(tiny(2), 'me/model', revision='v2')").error is None  # a branch that is there


def test_a_pull_request_changes_nothing_but_itself(server, client):
    assert client.run("hub.push(tiny(), 'me/model')").error is None
    before = server.files("me/model")
    result = client.run("answer(hub.push(tiny(1), 'me/model', create_pr=True).pr_url)")
    assert result.answer == f"{server.endpoint}/me/model/discussions/1", result.output
    assert server.files("me/model") == before
    proposed = client.run("answer(logits(pull('me/model@refs/pr/1'), 3, 16) == logits(tiny(1), 3, 16))")
    assert proposed.answer is True, proposed.output
    line = client.run("sys.exit(cli.main(['push', 'none', 'me/model', '--create-pr']))")
    assert "there is no checkpoint or run folder 'none'" in line.output


def test_private(server, client):
    assert client.run("hub.push(tiny(), 'me/secret', private=True)").error is None
    assert server.repositories["me/secret"].private
    assert client.run("hub.push(tiny(1), 'me/secret', private=True)").error is None
    assert client.run("hub.push(tiny(), 'me/open')").error is None
    before = server.files("me/open")
    refused = client.run("hub.push(tiny(1), 'me/open', private=True)")
    assert refused.error.startswith("PublishError: me/open is there already and public, so what is pushed would be too")
    assert server.files("me/open") == before


@pytest.mark.parametrize(("what", "path", "method"), [(403, "/blobs/", "PUT"), ("cut", "/commit/", "POST")])
def test_an_upload_that_breaks_off_leaves_what_was_there(server, client, what, path, method):
    assert client.run("hub.push(tiny(), 'me/model')").error is None
    before = server.files("me/model")
    # content that breaks off is sent five times by the client itself, over half a minute: here it is refused
    server.fail(what, path, method, after=100)
    broken = client.run("hub.push(tiny(1), 'me/model')")
    refusals = r"PublishError: the (Hub refuses this token write access|upload was interrupted \(Rem)"
    assert re.match(refusals, broken.error)
    assert server.files("me/model") == before
    client.forget()
    assert client.run("answer(logits(pull('me/model'), 3, 16) == logits(tiny(), 3, 16))").answer is True
    server.heal()
    assert client.run("hub.push(tiny(1), 'me/model')").error is None
    client.forget()
    assert client.run("answer(logits(pull('me/model'), 3, 16) == logits(tiny(1), 3, 16))").answer is True


def test_a_first_upload_that_breaks_off_leaves_nothing_that_loads(server, client):
    server.fail("cut", "/commit/", after=100)
    broken = client.run("hub.push(tiny(), 'me/model')")
    assert broken.error.startswith("PublishError: the upload was interrupted (RemoteProtocolError: ")
    assert broken.error.endswith("); me/model is as it was, and the same command again completes it")
    assert server.files("me/model").keys() == {".gitattributes"}
    assert client.run("pull('me/model')").error is not None
    server.heal()
    client.forget()
    assert client.run("hub.push(tiny(), 'me/model')").error is None
    assert client.run("answer(logits(pull('me/model'), 3, 16) == logits(tiny(), 3, 16))").answer is True


def test_content_that_breaks_off_once_is_sent_again(server, client):
    server.fail("cut", "/blobs/", method="PUT", times=1, after=100)
    assert client.run("hub.push(tiny(), 'me/model')").error is None
    client.forget()
    assert client.run("answer(logits(pull('me/model'), 3, 16) == logits(tiny(), 3, 16))").answer is True


FAILURES = {
    401: "the Hub does not know the token (401 from {}); log in as somebody else (`hf auth login`) and unset "
         "HF_TOKEN, or set it to a token with write access",
    403: "the Hub gives the token no write access to me/model (403 from {}); use one that has it, or propose the "
         "change with --create-pr",
    404: "the Hub has no me/model for the token, or not that revision (404 from {}); check both names",
    409: "the Hub has somebody else writing to me/model (409 from {}); give the same command again",
    429: "the Hub asks to slow down (429 from {}); try again in 60 s, or log in as somebody else (`hf auth login`) "
         "for a higher limit",
    500: "the Hub has a failure of its own (500 from {}); try again later, see https://status.huggingface.co",
    503: "the Hub has a failure of its own (503 from {}); try again later, see https://status.huggingface.co",
    "silence": "{} does not answer within 7 s; try again later, or check the network",
    "cut": "{} cannot be reached (RemoteProtocolError: ",
}


@pytest.mark.parametrize("what", FAILURES)
def test_a_failing_hub_is_named_soon(server, client, what):
    server.fail(what)
    result = client.run("hub.push(tiny(), 'me/model')")
    assert result.error.startswith("PublishError: " + FAILURES[what].format(server.endpoint))
    assert result.seconds < SOON
    assert "During handling" not in result.output  # one line, not the client's traceback


@pytest.mark.parametrize(("status", "path"), [
    (401, "/commit/"), (403, "/preupload/"), (503, "/commit/"), (500, "create")])
def test_a_hub_that_fails_on_the_way(server, client, status, path):
    server.fail(status, path)
    result = client.run("hub.push(tiny(), 'me/model')")
    assert result.error == "PublishError: " + FAILURES[status].format(server.endpoint)
    assert result.seconds < SOON


def test_tokens_are_in_the_header_and_nowhere_else(server, client):
    other, reader = server.add_user("other"), server.add_user("me", role="read")
    server.create_repo("me/model")
    before = server.files("me/model")
    bad = "hf_" + "x" * 34
    for token in (other, reader, bad):
        result = client.run(f"hub.push(tiny(), 'me/model', token={token!r})")
        assert result.error == "PublishError: " + FAILURES[401 if token == bad else 403].format(server.endpoint)
        assert token not in result.output + result.error
        assert server.leaks(token) == []
    assert server.files("me/model") == before
    stored = client.run("hub.push(tiny(), 'me/other', token=True)")  # the one in use
    assert stored.error is None, stored.output
    anonymous = client.run("hub.push(tiny(), 'me/model', token=False)")
    assert anonymous.error.startswith("PublishError: the Hub does not know who is asking (401 from ")


@pytest.mark.parametrize(("endpoint", "environment", "error"), [
    ("http://127.0.0.1:9", {}, "http://127.0.0.1:9 cannot be reached (ConnectionRefusedError: [Errno 111] Connection "
                               "refused); check the network, the proxy and HF_ENDPOINT"),
    ("http://127.0.0.1:9", dict(HF_HUB_OFFLINE="1"),
     "HF_HUB_OFFLINE is set, and me/model is on the Hub: unset it, or use --dry-run"),
])
def test_without_a_network(tmp_path, endpoint, environment, error):
    with HubClient(tmp_path, endpoint, SECRET, IMPORTS, **environment) as client:
        result = client.run("hub.push(tiny(), 'me/model')")
    assert result.error == f"PublishError: {error}"
    assert result.seconds < SOON
    assert SECRET not in result.output


def test_a_folder_that_is_not_there_is_told_before_the_hub_is_asked(tmp_path):
    with HubClient(tmp_path, "http://127.0.0.1:9", SECRET, IMPORTS) as client:
        result = client.run("hub.push('nothing', 'me/model')")
    assert result.error == "PublishError: there is no checkpoint or run folder 'nothing'"


def test_a_name_that_is_not_found_for_long_is_told(server, client):
    result = client.run("import socket, time; socket.getaddrinfo = lambda *a, **k: time.sleep(60)\n"
                        "hub.push(tiny(), 'me/model')")
    assert result.error == "PublishError: " + FAILURES["silence"].format(server.endpoint)
    assert result.seconds < SOON
