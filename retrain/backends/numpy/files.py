"""A numpy policy on disk: arrays as npz, everything else as JSON, without pickle."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from retrain.backends.numpy.gru import Array, Weights
from retrain.backends.numpy.training import Sgd
from retrain.backends.saved import reading, write_facts
from retrain.base.errors import ConfigError, RecordsError

FORMAT = 2  # of both files; increment when old ones can no longer be read
FACTS = "policy.json"
PREVIOUS, START = "previous_gradient", "start"


def save_policy(
    directory: Path,
    identity: Mapping[str, object],
    weights: Weights,
    optimizer: Sgd,
    random: np.random.Generator,
    previous: Sequence[Array] = (),
    start: Weights | None = None,
) -> None:
    """Write all state that later steps depend on, bit for bit."""
    arrays: dict[str, Any] = {"weights": weights.flat, **optimizer.arrays}
    if previous:
        arrays[PREVIOUS] = previous[0]
    if start is not None:
        arrays[START] = start.flat
    np.savez(directory / "policy.npz", **arrays)
    progress = {"optimizer_steps": optimizer.steps, "random": random.bit_generator.state}
    write_facts(directory / FACTS, _identity(identity, weights) | progress)


def load_policy(
    directory: Path,
    identity: Mapping[str, object],
    weights: Weights,
    optimizer: Sgd,
    random: np.random.Generator,
) -> dict[str, Array]:
    """Overwrite all state with what `save_policy` wrote; return PREVIOUS and START, if they are there."""
    own_facts = _identity(identity, weights)
    with reading(directory / FACTS, "numpy", own_facts, zipfile.BadZipFile) as facts:
        read = _arrays(directory)
        targets = {"weights": weights.flat, **optimizer.arrays}
        values = {name: read[name] for name in targets}
        random.bit_generator.state = facts["random"]
        optimizer.steps = facts["optimizer_steps"]
        for name, target in targets.items():
            target[:] = values[name]
        return {name: read[name] for name in (PREVIOUS, START) if name in read}


def load_start(directory: Path, alphabet: str, weights: Weights) -> None:
    """Overwrite the weights with those of a checkpoint; a ConfigError if it is of another policy."""
    own_facts, fix = _identity({"alphabet": alphabet}, weights), "make them equal, or name another run"
    try:
        with reading(directory / FACTS, "numpy", own_facts, zipfile.BadZipFile, fix=fix):
            weights.flat[:] = _arrays(directory)["weights"]
    except RecordsError as error:
        raise ConfigError(f"[model].adapter: {error}") from error


def _arrays(directory: Path) -> dict[str, Array]:
    # opened here, because np.load does not close a file that is not a zip
    with (directory / "policy.npz").open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}


def _identity(identity: Mapping[str, object], weights: Weights) -> dict[str, object]:
    """Return the properties that a checkpoint and a policy must share."""
    return {
        "format": FORMAT,
        **identity,
        "shapes": {name: list(shape) for name, shape in weights.shapes.items()},
        "dtype": weights.flat.dtype.name,
    }
