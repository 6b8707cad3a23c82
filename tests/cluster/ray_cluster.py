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
import time
from collections.abc import Sequence
from pathlib import Path

from retrain.base.errors import ClusterDownError
from retrain.campaign.launchers.ray.client import JobsClient
from tests.cluster.ports import free_ports
from tests.cluster.processes import environment_of, kill_together, running
from tests.cluster.waiting import await_that

HEAD = "127.0.0.2"
NODES = 2
ADDRESSES = ("127.0.0.3", "127.0.0.4", "127.0.0.5", "127.0.0.6")  # of them, and of their successors
STRANGER = "127.0.0.7"
ALL = (*ADDRESSES, STRANGER, HEAD)
MARK = "RAY_TEST_NODE"
QUIET = {
    "RAY_DISABLE_IMPORT_WARNING": "1",
    # of each node's agent, which has nothing to tell
    "REPORTER_UPDATE_INTERVAL_MS": "60000",  # looks at all processes
    "EVENT_AGENT_REPORT_INTERVAL_SECONDS": "60",
    "SCAN_EVENT_DIR_INTERVAL_SECONDS": "60",
    "RAY_DASHBOARD_AGENT_CHECK_PARENT_INTERVAL_S": "5",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_event_stats": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_enable_metrics_collection": "0",
    # of workers before there is work for them, as many as a node has cores
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
}
HASTE = {"RAY_health_check_period_ms": "1000"}  # a node that was killed is missed after five looks
FAIR = {"RAY_worker_niceness": "0"}  # by default workers wait for whatever else this machine does
ASK_S = 0.5  # a head that starts has other things to do than to answer


class Cluster:
    """Starts, harms and ends the nodes."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._ports = free_ports(3)
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}
        self._forgotten: set[str] = set()  # nodes that have outlived a head
        self.client = JobsClient(self.address)

    @property
    def address(self) -> str:
        """Where the Jobs API listens."""
        return f"http://127.0.0.1:{self._ports[1]}"

    @property
    def nodes(self) -> list[str]:
        """The nodes that the present head knows, except the stranger."""
        return [node for node in ADDRESSES if node in self._nodes and node not in self._forgotten]

    def start(self, nodes: int = NODES) -> None:
        """Start what does not run; returns when there are that many nodes beside the head."""
        if HEAD not in self._nodes:
            self.start_head()
        while len(self.nodes) < nodes:  # one after the other: they share files below the head's directory
            self._join(next(node for node in ADDRESSES if node not in self._nodes), '{"tinker": 2}')

    def start_stranger(self) -> None:
        """Start the stranger, alone with the resource `stranger`."""
        self._join(STRANGER, '{"tinker": 2, "stranger": 2}', "unshare", "--mount")

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
        self._start(node, *options, inside=inside)

    def start_head(self) -> None:
        """Start the head; one that was killed has forgotten everything, for good."""
        # or it would take the nodes that outlive it, which are on this machine as well, for itself
        (self.home / "ray_current_cluster").unlink(missing_ok=True)
        self._forgotten = set(self._nodes)
        ports = dict(zip(("port", "dashboard-port", "ray-client-server-port"), self._ports, strict=True))
        options = [f"--{name}={port}" for name, port in ports.items()]
        options += ["--head", "--num-cpus=0", "--dashboard-host=127.0.0.1", f"--temp-dir={self.home}"]
        self._start(HEAD, *options, "--no-monitor")  # which would scale a cluster of a cloud

    def stop(self) -> None:
        """End everything, the nodes before the head."""
        for node in ALL:
            self.kill(node)

    def kill(self, node: str) -> None:
        """End a node with all that runs there, as a power cut does."""
        daemon = self._nodes.pop(node, None)
        self._forgotten.discard(node)
        while pids := self.processes(node):
            kill_together(pids)
            time.sleep(0.05)
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

    def workers(self, *nodes: str) -> list[int]:
        """List the workers that run on any node, or on some."""
        return self.processes(*(nodes or ALL), program="retrain.trainer.worker")

    def processes(self, *nodes: str, program: str = "") -> list[int]:
        """List the processes of nodes, or those whose command line has a word."""
        marks = {f"{MARK}={self.home / node}" for node in nodes}
        return [pid for pid in running(program) if not marks.isdisjoint(environment_of(pid))]

    def _variables(self, node: str) -> dict[str, str]:
        return {**os.environ, MARK: str(self.home / node), **QUIET, **HASTE, **FAIR}

    def _is_there(self, node: str) -> bool:
        try:
            return any(f"node:{node}" in found for found in self.client.resources())
        except ClusterDownError:
            return False

    def _start(self, node: str, *arguments: str, inside: Sequence[str] = ()) -> None:
        """Start a node; again if Ray gives up, as it does after half a minute on a busy machine."""
        self._spawn(node, *arguments, inside=inside)

        def is_there() -> bool:
            if self._nodes[node].poll() is not None:
                self.kill(node)
                self._spawn(node, *arguments, inside=inside)
            return self._is_there(node)

        await_that(f"node {node}", is_there, every_s=ASK_S)

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
