"""Run code with the real huggingface_hub client in new processes that can reach only loopback addresses.

    with HubClient(folder, hub.endpoint, "import timm, torch, timm_ortho", token) as client:
        result = client.run("answer(sum(p.numel() for p in timm.create_model('hf-hub:me/model').parameters()))")
        result.answer, result.error, result.output

huggingface_hub reads HF_ENDPOINT, HF_HOME and HF_TOKEN when it is imported. Each client is therefore a separate process
with its own environment and an empty HF_HOME. The client process imports torch, timm and timm_ortho once and forks for
each `run`. A run therefore has a new process but does not repeat the imports.
"""
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Result:
    """Result of one `run`."""

    answer: Any  # the value that the code passed to `answer`
    error: Optional[str]  # "Type: message" of the exception
    output: str  # stdout, stderr and traceback


class HubClient:
    """A process whose code uses the Hub at ``endpoint``.

    Args:
        folder: The client's HF_HOME is created in this folder.
        endpoint: Value of HF_ENDPOINT, the Hub's URL.
        imports: Code that runs once, before the forks.
        token: Value of HF_TOKEN, if any.
    """

    def __init__(self, folder, endpoint, imports, token=None):
        self.home = Path(tempfile.mkdtemp(prefix="home", dir=folder))
        path = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._environment = {
            **{key: value for key, value in os.environ.items() if not key.upper().startswith(("HF_", "HUGGINGFACE_"))},
            "HF_ENDPOINT": endpoint, "HF_HOME": str(self.home), "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1", "PYTHONPATH": path, **({"HF_TOKEN": token} if token else {})}
        self._imports = imports

    def __enter__(self):
        self._process = subprocess.Popen(
            [sys.executable, __file__, self._imports], env=self._environment, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self

    def __exit__(self, *exception):
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()

    def run(self, code):
        """Run code in a new process. If the code calls `answer(value)`, the result contains this JSON value."""
        self._process.stdin.write(json.dumps(code) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the client ended with status {self._process.wait()}")
        return Result(**json.loads(line))

    def forget(self):
        """Empty HF_HOME, which contains the cache."""
        shutil.rmtree(self.home)
        self.home.mkdir()


# ------------------------------------------------------------------------------------ in the client's process
def _only_loopback(event, arguments):
    """Refuse connections of Python's sockets to other machines. This function is an audit hook."""
    if event == "socket.getaddrinfo":
        host = arguments[0]
    elif event == "socket.connect" and isinstance(arguments[1], tuple):
        host = arguments[1][0]
    else:
        return
    host = host.decode() if isinstance(host, bytes) else host
    if host not in (None, "", *LOOPBACK):
        raise OSError(f"a test tried to reach {host}")


def _main():
    sys.addaudithook(_only_loopback)
    sys.path.remove(str(Path(__file__).parent))
    names = {}
    exec(sys.argv[1], names)
    for line in sys.stdin:
        with tempfile.TemporaryDirectory() as folder:
            child = os.fork()
            if child == 0:
                _run(json.loads(line), names, Path(folder))
            os.waitpid(child, 0)
            result = json.loads(Path(folder, "result").read_text())
            output = Path(folder, "output").read_text()
        print(json.dumps({**result, "output": output}), flush=True)


def _run(code, names, folder):
    """Run code in the forked process. Write the code's output and result to files."""
    result = {"answer": None, "error": None}
    output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        exec(code, {**names, "answer": lambda value: result.update(answer=value)})
    except BaseException as error:  # noqa: BLE001  the parent reports every exception
        result["error"] = f"{type(error).__name__}: {error}"
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    (folder / "result").write_text(json.dumps(result))
    os._exit(0)


if __name__ == "__main__":
    _main()
