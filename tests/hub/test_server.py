"""Test the mock Hub with the real client. All other tests with the mock Hub rely on the behaviour tested here."""
import hashlib
import os
from pathlib import Path


def test_a_commit_needs_complete_uploads(server, client):
    server.create_repo("me/model")
    result = client.run("""
add = CommitOperationAdd("model.safetensors", b"1" * 600)
add._upload_mode, add._is_uploaded = "lfs", True
HfApi().create_commit("me/model", [add], commit_message="nothing behind it")
""")
    assert "the upload of model.safetensors is not complete" in result.error


def test_leaked_tokens_are_reported(server):
    import urllib.request

    token = server.add_user("me")
    server.commit("me/model", {"model.safetensors": b"1" * 100})
    headers = {"Authorization": f"Bearer {token}"}
    urllib.request.urlopen(urllib.request.Request(  # urllib also sends the header to the host it is redirected to
        f"{server.endpoint}/me/model/resolve/main/model.safetensors", headers=headers)).close()
    urllib.request.urlopen(f"{server.endpoint}/api/agent-harnesses?token={token}").close()
    assert server.leaks(token) == [
        f"GET {server.storage}/blobs/{hashlib.sha256(b'1' * 100).hexdigest()}",
        f"GET /api/agent-harnesses?token={token}"]


def test_the_client_reaches_only_this_machine(client):
    result = client.run("__import__('urllib.request').request.urlopen('http://192.0.2.1/', timeout=1)")
    assert result.error
    assert client.run("__import__('socket').create_connection(('192.0.2.1', 80), 1)").error == (
        "OSError: a test tried to reach 192.0.2.1")
    assert client.run("__import__('socket').create_connection(('example.com', 80), 1)").error == (
        "OSError: a test tried to reach example.com")


def test_each_run_has_a_new_process(client):
    first = client.run("import os; hf_hub_download = None; answer(os.getpid())").answer
    second = client.run("import os; answer([os.getpid(), hf_hub_download is None, os.environ['HF_HOME']])").answer
    assert second[0] not in (first, os.getpid())
    assert second[1:] == [False, str(client.home)]
    assert Path(client.home).is_dir()
