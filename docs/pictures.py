"""Make the pictures of README and docs: `python docs/pictures.py`, with the extra `report` and Chromium.

The campaign is that of `retrain init campaign`, evaluated more often. The live view is drawn while it runs.
"""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from retrain.cli.render.frame import frame
from retrain.results.status.watch import Watcher

DOCS = Path(__file__).parent
RETRAIN = [sys.executable, "-m", "retrain"]
SHOWN_FROM = 0.6  # of the campaign's steps
WIDTH, HEIGHT = 96, 24
CHANGES = ["training.eval_every=20", "campaign.seeds=[0, 1, 2, 3]", "campaign.max_workers=3"]


def draw_live_view(directory: Path, process: subprocess.Popen[bytes]) -> None:
    """Write live.svg as soon as the campaign has taken most of its steps."""
    (directory / "logs").mkdir()
    watcher = Watcher(directory / "logs")
    while process.poll() is None:
        time.sleep(0.2)
        view = watcher.refresh()
        runs = [run for watched in view.campaigns for run in watched.status.runs]
        if runs and sum(run.step for run in runs) > SHOWN_FROM * sum(run.max_steps or 0 for run in runs):
            console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
            for line in frame(view, WIDTH, HEIGHT, "logs"):
                console.print(line)
            svg = console.export_svg(title="retrain status logs --watch", unique_id="live")
            svg = re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # from another host
            (DOCS / "live.svg").write_text(svg)
            return
    raise SystemExit("the campaign ended before its live view was drawn")


def main() -> None:
    """Run the campaign, and write live.svg and report.png beside this file."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        raise SystemExit("needs Chromium")
    with tempfile.TemporaryDirectory() as work:
        directory = Path(work)
        subprocess.run([*RETRAIN, "init", "campaign"], cwd=directory, check=True)
        changes = [part for change in CHANGES for part in ("--set", change)]
        with subprocess.Popen([*RETRAIN, "campaign.toml", *changes], cwd=directory) as process:
            draw_live_view(directory, process)
        (campaign,) = directory.glob("logs/campaign-*")
        page = directory / "report.html"
        subprocess.run([*RETRAIN, "report", campaign, "--output", page], cwd=directory, check=True)
        shot = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        shot += [
            "--window-size=920,930",
            "--virtual-time-budget=10000",
            f"--screenshot={DOCS / 'report.png'}",
        ]
        subprocess.run([*shot, page.as_uri()], check=True)


if __name__ == "__main__":
    main()
