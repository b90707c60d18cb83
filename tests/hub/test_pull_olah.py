"""Pull from olah, an independent implementation of the Hub."""
import hashlib
import os
import shutil
import socket
import subprocess
import time

import pytest
from helpers.hub_client import HubClient
from helpers.hub_models import BY_NAME, BY_PULL, BY_TIMM, IMPORTS, check_refused

OLAH = os.environ.get("OLAH") or shutil.which("olah-cli")


@pytest.fixture(scope="module")
def olah(tmp_path_factory, saved):
    """Start olah with the ViT of `saved` as a local Git LFS repository. Yield the endpoint."""
    if OLAH is None:
        pytest.skip("install olah in a separate environment and set OLAH=.../bin/olah-cli")
    folder = tmp_path_factory.mktemp("olah")
    repository = folder / "mirrors" / "models" / "me" / "vit"
    repository.mkdir(parents=True)
    for name, content in saved["me/vit"][0].items():
        if name.endswith(".safetensors"):
            sha256 = hashlib.sha256(content).hexdigest()
            kept = repository / ".git" / "lfs" / "objects" / sha256[:2] / sha256[2:4] / sha256
            kept.parent.mkdir(parents=True)
            kept.write_bytes(content)
            content = f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {len(content)}\n".encode()
        (repository / name).write_bytes(content)
    for arguments in ("init --quiet -b main", "add .", "-c user.name=me -c user.email=me@here commit --quiet -m model"):
        subprocess.run(["git", *arguments.split()], cwd=repository, check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "olah.toml").write_text(
        f'[basic]\nhost = "127.0.0.1"\nport = {port}\nrepos-path = "{folder}/repos"\n'
        f'mirrors-path = ["{folder}/mirrors"]\n[accessibility]\noffline = true\n')
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            [OLAH, "--config", str(folder / "olah.toml"), "--log-path", str(folder / "logs")],
            stdout=log, stderr=log, cwd=folder, env=environment)
    try:
        for _ in range(300):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, (folder / "log").read_text()
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_models_pulled_from_olah_are_bit_identical(olah, tmp_path, saved):
    _, logits, connections = saved["me/vit"]
    with HubClient(tmp_path, olah, IMPORTS) as client:
        for way in (BY_TIMM, BY_PULL, BY_NAME):
            client.forget()
            result = client.run(f"model = {way}; answer([logits(model), connections(model)])")
            assert result.answer == [logits, connections], result.output
        # A missing file is not tested, because olah reports a missing repository instead.
        check_refused(client.run("timm_ortho.pull('me/none')"),
                "hf-hub:me/none: config.json cannot be downloaded: the repository does not exist")
