"""A real Ray of three nodes on loopback: a head that runs no jobs, and two nodes that do.

A fourth, the stranger, does not see directories that the others share, or not their locks.

Each node has an address of its own (127.0.0.2 and up; Ray replaces 127.0.0.1 by the machine's address).
Everything lies in one private directory; everything that runs is started here, carries the node's name
in its environment, and is ended by its process id.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import psutil

from retrain.errors import EngineDownError
from retrain.launchers.ray.client import Client
from tests.cluster.ports import free_ports
from tests.cluster.waiting import await_that

HEAD = "127.0.0.2"
NODES = 2
ADDRESSES = ("127.0.0.3", "127.0.0.4", "127.0.0.5", "127.0.0.6")  # of them, and of their successors
STRANGER = "127.0.0.7"
ALL = (*ADDRESSES, STRANGER, HEAD)
MARK = "RAY_TEST_NODE"
QUIET = {
    "RAY_DISABLE_IMPORT_WARNING": "1",
    "REPORTER_UPDATE_INTERVAL_MS": "60000",  # looks at all processes
    "RAY_enable_metrics_collection": "0",
    # of workers for jobs without an environment, which ours are not
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}
ASK_S = 0.5  # a head that starts has other things to do than to answer


class Cluster:
    """Starts, harms and ends the nodes."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._ports = free_ports(3)
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._forgotten: set[str] = set()  # nodes that have outlived a head
        self.client = Client(self.address)

    @property
    def address(self) -> str:
        """Where the Jobs API listens."""
        return f"http://127.0.0.1:{self._ports[1]}"

    @property
    def nodes(self) -> list[str]:
        """The nodes that the present head knows, except the stranger."""
        return [node for node in ADDRESSES if node in self._nodes and node not in self._forgotten]

    def start(self) -> None:
        """Start what does not run; returns when all nodes are there."""
        if HEAD not in self._nodes:
            self.start_head()
        while len(self.nodes) < NODES:  # one after the other: they share files below the head's directory
            self._join(next(node for node in ADDRESSES if node not in self._nodes), '{"tinker": 2}')

    def start_stranger(self) -> None:
        """Start the stranger, alone with the resource `stranger`."""
        self._join(STRANGER, '{"stranger": 2}', "unshare", "--mount")

    def hide(self, directory: Path) -> None:
        """Let the stranger see nothing in a directory."""
        self._as_stranger("mount", "-t", "tmpfs", "none", directory)

    def unlock(self, directory: Path) -> None:
        """Let the stranger see a directory's files, but not their locks."""
        self._as_stranger("bindfs", "--no-allow-other", directory, directory)

    def show(self, directory: Path) -> None:
        """Let the stranger see a directory as the other nodes do."""
        self._as_stranger("umount", directory)

    def _as_stranger(self, *command: object) -> None:
        inside = ["nsenter", "--mount", f"--target={self._nodes[STRANGER].pid}", *map(str, command)]
        subprocess.run(inside, check=True, env=self._variables(STRANGER))

    def _join(self, node: str, resources: str, *inside: str) -> None:
        await_that(f"the end of the former {node}", lambda: not self._is_there(node), every_s=ASK_S)
        options = (f"--address={HEAD}:{self._ports[0]}", "--num-cpus=4", f"--resources={resources}")
        self._spawn(node, *options, inside=inside)
        await_that(f"node {node}", lambda: self._is_there(node), every_s=ASK_S)

    def start_head(self) -> None:
        """Start the head; one that was killed has forgotten everything, for good."""
        # or it would take the nodes that outlive it, which are on this machine as well, for itself
        (self.home / "ray_current_cluster").unlink(missing_ok=True)
        self._forgotten = set(self._nodes)
        ports = dict(zip(("port", "dashboard-port", "ray-client-server-port"), self._ports, strict=True))
        options = [f"--{name}={port}" for name, port in ports.items()]
        options += ["--head", "--num-cpus=0", "--dashboard-host=127.0.0.1", f"--temp-dir={self.home}"]
        self._spawn(HEAD, *options, "--no-monitor")  # which would scale a cluster of a cloud
        await_that("the head", lambda: self._is_there(HEAD), every_s=ASK_S)

    def stop(self) -> None:
        """End everything, the nodes before the head."""
        for node in ALL:
            self.kill(node)

    def kill(self, node: str) -> None:
        """End a node with all that runs there, as a power cut does."""
        daemon = self._nodes.pop(node, None)
        self._forgotten.discard(node)
        while found := self.processes(node):
            for process in found:
                _kill(process)
            psutil.wait_procs(found, timeout=5)
        if daemon is not None:
            daemon.wait()

    def repair(self) -> None:
        """Make the cluster whole and idle."""
        for node in [*self._forgotten] if HEAD in self._nodes else ALL:
            self.kill(node)
        self.start()
        for job in self.client.jobs():
            if not job.is_over:
                self.client.stop(job.id)
        await_that("no worker", lambda: not self.workers())

    def processes(self, *nodes: str) -> list[psutil.Process]:
        """List the processes of nodes."""
        return self._marked(psutil.process_iter(), nodes)

    def workers(self, *nodes: str) -> list[int]:
        """List the workers that run on any node, or on some."""
        return [
            process.pid for process in self._marked(filter(_is_worker, psutil.process_iter()), nodes or ALL)
        ]

    def _marked(self, processes: Iterable[psutil.Process], nodes: Sequence[str]) -> list[psutil.Process]:
        marks = {str(self.home / node) for node in nodes}
        return [process for process in processes if _variable(process, MARK) in marks]

    def _variables(self, node: str) -> dict[str, str]:
        return {**os.environ, MARK: str(self.home / node), **QUIET}

    def _is_there(self, node: str) -> bool:
        try:
            return any(f"node:{node}" in found for found in self.client.resources())
        except EngineDownError:
            return False

    def _spawn(self, node: str, *arguments: str, inside: Sequence[str] = ()) -> None:
        command = [
            *inside,
            str(Path(sys.executable).with_name("ray")),
            "start",
            "--block",
            "--disable-usage-stats",
            f"--node-ip-address={node}",
            "--object-store-memory=80000000",
            "--dashboard-agent-listen-port=0",
            "--min-worker-port=0",
            "--max-worker-port=0",
            "--include-log-monitor=False",  # of which a machine needs no more than one
            *arguments,
        ]
        with (self.home / f"{node}.out").open("ab") as log:
            self._nodes[node] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._variables(node),
                cwd=self.home,
                start_new_session=True,
            )


def _variable(process: psutil.Process, name: str) -> str:
    try:
        return process.environ().get(name, "")
    except (psutil.Error, OSError):
        return ""


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
