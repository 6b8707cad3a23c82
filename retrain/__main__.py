"""The `retrain` command: the only place where errors become messages and exit codes."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from retrain.streams import fill_closed


def main() -> None:
    """Run the command line."""
    fill_closed()
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "1")  # looking for them takes 20 ms, and none is used
    arguments = sys.argv[1:]
    first = next((i for i, argument in enumerate(arguments) if not argument.startswith("-")), None)
    if first is not None and arguments[first].endswith(".toml"):
        arguments = [*arguments[:first], "run", *arguments[first:]]
    with contextlib.suppress(FileNotFoundError):  # the current directory may have been deleted
        sys.path.append(str(Path.cwd()))  # a plugin's dotted path may name a file beside the campaign
    sys.exit(_run(arguments))


def _run(arguments: list[str]) -> int:
    from retrain.cli import app
    from retrain.errors import EXIT_DONE, RetrainError

    try:
        result = app(arguments, prog_name="retrain")
        sys.stdout.flush()
    except RetrainError as error:
        if "--debug" in arguments:
            raise
        print(error, file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader has seen enough: `retrain status | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains when it exits
        return EXIT_DONE
    return int(result or 0)


if __name__ == "__main__":
    main()
