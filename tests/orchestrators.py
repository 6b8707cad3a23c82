"""Many orchestrators that want the same campaign at the same moment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from retrain.campaign.run import start

DEAD_BEFORE = "import sys, pathlib; from retrain.base import locks; locks.hold(pathlib.Path(sys.argv[1]))"
# Forked from one process, which has imported everything: they come closer together than by starting anew.
STARTER = """
import os, sys
from pathlib import Path
from retrain.campaign import Observer
from retrain.campaign.run import reopen
from retrain.base.errors import LaunchError
directory, count = Path(sys.argv[1]), int(sys.argv[2])
said, ready, gate, end = (os.pipe() for _ in range(4))
class Winner(Observer):
    def begun(self, *_):
        os.write(said[1], f"won {os.getpid()}\\n".encode())
        os.read(end[0], 1)
        os._exit(0)
def orchestrate():
    campaign = reopen(directory, Winner())
    os.write(ready[1], b"!")
    os.read(gate[0], 1)
    try:
        campaign.execute()
    except LaunchError as error:
        os.write(said[1], f"{error}\\n".encode())
pids = []
for _ in range(count):
    if not (pid := os.fork()):
        os.close(end[1])
        orchestrate()
        os._exit(0)
    pids.append(pid)
for _ in pids:
    os.read(ready[0], 1)
os.write(gate[1], b"!" * count)
with open(said[0]) as lines:
    for _ in pids:
        print(lines.readline(), end="", flush=True)
os.close(end[1])
for pid in pids:
    os.waitpid(pid, 0)
"""


def race(campaign_file: Path, count: int) -> tuple[str, list[str]]:
    """Start so many at once; give the process that won, and what the others said."""
    directory = start(campaign_file).directory
    subprocess.run([sys.executable, "-c", DEAD_BEFORE, str(directory / "campaign.lock")], check=True)
    command = [sys.executable, "-c", STARTER, str(directory), str(count)]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    (winner,) = [line.split()[1] for line in said if line.startswith("won ")]
    return winner, [line for line in said if not line.startswith("won ")]
