"""A numpy policy on disk: arrays in npz, everything else in JSON, both readable without pickle."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import numpy as np

from retrain.backends._adam import Adam
from retrain.backends._weights import Weights
from retrain.errors import RecordsError

FORMAT = 1  # of both files; raise it when old ones can no longer be read
ARRAYS = ("weights", "adam_mean", "adam_square")


def save_policy(
    directory: Path, alphabet: str, weights: Weights, adam: Adam, random: np.random.Generator
) -> None:
    """Write everything that a later step depends on, bit for bit."""
    arrays = dict(zip(ARRAYS, (weights.flat, adam.mean, adam.square), strict=True))
    np.savez(directory / "policy.npz", **arrays)  # type: ignore[arg-type]  # numpy's stub types the keywords as bool
    facts = {
        **_identity(alphabet, weights),
        "adam_steps": adam.steps,
        "random": random.bit_generator.state,
    }
    (directory / "policy.json").write_text(json.dumps(facts, indent=1), encoding="utf-8")


def load_policy(
    directory: Path, alphabet: str, weights: Weights, adam: Adam, random: np.random.Generator
) -> None:
    """Overwrite the four with what `save_policy` wrote.

    Raises:
        RecordsError: the files cannot be read, or belong to another policy.
    """
    try:
        facts = json.loads((directory / "policy.json").read_text(encoding="utf-8"))
        _check_same_policy(directory, facts, alphabet, weights)
        # opened here, because np.load leaves a file open that turns out not to be a zip
        with (directory / "policy.npz").open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            read = [arrays[name] for name in ARRAYS]
        random.bit_generator.state = facts["random"]
        adam.steps = facts["adam_steps"]
        for target, values in zip((weights.flat, adam.mean, adam.square), read, strict=True):
            target[:] = values
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise RecordsError(
            f"{directory}: not a readable checkpoint of the numpy backend ({error}); use an earlier one"
        ) from error


def _check_same_policy(directory: Path, facts: dict[str, object], alphabet: str, weights: Weights) -> None:
    for key, value in _identity(alphabet, weights).items():
        if facts[key] != value:
            raise RecordsError(
                f"{directory}: this checkpoint's {key} is {facts[key]!r}, the run's is {value!r}; "
                "resume with the configuration that wrote it"
            )


def _identity(alphabet: str, weights: Weights) -> dict[str, object]:
    """Say what a checkpoint and a policy must have in common."""
    return {
        "format": FORMAT,
        "alphabet": alphabet,
        "shapes": {name: list(shape) for name, shape in weights.shapes.items()},
        "dtype": weights.flat.dtype.name,
    }
