"""Runs one program, as its first frame of input says; what it answers is only data to the other side."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import sys
import threading
import types
from collections.abc import Sequence
from typing import Any, NoReturn

from retrain.plugins.sandbox.inside import confine, peer, testing, values

TOUCHING = ("open", "os.listdir", "os.scandir")
STDIN = ".stdin"  # a file in a program's folder; bubblewrap's /dev/stdin leads there, or to a link to it
SYSTEM = ("/usr/", "/lib", "/bin", "/sbin", "/dev/", "/etc/ld.so.", "/etc/localtime")


def run(reads: int, writes: int, *others: int) -> NoReturn:
    """Run the job that `reads` describes, and end this process.

    - "stdio": `source` with standard input `input`; `writes` is its standard output.
    - "calls": `source`, whose names then answer the requests on `reads`.
    - "shared": `tests` in the namespace of `source`; says `token` and how many assertions were reached.
    - "plain": the same as plain Python would; says only whether they accept it.
    - "tests": `tests` against `source` in the sandbox behind `others`; says how they ended. With `changes`,
      functions of the program may change all arguments.
    """
    frames = values.Frames(reads)
    job = frames.read()
    for name in [name for name in sys.modules if name.startswith("retrain.")]:
        del sys.modules[name]
    sys.argv = ["solution.py"]
    try:
        _do(job, frames, writes, others)
        code = 0
    except SystemExit as error:
        code = 0 if error.code is None else error.code if isinstance(error.code, int) else 1
    except BaseException as error:  # noqa: BLE001 - its traceback would be read by nobody
        confine.tell_of_limits(error)
        code = 1
    _end(code)


def _do(job: dict[str, Any], frames: values.Frames, writes: int, others: Sequence[int]) -> None:
    if job["job"] == "stdio":
        _redirect(_input(job["input"]), writes)
        os.close(frames.fd)
        _tell_of_paths()
        _execute("__main__", job["source"])
        return None
    _redirect(_input(""), None)
    if job["job"] == "tests":
        verdict = testing.run(
            others[0], others[1], job["source"], job["tests"], changes_all=bool(job.get("changes"))
        )
        return values.write_frame(writes, verdict)
    if job["job"] == "plain":
        return values.write_frame(writes, testing.run_plainly(job["source"], job["tests"]))
    _tell_of_paths()
    namespace = _execute("solution", job["source"])
    if job["job"] == "calls":
        return peer.Peer(frames, writes, namespace).serve()
    reached = testing.run_shared(job["tests"], namespace)
    return values.write_frame(writes, [job["token"], reached])


def _end(code: int) -> NoReturn:
    """End as the interpreter would, without the time that it takes to free everything."""
    try:
        threading._shutdown()  # type: ignore[attr-defined] # waits for threads
        atexit._run_exitfuncs()
        sys.stdout.flush()
    except BaseException:  # noqa: BLE001
        code = code or 1
    # or open(1, "w"), or its `write`
    for holder in [sys.__stdout__, *vars(sys.modules["__main__"]).values()]:
        with contextlib.suppress(BaseException):
            file = holder if isinstance(holder, io.IOBase) else getattr(holder, "__self__", None)
            if isinstance(file, io.IOBase):
                file.flush()
    os._exit(code & 0xFF)


def _tell_of_paths() -> None:
    """Have the supervisor count the paths outside of its folder and the interpreter that a program opens.

    It is a sign and no boundary: a program that means to can avoid it.
    """
    readable = (os.path.abspath("."), sys.prefix, sys.base_prefix, *sys.path, *SYSTEM)  # noqa: PTH100 - seldom loaded

    def hook(event: str, arguments: Sequence[Any]) -> None:
        is_path = event in TOUCHING and isinstance(arguments[0], str | bytes | os.PathLike)
        if is_path and not os.path.abspath(os.fsdecode(arguments[0])).startswith(readable):  # noqa: PTH100
            confine.tell_of_path()

    sys.addaudithook(hook)


def _input(text: str) -> int:
    """Return a descriptor of a file with a text: programs ask for its size, or open it by a device's name."""
    fd = os.open(STDIN, os.O_RDWR | os.O_CREAT)
    with open(os.dup(fd), "wb") as file:  # noqa: PTH123
        file.write(text.encode("utf-8", "surrogatepass"))
    os.lseek(fd, 0, os.SEEK_SET)
    with contextlib.suppress(OSError):  # a link of bubblewrap's to where nothing is yet
        os.symlink(os.path.abspath(STDIN), os.readlink("/dev/stdin"))  # noqa: PTH100, PTH115, PTH211
    return fd


def _redirect(given: int, writes: int | None) -> None:
    """Read standard input from a descriptor, and print to another or to nowhere."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd, target in ((0, given), (1, nowhere if writes is None else writes), (2, nowhere)):
        os.dup2(target, fd)
    for fd in {given, nowhere, *([] if writes is None else [writes])}:
        os.close(fd)
    how = {"encoding": "utf-8", "errors": "surrogateescape"}
    sys.stdin = sys.__stdin__ = open(0, **how)  # type: ignore[call-overload, misc] # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", **how)  # type: ignore[call-overload, misc] # noqa: SIM115


def _execute(name: str, source: str) -> dict[str, Any]:
    module = types.ModuleType(name)
    module.__file__ = os.path.abspath(f"{name}.py")  # noqa: PTH100 - seldom loaded
    sys.modules[name] = module  # dataclasses and pickle look up a class's module
    exec(compile(source, f"{name}.py", "exec", dont_inherit=True), module.__dict__)
    return module.__dict__
