"""A report's page in a browser, at phone and desktop widths: nothing is cut off, and the console logs nothing.

The tests need Chromium (Debian: `apt-get install chromium`).
"""
import html
import json
import re
import shutil
import subprocess

import pytest
from helpers.made_up_runs import runs_of, study_of
from helpers.reports import write

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDTHS = (400, 1200)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="requires Chromium in PATH")

# A browser's window is at least 500 pixels wide, so the page is opened in an iframe of each width. Only contents of a
# box that scrolls may be wider than the iframe.
WRAPPER = """<!DOCTYPE html>
<body>
{frames}
<script>
addEventListener("load", () => {{
  const measured = [...document.querySelectorAll("iframe")].map(frame => {{
    const page = frame.contentDocument, width = frame.contentWindow.innerWidth;
    const outside = [...page.body.querySelectorAll("*")].filter(element =>
      !element.parentElement.closest(".scroll") && element.getBoundingClientRect().right > width + 0.5);
    const still = [...page.querySelectorAll(".scroll")].filter(box => getComputedStyle(box).overflowX != "auto");
    const squeezed = [...page.querySelectorAll(".sentences")].filter(table =>
      table.parentElement.scrollWidth > table.parentElement.clientWidth);
    const free = (page.querySelector("main") || page.body).clientWidth;
    return {{width, scrollWidth: page.documentElement.scrollWidth, title: page.title,
            images: [...page.images].map(image => image.naturalWidth),
            shares: [...page.images].map(image => image.getBoundingClientRect().width / free),
            scales: [...page.images].map(image => image.getBoundingClientRect().width / image.naturalWidth),
            seen: [...page.querySelector("table")?.querySelectorAll("thead th") ?? []].filter(
              cell => cell.getBoundingClientRect().right <= width).map(cell => cell.textContent),
            headers: [...page.querySelectorAll("thead tr")].map(row => row.getBoundingClientRect().height),
            cut: [...outside, ...still, ...squeezed].map(element => element.outerHTML.slice(0, 80))}};
  }});
  document.body.textContent = JSON.stringify(measured);
}});
</script>
"""


def opened(text, folder):
    """Open a page. Return measurements at each width in pixels, and the messages in the browser's console."""
    frames = "\n".join(f'<iframe width="{width}" height="800" style="border: 0" srcdoc="{html.escape(text)}"></iframe>'
                       for width in WIDTHS)
    wrapper = folder / "wrapper.html"
    wrapper.write_text(WRAPPER.format(frames=frames), encoding="utf-8")
    done = subprocess.run(
        [BROWSER, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
         "--enable-logging=stderr", f"--user-data-dir={folder / 'profile'}", "--dump-dom", wrapper.as_uri()],
        capture_output=True, text=True, timeout=120, check=True)
    found = re.search(r"<body>(\[.*\])</body>", done.stdout, re.DOTALL)
    assert found, done.stdout[-500:]
    return json.loads(html.unescape(found[1])), [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.parametrize("name", ["accuracy", "compare"])
def test_nothing_is_cut_off_in_a_browser(name, tmp_path):
    study = study_of(name, versions={"timm-ortho": "0.1.0", "commit": "0123456789abcdef" * 3})
    runs = runs_of(name)
    if name == "compare":
        study["report"] = {"measures": ["top1"]}
        runs = [{**run, "top1": run["top1"] + run["seed"] * (run["connection"] == "feature")} for run in runs]
    write(study, runs, ["a-seed9"], tmp_path)
    frames, console = opened((tmp_path / "report.html").read_text(encoding="utf-8"), tmp_path)
    assert console == []
    if name == "compare":  # the answer is visible on a phone without scrolling
        assert "difference [95 % CI]" in frames[0]["seen"]
    assert [frame["width"] for frame in frames] == list(WIDTHS)
    for frame in frames:
        assert frame["title"].startswith((f"What about {name}?", "vit_small on digits"))
        assert frame["scrollWidth"] <= frame["width"]
        assert frame["cut"] == []
        assert all(frame["images"])
        assert frame["images"]
        assert all(0.75 < scale <= 2 for scale in frame["scales"])  # keeps text of 8 points legible
        assert all(height < 90 for height in frame["headers"])  # 90 pixels: three lines of text
