"""A Ray cluster of this machine alone, for a campaign that asks for `address = "local"`.

`python -m retrain.launchers._ray_local DIRECTORY` starts one, keeps it, and ends it when the campaign has
neither an orchestrator nor jobs any more. It is a process of its own, so the campaign goes on when the
orchestrator is gone. It listens on loopback only, and a lock that it holds says that it lives.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from retrain.errors import EngineDownError, LaunchError
from retrain.launchers._ray_client import Client
from retrain.locks.held import hold, is_held
from retrain.records.atomic import read_json, write_json
from retrain.records.layout import CampaignFiles
from retrain.records.text import plain

HOST = "127.0.0.1" if sys.platform == "darwin" else "127.0.0.2"  # Ray replaces the first one on Linux
START_S = 180.0  # a busy laptop needs one; no Ray needs three
IDLE_S = 10.0  # without a job or an orchestrator; a job that ends has submitted the next one before
SILENT_S = 60.0  # without an answer: a busy head takes seconds
LOOK_S = 3.0
PORTS = range(
    20001, 32000
)  # Ray's workers have those from 10002 to 19999, and the kernel gives out later ones
MEMORY = 80_000_000  # bytes of Ray's object store, which no run uses


class Local:
    """The cluster that a campaign's directory `ray/` belongs to."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._lock = home / "local.lock"
        self._facts = home / "local.json"

    @property
    def is_running(self) -> bool:
        """Whether somebody keeps it."""
        return is_held(self._lock)

    def address(self) -> str:
        """Return where its Jobs API listens.

        Raises:
            EngineDownError: it does not run.
        """
        found = read_json(self._facts) if self.is_running else None
        if found is None:
            raise EngineDownError(f"the Ray of this machine has ended; see {self._home / 'local.out'}")
        return str(found.get("url"))

    def start(self, say: Callable[[str], None]) -> None:
        """Start it if it does not run; returns when it answers.

        Raises:
            LaunchError: it does not come up.
        """
        if self.is_running:
            return
        say("starting a Ray of this machine alone, which ends with the campaign")
        try:
            keeper = self._begin()
        except OSError as error:
            raise LaunchError(f"Ray could not be started here: {error}") from error
        until = time.monotonic() + START_S
        while not self._facts.exists():
            if keeper.poll() is not None or time.monotonic() > until:
                raise LaunchError(f"Ray could not be started here: {self._last_words()}")
            time.sleep(0.2)

    def _begin(self) -> subprocess.Popen[bytes]:
        self._facts.unlink(missing_ok=True)
        with (self._home / "local.out").open("wb") as output:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "retrain.launchers._ray_local", str(self._home)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    def _last_words(self) -> str:
        path = self._home / "local.out"
        said = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
        return f"{plain(said[-1] if said else 'it said nothing', 300)} (all of it: {path})"

    def keep(self) -> int:
        """Be the process that starts, keeps and ends it."""
        lock = hold(self._lock)
        if lock is None:
            return 0
        temporary = Path(tempfile.mkdtemp(prefix="retrain-ray-"))  # short: a socket's path has its limits
        port, dashboard, clients = _free_ports(3)
        options = {
            "node-ip-address": HOST,
            "port": port,
            "dashboard-host": "127.0.0.1",
            "dashboard-port": dashboard,
            "ray-client-server-port": clients,
            "temp-dir": temporary,
            "object-store-memory": MEMORY,
            "dashboard-agent-listen-port": 0,
        }
        flags = [f"--{name}={value}" for name, value in options.items()]
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
        with lock:
            ray = subprocess.Popen([*command, "--disable-usage-stats", *flags], stdin=subprocess.DEVNULL)
            try:
                url = f"http://127.0.0.1:{dashboard}"
                self._serve(ray, url, Client(url))
            finally:
                self._facts.unlink(missing_ok=True)
                _end(ray)
                shutil.rmtree(temporary, ignore_errors=True)
        return 0

    def _serve(self, ray: subprocess.Popen[bytes], url: str, client: Client) -> None:
        campaign = CampaignFiles(self._home.parent)
        needed_at, patience_s = time.monotonic(), SILENT_S
        while ray.poll() is None and time.monotonic() - needed_at < patience_s:
            patience_s = IDLE_S
            try:
                has_jobs = any(not job.is_over for job in client.jobs())
                if not self._facts.exists() and client.resources():
                    write_json(self._facts, {"url": url})
            except EngineDownError:
                has_jobs, patience_s = False, SILENT_S
            if has_jobs or is_held(campaign.lock):
                needed_at = time.monotonic()
            time.sleep(LOOK_S if self._facts.exists() else 0.5)


def _end(ray: subprocess.Popen[bytes]) -> None:
    try:
        family = [psutil.Process(ray.pid), *psutil.Process(ray.pid).children(recursive=True)]
    except psutil.Error:
        return
    ray.terminate()
    _, alive = psutil.wait_procs(family, timeout=40)  # a head drains for up to 30 s
    for process in alive:
        if process.is_running():
            process.kill()
    ray.wait()


def _free_ports(count: int) -> list[int]:
    found: list[int] = []
    for port in PORTS:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        found.append(port)
        if len(found) == count:
            return found
    raise LaunchError(f"no free ports between {PORTS.start} and {PORTS.stop}")


if __name__ == "__main__":
    sys.exit(Local(Path(sys.argv[1])).keep())
