"""Meters a backend that does not meter its own calls, by the tokens of what it returns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from retrain.backends import Backend, Optimization, Sampling, Teacher, TeacherSpec, UpdateStats
from retrain.backends.metering import BilledCall, Meter
from retrain.backends.rows import LiveTurn, Taken, TurnFeed, unsampled
from retrain.base.errors import BackendMemoryError, ConfigError, PromptError
from retrain.base.rollouts import (
    FirstTurn,
    Group,
    Loss,
    NextTurn,
    Prompt,
    Rollout,
    TeacherScores,
    TrainingSample,
)
from retrain.records.spending import Tokens


class MeteredBackend(Backend):
    """A backend whose calls are counted; everything else is the backend's own.

    A prompt counts as read once in full, and from a cache for the other rollouts of its group, and so does
    what came before a turn of an episode.
    """

    def __init__(self, backend: Backend, meter: Meter) -> None:
        self._backend, self._meter, self.info = backend, meter, backend.info
        for name in vars(Backend).keys() - vars(MeteredBackend).keys():
            if not name.startswith("_"):
                setattr(self, name, getattr(backend, name))

    def sample(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Group]:
        size, read = sampling.group_size, sum(map(self._prompt, prompts))
        most = Tokens(read, (size - 1) * read, size * len(prompts) * sampling.max_tokens)
        with self.call(most) as call:
            groups = self._backend.sample(prompts, sampling)
            call.billed = sum(map(self._sampled, groups), Tokens())
        return groups

    def extend(self, turns: Sequence[NextTurn], sampling: Sampling) -> list[Rollout | None]:
        with self.call(sum(map(self.at_most, turns), Tokens())) as call:
            rollouts = self._backend.extend(turns, sampling)
            call.billed = sum(map(self.billed, turns, rollouts), Tokens())
        return rollouts

    def sample_turns(self, feed: TurnFeed, sampling: Sampling) -> None:
        with ExitStack() as calls:
            self._backend.sample_turns(_MeteredFeed(feed, self, calls), sampling)

    def update(
        self, samples: Sequence[TrainingSample], loss: Loss, optimization: Optimization
    ) -> UpdateStats:
        trained = Tokens(train=sum(self._length(sample.rollout) - 1 for sample in samples))
        with self.call(trained) as call:
            stats = self._backend.update(samples, loss, optimization)
            call.billed = trained
        return stats

    def open_teacher(self, teacher: TeacherSpec) -> Teacher:
        return _MeteredTeacher(self._backend.open_teacher(teacher), self)

    def save(self, directory: Path) -> None:
        self._backend.save(directory)

    def load(self, directory: Path) -> None:
        self._backend.load(directory)

    def billed(self, turn: FirstTurn | NextTurn, taken: Taken) -> Tokens:
        """Return what a turn was billed."""
        if not isinstance(taken, Rollout):
            return Tokens()
        if isinstance(turn, FirstTurn):
            return self._sampled(Group(turn.prompt, (taken,)))
        before = self._length(turn.rollout)
        sampled = len(taken.tokens) - len(turn.rollout.tokens)
        return Tokens(self._length(taken) - sampled - before, before, sampled)

    @contextmanager
    def call(self, at_most: Tokens) -> Iterator[BilledCall]:
        """Count a call; one that the backend cannot make, as it then says, costs nothing."""
        with self._meter.call(at_most) as call:
            try:
                yield call
            except (PromptError, BackendMemoryError):
                call.billed = Tokens()
                raise

    def at_most(self, turn: FirstTurn | NextTurn) -> Tokens:
        """Return what a turn is billed at most; of messages without ids, a token for each byte."""
        if isinstance(turn, NextTurn):
            read = len(turn.tokens) or sum(len(content.encode()) for _, content in turn.messages)
            return Tokens(read, self._length(turn.rollout), turn.max_tokens)
        try:
            return Tokens(self._prompt(turn.prompt), 0, turn.max_tokens)
        except PromptError:  # the backend answers with it
            return Tokens()

    def read_at_most(self, rollout: Rollout) -> Tokens:
        """Return what scoring a rollout is billed at most."""
        return Tokens(self._length(rollout))

    def _length(self, rollout: Rollout) -> int:
        if (ids := self.read(rollout)) is None:
            raise ConfigError(
                "[budget.prices]: the backend does not tell how many tokens a prompt has; implement `read` "
                "of retrain.Backend, or count its calls with `BackendSpec.meter`"
            )
        return len(ids)

    def _prompt(self, prompt: Prompt) -> int:
        return self._length(unsampled(prompt, 0))

    def _sampled(self, group: Group) -> Tokens:
        first, others = group.rollouts[0], len(group.rollouts) - 1
        prompt = self._length(first) - len(first.tokens)
        return Tokens(prompt, others * prompt, sum(len(rollout.tokens) for rollout in group.rollouts))


class _MeteredTeacher(Teacher):
    """A teacher whose calls are counted: it reads prompt and completion of each rollout."""

    def __init__(self, teacher: Teacher, backend: MeteredBackend) -> None:
        self._teacher, self._backend = teacher, backend

    def score(self, rollouts: Sequence[Rollout]) -> list[TeacherScores]:
        with self._backend.call(sum(map(self._backend.read_at_most, rollouts), Tokens())) as call:
            scores = self._teacher.score(rollouts)
            call.billed = Tokens(sum(each.read for each in scores))
        return scores

    def refresh(self) -> None:
        self._teacher.refresh()

    def close(self) -> None:
        self._teacher.close()


class _MeteredFeed:
    """A feed whose turns are counted one by one."""

    def __init__(self, feed: TurnFeed, backend: MeteredBackend, unanswered: ExitStack) -> None:
        """Prepare; calls of turns that are never answered end with `unanswered`."""
        self._feed, self._backend, self._unanswered = feed, backend, unanswered
        self._calls: dict[LiveTurn, tuple[ExitStack, BilledCall]] = {}

    def take(self, under_way: int) -> Sequence[LiveTurn]:
        taken = self._feed.take(under_way)
        for turn in taken:
            context = self._unanswered.enter_context(ExitStack())
            call = context.enter_context(self._backend.call(self._backend.at_most(turn.turn)))
            self._calls[turn] = context, call
        return taken

    def answer(self, taken: Sequence[tuple[LiveTurn, Taken]]) -> None:
        for turn, rollout in taken:
            context, call = self._calls.pop(turn)
            call.billed = self._backend.billed(turn.turn, rollout)
            context.close()
        self._feed.answer(taken)
