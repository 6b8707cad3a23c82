"""A process that has imported the command line, and forks one that runs it: imports are paid for once.

What it runs has its own process, descriptors, environment, directory and exit code, as if started anew.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pkgutil
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
cli render campaign status plan config report records launchers loggers rewards tasks advantages losses
transforms backends.numpy trainer sandbox semaphore
"""
LATER = {"compare": "scipy.stats"}  # what takes a second to import, by the command that needs it


class WarmCommandLine:
    """Runs `python -m retrain ARGUMENTS`; one command at a time."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.warm", str(theirs.fileno())],
            cwd=Path(__file__).parents[1],
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        self._answers = self._socket.makefile()

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
        for process in [*psutil.Process(self._process.pid).children(), self._process]:
            process.kill()
        self.close()
        self._start()

    def close(self) -> None:
        self._socket.close()
        self._answers.close()
        self._process.wait()


def starts_alike(env: dict[str, str] | None) -> bool:
    """Whether an interpreter with these variables would start as this one did."""
    if env is None:
        return True
    return _fixed(env) == _fixed(dict(os.environ))


def _fixed(env: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(FIXED) and name != FREE}


def _serve(requests: socket.socket) -> None:
    _import_all()
    gc.freeze()  # what was imported is no garbage of a command
    while True:
        head, descriptors, _, _ = socket.recv_fds(requests, 4, 2)
        if not head:
            return
        size, line = int.from_bytes(head), b""
        while len(line) < size:
            line += requests.recv(size - len(line))
        request = json.loads(line)
        if (module := LATER.get(next(iter(request["arguments"]), ""))) is not None:
            importlib.import_module(module)
        child = os.fork()
        if not child:
            _become(request, descriptors, requests)
        for descriptor in descriptors:
            os.close(descriptor)
        _, status = os.waitpid(child, 0)
        requests.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))


def _import_all() -> None:
    for name in ("pydantic.main", "pydantic.type_adapter", "retrain.__main__", "retrain.worker"):
        importlib.import_module(name)
    for name in PACKAGES.split():
        package = importlib.import_module(f"retrain.{name}")
        for module in pkgutil.iter_modules(package.__path__):
            importlib.import_module(f"{package.__name__}.{module.name}")


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
    _serve(socket.socket(fileno=int(sys.argv[1])))
