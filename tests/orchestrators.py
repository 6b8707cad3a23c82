"""Many orchestrators that want the same campaign at the same moment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from retrain.campaign.run import start

DEAD_BEFORE = "import sys, pathlib; from retrain.records import locks; locks.hold(pathlib.Path(sys.argv[1]))"
STARTER = """
import os, sys
from pathlib import Path
from retrain.campaign.run import reopen
from retrain.errors import LaunchError
campaign = reopen(Path(sys.argv[2]))
print("ready", flush=True)
os.read(int(sys.argv[1]), 1)
try:
    with campaign._lock():
        print("won", os.getpid(), flush=True)
        sys.stdin.read()
except LaunchError as error:
    print(error, flush=True)
"""


def race(campaign_file: Path, count: int) -> tuple[str, list[str]]:
    """Start so many at once; give the process that won, and what the others said."""
    directory = start(campaign_file).directory
    subprocess.run([sys.executable, "-c", DEAD_BEFORE, str(directory / "campaign.lock")], check=True)
    gate = os.pipe()
    starters = [
        subprocess.Popen(
            [sys.executable, "-c", STARTER, str(gate[0]), str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[gate[0]],
        )
        for _ in range(count)
    ]
    assert {starter.stdout.readline() for starter in starters} == {"ready\n"}  # type: ignore[union-attr]
    os.write(gate[1], b"!" * count)
    said = [starter.stdout.readline().strip() for starter in starters]  # type: ignore[union-attr]
    for starter in starters:
        starter.communicate()
    for end in gate:
        os.close(end)
    (winner,) = [line.split()[1] for line in said if line.startswith("won ")]
    return winner, [line for line in said if not line.startswith("won ")]
