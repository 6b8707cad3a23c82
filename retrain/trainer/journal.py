"""The records of a running trainer: metrics, progress, and some rollouts for people to read."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

import numpy as np

from retrain.backends.progress import (
    BackendProgress,
    EpisodeProgress,
    OutageProgress,
    SamplingProgress,
    StartProgress,
)
from retrain.base.errors import NonFiniteError, RecordsError
from retrain.base.rollouts import Episode, Floats, Rollout, TrainingSample
from retrain.records.layout import RunFiles
from retrain.records.metrics import MetricsWriter, read_metrics
from retrain.records.row_parts import EngineUse, Value
from retrain.records.run_state import Progress, RunState, write_progress
from retrain.records.samples import (
    KeptSample,
    OutcomesWriter,
    Rewards,
    SamplesWriter,
    SampleTurn,
    Spans,
    advantage_spans,
    shortened,
)
from retrain.records.step_row import StepRow
from retrain.records.text import about
from retrain.trainer.batch import ScoredBatch
from retrain.trainer.logger_threads import NO_LOGGERS, LoggerThreads

LONGEST_ANSWER = 500  # characters
PROGRESS_EVERY_S = 0.4  # status.json is read by people: twice a second is enough
TRAINING = "train"  # the phase in which others may sample
DETAIL_EVERY_S = 1.0  # a phase that takes longer says how far it is


class Journal:
    """metrics.jsonl, samples.jsonl and status.json of one attempt."""

    def __init__(
        self, files: RunFiles, attempt: int, max_steps: int, loggers: LoggerThreads = NO_LOGGERS
    ) -> None:
        self._loggers = loggers
        self._ending: tuple[str, Mapping[str, Value]] = (RunState.DIED, {})
        self._metrics = MetricsWriter(files.metrics, attempt)
        loggers.begin()
        self._directory = files.directory
        self._samples = SamplesWriter(files.samples, attempt)
        self._outcomes = OutcomesWriter(files.evals, attempt)
        self._held_out = SamplesWriter(files.held_out, attempt)
        self._writers = (self._metrics, self._samples, self._outcomes, self._held_out)
        self._status = files.status
        self.attempt = attempt
        self._max_steps = max_steps
        self._written_at = -PROGRESS_EVERY_S
        self._lock = threading.Lock()
        self._current: Progress | None = None
        self._engine = ""  # what the server that samples said last
        self._engine_server = ""  # its log or address
        self._began_s = 0.0  # the current phase
        self._has_detail = False  # whether it has said how far it is
        self._outage = OutageProgress()  # of the service that the backend calls
        self._is_out = False  # whether status.json shows it
        self._out_since_s, self._out_before_s = 0.0, 0.0  # this outage, and the sum of those before it
        self._is_closed = threading.Event()

    def row(self, row: StepRow) -> None:
        """Write a step's row; raise NonFiniteError, which names the key, if a value is NaN or infinite."""
        try:
            self._metrics.append(row.columns())
        except ValueError as error:
            raise NonFiniteError(f"step {row.identity.step}: {error}") from error
        self._loggers.recorded(row.identity.step)

    def complete(self, step: int, lacking: Mapping[str, Value]) -> None:
        """Write the newest row, of an earlier attempt, again, with columns that it lacks."""
        (newest,) = (row for row in read_metrics(self._directory) if row["step"] == step)
        self._metrics.append({**newest, **lacking})

    def samples(self, step: int, rows: Sequence[KeptSample]) -> None:
        self._samples.append(step, [row.as_dict() for row in rows])

    def held_out(self, step: int, rows: Sequence[KeptSample]) -> None:
        self._held_out.append(step, [row.as_dict() for row in rows])

    def evaluated(self, name: str, step: int, rewards: Rewards, maker: str = "") -> None:
        self._outcomes.append(name, step, rewards, maker)

    def phase(self, phase: str, step: int, *, state: str = RunState.RUNNING, message: str = "") -> None:
        """Write the current phase to status.json; at most every `PROGRESS_EVERY_S` while running."""
        progress = Progress(state, phase, step, self._max_steps, self.attempt, message=message)
        with self._lock:
            self._began_s, self._has_detail = time.monotonic(), False
            self._current = progress if state == RunState.RUNNING else None
            is_early = time.monotonic() < self._written_at + PROGRESS_EVERY_S
            if state != RunState.RUNNING or not is_early:  # `watch` shows one that lasts
                self._write(progress)

    def detail(self, detail: BackendProgress) -> None:
        """Add to the current phase how far it is; at most every `DETAIL_EVERY_S`, from any thread."""
        with self._lock, contextlib.suppress(RecordsError):  # the next write says so
            if isinstance(detail, EngineUse):
                self._engine, self._engine_server = str(detail), detail.server  # shown by the next write
                return
            current = self._current
            if isinstance(detail, OutageProgress):  # began, ended or became another one
                before, self._outage = self._outage, detail
                if detail.phase and not before.phase:
                    self._out_since_s = detail.since_s
                elif before.phase and not detail.phase:
                    self._out_before_s += time.monotonic() - self._out_since_s
                return
            if current is None or time.monotonic() - self._written_at < DETAIL_EVERY_S:
                return
            if current.phase == TRAINING and isinstance(detail, SamplingProgress | EpisodeProgress):
                return  # of a later step
            phase = detail.phase if isinstance(detail, StartProgress) else current.phase
            self._has_detail = True
            self._write(replace(current, phase=phase, detail=str(detail)))

    def watch(self, probes: Mapping[str, Callable[[], str]]) -> None:
        """Show how long a phase takes, from a thread of its own until `close`, and what its probe says."""
        threading.Thread(target=self._watch, args=(probes,), name="progress", daemon=True).start()

    def _watch(self, probes: Mapping[str, Callable[[], str]]) -> None:
        while not self._is_closed.wait(DETAIL_EVERY_S):
            if (current := self._current) is None:
                continue
            probe = probes.get(current.phase)
            detail = probe() if probe is not None else ""
            with self._lock, contextlib.suppress(RecordsError):  # the next write says so
                taken_s = time.monotonic() - self._began_s
                is_due = taken_s >= DETAIL_EVERY_S and (detail or not self._has_detail)
                if self._current is current and (is_due or self._outage.phase or self._is_out):
                    if not current.phase.startswith("paused"):  # that says for how long itself
                        detail = f"{detail}, {taken_s:.0f} s".removeprefix(", ")
                    self._write(replace(current, detail=detail))

    def _write(self, progress: Progress) -> None:
        self._written_at = time.monotonic()
        progress = replace(progress, engine=self._engine, engine_server=self._engine_server)
        out_s, out = time.monotonic() - self._outage.since_s, self._outage
        self._is_out = progress.state == RunState.RUNNING and bool(out.phase) and out_s >= DETAIL_EVERY_S
        if self._is_out:
            progress = replace(progress, phase=out.phase, detail=f"{out.why}, {about(out_s)}")
        this_s = time.monotonic() - self._out_since_s if out.phase else 0.0
        progress = replace(progress, paused_s=round(self._out_before_s + this_s, 3))
        write_progress(self._status, progress)

    def sync(self) -> None:
        """Sync every row and sample so far to disk, and flush the loggers."""
        for writer in self._writers:
            writer.sync()
        self._loggers.flush()

    def ended(self, state: str, result: Mapping[str, Value]) -> None:
        """Set the state and result with which `close` ends the loggers."""
        self._ending = (state, result)

    def close(self) -> str:
        """Close the files, then the loggers; return which rows the loggers lack, "" if none."""
        self._is_closed.set()
        with self._lock:
            self._current = None  # the end is written by whoever knows it
        for writer in self._writers:
            writer.close()
        return self._loggers.close(*self._ending)


