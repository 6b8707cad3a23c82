"""Standard streams that may be closed, as some services start programs, full, or of another encoding."""

from __future__ import annotations

import codecs
import io
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

STANDARD = 3  # input, output, errors: descriptors 0, 1 and 2
NOT_AWAITED = ("logger ", "producer-")  # threads that may be stuck in a library's own code
ASCII = {"±": "+-"} | dict(  # on a screen a line that is cut must not become longer
    zip("…·▁▂▃▄▅▆▇█✓✗‖━╸─", "~._.-=+*%@vx|#>-", strict=True)
)


def fill_closed() -> None:
    """Open what is closed of this process's standard streams on nothing.

    Otherwise the next file to be opened, a record, would be what messages are written to.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) < STANDARD:
        os.set_inheritable(fd, True)
    os.close(fd)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115 - for good


def write_in_any_encoding() -> None:
    """Write what the output's encoding does not have as ASCII: a locale such as C is no reason to fail."""
    codecs.register_error("short", lambda error: _replaced(error, lambda _: "?"))
    codecs.register_error("escaped", lambda error: _replaced(error, lambda one: ascii(one)[1:-1]))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="short" if stream.isatty() else "escaped")


def leave(code: int) -> NoReturn:
    """End this process, whatever its streams and its threads are doing."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:  # Python would flush again at exit and change the exit code
        os._exit(code)
    if any(thread.name.startswith(NOT_AWAITED) for thread in threading.enumerate()):
        os._exit(code)  # it might never end, or abort the process
    sys.exit(code)


def _replaced(error: UnicodeError, others: Callable[[str], str]) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    lacking = error.object[error.start : error.end]
    return "".join(ASCII.get(one) or others(one) for one in lacking), error.end
