"""The `retrain` command: the only place where errors become messages and exit codes."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from pathlib import Path

from retrain.base.errors import EXIT_BUG, EXIT_CONFIG, EXIT_DONE, EXIT_INTERRUPTED, EXIT_RECORDS, RetrainError
from retrain.base.hide_process import hide
from retrain.base.streams import fill_closed, leave, write_in_any_encoding

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)  # errors of a full disk


def main() -> None:
    """Run the command line."""
    hide()  # keys in its environment
    from retrain.base.redaction import cover_output
    from retrain.base.threads import search_rarely  # after that, as whatever is imported

    search_rarely()
    fill_closed()
    write_in_any_encoding()
    cover_output(results=False)
    arguments = sys.argv[1:]
    first = next((i for i, argument in enumerate(arguments) if not argument.startswith("-")), None)
    if first is not None and ("." in arguments[first] or os.sep in arguments[first]):  # no command has these
        arguments = [*arguments[:first], "run", *arguments[first:]]
    with contextlib.suppress(FileNotFoundError):  # the current directory may have been deleted
        sys.path.append(str(Path.cwd()))  # a plugin's dotted path may name a file there
    try:
        code = _run(arguments)
    except KeyboardInterrupt:  # while modules are imported; what runs has a handler of its own
        code = EXIT_INTERRUPTED
    except Exception as error:  # noqa: BLE001 - the edge: a bug, or --debug
        import traceback

        _print(traceback.format_exc().rstrip())
        code = error.exit_code if isinstance(error, RetrainError) else EXIT_BUG
    leave(code)


def _print(text: str) -> None:
    """Print what went wrong if it can be."""
    with contextlib.suppress(OSError):  # a full disk must not change the exit code
        print(text, file=sys.stderr)


def _run(arguments: list[str]) -> int:
    try:
        code = _answer(arguments)
        sys.stdout.flush()
    except RetrainError as error:
        if "--debug" in arguments:
            raise
        _print(str(error))
        return error.exit_code
    except Exception as error:
        if "--debug" in arguments and not isinstance(error, BrokenPipeError):
            raise
        if fault := _fault_of(error):
            _print(fault)
            return EXIT_CONFIG
        if isinstance(error, OSError):
            return _report_os_error(error)
        raise
    return code


def _fault_of(error: BaseException) -> str:
    """Return where a user's own code raised an error; "" if it did not."""
    user_code = sys.modules.get("retrain.base.user_code")  # without it, no plugin was looked for
    fault = user_code.fault_of(error) if user_code else ""
    return f"{fault}; --debug shows all" if fault else ""


def _answer(arguments: list[str]) -> int:
    from retrain.cli import app

    try:
        app(arguments, prog_name="retrain")
    except SystemExit as leaving:
        if isinstance(leaving.__context__, BrokenPipeError):
            raise leaving.__context__ from None
        if fault := _fault_of(leaving):
            _print(fault)
            return EXIT_CONFIG
        return int(leaving.code or EXIT_DONE)
    return EXIT_DONE


def _report_os_error(error: OSError) -> int:
    """Print which file could not be read or written, and return the exit code."""
    if error.filename is not None:  # an unforeseen one, such as the shell's own files
        _print(f"{error.filename}: {error.strerror}; --debug shows where")
        return EXIT_RECORDS
    if isinstance(error, FileNotFoundError):  # which only the current directory has no name for
        _print("the current directory was deleted; change to another one")
        return EXIT_CONFIG
    if not isinstance(error, BrokenPipeError) and error.errno not in FULL:
        raise error
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it exits
    if isinstance(error, BrokenPipeError):  # the reader has seen enough: `retrain status | head`
        return EXIT_DONE
    _print(f"output: {error.strerror}; --debug shows where")
    return EXIT_RECORDS


if __name__ == "__main__":
    if not sys.flags.safe_path:  # as the installed command: the current directory is looked in last
        del sys.path[0]
    main()
