"""Standard streams that may be closed, as cron and some services start programs."""

from __future__ import annotations

import os
import sys

STANDARD = 3  # input, output, errors: descriptors 0, 1 and 2


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
