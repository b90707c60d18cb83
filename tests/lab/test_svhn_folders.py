"""The script and the commands of docs/your_own_data.md that write SVHN's .mat files into class folders."""
import shlex
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from helpers.pages import blocks, section
from PIL import Image
from scipy.io import savemat

COUNTS = {"train": 5, "extra": 4, "test": 7}  # images per class
HELD_OUT = {"400": "2", "200": "1"}


@pytest.fixture
def folder(tmp_path):
    """Run the script and the commands of the page with small files, where 2 and 1 images per class are held out."""
    text = section("your_own_data.md", "SVHN")
    (script,), (commands,) = blocks(text), blocks(text, "sh")
    (tmp_path / "svhn.py").write_text(script, encoding="utf-8")
    for name, count in COUNTS.items():
        labels = np.random.default_rng(1).permutation(np.repeat(np.arange(1, 11), count))  # 10 is the digit 0
        images = np.random.default_rng(2).integers(256, size=(32, 32, 3, len(labels)), dtype=np.uint8)
        images[0, 0, 0], images[0, 0, 1] = labels, np.arange(len(labels))
        savemat(tmp_path / f"{name}_32x32.mat", {"X": images, "y": labels[:, None].astype(np.uint8)})
    for line in commands.splitlines():
        python, *words = [HELD_OUT.get(word, word) for word in shlex.split(line)]
        assert python == "python"
        subprocess.run([sys.executable, *words], cwd=tmp_path, check=True)
    return tmp_path / "DIR"


def test_images_are_in_the_folder_of_their_class(folder):
    files = list(folder.rglob("*.png"))
    counts = Counter((file.parts[-3], file.parts[-2], file.name.partition("_")[0]) for file in files)
    assert counts == {
        **{("train", str(digit), name): n for digit in range(10) for name, n in (("train", 3), ("extra", 3))},
        **{("val", str(digit), name): n for digit in range(10) for name, n in (("train", 2), ("extra", 1))},
        **{("test", str(digit), "test"): 7 for digit in range(10)}}
    for file in files:
        red, green, _ = Image.open(file).getpixel((0, 0))
        assert (red % 10, green) == (int(file.parts[-2]), int(file.stem[-6:]))
    assert len({file.name for file in files}) == 10 * sum(COUNTS.values())  # no image is in two splits
