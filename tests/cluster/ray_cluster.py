"""A real Ray of three nodes on loopback: a head that runs no jobs, and two nodes that do.

Each node has an address of its own (127.0.0.2 and up; Ray replaces 127.0.0.1 by the machine's address).
Everything lies in one private directory; everything that runs is started here, carries the node's name
in its environment, and is ended by its process id.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from retrain.launchers._ray_client import Client
from tests.cluster.ports import free_ports
from tests.cluster.waiting import await_that

HEAD = "127.0.0.2"
NODES = ("127.0.0.3", "127.0.0.4")
MARK = "RAY_TEST_NODE"


class Cluster:
    """Starts, harms and ends the nodes."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._ports = free_ports(3)
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.client = Client(self.address)

    @property
    def address(self) -> str:
        """Where the Jobs API listens."""
        return f"http://127.0.0.1:{self._ports[1]}"

    def start(self) -> None:
        """Start what does not run; returns when all nodes are there."""
        if HEAD not in self._nodes:
            self.start_head()
        for node in NODES:  # one after the other: they share files below the head's directory
            if node not in self._nodes:
                there = self._count()
                join = f"--address={HEAD}:{self._ports[0]}"
                self._spawn(node, join, "--num-cpus=4", '--resources={"tinker": 2}')
                await_that(f"node {node}", lambda there=there: self._count() > there)

    def start_head(self) -> None:
        """Start the head; one that was killed has forgotten everything."""
        ports = dict(zip(("port", "dashboard-port", "ray-client-server-port"), self._ports, strict=True))
        options = [f"--{name}={port}" for name, port in ports.items()]
        self._spawn(
            HEAD, "--head", "--num-cpus=0", "--dashboard-host=127.0.0.1", f"--temp-dir={self.home}", *options
        )
        await_that("the head", lambda: self._count() >= 1)

    def stop(self) -> None:
        """End everything, the nodes before the head."""
        for node in [*NODES, HEAD]:
            self.kill(node)

    def kill(self, node: str) -> None:
        """End a node with all that runs there, as a power cut does."""
        daemon = self._nodes.pop(node, None)
        while found := self.processes(node):
            for process in found:
                _kill(process)
            psutil.wait_procs(found, timeout=5)
        if daemon is not None:
            daemon.wait()

    def repair(self) -> None:
        """Make the cluster whole and idle."""
        if {HEAD, *NODES} != set(self._nodes):
            self.stop()
            self.start()
        for job in self.client.jobs():
            if not job.is_over:
                self.client.stop(job.id)
        await_that("no worker", lambda: not self.workers())

    def processes(self, node: str) -> list[psutil.Process]:
        """List the processes of a node."""
        mark = str(self.home / node)
        return [process for process, variables in _environments() if variables.get(MARK) == mark]

    def workers(self, node: str = "") -> list[int]:
        """List the workers that run on the nodes, or on one."""
        found = [process for one in ([node] if node else NODES) for process in self.processes(one)]
        return [process.pid for process in found if _is_worker(process)]

    def _count(self) -> int:
        from retrain.errors import EngineDownError

        try:
            return len(self.client.resources())
        except EngineDownError:
            return 0

    def _spawn(self, node: str, *arguments: str) -> None:
        command = [
            str(Path(sys.executable).with_name("ray")),
            "start",
            "--block",
            "--disable-usage-stats",
            f"--node-ip-address={node}",
            "--object-store-memory=80000000",
            "--dashboard-agent-listen-port=0",
            "--min-worker-port=0",
            "--max-worker-port=0",
            *arguments,
        ]
        variables = {**os.environ, MARK: str(self.home / node), "RAY_DISABLE_IMPORT_WARNING": "1"}
        with (self.home / f"{node}.out").open("ab") as log:
            self._nodes[node] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=variables,
                cwd=self.home,
                start_new_session=True,
            )


def _environments() -> Iterator[tuple[psutil.Process, dict[str, str]]]:
    for process in psutil.process_iter():
        try:
            yield process, process.environ()
        except (psutil.Error, OSError):
            continue


def _is_worker(process: psutil.Process) -> bool:
    try:
        return "retrain.worker" in process.cmdline()
    except psutil.Error:
        return False


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return
