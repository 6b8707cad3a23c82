"""Strategies: which runs a campaign asks for next, by the values of those that ended.

`Strategy` asks for all runs at once, `DecisionStrategy` by the rounds of `[decision]`, `SearchStrategy` by
the rungs of `[campaign.search]`: which runs go how far, and which no further. What was looked at is written
before anything follows from it. The manifest is left to the campaign.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from retrain.base.errors import RecordsError, may_pass
from retrain.base.locks import hold
from retrain.campaign.forecast import busy_s
from retrain.config.schema import DecisionSection, SearchSection
from retrain.plan.matrix import Origin, Plan, RunPlan
from retrain.records.decision import (
    ADDED,
    Decision,
    Looks,
    QuestionNoise,
    append_questions,
    append_round,
    begin_design,
    dropped,
    ending_of,
    evaluation_of,
    known_looks,
    questions_key,
    reach_of,
    read_looks,
    unscored_in,
    value_key,
    value_over,
    verdict_of,
)
from retrain.records.files import readable, remove_file
from retrain.records.layout import CampaignFiles, RunFiles
from retrain.records.lines import append_line, number_in, read_records
from retrain.records.manifest import Manifest
from retrain.records.metrics import seal_of
from retrain.records.run_row import RunEntry
from retrain.records.run_state import (
    ENDINGS,
    RunState,
    end_as_done,
    read_attempts,
    read_done,
    sealed_done,
    write_done,
)
from retrain.records.rungs import (
    STOPPED,
    Rung,
    Searched,
    lines_of_search,
    read_proposals,
    read_wait,
    write_wait,
)
from retrain.records.spending import read_spending
from retrain.records.text import count_of, parse_duration
from retrain.records.windows import STEPS, Window, amount, read_window

if TYPE_CHECKING:
    from retrain.plan.search import Climb

T = TypeVar("T")
Notice: TypeAlias = Callable[[str], None]  # tells the user
TRIED_AGAIN = ENDINGS - {RunState.DONE, RunState.FAILED}  # by a resume


@dataclass(frozen=True)
class Request:
    """The runs that a campaign asks for, and what it has found; runs by their ids."""

    runs: frozenset[str]  # asked for so far
    shown: frozenset[str]  # to readers: others may never be needed
    decision: Decision | None
    searched: Searched | None
    promoted: Collection[str] = ()  # waited at a rung and go on, or are asked further questions
    finished: Collection[str] = ()  # by the search, where they were
    due: Mapping[str, float | None] | None = None  # values from which a sampler goes on; None: not yet


class Strategy:
    """Asks for all runs of a campaign at once. For the holder of the campaign's lock, as all strategies."""

    adds_runs = False  # once those that were asked for have ended

    def __init__(self, plan: Plan, files: CampaignFiles, manifest: Manifest, notice: Notice) -> None:
        """Go on from what a manifest says; `notice` receives what the user should know."""
        self._plan = plan
        self._files = files
        self._decision = manifest.decision
        self._searched = manifest.searched
        self._notice = notice

    def begin(self, changes: Sequence[str]) -> None:
        """Look anew if the user has accepted changes of the file, which are told with every verdict.

        The verdicts of a `[decision]` that is in the file no more are kept, marked so.
        """
        looks = known_looks(self._files.looks, self._decision)
        if looks.is_lost and not changes:
            self._notice("decision.jsonl was lost: its looks are repeated, at the results as they are now")
        if changes and (looks.was_begun or ADDED in changes):
            after = f", after looks at {count_of(looks.seeds, 'seed')}" if looks.rounds else ""
            departures = (f"{change}{after}" for change in changes)
            begin_design(self._files.looks, self._plan.design, (*looks.changes, *departures))
        if self._plan.decision is None:
            self._decision = dropped(self._decision) if self._decision and looks.was_begun else None

    def request(
        self, entries: Mapping[str, RunEntry], over: Collection[str], lost: Collection[str]
    ) -> Request:
        """Return the runs asked for so far, and what was found.

        A decision goes on without the runs that are `over`, and looks again at one that is repaired; a rung
        stands, so a search decides it without those that are `lost` only.

        Args:
            entries: all runs as they are, by id.
            over: runs that ended without a result and are not tried again for now.
            lost: runs that no resume tries again.
        """
        del over, lost
        runs = frozenset(entries)
        return Request(runs, runs, self._decision, self._searched)

    def propose(self, values: Mapping[str, float | None]) -> bool:
        """Store what a sampler proposes after these values of conditions; return whether it is anything."""
        del values
        return False


