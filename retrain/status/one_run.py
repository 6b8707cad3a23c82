"""What one run left: where it is, its output and whether that is still written, and its samples."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from retrain.config.resolve import label_of
from retrain.errors import RecordsError
from retrain.locks.held import is_held
from retrain.records.layout import CampaignFiles, RunFiles, find_campaigns, is_campaign, is_single_run
from retrain.records.lines import number_in
from retrain.records.samples import read_samples
from retrain.records.text import count_of, first_of, plain

SHOWN_RUNS = 10
SHOWN_CAMPAIGNS = 3  # the newest
Which = Literal["", "best", "worst", "ties"]


def find_run(directory: Path, run_id: str = "") -> RunFiles:
    """Find a run, given by its directory or by its campaign's and its id or CONDITION_sSEED.

    Raises:
        RecordsError: there is no such run; lists the existing ones.
    """
    campaign = CampaignFiles(directory)
    if not is_campaign(directory):
        if run_id or not is_single_run(directory):
            raise RecordsError(f"{directory}: {_what_it_is(directory)}")
        return RunFiles(directory)
    if not run_id:
        raise RecordsError(f"{directory}: is a campaign; name one of its runs: {_names(campaign)}")
    condition, _, seed = run_id.rpartition("_s")
    for name in (run_id, f"{label_of(condition)}_s{seed}"):
        with suppress(RecordsError):  # an invalid id may still be a valid name
            files = campaign.run(name)
            if files.run_toml.is_file():
                return files
    raise RecordsError(f"{directory}: has no run {run_id!r}; it has {_names(campaign)}")


def _what_it_is(directory: Path) -> str:
    """Return why a directory is neither a campaign nor a run, and what to specify instead."""
    if not directory.is_dir():
        return "does not exist; `retrain status` lists campaigns"
    found = find_campaigns(directory)
    if not found:
        return "no campaigns yet; start one with `retrain FILE.toml`"
    newest = ", ".join(str(path) for path in reversed(found[-SHOWN_CAMPAIGNS:]))
    return f"is a log directory; name a campaign, such as the latest: {plain(newest, 1000)}"


def _names(campaign: CampaignFiles) -> str:
    names = sorted(path.name for path in campaign.runs.iterdir()) if campaign.runs.is_dir() else []
    return plain(first_of(names, SHOWN_RUNS), 1000)


@dataclass(frozen=True)
class Log:
    """A file of output, and the locks of the processes that write it."""

    path: Path
    lock: Path  # of the process that writes it
    starter: Path | None = None  # lock of the orchestrator, which may start another such process
    end: Path | None = None  # a file that exists once no further process will be started
    beside: tuple[Path, ...] = ()  # the engine's output for the run's tasks

    def is_over(self) -> bool:
        """Whether no process that could write to it is alive."""
        if is_held(self.lock):
            return False
        is_finished = self.end is not None and self.end.exists()
        return is_finished or self.starter is None or not is_held(self.starter)


def find_log(directory: Path, run_id: str = "") -> Log:
    """Find the output of a run, given by its directory or by a campaign's and its id; else a campaign's own.

    Raises:
        RecordsError: there is no such run; lists the existing ones.
    """
    campaign = CampaignFiles(directory)
    if not run_id and is_campaign(directory):
        if not campaign.log.exists():
            raise RecordsError(
                f"{directory}: never ran in the background, so it has no log; name a run: {_names(campaign)}"
            )
        return Log(campaign.log, campaign.lock)
    files = find_run(directory, run_id)
    above = files.directory.parent.parent if files.directory.parent.name == "runs" else directory
    return Log(files.output_log, files.lock, CampaignFiles(above).lock, files.done, files.engine_logs)


@dataclass(frozen=True, slots=True)
class ShownTurn:
    """A turn of an episode."""

    policy: str
    reward: float | None
    environment: str  # its answer; "" after the last turn


@dataclass(frozen=True, slots=True)
class ShownSample:
    """One kept rollout. Its texts come from a policy or a data set and are not safe to print."""

    step: int
    prompt_id: int | None
    prompt: str
    answer: str
    completion: str
    reward: float | None  # None: could not be scored
    advantage: float | None
    tie: bool  # its whole group had the same reward: no learning signal
    tokens: int | None
    truncated: bool
    turns: tuple[ShownTurn, ...] = ()  # of an episode
    error: str = ""  # why the episode failed
    tool_calls: int = 0
    tool_errors: int = 0  # of them
    other_conversations: int = 0  # of the episode, which are not shown

    @property
    def extent(self) -> list[str]:
        """How many turns and calls an episode had, in words; empty of a single turn."""
        parts = [count_of(len(self.turns), "turn")] * bool(self.turns)
        failed = f", {self.tool_errors} failed" if self.tool_errors else ""
        parts += [count_of(self.tool_calls, "tool call") + failed] * bool(self.tool_calls)
        parts += [count_of(self.other_conversations, "other conversation")] * bool(self.other_conversations)
        return parts


def choose_samples(files: RunFiles, step: int | None, which: Which, count: int) -> list[ShownSample]:
    """Return samples of a run.

    Args:
        files: the run's.
        step: of this step only; None: of all kept ones for `which`, otherwise of the last.
        which: the highest or lowest rewards first, or those of tied groups; "" of one step, highest first.
        count: maximum number of samples.

    Raises:
        RecordsError: there are none, or none of that step; names the nearest steps.
    """
    found = [sample for row in read_samples(files.samples) if (sample := _sample(row))]
    if not found:
        raise RecordsError(f"{files.samples}: holds no samples; a run writes them with its first step")
    if step is None and not which:
        step = found[-1].step
    if step is not None:
        found = _of_step(files, found, step)
    return _ordered(found, which)[:count]


def _of_step(files: RunFiles, samples: Sequence[ShownSample], step: int) -> list[ShownSample]:
    if found := [sample for sample in samples if sample.step == step]:
        return found
    steps = sorted({sample.step for sample in samples})
    at = bisect_left(steps, step)
    near = " and ".join(map(str, steps[max(0, at - 1) : at + 1]))
    raise RecordsError(f"{files.samples}: has no samples of step {step}; the nearest are of step {near}")


def _ordered(samples: Sequence[ShownSample], which: Which) -> list[ShownSample]:
    if which == "ties":
        return [sample for sample in reversed(samples) if sample.tie]
    sign = 1 if which == "worst" else -1
    scored = [(sample.reward, sample) for sample in samples if sample.reward is not None]
    ordered = [sample for _, sample in sorted(scored, key=lambda pair: (sign * pair[0], -pair[1].step))]
    return ordered if which else [*ordered, *(sample for sample in samples if sample.reward is None)]


def _sample(row: Mapping[str, Any]) -> ShownSample | None:
    reward = number_in(row, "reward")
    if reward is None and row.get("reward", "") is not None:
        return None
    turns = row["turns"] if isinstance(row.get("turns"), list) else []
    return ShownSample(
        step=row["step"],
        prompt_id=_whole(row.get("prompt_id")),
        prompt=str(row.get("prompt", "")),
        answer=str(row.get("answer", "")),
        completion=str(row.get("completion", "")),
        reward=reward,
        advantage=number_in(row, "advantage"),
        tie=row.get("tie") is True,
        tokens=_whole(row.get("tokens")),
        truncated=row.get("truncated") is True,
        turns=tuple(_turn(turn) for turn in turns if isinstance(turn, dict)),
        error=str(row.get("error") or ""),
        tool_calls=int(number_in(row, "tool_calls") or 0),
        tool_errors=int(number_in(row, "tool_errors") or 0),
        other_conversations=int(number_in(row, "other_conversations") or 0),
    )


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _turn(turn: Mapping[str, Any]) -> ShownTurn:
    said, answered = (str(turn.get(who, "")) for who in ("policy", "environment"))
    return ShownTurn(said, number_in(turn, "reward"), answered)
