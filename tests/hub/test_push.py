"""Push models to the mock Hub, from Python and the command line, and load them in new processes without a cache."""
import re

import pytest
from helpers.hub_client import SOON, HubClient
from helpers.hub_models import IMPORTS, SLOW_DNS
from helpers.hub_server import HubServer
from helpers.tiny_study import result_of

from timm_ortho import hub

SECRET = "hf_" + "0123456789abcdef" * 2
MODELS = {  # the ViT's weights exceed 10 MB, the real Hub's limit for files inside a commit request
    "me/vit": ("vit_small_orthog", dict(img_size=32, patch_size=8, depth=2, num_classes=7, connection_prob=0.5)),
    "me/resnet": ("resnetv2_18_cifar_ortho", dict(
        channels=[16, 16, 32, 32], head_norm=True, num_classes=5, connection_layers=[0, 3])),
}


def pushed_and_pulled(server, client):
    """Push MODELS and check that pulled models are equal. Return the files of the ViT, and whether PUT was used."""
    token = server.add_user("me")
    for repo_id, (name, kwargs) in MODELS.items():
        pushed = client.run(f"model = make({name!r}, **{kwargs!r}); hub.push(model, {repo_id!r}); answer("
                            "[logits(model, size=32), [repr(site) for site in timm_ortho.sites(model)]])")
        assert pushed.error is None, pushed.output
        client.forget()
        pulled = client.run(f"model = pull({repo_id!r}); answer("
                            "[logits(model, size=32), [repr(site) for site in timm_ortho.sites(model)]])")
        assert pulled.answer == pushed.answer, pulled.output
        assert token not in pushed.output + pulled.output
        files = server.repositories[repo_id].find("main").files
        assert files.keys() == {".gitattributes", "model.safetensors", "config.json", "README.md"}
    assert server.leaks(token) == []
    large = server.repositories["me/vit"].find("main").files["model.safetensors"]
    assert large.size > 10_000_000
    return large.xet is not None, any(request.method == "PUT" for request in server.requests)


def test_pushed_models_load_bit_for_bit(server, client):
    assert pushed_and_pulled(server, client) == (False, True)


def test_pushed_models_load_bit_for_bit_with_xet(tmp_path):
    with HubServer(tmp_path) as server:
        token = server.add_user("me")
        with HubClient(tmp_path, server.endpoint, IMPORTS, token, HF_HUB_DISABLE_XET="0") as client:
            assert pushed_and_pulled(server, client) == (True, False)


def test_a_run_from_the_command_line(server, client, grid, tmp_path):
    run = grid / "feature-seed0"
    words = ["push", str(run), "me/digits", "--message", "First", "--license", "mit"]
    pushed = client.run(f"answer(cli.main({words!r}))")
    assert pushed.answer == 0, pushed.output
    commit = server.repositories["me/digits"].find("main")
    assert commit.title == "First"
    assert f"{server.endpoint}/me/digits/commit/{commit.oid}\n" in pushed.output
    assert commit.files.keys() >= {"training.png", "README.md"}
    card = server.files("me/digits")["README.md"].decode()
    assert "license: mit" in card
    top1 = result_of(run)["top1"]
    assert f"| top-1 of these weights, % | {top1:.2f} |" in card
    again = client.run("answer(logits(pull('me/digits'), 1, 16))")
    hub.export(run, tmp_path / "out", "me/digits")
    expected = client.run(f"model = timm.create_model('local-dir:{tmp_path / 'out'}', pretrained=True).eval(); "
                          "answer(logits(model, 1, 16))")
    assert again.answer == expected.answer, again.output


def test_show_accepts_a_repository(server, client):
    assert client.run("hub.push(tiny(), 'me/model')").error is None
    shown = client.run("answer(cli.main(['show', 'hf-hub:me/model']))")
    assert shown.answer == 0, shown.output
    expected = client.run("from timm_ortho.diagnostics import show\n"
                          "model = tiny(); print(show.as_text(show.measured_sites(model, torch.randn(4, 3, 16, 16, "
                          "generator=torch.Generator().manual_seed(0)))))")
    table = [line for line in shown.output.splitlines() if not line.startswith("On a GPU")]  # stderr, at any position
    assert table[-3:] == expected.output.splitlines()[-3:]


def test_a_revision_is_a_branch(server, client):
    assert client.run("hub.push(tiny(), 'me/model')").error is None
    pushed = client.run("hub.push(tiny(1), 'me/model', revision='v2'); answer(logits(tiny(1), 3, 16))")
    assert pushed.error is None, pushed.output
    client.forget()
    assert client.run("answer(logits(pull('me/model@v2'), 3, 16))").answer == pushed.answer
    assert client.run("answer(logits(pull('me/model'), 3, 16) == logits(tiny(), 3, 16))").answer is True
    assert 'hf-hub:me/model@v2"' in server.files("me/model", "v2")["README.md"].decode()
    assert client.run("hub.push(tiny(2), 'me/model', revision='v2')").error is None  # the branch exists


def test_a_pull_request_does_not_change_main(server, client):
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
    assert refused.error.startswith("PublishError: me/open exists and is public")
    assert server.files("me/open") == before


