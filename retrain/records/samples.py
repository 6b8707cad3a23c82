"""samples.jsonl and heldout.jsonl, completions of some prompts; evals/<name>.jsonl, rewards of an evaluation.

Samples are kept of the first steps, the last steps and evenly spaced steps between them, so their file is of
bounded size. The choice depends only on the number of the last step, so a run that was killed and resumed
ends with the same samples as an uninterrupted run. Other rows are dropped when the file is rewritten, every
few hundred steps.

Of an evaluation, a line per question and step is `{"step": 20, "attempt": 1, "question": 7, "rewards":
[1, 0, null]}`: the id of a held-out prompt, and the reward of each of its samples; null if it was not scored.
A resumed run repeats steps, whose last lines count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from retrain.base.redaction import recorded_error
from retrain.base.rollouts import Parts
from retrain.records.files import make_directory, record_of, write_atomic
from retrain.records.lines import LineAppender, Row, dump_line, finite, is_count, parse_line, read_lines
from retrain.records.text import count_of

FIRST, LAST, BETWEEN = 8, 16, 64  # steps kept: at most this many of each
REWRITE_EVERY = 512  # steps; a rewrite waits for the disk. The file holds up to this many extra steps
Rewards: TypeAlias = Mapping[int, Sequence[float | None]]  # by question
LONGEST_TEXT = 4000  # characters; of a longer text, the start and the end are kept
SELDOM = (
    "source",
    "parts",
    "unscored",
    "sign",
    "turns",
    "error",
    "tool_calls",
    "tool_errors",
    "other_conversations",
    "token_advantages",
    "evaluation",
)  # left out if empty


# of a kept text, from its start: how many characters have an advantage; null: of the note of what was cut
Spans: TypeAlias = tuple[tuple[int, float | None], ...]


@dataclass(frozen=True, slots=True)
class SampleTurn:
    """One turn of an episode."""

    policy: str
    reward: float | None = None
    environment: str = ""  # what it answered; "" after the last turn
    cut: bool = False  # at `max_turn_tokens`
    token_advantages: Spans = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptSample:
    """One kept rollout. Its texts come from a policy or a data set and are not safe to print."""

    step: int = 0  # set by the file's writer
    prompt_id: int | None = None
    source: str = ""  # of the prompt, where there are several
    rollout: int = 0  # number within its group
    reward: float | None  # None: could not be scored
    parts: Parts = field(default_factory=dict)  # of the reward
    unscored: str = ""  # why it could not be
    sign: str = ""  # what it did that may be a sign of cheating
    advantage: float | None = None
    tie: bool = False  # its whole group had the same reward: no learning signal
    tokens: int | None = None
    truncated: bool = False
    prompt: str = ""
    answer: str = ""
    completion: str = ""
    turns: tuple[SampleTurn, ...] = ()  # of an episode
    error: str = ""  # why the episode failed
    tool_calls: int = 0
    tool_errors: int = 0  # of them
    other_conversations: int = 0  # of the episode, which are not shown
    token_advantages: Spans = ()  # of the completion, where it was trained on; those of turns are there
    evaluation: str = ""  # name of the `[[eval]]`, of a held-out prompt

    def as_dict(self) -> dict[str, Any]:
        """Return the row without its step; without the keys of episodes for a single turn."""
        row = {key: value for key, value in asdict(self).items() if key not in SELDOM or value}
        del row["step"]
        for name in ("error", "unscored", "sign"):  # the other texts are data
            if name in row:
                row[name] = recorded_error(row[name])
        return row

    @property
    def extent(self) -> list[str]:
        """How many turns and calls an episode had, in words; empty of a single turn."""
        parts = []
        if self.turns:
            parts.append(count_of(len(self.turns), "turn"))
        if self.tool_calls:
            failed = f", {self.tool_errors} failed" if self.tool_errors else ""
            parts.append(count_of(self.tool_calls, "tool call") + failed)
        if self.other_conversations:
            parts.append(count_of(self.other_conversations, "other conversation"))
        return parts


def is_kept(step: int, last: int) -> bool:
    """Whether a step's samples are kept once `last` steps are done; a dropped step is never kept later."""
    stride = 1
    while last // stride > BETWEEN:
        stride *= 2
    return step <= FIRST or step > last - LAST or step % stride == 0


