"""A policy on disk: checkpoints, of which a run reads only its own, and what others load."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from retrain.base.errors import RecordsError

FAULTS: tuple[type[Exception], ...] = (OSError, ValueError, LookupError, TypeError, AttributeError, EOFError)


def write_facts(file: Path, facts: Mapping[str, object]) -> None:
    """Write what a checkpoint says of its policy."""
    file.write_text(json.dumps(facts, indent=1), encoding="utf-8")


@contextmanager
def reading(
    file: Path,
    backend: str,
    wanted: Mapping[str, object],
    *faults: type[Exception],
    fix: str = "resume with the configuration that wrote it",
) -> Iterator[Any]:
    """Read what a checkpoint says of its policy, and the rest while entered.

    Raises a RecordsError for what fails; `faults` are those of its formats. Also if it is of another policy
    than the run's, by what is `wanted`.
    """
    directory = file.parent
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
        has = _flat(facts | facts.get("identity", {}))
        for key, value in _flat(wanted).items():
            if has[key] != value:
                what = f"this checkpoint's {key} is {has[key]!r}, the run's is {value!r}"
                raise RecordsError(f"{directory}: {what}; {fix}")
        yield facts
    except FAULTS + faults as error:
        raise RecordsError(
            f"{directory}: not a readable checkpoint of the {backend} backend ({error}); use an earlier one"
        ) from error


def _flat(facts: Mapping[str, object]) -> dict[str, object]:
    """Return facts with those of tables by dotted keys, so that a message shows one at a time."""
    tables = ((key, value if isinstance(value, Mapping) else {"": value}) for key, value in facts.items())
    return {f"{key}.{name}".rstrip("."): one for key, table in tables for name, one in table.items()}