def choose(
    batch: ScoredBatch, advantages: Floats, count: int, trained: Sequence[TrainingSample] = ()
) -> list[KeptSample]:
    """Return `count` rollouts of each source's first prompt, and the batch's best, worst, a tie and a sign.

    Prompts come in random order, so the first one is a fair sample. Nothing else is random: a repeated
    step chooses the same rollouts. Those among the `trained` hold the advantage of each token.
    """
    if count == 0:
        return []
    flat, width = batch.rewards.ravel(), batch.rewards.shape[1]
    first = {group.prompt.source: number for number, group in reversed([*enumerate(batch.groups)])}
    places = [(number, rollout) for number in sorted(first.values()) for rollout in range(min(count, width))]
    if batch.scored.any():
        places += [divmod(int(np.nanargmax(flat)), width), divmod(int(np.nanargmin(flat)), width)]
    places += [(int(group), 0) for group in np.flatnonzero(batch.tied)[:1]]
    places += [divmod(number, width) for number, score in batch.marked.items() if score.sign][:1]
    of_tokens = {id(sample.rollout): sample.advantages for sample in trained}
    kept = []
    for group, rollout in dict.fromkeys(places):
        advantage = float(advantages[group, rollout])
        sample = _shown(batch, group, rollout, of_tokens.get(id(batch.groups[group].rollouts[rollout])))
        kept.append(
            replace(
                sample,
                advantage=advantage if sample.reward is not None and math.isfinite(advantage) else None,
                tie=bool(batch.tied[group]) and not advantages[group].any(),
            )
        )
    return kept


