"""Ranks on the other nodes of a Slurm job: srun starts them, and they connect to rank 0 over TCP.

srun hands them rank 0's port and a key, in their environment. Either side proves that it has the key before
anything else is sent; after that, as tensors are, messages are neither encrypted nor signed. A node that is
lost without a word is missed after some lost keep-alive packets.
"""

from __future__ import annotations

import os
import secrets
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

import psutil

from retrain.base.errors import ConfigError, InfrastructureError
from retrain.control.machine import RANK_SHARE, cpu_capacity

COMMAND = (sys.executable, "-P", "-m", "retrain.base.hide_process", "retrain.backends.local.rank_process")
PORT, KEY = "RETRAIN_RANKS_PORT", "RETRAIN_RANKS_KEY"
INTERFACE = "GLOO_SOCKET_IFNAME"  # else gloo looks the machine's name up, and listens to the network
ADDRESS = "SLURM_LAUNCH_NODE_IPADDR"  # of the node on which srun was called, as the others reach it
SET_BY_JOB = ("SLURM_CPUS_PER_TASK", "SLURM_TRES_PER_TASK")  # which would contradict srun's arguments
CONNECT_S = 120.0  # for srun to start all processes, and for them to connect
CLOSE_S = 3.0  # for srun to end after its processes; it may wait for a node that is lost
PROOF_S = 5.0  # for a connection to prove that it has the key
KEEP_ALIVE_S, LOST_AFTER = 5, 4  # a peer is lost after so many packets without an answer, sent so often


class Remote:
    """A connection between rank 0 and a rank on another node."""

    def __init__(self, peer: socket.socket) -> None:
        peer.settimeout(None)
        self._socket = peer
        self.own_address: str = peer.getsockname()[0]
        self.connection = Connection(os.dup(peer.fileno()))
        self.cores = 0.0  # of the rank
        self._let_wait(PROOF_S)

    def prove(self, key: bytes, *, first: bool) -> None:
        """Prove that both sides have the key; raises OSError, EOFError or AuthenticationError."""
        for step in (deliver_challenge, answer_challenge) if first else (answer_challenge, deliver_challenge):
            step(self.connection, key)

    def accept(self) -> None:
        """Wait as long as the peer lives, from now on."""
        self._let_wait(0.0)
        for level, option, value in (
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEP_ALIVE_S),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEP_ALIVE_S),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, LOST_AFTER),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * KEEP_ALIVE_S * LOST_AFTER),
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
        ):
            self._socket.setsockopt(level, option, value)

    def _let_wait(self, seconds: float) -> None:
        limit = struct.pack("ll", int(seconds), 0)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)

    def close(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # a thread that watches it keeps it open
        self.connection.close()
        self._socket.close()


class Nodes:
    """The other nodes of this process's job, with the ranks on them."""

    def __init__(self, nodes: int, devices: int) -> None:
        """Start so many ranks on each node but this one, and wait until they have connected."""
        of_job = int(os.environ.get("SLURM_JOB_NUM_NODES", 1))
        if of_job < nodes:
            why = f"got {nodes}, and this job has {of_job}"
            fix = f"use {of_job}, or remove --nodes from [campaign.slurm].flags"
            raise ConfigError(f"[backend.options].nodes: {why}; {fix}")
        if shutil.which("srun") is None:
            why = "srun, which starts the ranks of other nodes, is not on the PATH of this job"
            raise ConfigError(f"[backend.options].nodes: {why}; add its directory in [campaign.slurm].setup")
        count, key = (nodes - 1) * devices, secrets.token_bytes(32)
        cores = max(1, int(os.environ.get("SLURM_CPUS_PER_TASK", devices)) // devices)
        variables = {KEY: key.hex(), RANK_SHARE: f"{cores} {devices}"}
        with socket.create_server(("", 0), backlog=count) as server:
            environment = {name: value for name, value in os.environ.items() if name not in SET_BY_JOB}
            self.process = subprocess.Popen(
                [*_srun(nodes - 1, devices, cores), *COMMAND],
                stdin=subprocess.DEVNULL,
                env={**environment, **variables, PORT: str(server.getsockname()[1])},
            )
            self.remotes: dict[int, Remote] = {}  # by rank
            try:
                self._accept(server, key, count, devices)
            except BaseException:
                self.close()
                raise
        _use_interface(self.remotes[devices].own_address)

    def _accept(self, server: socket.socket, key: bytes, count: int, first: int) -> None:
        server.settimeout(1.0)
        until_s = time.monotonic() + CONNECT_S
        while len(self.remotes) < count:
            if (code := self.process.poll()) is not None:
                why = f"srun exited with code {code}; its message is above"
                raise InfrastructureError(f"the ranks on other nodes cannot be started: {why}")
            if time.monotonic() > until_s:
                why = f"{len(self.remotes)} of {count} have connected within {CONNECT_S:g} s"
                raise InfrastructureError(f"ranks on other nodes: {why}; can nodes reach each other's ports?")
            with suppress(TimeoutError):
                remote = Remote(server.accept()[0])
                try:
                    remote.prove(key, first=True)
                    number, remote.cores = remote.connection.recv()
                    remote.accept()
                    self.remotes[first + number] = remote
                except (OSError, EOFError, AuthenticationError):
                    remote.close()

    def watch(self, lose: Callable[[int], None]) -> None:
        """Call `lose` with the rank whose connection ends, and signal that as the end of a child."""
        poll, ranks = select.poll(), dict[int, int]()
        for rank, remote in self.remotes.items():
            ranks[remote.connection.fileno()] = rank
            poll.register(remote.connection.fileno(), select.POLLRDHUP)
        main = threading.main_thread().ident
        assert main is not None

        def wait() -> None:
            for descriptor, _ in poll.poll():
                lose(ranks[descriptor])
            signal.pthread_kill(main, signal.SIGCHLD)

        threading.Thread(target=wait, daemon=True).start()

    def close(self) -> None:
        """End the ranks, which do when their connections have."""
        for remote in self.remotes.values():
            remote.close()
        try:
            self.process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def _srun(nodes: int, devices: int, cores: int) -> list[str]:
    options: Mapping[str, object] = {
        "nodes": nodes,
        "relative": 1,  # not on the first, which is rank 0's
        "ntasks": nodes * devices,
        "ntasks-per-node": devices,
        "cpus-per-task": cores,
        "distribution": "block",
        "kill-on-bad-exit": 1,
        "input": "none",
        "mpi": "none",
    }
    return ["srun", *(f"--{name}={value}" for name, value in options.items())]


def connect() -> Remote:
    """Connect this process, which rank 0 had srun start, to rank 0."""
    key, address = bytes.fromhex(os.environ.pop(KEY)), (os.environ[ADDRESS], int(os.environ[PORT]))
    remote = Remote(socket.create_connection(address, CONNECT_S))
    remote.prove(key, first=False)
    cores = min(cpu_capacity(), int(os.environ[RANK_SHARE].split()[0]))
    remote.connection.send((int(os.environ["SLURM_PROCID"]), cores))
    remote.accept()
    _use_interface(remote.own_address)
    return remote


def _use_interface(address: str) -> None:
    """Let gloo, in this process and its children, listen where the ranks of other nodes reach it."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            os.environ.setdefault(INTERFACE, name)
