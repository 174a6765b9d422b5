"""Draw the figures of the README files: PYTHONPATH=. python3 assets/figures/draw.py [1_RANK 8_RANKS TRACED]

Needs chromium. The arguments are the folders of three runs: the two runs in "The same loss" of README.md, and a run of
debug_3d with profiling.enable_profiling. Without arguments, only the layouts and the pipeline are drawn.
"""

import shutil
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

from torchtitan_lite.tools.pictures import draw_curves, wrap_page
from torchtitan_lite.tools.plan.page import draw_mesh, draw_pipeline
from torchtitan_lite.tools.plan.planned_run import plan_run
from torchtitan_lite.tools.report.page import draw_calls
from torchtitan_lite.tools.report.runs import RecordedRun

FOLDER = Path(__file__).parent
CROPPED = """<style>h2, h3 { display: none } body { padding: 4px 12px; margin: 0 } p { max-width: none }
.desk { display: inline }</style>"""
LAYOUTS = {  # figure -> width and height in pixels, config arguments, ranks
    "tp2": (560, 372, "--config debug --parallelism.tensor_parallel_degree 2", 2),
    "dp2": (560, 372, "--config debug", 2),
    "cp2": (560, 372, "--config debug --parallelism.context_parallel_degree 2", 2),
    "ep2": (560, 388, "--config debug_moe --parallelism.expert_parallel_degree 2", 2),
    "mesh": (960, 586, "--config debug_3d", 8),
}


def crop(path: Path, height: int) -> None:
    """Keep the first rows of a PNG. Chromium does not paint the last rows of its window."""
    data = path.read_bytes()
    n_columns, _ = struct.unpack(">II", data[16:24])
    channels = 4 if data[25] == 6 else 3
    pixels = b""
    at = 8
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        if data[at + 4 : at + 8] == b"IDAT":
            pixels += data[at + 8 : at + 8 + length]
        at += length + 12
    rows = zlib.decompress(pixels)[: height * (1 + n_columns * channels)]
    chunks = {
        b"IHDR": struct.pack(">II", n_columns, height) + data[24:29],
        b"IDAT": zlib.compress(rows, 9),
        b"IEND": b"",
    }
    whole = data[:8]
    for kind, content in chunks.items():
        checksum = zlib.crc32(kind + content)
        whole += struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)
    path.write_bytes(whole)


def shoot(name: str, body: str, width: int, height: int) -> None:
    """Render a page to two PNG files, one with light and one with dark colors."""
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        page.write_text(wrap_page(name, CROPPED + body), encoding="utf-8")
        for theme, scheme in (("light", 1), ("dark", 0)):
            picture = FOLDER / f"{name}-{theme}.png"
            subprocess.run(
                [
                    *"chromium --headless --no-sandbox --hide-scrollbars --disable-gpu".split(),
                    "--force-device-scale-factor=2",
                    f"--window-size={width},{height + 120}",
                    f"--blink-settings=preferredColorScheme={scheme}",
                    f"--screenshot={picture}",
                    str(page),
                ],
                check=True,
                capture_output=True,
            )
            crop(picture, 2 * height)


def draw_losses(folders: list[Path]) -> str:
    """Draw the losses of two runs on top of each other."""
    curves = []
    key = ""
    for folder, color, dashes in zip(
        folders, ("var(--run0)", "var(--run1)"), ("none", "5 6"), strict=True
    ):
        samples = [(step, [loss]) for step, loss in RecordedRun(folder).list_values("loss")]
        curves.append((folder.name, color, dashes, samples))
        key += f'<span style="color: {color}">{folder.name}: {samples[-1][1][0]:.5f} </span> '
    return f"<figure><b>Loss of debug_3d</b> {key}{draw_curves(curves, [], axis='steps', from_zero=False)}</figure>"


def main() -> None:
    if not shutil.which("chromium"):
        sys.exit("chromium is not installed")
    for name, (width, height, args, n_ranks) in LAYOUTS.items():
        shoot(name, draw_mesh(plan_run(args.split(), n_ranks, "cpu")), width, height)
    shoot("pipeline", draw_pipeline(plan_run(["--config", "debug_3d"], 8, "cpu")), 960, 150)
    if folders := list(map(Path, sys.argv[1:])):
        *untraced, traced = folders
        shoot("losses", draw_losses(untraced), 640, 190)
        trace = max(RecordedRun(traced).traces, key=lambda trace: trace.parts["computing"])
        shoot("calls", draw_calls(trace, sum(trace.parts.values())), 960, 192)


if __name__ == "__main__":
    main()
