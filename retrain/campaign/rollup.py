"""Keeps manifest.json in step with the runs: one look at each run that changed, one write now and then.

It is written as a whole, so it waits until a twentieth of the runs have changed: what it costs then grows
with the changes, and not with changes times runs. Nobody waits for it, because `status`, `report` and
`resume` read the runs themselves.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from retrain.records.clock import utc_now
from retrain.records.layout import RunFiles
from retrain.records.manifest import (
    Expectation,
    Manifest,
    RunEntry,
    look_at,
    write_manifest,
)

EVERY_S = 2.0  # at least between two writes
SHARE = 0.05  # of the runs, to have changed: so a change costs the writing of some twenty entries


class RollUp:
    """A campaign's manifest; for the holder of its lock."""

    def __init__(self, manifest: Manifest, path: Path, files_of: Callable[[str], RunFiles]) -> None:
        self._manifest = manifest
        self._path = path
        self._files_of = files_of
        self._places = {run.run_id: i for i, run in enumerate(manifest.runs)}
        self._changed = set(self._places)
        self._written_at = float("-inf")
        self._is_expected_anew = False

    def changed(self, run_id: str) -> None:
        """Look at a run again, at the next write."""
        self._changed.add(run_id)

    def entries(self) -> tuple[RunEntry, ...]:
        """Look at every run that changed, and give what is known of all."""
        runs = list(self._manifest.runs)
        for run_id in self._changed:
            place = self._places[run_id]
            runs[place] = look_at(runs[place], self._files_of(run_id))
        self._changed.clear()
        self._manifest = replace(self._manifest, runs=tuple(runs))
        return self._manifest.runs

    @property
    def manifest(self) -> Manifest:
        """The manifest as it is now."""
        return self._manifest

    def expect(self, expected: Expectation) -> None:
        """Take note of how long the campaign is expected to take, or took; written with the next end."""
        self._is_expected_anew = True
        self._manifest = replace(self._manifest, expected=expected)

    def keep(self) -> None:
        """Write if the last time is long enough ago, and enough has changed since.

        Raises:
            RecordsError: not possible; the manifest on disk is an older one.
        """
        is_enough = len(self._changed) >= SHARE * len(self._places) or self._is_expected_anew
        if is_enough and time.monotonic() - self._written_at >= EVERY_S:
            self.write()

    def write(self, *, ended: bool = False) -> None:
        """Write now.

        Raises:
            RecordsError: not possible; the manifest on disk is an older one.
        """
        self._manifest = replace(self._manifest, runs=self.entries(), ended_at=utc_now() if ended else "")
        write_manifest(self._path, self._manifest)
        self._written_at = time.monotonic()
        self._is_expected_anew = False
