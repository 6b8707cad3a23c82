"""The `retrain` command: the only place where errors become messages and exit codes."""

from __future__ import annotations

import sys
from pathlib import Path


def main() -> None:
    """Run the command line."""
    arguments = sys.argv[1:]
    if arguments and arguments[0].endswith(".toml"):
        arguments = ["run", *arguments]
    sys.path.append(str(Path.cwd()))  # a plugin's dotted path may name a file beside the campaign
    sys.exit(_run(arguments))


def _run(arguments: list[str]) -> int:
    from retrain.cli import app
    from retrain.errors import RetrainError

    try:
        result = app(arguments, standalone_mode=True)
    except RetrainError as error:
        if "--debug" in arguments:
            raise
        print(error, file=sys.stderr)
        return error.exit_code
    return int(result or 0)


if __name__ == "__main__":
    main()
