"""A process that has imported the command line, and forks others that run it: imports are paid for once.

What it runs has its own process, descriptors, environment, directory and exit code, as if started anew. Each
process of tests has a fork of its own, which runs one command at a time.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import pkgutil
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import psutil

FIXED = ("PYTHON", "LANG", "LC_", "OPENBLAS", "OMP")  # variables that decide how an interpreter starts
FREE = "PYTHONPATH"
PACKAGES = """
cli cli.render campaign results.status plan config results.report records campaign.launchers plugins.loggers
plugins.rewards plugins.tasks plugins.advantages plugins.losses plugins.transforms backends.numpy trainer
plugins.sandbox control.semaphore
"""


class WarmServer:
    """A process that imports what commands import when it is first asked for one."""

    def __init__(self) -> None:
        self._directory = tempfile.mkdtemp(prefix="warm-")
        self.address = str(Path(self._directory) / "socket")
        life, self._life = os.pipe()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.address)
            listener.listen()
            passed = (listener.fileno(), life)
            command = [sys.executable, "-m", "tests.warm", *map(str, passed)]
            self._process = subprocess.Popen(command, cwd=Path(__file__).parents[1], pass_fds=passed)
        os.close(life)

    def close(self) -> None:
        os.close(self._life)
        self._process.wait()
        shutil.rmtree(self._directory)


class WarmCommandLine:
    """Runs `python -m retrain ARGUMENTS`; one command at a time."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._connect()

    def _connect(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(self._address)
        self._answers = self._socket.makefile()
        self._process = psutil.Process(int(self._answers.readline()))

    def run(
        self, arguments: list[str], cwd: Path, env: dict[str, str] | None, timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """Run one command to its end.

        Raises:
            TimeoutError: it did not end, and was killed.
        """
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            request = {"arguments": arguments, "cwd": str(cwd), "env": dict(env or os.environ)}
            self._socket.settimeout(timeout_s)
            line = json.dumps(request).encode() + b"\n"
            socket.send_fds(self._socket, [len(line).to_bytes(4)], [out.fileno(), err.fileno()])
            self._socket.sendall(line)
            try:
                code = int(self._answers.readline())
            except BaseException:  # also that of pytest's own limit
                self._end_all()
                raise
            for file in (out, err):
                file.seek(0)
            command = [sys.executable, "-m", "retrain", *arguments]
            return subprocess.CompletedProcess(command, code, out.read(), err.read())

    def _end_all(self) -> None:
        """Kill the command and the process that ran it, whose next answer would be of this command."""
        for process in [*self._process.children(), self._process]:
            process.kill()
        self.close()
        self._connect()

    def close(self) -> None:
        self._socket.close()
        self._answers.close()


def starts_alike(env: dict[str, str] | None) -> bool:
    """Whether an interpreter with these variables would start as this one did."""
    if env is None:
        return True
    return _fixed(env) == _fixed(dict(os.environ))


def _fixed(env: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(FIXED) and name != FREE}


def _listen(listener: socket.socket, life: int) -> None:
    """Fork a process for each that connects, until the process that started this one has ended."""
    is_warm = False
    while listener in select.select([listener, life], [], [])[0]:
        connection, _ = listener.accept()
        if not is_warm:
            _import_all()
            gc.freeze()  # what was imported is no garbage of a command
            is_warm = True
        if not os.fork():
            listener.close()
            os.close(life)
            _serve(connection)
            os._exit(0)
        connection.close()


def _serve(requests: socket.socket) -> None:
    requests.sendall(b"%d\n" % os.getpid())
    while True:
        head, descriptors, _, _ = socket.recv_fds(requests, 4, 2)
        if not head:
            return
        size, line = int.from_bytes(head), b""
        while len(line) < size:
            line += requests.recv(size - len(line))
        request = json.loads(line)
        _prepare(request["arguments"])
        child = os.fork()
        if not child:
            _become(request, descriptors, requests)
        for descriptor in descriptors:
            os.close(descriptor)
        _, status = os.waitpid(child, 0)
        requests.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))


def _import_all() -> None:
    for name in ("pydantic.main", "pydantic.type_adapter", "retrain.__main__", "retrain.trainer.worker"):
        importlib.import_module(name)
    for name in PACKAGES.split():
        package = importlib.import_module(f"retrain.{name}")
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{module.name}")


def _prepare(arguments: list[str]) -> None:
    """Do once what takes every process of a command a second or two."""
    command = next(iter(arguments), "")
    with contextlib.suppress(ImportError):  # which the command tells, if it comes to that
        if "--probe" in arguments:
            importlib.import_module("tinker")
        if command == "report" and importlib.util.find_spec("vl_convert"):
            importlib.import_module("retrain.results.report.page").bundle()


def _become(request: dict[str, Any], descriptors: list[int], requests: socket.socket) -> None:
    """Run the command in this new process, and end it."""
    code = 1
    try:
        requests.close()
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        sys.path[:0] = [place for place in os.environ.get(FREE, "").split(os.pathsep) if place]
        for theirs, ours in zip(descriptors, (1, 2), strict=True):
            os.dup2(theirs, ours)
            os.close(theirs)
        sys.argv = ["retrain", *request["arguments"]]
        from retrain.__main__ import main

        main()
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:  # noqa: BLE001  (as an interpreter does at its end)
        traceback.print_exc()
    finally:
        import atexit

        with contextlib.suppress(Exception):
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code & 0xFF)


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as ours:
        _listen(ours, int(sys.argv[2]))