def strategy_of(plan: Plan, files: CampaignFiles, manifest: Manifest, notice: Notice) -> Strategy:
    """Return the strategy that a campaign's file asks for."""
    if plan.decision is None:
        return Strategy(plan, files, manifest, notice)
    if plan.campaign.search is None:
        return DecisionStrategy(plan.decision, plan, files, manifest, notice)
    return SearchStrategy(plan.campaign.search, plan.decision, plan, files, manifest, notice)


class DecisionStrategy(Strategy):
    """Asks for further seeds round by round, until `[decision]` has its verdicts."""

    adds_runs = True

    def __init__(
        self, table: DecisionSection, plan: Plan, files: CampaignFiles, manifest: Manifest, notice: Notice
    ) -> None:
        super().__init__(plan, files, manifest, notice)
        self._table = table
        self._window = read_window(table.per, table.over)
        self._evaluation = evaluation_of(table.metric)
        self._values: dict[str, float | None] = {}  # of finished runs, which do not change
        self._reached: dict[str, float] = {}  # of values that lack as the run ended before: how far it came
        self._by_question: dict[str, Mapping[int, float]] = {}  # means of theirs, for the same reason
        conditions = manifest.decision.conditions if manifest.decision else ()
        self._verdicts = {condition.condition: condition.verdict for condition in conditions}  # as told
        self._ended = manifest.decision.ended if manifest.decision else ""

    def begin(self, changes: Sequence[str]) -> None:
        super().begin(changes)
        for run in self._plan.runs if changes else ():  # those that were stopped at a rung may go on
            done = readable(read_done, self._files.run(run.run_id).done)
            if done is not None and STOPPED in done.result:
                remove_file(self._files.run(run.run_id).done)

    def request(
        self, entries: Mapping[str, RunEntry], over: Collection[str], lost: Collection[str]
    ) -> Request:
        from retrain.plan.decision import decide  # not at the top: imports numpy

        rungs = self._table.rungs or [0.0]
        compared = [entries[run.run_id] for run in self._plan.runs]
        done = [run for run in compared if run.state == RunState.DONE]
        begun = {run.run_id for run in entries.values() if run.attempts}
        is_spent = self._is_spent(begun)
        looks = self._with_questions(read_looks(self._files.looks), done, over, is_spent=is_spent)
        questions, key = looks.questions, questions_key(self._table.metric)
        count = questions.count if questions and questions.are_more else None  # that decides
        is_known = self._evaluation and (questions or not self._table.max_questions)
        others = {run.run_id for run in done if is_known and number_in(run.result or {}, key) != count}
        done = [run for run in done if run.run_id not in others]
        there: dict[str, float | None] = {}
        for run in compared if self._table.rungs else done:
            there |= self._values_of(run)
        progress = decide(
            self._plan,
            self._table,
            {value_key(run_id, rung): None for run_id in over for rung in rungs} | there,
            {value_key(run_id, rung) for run_id in begun for rung in rungs if rung <= self._wait(run_id)},
            is_spent=is_spent,
            before=looks,
            seconds=self._seconds(done) if self._table.allocate == "auto" else {},
            reached=self._reached,
        )
        if progress.rounds and not looks.design:
            begin_design(self._files.looks, self._plan.design, looks.changes)
        for round_ in progress.rounds:
            append_round(self._files.looks, round_)
        unscored = _unscored(done, self._table.metric)
        again = others & progress.wanted
        for run_id in again:  # each makes the evaluation at its end again, from its last checkpoint
            remove_file(self._files.run(run_id).done)
            self._values.pop(run_id, None)
            self._by_question.pop(run_id, None)
        left = [run for run in compared if run.attempts and run.state == RunState.PENDING]
        self._decision = replace(
            progress.decision,
            unscored=unscored,
            noise=self._noise(done),
            questions=looks.questions,
            asked_again=len(again) + (len(left) if looks.questions else 0),
        )
        self._tell(self._decision)
        request = Request(
            progress.wanted, progress.wanted | begun, self._decision, self._searched, promoted=again
        )
        if not self._table.rungs:
            return request
        promoted, finished = set[str](), list[str]()
        for plan in (run for run in self._plan.runs if run.run_id in progress.waits):
            run, files, rung = entries[plan.run_id], self._files.run(plan.run_id), progress.waits[plan.run_id]
            if why := progress.over.get(run.run_id):
                if run.state in TRIED_AGAIN | {RunState.PENDING} and value_key(run.run_id, rung) in there:
                    _finish(plan, files, why)
                    finished.append(run.run_id)
            elif run.state != RunState.DONE:
                is_end = self._table.per == STEPS and rung >= plan.max_steps
                if write_wait(files.rung, 0 if is_end else rung, self._table.per):
                    promoted.add(run.run_id)
        return replace(request, runs=progress.needed, promoted=promoted, finished=finished)

    def _with_questions(
        self, looks: Looks, done: Sequence[RunEntry], over: Collection[str], *, is_spent: bool
    ) -> Looks:
        """Return the looks with the number of questions that is asked; chosen once, before the first look.

        That is when all runs of the first round have ended. A budget that is used up leaves it as it is.
        """
        if (most := self._table.max_questions) is None or looks.questions or looks.rounds:
            return looks
        from retrain.plan.question_noise import chosen_questions, question_means  # imports numpy

        first = self._plan.planned_seeds[: self._plan.first_seeds]
        runs, ended = [run for run in self._plan.runs if run.seed in first], {run.run_id for run in done}
        if not {run.run_id for run in runs} <= ended | set(over):
            return looks
        tables = runs[0].config.eval.tables
        asked = next(table.prompts for table in tables if table.name == self._evaluation)
        means: dict[int, list[Mapping[int, float]]] = {seed: [] for seed in first}
        for run in runs:
            files = self._files.run(run.run_id)
            own = question_means(files, self._table.metric, asked) if run.run_id in ended else {}
            means[run.seed].append(own)
        most = asked if is_spent else most
        questions = chosen_questions(self._evaluation, list(means.values()), asked, most)
        if not looks.design:
            begin_design(self._files.looks, self._plan.design, looks.changes)
        append_questions(self._files.looks, questions)  # before any run is asked more
        self._notice(str(questions))
        return read_looks(self._files.looks)

    def _wait(self, run_id: str) -> float:
        """Return to which rung a run may go."""
        rungs = self._table.rungs
        read = partial(read_wait, per=self._table.per)
        return (readable(read, self._files.run(run_id).rung) or rungs[-1]) if rungs else 0.0

    def _values_of(self, run: RunEntry) -> dict[str, float | None]:
        """Return a run's values by key, at its end or at each rung that it has come to."""
        values: dict[str, float | None] = {}
        for rung in self._table.rungs or [0.0]:
            key, window = value_key(run.run_id, rung), replace(self._window, end=rung or self._window.end)
            if key not in self._values:
                files, metric = self._files.run(run.run_id), self._table.metric
                is_there, value = _value_at(run, files, metric, window, self._notice)
                has_ended = run.state == RunState.DONE and STOPPED not in (run.result or {})
                if not is_there and not has_ended:  # one that was stopped at a rung may go on
                    continue
                if value is None:
                    lacks = f"{run.run_id} has no {metric}{'' if window == Window() else f' over {window}'}"
                    reached = None if is_there else _read(partial(reach_of, per=window.per), files, str)
                    if window.end is not None and reached is not None and reached < window.end:
                        self._reached[key] = reached
                        lacks += f", as it ended at {amount(reached)}"
                    self._notice(f"{lacks}: its seed is left out of the comparison")
                self._values[key] = value
            values[key] = self._values[key]
        return values

    def _noise(self, done: Sequence[RunEntry]) -> QuestionNoise | None:
        """Return whether questions or seeds are worth more; None unless last evaluations decide."""
        from retrain.plan.question_noise import paired_gains, question_means, question_noise  # imports numpy

        if self._window != Window() or self._table.rungs:
            return None
        for run in done:
            if run.run_id not in self._by_question:
                self._by_question[run.run_id] = question_means(
                    self._files.run(run.run_id), self._table.metric
                )
        means = {("", run.condition, run.seed): self._by_question[run.run_id] for run in done}
        return question_noise(paired_gains(means, self._plan.reference))

    def _is_spent(self, begun: Collection[str]) -> bool:
        """Whether runs, without those of seeds added by hand, have used up the decision's time or money."""
        by_hand = {run.run_id for run in self._plan.runs if run.origin is Origin.ADDED}
        runs = [self._files.run(run_id) for run_id in begun if run_id not in by_hand]
        if self._table.budget_usd is not None:
            spent = [spending.at_most_usd or 0.0 for run in runs if (spending := read_spending(run))]
            if math.fsum(spent) >= self._table.budget_usd:
                return True
        return bool(self._table.budget) and busy_s(runs) >= parse_duration(self._table.budget)

    def _seconds(self, done: Sequence[RunEntry]) -> dict[str, float]:
        """Return how long a finished run of each condition was alive on average."""
        seconds: dict[str, list[float]] = {}
        for run in done:
            seconds.setdefault(run.condition, []).append(busy_s([self._files.run(run.run_id)]))
        return {name: mean for name, each in seconds.items() if (mean := sum(each) / len(each)) > 0}

    def _tell(self, decision: Decision) -> None:
        """Notice verdicts that are new, and the end."""
        for condition in decision.conditions:
            if condition.verdict not in ("continue", self._verdicts.get(condition.condition)):
                self._notice(verdict_of(condition, decision))
            self._verdicts[condition.condition] = condition.verdict
        if decision.ended and not self._ended:
            self._notice(ending_of(decision))
        self._ended = decision.ended


