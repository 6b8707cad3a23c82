"""Whatever stands in a record, its reader gives what it can or an error of retrain's own, never another."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from retrain.base.errors import RetrainError
from retrain.base.locks import LockFile, hold, holder, is_held
from retrain.campaign.endings import conclude
from retrain.control.rules.concurrency_limit import CallFacts
from retrain.control.semaphore import FileSemaphore, read_holder
from retrain.control.semaphore.adaptive import SharedLimit
from retrain.records.decision import Round, begin_design, read_looks
from retrain.records.files import write_json
from retrain.records.layout import CampaignFiles, RunFiles
from retrain.records.lines import append_line, read_records
from retrain.records.manifest import new_manifest, read_manifest, write_manifest
from retrain.records.metrics import MetricsWriter, read_ends
from retrain.records.provenance import Provenance, known_origin, write_provenance
from retrain.records.run_row import RunEntry
from retrain.records.run_state import (
    Progress,
    RunState,
    begin_attempt,
    end_attempt,
    read_attempts,
    read_done,
    read_progress,
    write_done,
    write_progress,
)
from retrain.records.rungs import Rung
from retrain.records.samples import OutcomesWriter, SamplesWriter, read_outcomes, read_samples
from retrain.records.spending import EvaluationCost, Spending, Tokens, read_spending, write_spending
from retrain.results.publish import FACTS, Published, read_published
from tests.scanned import scan_metrics

ODD = (None, True, -1, 0, 10**400, 1e308, float("nan"), float("inf"), "x", [], [1], {}, {"a": []})
READERS: dict[str, Callable[[Path], object]] = {
    "status.json": read_progress,
    "done.json": read_done,
    "attempts.jsonl": read_attempts,
    "run.lock": lambda path: (holder(path), is_held(path)),
    "metrics.jsonl": lambda path: (scan_metrics(path.parent), read_ends(path, 2)),
    "samples.jsonl": read_samples,
    "evals/hard.jsonl": read_outcomes,
    "manifest.json": read_manifest,
    "spend.json": lambda path: read_spending(RunFiles(path.parent)),
    "decision.jsonl": read_looks,
    "search.jsonl": lambda path: read_records(path, Rung),
    "origin.json": lambda path: known_origin(CampaignFiles(path.parent)),
    "permits.json": lambda path: FileSemaphore.inspect(path.parent),
    "adaptive.json": lambda path: _permits(path.parent).observe(CallFacts("sample", 0.1, overloaded=True)),
    "retrain.json": lambda path: read_published(path.parent),
    "slot-0000": lambda path: read_holder(LockFile(str(path), read_only=True)),
}


def _permits(directory: Path) -> SharedLimit:
    return SharedLimit(directory, FileSemaphore(directory, 4), "a_s0")


@pytest.fixture
def written(tmp_path: Path) -> Path:
    """A directory with every record, as its writer writes it."""
    run, campaign = RunFiles(tmp_path), CampaignFiles(tmp_path)
    end_attempt(run.attempts, begin_attempt(run.attempts), "done", duration_s=1.0)
    write_progress(run.status, Progress("running", "train", 1, 4, 1))
    write_done(run.done, "abc", {"eval_reward": 0.5})
    with MetricsWriter(run.metrics, 1) as rows:
        rows.append({"step": 1, "loss": 0.5})
    samples = SamplesWriter(run.samples, 1)
    samples.append(1, [{"prompt": "p", "completion": "c"}])
    samples.close()
    outcomes = OutcomesWriter(run.evals, 1)
    outcomes.append("hard", 1, {7: [1.0, None]})
    outcomes.close()
    planned = RunEntry("a_s0", "a", 0, 4)
    write_manifest(campaign.manifest, new_manifest("c", "abc", [planned], tmp_path))
    write_spending(run, Spending(Tokens(1), evaluations={"hard": EvaluationCost(1.0, 0.5, "4")}))
    begin_design(campaign.looks, {"error": 0.05}, ["a"])
    append_line(campaign.looks, {"event": "round", **asdict(Round({"a": 1}, {"a_s0": 0.5}))})
    append_line(campaign.rungs, asdict(Rung(4, {"a": 0.5}, ("a",))))
    write_provenance(campaign, Provenance("c", (), str(tmp_path), None, "local", "abc"))
    lock = hold(run.lock)
    assert lock is not None
    lock.release()
    with FileSemaphore(tmp_path, 4):
        pass
    for overloaded in (False, True, False):
        _permits(tmp_path).observe(CallFacts("sample", 0.1, overloaded=overloaded))
    facts = Published("d", "d", "adapter", "c", "a_s0", "a_s0", 4, "", "base", "abc", 8)
    write_json(tmp_path / FACTS, asdict(facts))
    return tmp_path


def spoilt(record: Any) -> Iterator[Any]:
    """Return a record with each of its values, at any depth, replaced or left out in turn."""
    for key in list(record) if isinstance(record, dict) else range(len(record)):
        value = record[key]
        if isinstance(value, dict | list):
            for inner in spoilt(value):
                record[key] = inner
                yield record
        for odd in ODD:
            record[key] = odd
            yield record
        record[key] = value
    for key in list(record) if isinstance(record, dict) else ():
        yield {name: value for name, value in record.items() if name != key}


@pytest.mark.parametrize("name", READERS)
def test_a_record_with_any_value_spoilt_is_read_or_refused(name: str, written: Path) -> None:
    path = written / name
    text = path.read_text()
    is_lines = path.suffix != ".json"
    records = [json.loads(line) for line in text.splitlines()] if is_lines else [json.loads(text)]
    READERS[name](path)  # as it was written
    for number, record in enumerate(records):
        for odd in spoilt(record):
            lines = [*records[:number], odd, *records[number + 1 :]]
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
            with contextlib.suppress(RetrainError):
                READERS[name](path)


@pytest.mark.parametrize("ending", [RunState.PENDING, RunState.RUNNING])
def test_an_attempt_whose_recorded_ending_is_none_ends_by_its_exit_code(tmp_path: Path, ending: str) -> None:
    run = RunFiles(tmp_path)
    end_attempt(run.attempts, begin_attempt(run.attempts), ending)
    assert conclude(run, "abc", -signal.SIGKILL, None).state is RunState.INFRASTRUCTURE