def shortened(text: str, limit: int = LONGEST_TEXT) -> str:
    """Return a text's start and end, with a note of how much was cut between; a short text is unchanged."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters ...]\n{text[-half:]}"


def advantage_spans(text: str, pieces: Sequence[str], advantages: Sequence[float]) -> Spans:
    """Return the advantages of a text's tokens, as it is `shortened`; none if the pieces are another text.

    Args:
        text: what the pieces begin with.
        pieces: each token's text.
        advantages: one for each token.
    """
    if not "".join(pieces).startswith(text):
        return ()
    half, is_cut = LONGEST_TEXT // 2, len(text) > LONGEST_TEXT
    note = len(shortened(text)) - 2 * half
    spans: list[tuple[int, float | None]] = []
    for begin, end in [(0, half), (len(text) - half, len(text))] if is_cut else [(0, len(text))]:
        if begin:
            spans.append((note, None))
        at = 0
        for piece, advantage in zip(pieces, advantages, strict=True):
            inside = min(at + len(piece), end) - max(at, begin)
            at += len(piece)
            if inside <= 0:
                continue
            rounded = float(f"{advantage:.3g}")
            if spans and spans[-1][1] == rounded:
                spans[-1] = spans[-1][0] + inside, rounded
            else:
                spans.append((inside, rounded))
    return tuple(spans)


class SamplesWriter:
    """Append the samples of one attempt; only for the holder of the run's lock."""

    def __init__(self, path: Path, attempt: int, rewrite_every: int = REWRITE_EVERY) -> None:
        """Set up; the file is created with the first step, and rewritten every `rewrite_every` steps."""
        self._rewrite_every = rewrite_every
        self._path = path
        self._attempt = attempt
        self._lines: LineAppender | None = None

    def append(self, step: int, rows: Sequence[Mapping[str, object]]) -> None:
        marked = [dump_line({"step": step, "attempt": self._attempt, **row}) for row in rows]
        if not marked:
            return
        if self._lines is None:
            self._lines = LineAppender(self._path)
        self._lines.write("\n".join(marked))
        if step % self._rewrite_every == 0:
            self.close()
            write_atomic(self._path, "".join(f"{dump_line(row)}\n" for row in read_samples(self._path)))
            self._lines = LineAppender(self._path)

    def sync(self) -> None:
        if self._lines is not None:
            self._lines.sync()

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()
            self._lines = None


def read_samples(path: Path) -> list[Row]:
    """Read the kept samples in step order, each step once, also after crashes; none if there is no file."""
    rows = latest_rows(path)
    return [row for row in rows if is_kept(row["step"], rows[-1]["step"])]


def samples_of(path: Path) -> Iterator[KeptSample]:
    """Iterate over the kept samples, without rows in which a value is missing or wrong."""
    for row in read_samples(path):
        with suppress(ValueError):
            yield record_of(KeptSample, row)


def latest_rows(path: Path) -> list[Row]:
    """Return every row that counts, in step order; a step has several rows."""
    kept: list[Row] = []
    for row in map(parse_line, read_lines(path)):
        if row is None or not is_count(step := row.get("step")):
            continue
        # a later attempt's first row of a step removes all from that step on
        at = step, row.get("attempt")
        while kept and kept[-1]["step"] >= step and (kept[-1]["step"], kept[-1].get("attempt")) != at:
            kept.pop()
        kept.append(row)
    return kept


class OutcomesWriter:
    """Append the outcomes of one attempt; only for the holder of the run's lock."""

    def __init__(self, folder: Path, attempt: int) -> None:
        """Set up; the folder and the file of each evaluation are made when there are outcomes for them."""
        self._folder, self._attempt = folder, attempt
        self._files: dict[str, LineAppender] = {}

    def append(self, name: str, step: int, rewards: Rewards, maker: str = "") -> None:
        """Write all questions of an evaluation after a step, and which run made it, if another did."""
        if name not in self._files:
            make_directory(self._folder)
            self._files[name] = LineAppender(self._folder / f"{name}.jsonl")
        start = {"step": step, "attempt": self._attempt} | ({"run": maker} if maker else {})
        lines = []
        for question, values in rewards.items():  # whole numbers without a decimal point
            short = [int(v) if v is not None and float(v).is_integer() else v for v in values]
            lines.append(dump_line({**start, "question": question, "rewards": short}))
        self._files[name].write("\n".join(lines))

    def sync(self) -> None:
        for file in self._files.values():
            file.sync()

    def close(self) -> None:
        while self._files:
            self._files.popitem()[1].close()


def read_outcomes(path: Path) -> dict[int, Rewards]:
    """Read the rewards of each step's questions, also after crashes; empty if there is no file."""
    outcomes: dict[int, dict[int, Sequence[float | None]]] = {}
    for row in latest_rows(path):
        question, rewards = row.get("question"), row.get("rewards")
        if isinstance(question, int) and isinstance(rewards, list):
            outcomes.setdefault(row["step"], {})[question] = [finite(one) for one in rewards]
    return dict(outcomes)