class SearchStrategy(Strategy):
    """Asks for runs rung by rung; the winner is then compared with the reference as `[decision]` says."""

    adds_runs = True

    def __init__(
        self,
        table: SearchSection,
        comparison: DecisionSection,
        plan: Plan,
        files: CampaignFiles,
        manifest: Manifest,
        notice: Notice,
    ) -> None:
        super().__init__(plan, files, manifest, notice)
        self._table, self._comparison = table, comparison
        self._manifest = manifest
        self._compared: DecisionStrategy | None = None  # the winner and the reference, once it is known
        self._told = set(lines_of_search(manifest.searched))

    def request(
        self, entries: Mapping[str, RunEntry], over: Collection[str], lost: Collection[str]
    ) -> Request:
        climb = self._climb(entries, lost)
        waits = climb.waits.items()
        promoted = {run_id for run_id, step in waits if write_wait(self._files.run(run_id).rung, step)}
        finished = [run_id for run_id in climb.over if entries[run_id].state in TRIED_AGAIN]
        plans = {run.run_id: run for run in self._plan.runs} if finished else {}
        for run_id in finished:
            _finish(plans[run_id], self._files.run(run_id), climb.over[run_id])
        for line in lines_of_search(self._searched):
            self._tell(line)
        shown = climb.wanted | {run.run_id for run in entries.values() if run.attempts}
        searching = Request(
            frozenset(climb.waits), shown, self._decision, self._searched, promoted, finished, climb.due
        )
        if climb.winner in ("", self._plan.reference):
            return searching
        if self._compared is None:
            from retrain.plan.search import fresh_plan  # not at the top: few campaigns search

            plan = fresh_plan(self._plan, climb.winner)
            self._compared = DecisionStrategy(
                self._comparison, plan, self._files, self._manifest, self._notice
            )
        decided = self._compared.request(entries, over, lost)
        return replace(
            decided,
            shown=shown | decided.shown,
            searched=self._searched,
            promoted=promoted | set(decided.promoted),
            finished=[*finished, *decided.finished],
        )

    def propose(self, values: Mapping[str, float | None]) -> bool:
        from retrain.plan.proposals import propose  # not at the top: few campaigns have a sampler

        rounds = read_proposals(self._files.proposals)
        proposed = propose(self._plan, self._table, rounds, values, self._notice)
        append_line(self._files.proposals, asdict(proposed))
        if not proposed.proposals:
            self._notice(
                f"{self._table.sampler} proposes nothing else, so the search goes on with what it proposed "
                "so far"
            )
        return bool(proposed.proposals)

    def _climb(self, entries: Mapping[str, RunEntry], lost: Collection[str]) -> Climb:
        """Return how far the search is; rungs that are new are written."""
        from retrain.plan.proposals import to_come  # not at the top: few campaigns search
        from retrain.plan.search import climb, stages_of

        def value_at(run: RunPlan, step: int) -> tuple[bool, float | None]:
            """Return whether a run is after a step, 0 for its end, and its value there."""
            entry, files, window = entries[run.run_id], self._files.run(run.run_id), Window(end=step or None)
            is_there, value = _value_at(entry, files, self._table.metric, window, self._tell)
            if not is_there and entry.state == RunState.DONE:  # it was over before
                is_there, value = _value_at(entry, files, self._table.metric, Window(), self._tell)
            return is_there or run.run_id in lost, value

        decided = read_records(self._files.rungs, Rung)
        left = to_come(self._table, read_proposals(self._files.proposals))
        progress = climb(self._plan, self._table, decided, value_at, left)
        for rung in progress.rungs[len(decided) :]:
            append_line(self._files.rungs, asdict(rung))
        self._searched = Searched(
            self._table.metric,
            self._plan.reference,
            self._plan.search_seeds,
            progress.rungs,
            progress.winner,
            tuple(stages_of(self._plan, self._table, left)),
            self._table.sampler,
            len(self._plan.proposed_conditions),
            left,
        )
        return progress

    def _tell(self, line: str) -> None:
        """Notice a line once, however often a look finds the same."""
        if line not in self._told:
            self._told.add(line)
            self._notice(line)


