"""Episodes to read: of each condition, the best and the worst that the last step of its first run kept."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice

from retrain.records.files import readable
from retrain.records.layout import RunFiles
from retrain.records.samples import Sample
from retrain.records.text import number, plain, plain_lines
from retrain.report.gather import RunHistory
from retrain.report.sides import Side
from retrain.status.one_run import choose_samples

MOST_CONDITIONS = 8  # of each, two conversations are shown
LONGEST_ANSWER = 60  # characters
MOST_KEPT = 100  # samples of a step; a run keeps a handful


@dataclass(frozen=True)
class Spoken:
    """A part of a conversation, safe to show as text."""

    kind: str  # policy, given or failed
    who: str
    text: str
    reward: str = ""


@dataclass(frozen=True)
class Talk:
    """One episode."""

    run_id: str
    facts: str
    parts: tuple[Spoken, ...]


def conversations(sides: Sequence[Side]) -> tuple[Talk, ...]:
    """Return episodes of the first conditions that have any."""
    found = (talks for side in sides if (talks := tuple(_of_side(side))))
    return tuple(talk for talks in islice(found, MOST_CONDITIONS) for talk in talks)


def _of_side(side: Side) -> Iterator[Talk]:
    for run in side.runs:
        read = partial(choose_samples, step=None, which="", count=MOST_KEPT)
        samples = readable(read, RunFiles(run.directory)) or []
        if episodes := [one for one in samples if one.turns or one.error]:
            yield _talk(run, episodes[0])
            if len(episodes) > 1:
                yield _talk(run, episodes[-1])
            return


def _talk(run: RunHistory, sample: Sample) -> Talk:
    reward = "unscored" if sample.reward is None else f"reward {number(sample.reward)}"
    facts = [f"step {sample.step}", f"prompt {sample.prompt_id}"]
    facts += [f"answer {plain(sample.answer, LONGEST_ANSWER)}"] * bool(sample.answer)
    facts += [reward, *sample.extent, *["truncated"] * sample.truncated]
    return Talk(run.run_id, ", ".join(facts), tuple(_parts(sample)))


def _parts(sample: Sample) -> Iterator[Spoken]:
    yield Spoken("given", "prompt", _safe(sample.prompt))
    for count, turn in enumerate(sample.turns, 1):
        reward = "" if turn.reward is None else f"reward {turn.reward:g}"
        yield Spoken("policy", f"turn {count}", _safe(turn.policy), reward)
        if turn.environment:
            yield Spoken("given", "observation", _safe(turn.environment))
    if sample.error:
        yield Spoken("failed", "failed", _safe(sample.error))


def _safe(text: str) -> str:
    return "\n".join(plain_lines(text)) or "(empty)"
