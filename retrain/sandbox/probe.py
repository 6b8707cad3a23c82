"""The self-test of a sandbox: a program tries to get out, and says where it could."""

from __future__ import annotations

import json
import tempfile

from retrain.sandbox import Limits, Sandbox, SandboxError
from retrain.sandbox.cell import Cell
from retrain.sandbox.inside import values

LIMITS = Limits(seconds=20.0, memory_bytes=1 << 30)
HOLES = ("files", "network", "processes")
PROBE = """
import json, os, socket, sys
found = []
def reaches(what, attempt):
    try:
        attempt()
    except (OSError, IndexError):
        return
    found.append(what)
reaches("files", lambda: open(sys.stdin.read()).read())
reaches("network", lambda: socket.socket(type=socket.SOCK_DGRAM).connect(("192.0.2.1", 9)))
reaches("processes", lambda: os.listdir("/proc")[0])
open("own", "w").write("x")
print(json.dumps(found))
"""


def holes(sandbox: Sandbox) -> list[str]:
    """Return what a program can reach from a sandbox: files, network, processes.

    Raises:
        SandboxError: programs do not run in it.
    """
    cell = Cell(sandbox)
    try:
        with tempfile.NamedTemporaryFile(prefix="retrain-probe-") as secret:
            program = cell.start(LIMITS)
            program.send(values.frame({"job": "stdio", "source": PROBE, "input": secret.name}))
            output = program.output() or b""
            program.close()
            ended = cell.ended()
    finally:
        cell.close()
    if ended.broke:
        raise SandboxError(f"programs do not run in {sandbox.name}: a harmless one {ended.broke}")
    try:
        found = json.loads(output)
    except ValueError:
        raise SandboxError(f"programs do not run in {sandbox.name}: exit status {ended.code}") from None
    return [what for what in HOLES if what in found]