def choose_held_out(batch: ScoredBatch, name: str, count: int) -> list[KeptSample]:
    """Return the first rollout of the first `count` prompts of an evaluation, the same at every step."""
    return [replace(_shown(batch, n, 0), evaluation=name) for n in range(min(count, len(batch.groups)))]


def _shown(batch: ScoredBatch, group: int, rollout: int, of_tokens: Floats | None = None) -> KeptSample:
    prompt, sampled = batch.groups[group].prompt, batch.groups[group].rollouts[rollout]
    episode, reward = sampled.episode or Episode(), float(batch.rewards[group, rollout])
    parts = {name: float(values[group, rollout]) for name, values in batch.parts.items()}
    why, score = "", batch.marked.get(group * batch.rewards.shape[1] + rollout)
    if score is not None and score.value is None:
        kind = "the scorer failed or timed out" if score.is_outage else "cannot be judged"
        why = shortened(f"{kind}: {score.message}", LONGEST_ANSWER)
    spans: Spans = ()
    if sampled.episode is None and of_tokens is not None:
        spans = advantage_spans(sampled.text, sampled.pieces, of_tokens.tolist())
    return KeptSample(
        prompt_id=prompt.id,
        source=prompt.source,
        rollout=rollout,
        reward=reward if math.isfinite(reward) else None,
        parts={name: None if math.isnan(value) else value for name, value in parts.items()},
        tokens=len(sampled.tokens),
        truncated=sampled.truncated,
        prompt=shortened(sampled.prompt.shown),  # what the policy read first
        answer=shortened(prompt.answer, LONGEST_ANSWER),
        completion=shortened(sampled.text),
        turns=tuple(_turns(sampled, of_tokens)),
        error=episode.error,
        unscored=why,
        sign=shortened(score.sign, LONGEST_ANSWER) if score is not None else "",
        tool_calls=episode.tool_calls,
        tool_errors=episode.tool_errors,
        other_conversations=len(episode.others),
        token_advantages=spans,
    )


def _turns(rollout: Rollout, of_tokens: Floats | None) -> Iterator[SampleTurn]:
    """Iterate over what the policy and the environment said in turn; nothing in a single turn."""
    if rollout.episode is None:
        return
    turns, answers = rollout.turns, [given.text for given in rollout.given]
    rewards = rollout.episode.rewards[-len(turns) :]  # an episode's earlier ones are of other conversations
    before = len(rollout.episode.rewards) - len(rewards)  # turns of other conversations
    ends = [0, *(given.at for given in rollout.given), len(rollout.pieces)]
    for number, (turn, reward, answer) in enumerate(zip_longest(turns, rewards, answers)):
        is_cut = before + number in rollout.episode.cut_turns
        spans: Spans = ()
        if of_tokens is not None and turn is not None:
            own = slice(ends[number], ends[number + 1])
            spans = advantage_spans(turn, rollout.pieces[own], of_tokens[own].tolist())
        yield SampleTurn(shortened(turn or ""), reward, shortened(answer or ""), is_cut, spans)
