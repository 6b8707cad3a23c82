"""A real Slurm of four nodes on loopback: munged, slurmctld and four slurmd, without systemd.

A fifth node, the stranger, is as another machine would be: its own host name, one directory (`lone`)
that is not shared with the others, and one (`unlocked`) whose files are, but not their locks.

Everything lies in one private directory, and everything that runs is started here and ended by its
process id; jobs are known by the SLURM_CONF in their environment.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.cluster.ports import free_ports
from tests.cluster.processes import command_of, environment_of, kill, running
from tests.cluster.waiting import await_that

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel", "scontrol", "srun")
NODES = ("n1", "n2", "n3", "n4")
STRANGER = "n5"
NAMESPACES = """
set -e
hostname stranger
(cat /etc/hosts; echo 127.0.0.1 stranger) > {home}/hosts
mount --bind {home}/hosts /etc/hosts
mount -t tmpfs none {home}/lone
bindfs -f --no-allow-other {home}/unlocked {home}/unlocked &
echo $! > {home}/bindfs.pid
while ! mountpoint -q {home}/unlocked; do kill -0 $!; sleep 0.05; done
exec {slurmd} -D -N n5
"""
IDLE_S = 60.0  # a controller that was restarted takes half a minute to look at its nodes
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={home}/munge.sock
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmdParameters=config_overrides
ReturnToService=2
Licenses=tinker:4
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool/%n
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd-%n.pid
SlurmctldLogFile={home}/slurmctld.log
SlurmdLogFile={home}/slurmd-%n.log
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=1
MaxArraySize={array_size}
MaxJobCount=20000
KillWait=5
MessageTimeout=5
SlurmdTimeout=6
InactiveLimit=0
NodeName=n[1-5] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[5]}] CPUs=8 RealMemory=4000
PartitionName=main Nodes=n[1-4] Default=YES MaxTime=INFINITE State=UP
PartitionName=strange Nodes=n5 MaxTime=INFINITE State=UP
PartitionName=mixed Nodes=n[1,5] MaxTime=INFINITE State=UP
"""


class SlurmMissingError(Exception):
    """The programs are not installed."""


