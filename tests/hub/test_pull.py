"""Pull models by repository, folder and registered name.

The models are built in the client's process, which can reach only the mock Hub. Their logits must be bit-identical to
the logits of the same models in this process.
"""
import json

import pytest
import torch
from helpers.hub_models import MODELS, commit_changed, shifted, write
from safetensors.torch import load


@pytest.mark.parametrize("repo_id", list(MODELS))
@pytest.mark.parametrize("way", ["timm.create_model('hf-hub:{}', pretrained=True)", "timm_ortho.pull('{}')"])
def test_a_repository_restores_weights_architecture_and_connections(hub, client, saved, repo_id, way):
    result = client.run(f"model = {way.format(repo_id)}; cfg = model.pretrained_cfg\n"
                        "answer([logits(model), connections(model), cfg.get('hf_hub_id'), cfg.get('file')])")
    assert result.answer == [*saved[repo_id][1:], repo_id, None], result.output
    assert not any(".bin" in request.path for request in hub.requests)


def test_config_json_may_name_the_file(hub, client, saved):
    files, logits, _ = saved["me/vit"]
    config = json.loads(files["config.json"])
    config["pretrained_cfg"]["hf_hub_filename"] = "weights.safetensors"
    hub.commit("me/named", {
        "config.json": json.dumps(config).encode(), "weights.safetensors": files["model.safetensors"]})
    for way in ("timm.create_model('hf-hub:me/named', pretrained=True)", "timm_ortho.pull('me/named')"):
        result = client.run(f"answer(logits({way}))")
        assert result.answer == logits, result.output


@pytest.mark.parametrize("way", [
    "timm.create_model('local-dir:{}', pretrained=True)", "timm_ortho.pull('local-dir:{}')",
    "timm_ortho.pull(pathlib.Path('{}'))"])
def test_a_folder_is_loaded_without_requests(hub, client, saved, tmp_path, way):
    files, logits, connections = saved["me/vit"]
    write(tmp_path, files)
    result = client.run(f"model = {way.format(tmp_path)}; cfg = model.pretrained_cfg\n"
                        "answer([logits(model), connections(model), cfg['source'], cfg['file']])")
    assert result.answer == [logits, connections, "local-dir", str(tmp_path)], result.output
    assert hub.requests == []


def test_a_registered_name_downloads_once(hub, client, saved):
    code = "model = small(); answer([logits(model), model.pretrained_cfg['hf_hub_id'], 'file' in model.pretrained_cfg])"
    first = client.run(code)
    assert first.answer == [saved["me/vit"][1], "me/vit", False], first.output
    assert [r.status for r in hub.requests if r.path == "/me/vit/resolve/main/model.safetensors"] == [302, 302]
    hub.requests.clear()
    assert client.run(code).answer == first.answer
    assert hub.requests == []


def test_a_revision(hub, client, saved):
    hub.repositories["me/vit"].tags["v1"] = hub.repositories["me/vit"].branches["main"]
    commit_changed(hub, saved, shifted)
    for way in ("timm_ortho.pull('me/vit{}')", "timm.create_model('hf-hub:me/vit{}', pretrained=True)"):
        tagged, newest = (client.run(f"answer(logits({way.format(at)}))").answer for at in ("@v1", ""))
        assert tagged == saved["me/vit"][1]
        assert newest not in (None, tagged)


def test_pull_updates_and_falls_back_to_the_cache(hub, client, saved):
    code = "answer(logits(timm_ortho.pull('me/vit')))"
    assert client.run(code).answer == saved["me/vit"][1]
    commit_changed(hub, saved, shifted)
    newest = client.run(code).answer
    assert newest not in (None, saved["me/vit"][1])
    hub.fail(503)
    assert client.run(code).answer == newest


def test_arguments_of_the_call_adapt_the_weights(hub, client, saved):
    weights = load(saved["me/vit"][0]["model.safetensors"])
    result = client.run("""
model = timm_ortho.pull("me/vit", num_classes=3, in_chans=1, connection="hybrid")
features = timm_ortho.pull("me/vit", features_only=True, out_indices=[1])
answer([model.patch_embed.proj.weight.tolist(), model.head.weight.shape[0], connections(model)[0],
        features.model.blocks[0].mlp.fc1.weight.tolist(), model.blocks[0].mlp.fc1.weight.tolist()])
""")
    assert result.error is None, result.output
    stem, classes, connection, in_features, in_model = result.answer
    torch.testing.assert_close(torch.tensor(stem), weights["patch_embed.proj.weight"].sum(1, keepdim=True))
    assert classes == 3
    assert connection.startswith("HybridConnection")
    assert in_features == in_model == weights["blocks.0.mlp.fc1.weight"].tolist()
