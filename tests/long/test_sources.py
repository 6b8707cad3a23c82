"""Several sources of prompts: their shares of each step, their own rewards and environments, their rows."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.base.errors import ConfigError, RunFailedError
from retrain.base.rollouts import Group, Prompt
from retrain.config.load import load_config, parse
from retrain.config.schema import DataSection, SourceSection
from retrain.plan.build import plan_runs
from retrain.plan.preflight import preflight
from retrain.records.metrics import read_metrics
from retrain.records.samples import samples_of
from retrain.trainer import worker
from retrain.trainer.batch import ScoredBatch, joined
from retrain.trainer.evaluation import HeldOut
from retrain.trainer.prompts import Draw, PromptStream, apportioned, open_stream
from retrain.trainer.refill import InTurn, Refill
from retrain.trainer.source import Source
from tests.clocks import without_times
from tests.stopping import StopAfterStep
from tests.trainer.test_async_source import sampled
from tests.trainer.test_refill import Timeless
from tests.trainer.test_trainer import SMALL, make_run, train

SORT = {"task": "sort", "weight": 3.0}
ADD = {"name": "sums", "task": "addition"}
GUESS = {"task": "guess", "environment": "guess"}
WEIGHTS = st.sampled_from([0.1, 0.3, 1.0, 2.0, 2.5, 7.0, 90.0])


def with_sources(*sources: dict[str, Any], **data: object) -> dict[str, Any]:
    return {**SMALL, "data": {"source": [*sources], **data}}


def of(name: str, weight: float = 1.0, **keys: int) -> SourceSection:
    return SourceSection(name=name, task="t", weight=weight, **keys)


def stream_of(*sources: SourceSection, size: int = 50, curriculum: str = "shuffle") -> PromptStream:
    names = [(source.label, n) for source in sources for n in range(size)]
    prompts = [Prompt(number, f"{name} {n}", "", source=name) for number, (name, n) in enumerate(names)]
    return open_stream(prompts, curriculum, {}, 1, sources)


def shares(stream: PromptStream, draws: Sequence[Draw]) -> Counter[str]:
    return Counter(stream.at(draw).source for draw in draws)


@given(
    weights=st.lists(WEIGHTS, min_size=2, max_size=6),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=30),
)
def test_shares_are_exact_over_any_steps(weights: list[float], sizes: list[int]) -> None:
    sources = [of(f"s{n}", weight) for n, weight in enumerate(weights)]
    stream, drawn, whole = stream_of(*sources), Counter[str](), sum(Fraction(str(w)) for w in weights)
    for size in sizes:
        step = shares(stream, stream.draw(size))
        assert step.total() == size
        drawn += step
        for source in sources:
            exact = drawn.total() * Fraction(str(source.weight)) / whole
            assert abs(drawn[source.label] - exact) < 1


@given(exact=st.lists(st.fractions(-1, 50), min_size=1, max_size=30))
def test_whole_numbers_have_the_sum_of_the_shares(exact: list[Fraction]) -> None:
    exact.append(-sum(exact) % 1 + 60)
    whole = apportioned(exact)
    assert sum(whole) == sum(exact)
    assert min(whole) >= 0


def test_the_largest_remainders_get_the_rest_and_it_is_carried_over() -> None:
    stream = stream_of(of("a", 0.5), of("b", 0.3), of("c", 0.2))
    steps = [shares(stream, stream.draw(3)) for _ in range(10)]
    # owed 1.5, 0.9, 0.6: b and c have the largest remainders; then a is owed 0.5 more
    assert steps[0] == {"a": 1, "b": 1, "c": 1}
    assert steps[1] == {"a": 2, "b": 1}
    assert sum(steps, Counter()) == {"a": 15, "b": 9, "c": 6}


def test_a_source_has_prompts_only_between_its_steps() -> None:
    stream = stream_of(of("a", until_step=2), of("b", from_step=2, until_step=4), of("c", from_step=4))
    seen = [set(shares(stream, stream.draw(8, step))) for step in (1, 2, 3, 4, 5)]
    assert seen == [{"a"}, {"a", "b"}, {"b"}, {"b", "c"}, {"c"}]


def test_sampling_ahead_of_the_last_step_draws_from_its_sources() -> None:
    stream = stream_of(of("a", until_step=2), of("b", until_step=3))
    assert set(shares(stream, stream.draw(4, 9))) == {"b"}


def test_a_step_without_a_source_names_it() -> None:
    stream = stream_of(of("a", until_step=2), of("b", from_step=4))
    with pytest.raises(RunFailedError, match=r"\[\[data.source\]\]: step 3 has no source"):
        stream.draw(4, 3)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=20),
    curriculum=st.sampled_from(["shuffle", "pool", "skip"]),
)
def test_what_is_put_back_is_drawn_again_and_changes_no_share(
    sizes: list[tuple[int, int]], curriculum: str
) -> None:
    stream, kept = stream_of(of("a", 3), of("b"), of("c", 0.7), curriculum=curriculum), list[Draw]()
    for size, back in sizes:
        draws = stream.draw(size)
        stream.put_back(draws[:back])
        kept += draws[back:]
    counts, numbers = shares(stream, kept), [draw.number for draw in kept]
    assert len(set(numbers)) == len(numbers)
    for name, weight in (("a", 3.0), ("b", 1.0), ("c", 0.7)):
        assert abs(counts[name] - len(kept) * weight / 4.7) < 1 + max(size for size, _ in sizes)
    stream.draw(stream.due)  # or fewer, as shares want others
    assert stream.due < 3 * len(sizes) * 9


def test_a_step_that_is_drawn_again_is_the_same_and_a_smaller_one_has_its_shares() -> None:
    stream = stream_of(of("a", 3), of("b"))
    first = stream.draw(8)
    stream.put_back(first)
    assert stream.draw(8) == first
    stream.put_back(first)
    assert shares(stream, stream.draw(4)) == {"a": 3, "b": 1}
    assert shares(stream, stream.draw(4)) == {"a": 3, "b": 1}


def test_prompts_beyond_a_share_are_not_owed_when_put_back() -> None:
    stream = stream_of(of("a", 3), of("b"))
    draws = stream.draw(8)
    further = stream.draw(3, shares={"b": 3})
    assert shares(stream, further) == {"b": 3}
    stream.put_back([*draws, *further])
    again = stream.draw(8)
    assert shares(stream, again) == {"a": 6, "b": 2}
    assert again == draws
    assert shares(stream, stream.draw(8)) == {"a": 6, "b": 2}


@pytest.mark.parametrize("curriculum", ["shuffle", "pool", "skip"])
def test_draws_go_on_from_a_saved_state(curriculum: str) -> None:
    first, second = (stream_of(of("a", 2), of("b"), curriculum=curriculum) for _ in "12")
    taken = first.draw(7)
    first.observe(taken, np.linspace(0, 1, 14).reshape(7, 2))
    under_way = first.draw(5)
    second.load_state_dict(first.state_dict(under_way))
    first.put_back(under_way)
    assert [first.draw(6) for _ in range(9)] == [second.draw(6) for _ in range(9)]


def test_each_source_has_a_curriculum_of_its_own() -> None:
    stream = stream_of(of("a"), of("b"), curriculum="pool")
    draws = stream.draw(40)
    right = np.array([[float(stream.at(draw).source == "a")] * 2 for draw in draws])
    stream.observe(draws, right)
    summary = stream.observe(draws, right)
    assert summary is not None
    assert summary.seen == pytest.approx(0.5)
    known = stream.state_dict()["sources"]
    successes = {name: np.sum(state["curriculum"]["seen"][1], axis=0)[0] for name, state in known.items()}
    assert successes["a"] > 0
    assert successes["b"] == 0


def test_rows_say_what_each_source_gave(tmp_path: Path) -> None:
    rows = read_metrics(train(tmp_path / "r", with_sources(SORT, ADD)).directory)
    counts = [(row["source_sort_prompts"], row["source_sums_prompts"]) for row in rows]
    assert counts == [(2, 1), (3, 0), (2, 1), (2, 1), (2, 1), (3, 0)]
    for row in rows:
        assert row["source_sort_tokens"] + row["source_sums_tokens"] == row["tokens_per_step"]
        sums = [
            row[f"source_{name}_prompts"] * (row[f"source_{name}_mean_reward"] or 0)
            for name in ("sort", "sums")
        ]
        assert sum(sums) / row["batch_size"] == pytest.approx(row["mean_reward"])


def test_one_source_is_a_run_of_its_task(tmp_path: Path) -> None:
    plain = {**with_sources(), "data": {"task": "sort"}, "reward": {"reward": "partial"}}
    sourced = with_sources({**SORT, "name": "any", "reward": "partial", "from_step": 1})
    first, second = (train(tmp_path / name, raw) for name, raw in (("a", plain), ("b", sourced)))
    assert without_times(read_metrics(first.directory)) == without_times(read_metrics(second.directory))
    assert plan_runs(parse(plain, "c")).config_hash == plan_runs(parse(sourced, "c")).config_hash
    assert not any(sample.source for sample in samples_of(second.samples))


def test_each_source_has_its_own_reward_and_limit_of_tokens(tmp_path: Path) -> None:
    own = {"reward": "tests.reward_functions.length", "params": {"longest": 4}, "max_tokens": 2}
    rows = read_metrics(train(tmp_path / "r", with_sources(SORT, {**ADD, **own})).directory)
    for row in rows:
        prompts = row["source_sums_prompts"]
        assert row["source_sums_tokens"] <= 2 * 4 * prompts
        assert row["source_sort_tokens"] <= 4 * 4 * row["source_sort_prompts"]
        if prompts:
            assert 0 < row["source_sums_mean_reward"] <= 0.5
            assert row["source_sums_mean_reward"] != row["source_sort_mean_reward"]


def test_one_source_plays_episodes_and_another_answers_in_a_turn(tmp_path: Path) -> None:
    raw = with_sources(GUESS, ADD)
    raw["training"] = {**SMALL["training"], "max_tokens": 12}
    raw["environment"] = {"max_turns": 3, "max_turn_tokens": 3}
    raw["training"]["batch_size"] = 4
    raw["logging"] = {"samples_per_step": 2}
    files = train(tmp_path / "r", raw)
    rows = read_metrics(files.directory)
    assert all(row["source_guess_prompts"] == row["source_sums_prompts"] == 2 for row in rows)
    assert max(row["turns_mean"] for row in rows) > 1
    kept = [*samples_of(files.samples)]
    assert {sample.source for sample in kept} == {"guess", "sums"}
    assert all(bool(sample.turns) == (sample.source == "guess") for sample in kept)


@pytest.mark.parametrize("refill", ["none", "tied"])
@pytest.mark.parametrize("curriculum", ["shuffle", "pool"])
def test_a_run_of_several_sources_that_is_stopped_goes_on_as_if_it_had_not_been(
    tmp_path: Path, refill: str, curriculum: str
) -> None:
    later = {**ADD, "from_step": 2, "reward": "partial"}
    raw = with_sources({**SORT, "until_step": 5}, later, refill=refill, curriculum=curriculum)
    undisturbed, files = train(tmp_path / "a", raw), make_run(tmp_path / "b", raw)
    assert worker.run(files.directory, StopAfterStep(files, 3)) == 130
    assert worker.run(files.directory, threading.Event()) == 0
    whole, resumed = (read_metrics(run.directory) for run in (undisturbed, files))
    assert without_times(resumed) == without_times(whole)
    assert whole[0]["source_sums_prompts"] == whole[5]["source_sort_prompts"] == 0


def test_sampling_ahead_keeps_the_shares_of_all_draws(tmp_path: Path) -> None:
    raw = with_sources(SORT, ADD)
    raw["rate_limiter"] = {"max_staleness": 1}
    raw["training"] = {**SMALL["training"], "batch_size": 4, "max_steps": 8}
    rows = read_metrics(train(tmp_path / "r", raw).directory)
    assert sum(row["source_sort_prompts"] for row in rows) == 24
    assert sum(row["source_sums_prompts"] for row in rows) == 8


def test_back_pressure_that_changes_the_batch_keeps_the_shares(tmp_path: Path) -> None:
    raw = with_sources(SORT, ADD)
    raw["backpressure"] = {"enabled": True, "warmup_steps": 8, "max_batch_size": 9}
    raw["reward"] = {"reward": "partial"}
    raw["training"] = {**SMALL["training"], "max_steps": 12}
    rows = read_metrics(train(tmp_path / "r", raw).directory)
    assert len({row["batch_size"] for row in rows}) > 1
    drawn = Counter[str]()
    for row in rows:
        drawn += Counter({name: row[f"source_{name}_prompts"] for name in ("sort", "sums")})
        assert abs(drawn["sort"] - 0.75 * drawn.total()) < 1


class TiesOf:
    """Scores groups of some sources as tied."""

    def __init__(self, *sources: str) -> None:
        self._sources = sources

    def __call__(self, groups: Sequence[Group], step: int, *, is_part: bool = False) -> ScoredBatch:
        rewards = [[1.0, 1.0 if g.prompt.source in self._sources else 0.5] for g in groups]
        return ScoredBatch(groups, np.array(rewards))


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_refill_replaces_a_group_by_one_of_its_source(overlaps: bool) -> None:
    refill = Refill(DataSection(refill="tied", refill_most=2), TiesOf("b"), Timeless())
    source = Source(stream_of(of("a", 3), of("b")), sampled, refill, overlaps=overlaps)
    for version in range(3):
        groups = source.next_groups(8, 8, version)
        assert Counter(group.prompt.source for group in groups) == {"a": 6, "b": 2}
        everything = refill.score(groups, version).everything.groups
        assert Counter(group.prompt.source for group in everything) == {"a": 6, "b": 18}
        with source.updating(version + 1):
            pass


def test_a_source_whose_scorer_is_away_costs_no_step_while_another_has_a_score(tmp_path: Path) -> None:
    away = {**ADD, "reward": "tests.reward_functions.once_there", "params": {"needs": "never"}}
    raw = with_sources(SORT, away)
    raw["training"] = {**SMALL["training"], "max_steps": 2}
    rows = read_metrics(train(tmp_path / "r", raw).directory)
    assert [row["source_sums_mean_reward"] for row in rows] == [None, None]
    assert all(row["source_sort_mean_reward"] is not None for row in rows)


def problems(*sources: dict[str, Any], **tables: Any) -> list[str]:
    raw = {**with_sources(*sources), **tables}
    with pytest.raises(ConfigError) as caught:
        preflight(plan_runs(parse(raw, "c")), "c")
    return list(caught.value.problems)


@pytest.mark.parametrize(
    ("key", "value", "needs"),
    [
        ("weight", -1.0, "got -1.0; needs more than 0"),
        ("weight", 0, "got 0; needs more than 0"),
        ("weight", "much", 'got "much"; needs a number'),
        ("weight", True, "got true; needs a number"),
        ("from_step", 0, "got 0; needs at least 1"),
        ("max_tokens", 5, "got 5; needs at most training.max_tokens = 4"),
        ("name", "A b", 'got "A b"; needs lower-case letters, digits, _ or -, such as "hard"'),
        ("name", "sort", '"sort" names 2 sources; give each a name of its own'),
        ("params", {"a": 1}, "has no effect; set reward, whose parameters they are"),
        ("task", "", "is not given; name the task of its prompts"),
    ],
)
def test_a_wrong_key_of_a_source_is_named(key: str, value: object, needs: str) -> None:
    wrong = problems(SORT, {**ADD, key: value})
    assert f"c [[data.source]] #2.{key}: {needs}" in wrong


def test_steps_that_end_before_they_begin_are_refused() -> None:
    wrong = problems(SORT, {**ADD, "from_step": 4, "until_step": 3})
    assert wrong == ["c [[data.source]] #2.until_step: got 3; needs at least from_step = 4"]


def test_steps_without_a_source_are_refused() -> None:
    wrong = problems({**SORT, "from_step": 2, "until_step": 2}, {**ADD, "from_step": 5, "until_step": 5})
    fix = "change from_step or until_step of one"
    assert wrong == [
        f"c [[data.source]]: step 1 has no source; {fix}",
        f"c [[data.source]]: steps 3 to 4 have no source; {fix}",
        f"c [[data.source]]: step 6 has no source; {fix}",
    ]


def test_prompts_of_two_sources_are_refused() -> None:
    (wrong,) = problems(SORT, {"name": "other", "task": "reverse"})
    assert wrong.startswith('c [[data.source]] "other".task: 1000 prompts are also in source "sort", such as')


def test_a_task_beside_sources_is_refused() -> None:
    raw = with_sources(SORT, ADD, task="copy")
    with pytest.raises(ConfigError, match=r"\[data\].task: has no effect beside \[\[data.source\]\]"):
        parse(raw, "c")


def test_functions_that_only_a_source_has_are_refused() -> None:
    tools = {**ADD, "environment": "tools", "environment_options": {"tools": ["python"]}}
    wrong = problems(SORT, tools, backend={"backend": "numpy"})
    assert any('[[data.source]] "sums".environment' in problem for problem in wrong)


def test_held_out_prompts_are_told_by_source(tmp_path: Path) -> None:
    own = {**ADD, "reward": "tests.reward_functions.length", "params": {"longest": 4}}
    raw = with_sources(SORT, own, eval_prompts=20)
    raw["training"] = {**SMALL["training"], "eval_every": 6}
    row = read_metrics(train(tmp_path / "r", raw).directory)[-1]
    both = (row["eval_source_sort_reward"], row["eval_source_sums_reward"])
    assert sum(both) / 2 == pytest.approx(row["eval_reward"])  # ten prompts of each
    assert both[0] != both[1]
    assert "eval_source_sort_reward" not in read_metrics(train(tmp_path / "one", SMALL).directory)[-1]


def test_an_evaluation_with_the_name_of_a_sources_fields_is_refused() -> None:
    wrong = problems(SORT, ADD, eval={"tables": [{"name": "source_sums"}]})
    what = '"source_sums" is what the fields of source "sums" are called; choose another name'
    assert wrong == [f'c [[eval]] "source_sums".name: {what}']


def test_a_source_reads_files_beside_its_campaign(tmp_path: Path) -> None:
    (tmp_path / "sums.jsonl").write_text(
        '{"prompt": "1+1", "answer": "2"}\n{"prompt": "1+2", "answer": "3"}\n'
    )
    (tmp_path / "c.toml").write_text(
        '[[data.source]]\ntask = "sort"\n'
        '[[data.source]]\ntask = "jsonl"\noptions = { path = "sums.jsonl", held_out = 0.0 }\n'
    )
    run = plan_runs(load_config(tmp_path / "c.toml")).runs[0]
    assert run.config.data.source[1].options["path"] == str(tmp_path / "sums.jsonl")
    assert run.config.run is not None
    assert list(run.config.run.files) == ["data.source.1.options.path"]


def test_explain_shows_the_prompts_of_each_source(
    retrain: Callable[..., CompletedProcess[str]], here: Path
) -> None:
    sources = (
        '[[data.source]]\ntask = "sort"\nweight = 3\n[[data.source]]\ntask = "addition"\nfrom_step = 4\n'
    )
    (here / "c.toml").write_text(f"[training]\nmax_steps = 9\nbatch_size = 2\nseed = 1\n{sources}")
    shown = retrain("explain", "c.toml").stdout
    assert "steps 1 to 3: prompts a step: 2 of sort\n" in shown
    assert "steps 4 to 9: prompts a step: 1.5 of sort, 0.5 of addition\n" in shown


def test_status_and_samples_show_each_source(
    retrain: Callable[..., CompletedProcess[str]], here: Path
) -> None:
    files = train(here / "r", with_sources(SORT, ADD))
    assert re.search(r"sort \d\.\d{3} \(\d+% of prompts\)", retrain("status", files.directory).stdout)
    read = retrain("samples", files.directory, "--source", "sums", "--best").stdout
    assert "of sums  reward" in read
    assert "of sort" not in read
    wrong = retrain("samples", files.directory, "--source", "sum")
    assert wrong.returncode == 2
    assert "has no samples of source 'sum'; the sources are sort, sums" in wrong.stderr


def test_a_part_of_one_sources_reward_is_no_lack_of_the_others(tmp_path: Path) -> None:
    weighted = {"reward": "weighted", "params": {"parts": {"partial": 1.0}}}
    for row in read_metrics(train(tmp_path / "r", with_sources({**SORT, **weighted}, ADD)).directory):
        assert row["reward_partial"] == pytest.approx(row["source_sort_mean_reward"])
        assert "reward_partial_unscored" not in row


def test_by_outcome_a_source_that_knows_none_is_refilled_by_ties() -> None:
    def scored(name: str, rewards: list[float], right: list[float] | None) -> ScoredBatch:
        group = sampled([Prompt(0, "0", "", source=name)])
        return ScoredBatch(group, np.array([rewards]), right=None if right is None else np.array([right]))

    known = [scored("a", [0.1, 0.2], [0.0, 0.0]), scored("a", [0.1, 1.0], [0.0, 1.0])]
    unknown = [scored("b", [0.1, 0.2], None), scored("b", [0.2, 0.2], None)]
    batches = iter([joined([*known, *unknown]), *[joined([known[1]])] * 9])
    refill = Refill(DataSection(refill="outcome"), lambda *_, is_part: next(batches), Timeless())
    in_turn = iter([joined([*known, *unknown]).groups, known[1].groups, known[1].groups])
    asked: list[object] = []

    def sample(count: int, shares: object) -> list[Group]:
        asked.append(shares)
        return [*next(in_turn)]

    refill.fill(InTurn(sample), 4, 0, by_source=True)
    assert asked[:2] == [None, {"a": 1, "b": 1}]


def test_a_reward_in_another_process_knows_the_source(tmp_path: Path) -> None:
    reward = {"reward": "tests.reward_functions.by_source"}
    rows = read_metrics(train(tmp_path / "r", with_sources({**SORT, **reward}, {**ADD, **reward})).directory)
    assert {row["source_sort_mean_reward"] for row in rows} == {0.25}
    assert {row["source_sums_mean_reward"] for row in rows} == {0.75, None}


def test_an_evaluation_is_at_most_as_dear_as_the_longest_episodes() -> None:
    raw = {**with_sources(GUESS, ADD), "environment": {"max_turns": 3}}
    config = plan_runs(parse(raw, "c")).runs[0].config
    held_out = HeldOut(config, (), lambda groups, step: joined([]), lambda prompts, how: [])
    assert held_out.due().played.environment == "guess"
    assert held_out.due().played.max_turns == 3