class Cluster:
    """Starts, harms and ends the daemons."""

    def __init__(self, home: Path, array_size: int = 1001) -> None:
        missing = [name for name in PROGRAMS if not _find(name)]
        if missing:
            raise SlurmMissingError(f"{', '.join(missing)} not found: apt-get install -y slurm-wlm munge")
        self.home = home
        self.conf = home / "slurm.conf"
        self.array_size = array_size
        self._first_job = 0
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to talk to this Slurm."""
        path = os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/usr/local/sbin"])
        return {**os.environ, "SLURM_CONF": str(self.conf), "PATH": path}

    def start(self) -> None:
        """Start everything; returns when all nodes are idle."""
        for name in (
            "state",
            "munge",
            "lone",
            "unlocked",
            f"spool/{STRANGER}",
            *(f"spool/{node}" for node in NODES),
        ):
            (self.home / name).mkdir(parents=True, mode=0o700)
        (self.home / "munge/key").write_bytes(os.urandom(128))
        (self.home / "munge/key").chmod(0o600)
        user = subprocess.check_output(["id", "-un"], text=True).strip()
        host = socket.gethostname().partition(".")[0]
        self.conf.write_text(
            CONF.format(home=self.home, user=user, host=host, ports=free_ports(6), array_size=self.array_size)
        )
        files = {"key": "munge/key", "socket": "munge.sock", "pid": "munged.pid", "log": "munged.log"}
        named = {"key": "--key-file", "socket": "--socket", "pid": "--pid-file", "log": "--log-file"}
        options = [f"{named[what]}={self.home / path}" for what, path in files.items()]
        self._spawn("munged", "-F", "--force", f"--seed-file={self.home / 'munged.seed'}", *options)
        await_that("munged's socket", (self.home / "munge.sock").exists)
        self.start_controller("-c")
        for node in NODES:
            self.start_node(node)
        self.await_idle()

    def stop(self) -> None:
        """End everything, jobs first."""
        kill(self.job_processes())
        for name in reversed(list(self._daemons)):
            self._end(name)
        kill(self.job_processes())

    def start_controller(self, *arguments: str) -> None:
        """Start slurmctld; with `-c` it forgets all that was, and counts jobs where nodes remember none."""
        if "-c" in arguments:
            self._first_job += 10_000
            kept = [line for line in self.conf.read_text().splitlines() if "FirstJobId" not in line]
            self.conf.write_text("\n".join([*kept, f"FirstJobId={self._first_job}", ""]))
        self._spawn("slurmctld", "-D", *arguments)
        await_that("slurmctld", lambda: self.run("scontrol", "ping").stdout.find("UP") >= 0)

    def kill_controller(self) -> None:
        """End slurmctld as a power cut does."""
        self._end("slurmctld", signal.SIGKILL)

    def start_node(self, node: str) -> None:
        """Start a node's slurmd."""
        self._spawn("slurmd", "-D", "-N", node, name=node)

    def start_stranger(self) -> None:
        """Start the fifth node in namespaces of its own."""
        for program in ("unshare", "bindfs", "nsenter"):
            if _find(program) is None:
                raise SlurmMissingError(f"{program} not found: apt-get install -y util-linux bindfs")
        script = NAMESPACES.format(home=self.home, slurmd=_find("slurmd"))
        self._spawn("unshare", "-m", "-u", "bash", "-c", script, name=STRANGER)
        said = self.home / f"{STRANGER}.out"
        try:
            await_that("idle stranger", lambda: self._states().get(STRANGER) == "idle")
        except TimeoutError as error:
            raise TimeoutError(f"{error}; it needs root and /dev/fuse: {said.read_text()[-500:]}") from error

    def stop_stranger(self) -> None:
        """End the fifth node."""
        self.kill_node(STRANGER)
        pid = self.home / "bindfs.pid"
        if pid.exists():
            kill([int(pid.read_text())])
            pid.unlink()

    def as_stranger(self, *command: str) -> list[str]:
        """Return a command line that runs where the fifth node does."""
        return ["nsenter", "-t", str(self._daemons[STRANGER].pid), "-m", "-u", "--wd=.", *command]

    def kill_node(self, node: str) -> list[int]:
        """End a node with all that runs there, as a power cut does; gives the processes of jobs."""
        killed = self.job_processes(node)
        self._end(node, signal.SIGKILL)
        kill(killed)
        return killed

    def repair(self) -> None:
        """Start what was killed, end what still runs, and wait until all nodes are idle."""
        kill(self.job_processes())
        if "slurmctld" not in self._daemons:  # it would wait for jobs whose end it missed
            self.start_controller("-c")
        self.run("scancel", "--quiet", "-u", str(os.getuid()))
        for node in NODES:
            if node not in self._daemons:
                self.start_node(node)
        self.await_idle()

    def await_idle(self) -> None:
        """Wait until every node is there and has nothing to do."""

        def idle() -> bool:
            states = self._states()
            for node in NODES:  # a controller that was killed may start a task twice, and shut that node out
                if states.get(node, "").startswith(("drain", "down")):
                    self.run("scontrol", "update", f"nodename={node}", "state=resume")
            return {states.get(node) for node in NODES} == {"idle"}

        try:
            await_that("four idle nodes", idle, IDLE_S)
        except TimeoutError:  # a busy controller may miss an end, and ask again minutes later
            for node in NODES:
                self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=missed")
            await_that(f"four idle nodes after {self.run('sinfo', '-N', '-l').stdout}", idle, IDLE_S)

    def _states(self) -> dict[str, str]:
        lines = self.run("sinfo", "-h", "-N", "-o", "%N %T").stdout.splitlines()
        return dict(line.split(maxsplit=1) for line in lines)

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run one of Slurm's commands."""
        return subprocess.run(
            command, capture_output=True, text=True, env=self.environment, check=False, timeout=60
        )

    def job_processes(self, node: str = "") -> list[int]:
        """List processes that this Slurm started for jobs (on a node), with those that watch over them."""
        found = {above for pid in self._of_jobs(node) for above in (pid, *_stepd_above(pid))}
        return sorted(found - {os.getpid()})

    def workers(self, node: str = "", program: str = "retrain.trainer.worker") -> list[int]:
        """List the workers, or another module's processes, that run on the nodes, or on one."""
        return list(self._of_jobs(node, program))

    def _of_jobs(self, node: str, program: str = "") -> Iterator[int]:
        for pid in running(program):
            variables = environment_of(pid)
            ours = f"SLURM_CONF={self.conf}" in variables
            job = next((v.partition("=")[2] for v in variables if v.startswith("SLURMD_NODENAME=")), "")
            if ours and job and (not node or job == node):
                yield pid

    def _spawn(self, program: str, *arguments: str, name: str = "") -> None:
        found = _find(program)
        assert found is not None
        with (self.home / f"{name or program}.out").open("ab") as log:
            self._daemons[name or program] = subprocess.Popen(
                [found, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self.environment,
                cwd=self.home,
                start_new_session=True,
            )

    def _end(self, name: str, number: int = signal.SIGTERM) -> None:
        daemon = self._daemons.pop(name, None)
        if daemon is None:
            return
        daemon.send_signal(number)
        try:
            daemon.wait(timeout=10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


def _find(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/usr/local/sbin")


def _stepd_above(pid: int) -> list[int]:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
    parent = int(fields[1])
    return [parent] if "slurmstepd" in command_of(parent)[0] else []
