"""A checkpoint of a remote policy: where the API keeps it, as JSON."""

from __future__ import annotations

import json
from pathlib import Path

from retrain.errors import RecordsError

FORMAT = 1  # of the file; raise it when old ones can no longer be read
NAME = "tinker.json"


def write_state(directory: Path, path: str, version: int, model: str, rank: int) -> None:
    """Write the API's path of a saved policy, and what it belongs to."""
    facts = {"format": FORMAT, "path": path, "version": version, "model": model, "lora_rank": rank}
    (directory / NAME).write_text(json.dumps(facts, indent=1), encoding="utf-8")


def read_state(directory: Path, model: str, rank: int) -> tuple[str, int]:
    """Return the API's path of the saved policy, and the optimizer updates that it has seen.

    Raises:
        RecordsError: unreadable, or of another model.
    """
    try:
        facts = json.loads((directory / NAME).read_text(encoding="utf-8"))
        found = {key: facts[key] for key in ("format", "model", "lora_rank")}
        path, version = str(facts["path"]), int(facts["version"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RecordsError(
            f"{directory}: not a readable checkpoint of the tinker backend ({error}); use an earlier one"
        ) from error
    for key, value in (("format", FORMAT), ("model", model), ("lora_rank", rank)):
        if found[key] != value:
            raise RecordsError(
                f"{directory}: this checkpoint's {key} is {found[key]!r}, the run's is {value!r}; "
                "resume with the configuration that wrote it"
            )
    return path, version