def _unscored(done: Sequence[RunEntry], metric: str) -> dict[str, float]:
    """Return each condition's mean share of completions without a score, where there are any."""
    shares: dict[str, list[float]] = {}
    for run in done:
        in_training = run.reading.row.unscored_fraction if run.reading else None
        shares.setdefault(run.condition, []).append(unscored_in(in_training, run.result or {}, metric))
    return {name: math.fsum(each) / len(each) for name, each in shares.items() if any(each)}


def _value_at(
    run: RunEntry, files: RunFiles, metric: str, window: Window, tell: Notice
) -> tuple[bool, float | None]:
    """Return whether a run that is at rest has come to the end of a window, and its value there."""
    is_at_rest = run.attempts and run.state != RunState.RUNNING
    if not is_at_rest or (window.end is None and run.state != RunState.DONE):
        return False, None
    read = partial(value_over, result=run.result or {}, metric=metric, window=window)
    return _read(read, files, tell) or (False, None)


def _finish(run: RunPlan, files: RunFiles, why: str) -> None:
    """Have a run that goes no further be done where it is, unless its worker still runs."""
    lock = hold(files.lock)
    if lock is None:
        return
    with lock:
        attempts = read_attempts(files.attempts)
        if not attempts or sealed_done(files, run.config_hash) is not None:
            return
        seal = seal_of(files.metrics)
        write_done(files.done, run.config_hash, {"steps": seal.rows, STOPPED: why}, seal)
        end_as_done(files.attempts, attempts[-1], why)


def _read(read: Callable[[RunFiles], T], files: RunFiles, tell: Callable[[str], object]) -> T | None:
    """Return what a run's records say; None, and the problem is told, if they cannot be read.

    Raises RecordsError if that may pass: what is found without a value is final.
    """
    try:
        return read(files)
    except RecordsError as error:
        if may_pass(error):
            raise
        tell(str(error))
        return None