@pytest.mark.parametrize(("what", "path", "method"), [(403, "/blobs/", "PUT"), ("cut", "/commit/", "POST")])
def test_an_interrupted_upload_changes_nothing(server, client, what, path, method):
    assert client.run("hub.push(tiny(), 'me/model')").error is None
    before = server.files("me/model")
    # PUT fails with 403. If its connection were cut, the client would retry the upload for half a minute.
    server.fail(what, path, method, after=100)
    broken = client.run("hub.push(tiny(1), 'me/model')")
    refusals = r"PublishError: the (Hub gives the token no write access|upload was interrupted \(Rem)"
    assert re.match(refusals, broken.error)
    assert server.files("me/model") == before
    client.forget()
    assert client.run("answer(logits(pull('me/model'), 3, 16) == logits(tiny(), 3, 16))").answer is True
    server.heal()
    assert client.run("hub.push(tiny(1), 'me/model')").error is None
    client.forget()
    assert client.run("answer(logits(pull('me/model'), 3, 16) == logits(tiny(1), 3, 16))").answer is True


def test_an_interrupted_first_upload_leaves_nothing_that_loads(server, client):
    server.fail("cut", "/commit/", after=100)
    broken = client.run("hub.push(tiny(), 'me/model')")
    assert broken.error.startswith("PublishError: the upload was interrupted (RemoteProtocolError: ")
    assert broken.error.endswith("); the files of me/model are unchanged; push again to complete it")
    assert server.files("me/model").keys() == {".gitattributes"}
    assert client.run("pull('me/model')").error is not None
    server.heal()
    client.forget()
    assert client.run("hub.push(tiny(), 'me/model')").error is None
    assert client.run("answer(logits(pull('me/model'), 3, 16) == logits(tiny(), 3, 16))").answer is True


FAILURES = {
    401: "the Hub does not accept the token (401 from {}); log in with another account (`hf auth login`)",
    403: "the Hub gives the token no write access to me/model (403 from {}); use a token with write access, or propose",
    404: "the Hub has no repository me/model that the token can read, or the repository has no such revision "
         "(404 from {}); check the names",
    409: "the Hub reports another write to me/model (409 from {}); repeat the command",
    429: "the Hub limits the rate of requests (429 from {}); try again in 60 s, or log in with another account",
    500: "the Hub failed (500 from {}); try again later, see https://status.huggingface.co",
    503: "the Hub failed (503 from {}); try again later, see https://status.huggingface.co",
    "silence": "{} does not answer in time; try again later, or check the network",
    "cut": "{} cannot be reached (RemoteProtocolError: ",
}


@pytest.mark.parametrize(("what", "path"), [
    *((what, "") for what in FAILURES), (401, "/commit/"), (403, "/preupload/"), (503, "/commit/"), (500, "create")])
def test_failures_of_the_hub(server, client, what, path):
    server.fail(what, path)
    result = client.run("hub.push(tiny(), 'me/model')")
    assert result.error.startswith("PublishError: " + FAILURES[what].format(server.endpoint))
    assert result.seconds < SOON
    assert "During handling" not in result.output  # there is no traceback from huggingface_hub


def test_tokens_are_only_in_the_header(server, client):
    other, reader = server.add_user("other"), server.add_user("me", role="read")
    server.create_repo("me/model")
    before = server.files("me/model")
    bad = "hf_" + "x" * 34
    for token in (other, reader, bad):
        result = client.run(f"hub.push(tiny(), 'me/model', token={token!r})")
        assert result.error.startswith(
            "PublishError: " + FAILURES[401 if token == bad else 403].format(server.endpoint))
        assert token not in result.output + result.error
        assert server.leaks(token) == []
    assert server.files("me/model") == before
    stored = client.run("hub.push(tiny(), 'me/other', token=True)")  # the token in HF_TOKEN
    assert stored.error is None, stored.output
    anonymous = client.run("hub.push(tiny(), 'me/model', token=False)")
    assert anonymous.error.startswith("PublishError: the Hub does not accept requests without a token (401 from ")
    server.fail(403)
    anonymous = client.run("hub.push(tiny(), 'me/model', token=False)")
    assert "the Hub gives requests without a token no write access to me/model (403 from " in anonymous.error


def test_without_a_network(tmp_path):
    with HubClient(tmp_path, "http://127.0.0.1:9", IMPORTS, SECRET) as client:
        missing = client.run("hub.push('nothing', 'me/model')")
        result = client.run("hub.push(tiny(), 'me/model')")
    assert missing.error == "PublishError: there is no checkpoint or run folder 'nothing'"  # before any request
    assert result.error == (
        "PublishError: http://127.0.0.1:9 cannot be reached (ConnectionRefusedError: [Errno 111] Connection refused); "
        "check the network, the proxy and HF_ENDPOINT")
    assert result.seconds < SOON
    assert SECRET not in result.output


def test_a_dns_lookup_without_answer(server, client):
    result = client.run(f"{SLOW_DNS}hub.push(tiny(), 'me/model')")
    assert result.error == "PublishError: " + FAILURES["silence"].format(server.endpoint)
    assert result.seconds < SOON
