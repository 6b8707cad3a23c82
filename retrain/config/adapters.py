"""Where the weights are that a run may start from: in a finished run, or in a directory in peft's format."""

from __future__ import annotations

import json
import os
from pathlib import Path

PEFT, NUMPY, TINKER = "adapter_model.safetensors", "policy.npz", "tinker.json"
REMOTE = "tinker://"  # of states that the Tinker API saved
KEY = "model.adapter"


def weights_of(adapter: str | Path) -> Path | None:
    """Return the file of an adapter's weights, of a run that in its newest checkpoint; None if there is none.

    Its content identifies the adapter: rank, alpha and layers are the run's own, or the adapter is refused.
    """
    directory = Path(adapter)
    steps = sorted(directory.glob("checkpoints/step-*"), key=lambda step: (len(step.name), step.name))
    places = (directory, *reversed(steps))
    names = (PEFT, f"adapter/{PEFT}", NUMPY, TINKER)
    return next((place / name for place in places for name in names if (place / name).is_file()), None)


def state_of(adapter: str) -> str:
    """Return the path at the Tinker API of an adapter that is a state there; "" of others."""
    if adapter.startswith(REMOTE):
        return adapter
    file = weights_of(adapter)
    if file is None or file.name != TINKER:
        return ""
    try:
        return str(json.loads(file.read_text(encoding="utf-8"))["path"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def adapter_problem(adapter: str) -> str:
    """Return why there is nothing to start from; "" if there is, or if only an API knows."""
    directory = Path(adapter)
    if adapter.startswith(REMOTE):
        return ""
    if not os.path.isdir(adapter):  # noqa: PTH112 - a name may be too long for any file
        return f"{adapter!r} does not exist; name a finished run, or a directory that peft saved"
    if weights_of(directory) is None:
        return f"{adapter!r} {_what_it_is(directory)}"
    if (directory / "run.toml").is_file() and not (directory / "done.json").is_file():
        return f"{adapter!r} is a run that is not finished; finish it, or name a copy of a checkpoint"
    return ""


def _what_it_is(directory: Path) -> str:
    """Return what a directory is that has no weights, and what to name instead."""
    if (directory / "run.toml").is_file():
        whole = next(directory.glob("checkpoints/step-*/model"), None)
        trained = f"trained every parameter; name {whole} as [model].model" if whole else ""
        return f"is a run that {trained}" if whole else "is a run without a checkpoint; name another"
    run = next((path for path in sorted(directory.glob("runs/*")) if weights_of(path)), None)
    if run is not None:
        return f"is a campaign; name one of its runs, such as {run}"
    return f"has neither {PEFT} nor checkpoints; name a finished run, or a directory that peft saved"
