"""The exit code of a failed attempt: whether the run failed, or the machine and network around it."""

from __future__ import annotations

import errno
from collections.abc import Iterator

from retrain.errors import (
    EXIT_BUG,
    EXIT_INFRASTRUCTURE,
    EXIT_RUN_FAILED,
    RecordsError,
    RetrainError,
    may_pass,
)

SURROUNDINGS = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.ESTALE),
        *(errno.ENETDOWN, errno.ENETUNREACH, errno.EHOSTDOWN, errno.EHOSTUNREACH),
        *(errno.ENOMEM, errno.EAGAIN, errno.EMFILE, errno.ENFILE),  # out of memory, processes or open files
    }
)


def exit_code_of(error: Exception) -> int:
    """Return the exit code of a worker ended by this error; 75 if another attempt may succeed."""
    if isinstance(error, RecordsError) and may_pass(error):
        return EXIT_INFRASTRUCTURE
    if isinstance(error, RetrainError):
        return EXIT_RUN_FAILED if error.exit_code == EXIT_BUG else error.exit_code
    return EXIT_INFRASTRUCTURE if any(map(_is_the_surroundings, _behind(error))) else EXIT_RUN_FAILED


def _behind(error: BaseException | None) -> Iterator[BaseException]:
    """Iterate over an error and its causes: libraries wrap a lost connection in errors of their own."""
    while error is not None:
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _is_the_surroundings(error: BaseException) -> bool:
    if isinstance(error, (ConnectionError, MemoryError, TimeoutError)):
        return True
    return isinstance(error, OSError) and (error.errno in SURROUNDINGS or _is_name_trouble(error))


def _is_name_trouble(error: OSError) -> bool:
    import socket  # imported late: few runs fail

    return isinstance(error, socket.gaierror) and error.errno == socket.EAI_AGAIN
