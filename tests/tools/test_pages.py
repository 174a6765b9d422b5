"""Test the pages of `plan` and `explain`: they have the figures of the text output, and a browser displays the
pages."""

import re
from contextlib import redirect_stderr
from html import unescape
from io import StringIO

import pytest
from programs import browse, needs_browser

from torchtitan_lite.__main__ import main
from torchtitan_lite.tools.plan.slices import slice_range

# config and number of GPUs -> number of ranks that the page draws. On 2,048 GPUs, a step has 128 microbatches.
PAGES = """
debug_3d-8 8
llama3_70b-64 64
llama3_405b-16384 32
llama3_405b-2048 32
mixtral_8x22b-128 32
debug-1 1
"""
N_CARDS = dict(row.split() for row in PAGES.strip().splitlines())
TOO_LARGE = {"mixtral_8x22b-128", "llama3_405b-2048"}  # these runs do not fit in memory


def test_slices_of_uneven_sizes_equal_those_of_torch():
    assert [len(slice_range(range(10), 4, index)) for index in range(4)] == [3, 3, 3, 1]


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    for name in N_CARDS:
        path = f"{folder}/{name}.html"
        args = f"plan --config {name.replace('-', ' --gpus ')} --html {path}"
        with redirect_stderr(StringIO()) as said:
            assert main(args.split()) == (name in TOO_LARGE)
        assert f"open {path} in a browser" in said.getvalue()
    args = f"explain --config debug_3d --gpus 8 --rank 3 --html {folder}/walk.html"
    assert main(args.split()) == 0
    return {path.stem: path for path in folder.iterdir()}


def test_a_page_is_small_loads_no_other_file_and_shows_64_ranks_at_most(pages):
    for name, path in pages.items():
        page = path.read_text(encoding="utf-8")
        assert not re.search(r"https?:|<script|<link|@import|url\(", page), name
        assert len(page) < 300_000, name
        assert page.count('class="card"') == int(N_CARDS.get(name, 0)), name


def test_a_page_has_the_same_figures_as_the_text_output(pages, run_tool):
    text = run_tool("plan", "--config", "llama3_405b", "--gpus", "16384")
    page = unescape(pages["llama3_405b-16384"].read_text(encoding="utf-8"))
    for name, live, most in re.findall(
        r"(pp rank \d+.*?)  .*?([\d.]+ GiB) +([\d.]+ GiB)$", text, re.M
    ):
        assert f"<span>{name}</span><span>{live}, at most {most}</span>" in page
    for axis, operation, n_calls, n_bytes in re.findall(
        r"^  (\w+) +([\w-]+) +([\d,]+) calls +([\d.]+ GiB)", text, re.M
    ):
        assert re.search(
            rf"{operation} over {axis}, .*?</span><span>{n_bytes} in {n_calls} calls", page
        )
    assert page.count("GiB in ") >= 6


def test_the_page_of_explain_shows_the_slices_and_collectives_of_each_module(pages):
    page = pages["walk"].read_text(encoding="utf-8").replace("<wbr>", "")
    page = re.sub("<(?!tr|td)[^>]*>", " ", page)
    rows = re.findall(r"<tr><td> *<td>(\S+)([^<]*)<td>([^<]*)", page)
    of_layer = {module: (weight, calls) for module, weight, calls in rows}
    assert (
        of_layer["layers.0.attention.wo"][0].split()
        == "64 x 64 of 128 x 128, 128 x 64 in use".split()
    )
    assert "all-gather over dp_shard  90.2 KiB" in of_layer["layers.0"][1]
    assert [module for module, *_ in rows][-2:] == ["norm", "output"]


PROBE = """<script>addEventListener("load", () => {
  const wide = [...document.querySelectorAll("body *")].filter(each =>
    !each.closest(".wide, pre, svg") && each.getBoundingClientRect().right > innerWidth + 1)
  const small = [...document.querySelectorAll("p, td, small, b, span")].filter(each =>
    each.offsetParent && each.textContent && parseFloat(getComputedStyle(each).fontSize) < 11)
  parent.document.title += [document.body.scrollWidth <= innerWidth, wide.length, small.length].join() + ";"
})</script>"""


@needs_browser
def test_a_browser_shows_every_page_without_overflow_on_a_phone_and_on_a_desktop(pages, tmp_path):
    frames = ""
    for name, path in pages.items():
        (tmp_path / f"{name}.html").write_text(path.read_text(encoding="utf-8") + PROBE)
        for width in (390, 1400):
            frames += f'<iframe src="{name}.html" width="{width}" height="900"></iframe>'
    (tmp_path / "all.html").write_text(f"<!doctype html><title></title>{frames}")
    options = ["--allow-file-access-from-files", "--disable-web-security"]
    shown = browse(tmp_path / "all.html", *options, f"--user-data-dir={tmp_path}/profile")
    titles = re.search(r"<title>(.*?)</title>", shown.stdout)[1]
    assert titles == "true,0,0;" * 2 * len(pages)
