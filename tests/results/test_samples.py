"""samples.jsonl: small, crash-safe, the same after a resume; and reading it."""

import json
import threading
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from retrain.base.errors import ConfigError, RecordsError
from retrain.base.rollouts import Episode, Group, Prompt, Rollout
from retrain.cli import app
from retrain.plugins.rewards import Outcome, Score
from retrain.records.layout import RunFiles
from retrain.records.samples import (
    BETWEEN,
    FIRST,
    LAST,
    LONGEST_TEXT,
    REWRITE_EVERY,
    SamplesWriter,
    advantage_spans,
    is_kept,
    read_samples,
    samples_of,
    shortened,
)
from retrain.records.text import plain_lines
from retrain.results.status.one_run import choose_samples
from retrain.trainer import worker
from retrain.trainer.batch import ScoredBatch
from retrain.trainer.journal import choose as choose_shown
from tests.stopping import StopAfterStep
from tests.trainer.test_trainer import SMALL, make_run, train

LONG = SMALL | {"training": SMALL["training"] | {"max_steps": 30, "save_every": 7}}


def write(files: RunFiles, steps, attempt=1, **values):
    writer = SamplesWriter(files.samples, attempt)
    for step in steps:
        reward = {"reward": step / 100, "advantage": 0.0, "tie": step % 2 == 0}
        writer.append(step, [{"prompt": f"p{step}", "completion": "c"} | reward | values])
    writer.close()


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run.toml").touch()
    return RunFiles(tmp_path)


def steps_of(files):
    return [row["step"] for row in read_samples(files.samples)]


@given(last=st.integers(1, 10**6))
def test_first_last_and_evenly_spaced_steps_are_kept_and_few(last):
    stride = max(1, last // (2 * BETWEEN))
    looked = {*range(1, 40), *range(max(1, last - 40), last + 1), *range(stride, last, stride)}
    kept = [step for step in looked if step <= last and is_kept(step, last)]
    assert {*range(1, min(FIRST, last) + 1)} <= set(kept)
    assert {*range(max(1, last - LAST + 1), last + 1)} <= set(kept)
    assert sum(is_kept(step, 5000) for step in range(1, 5001)) <= FIRST + LAST + BETWEEN


@given(step=st.integers(1, 3000), last=st.integers(1, 3000), more=st.integers(0, 3000))
def test_what_was_dropped_is_never_wanted_again(step, last, more):
    if step <= last and not is_kept(step, last):
        assert not is_kept(step, last + more)


def test_the_file_stays_small_however_long_a_run_is(run):
    write(run, range(1, 2001))
    assert len(run.samples.read_bytes().splitlines()) <= FIRST + LAST + BETWEEN + REWRITE_EVERY
    assert len(steps_of(run)) <= FIRST + LAST + BETWEEN
    assert (steps_of(run)[0], steps_of(run)[-1]) == (1, 2000)


@settings(max_examples=20, deadline=None)
@given(lives=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 10)), max_size=6))
def test_a_run_killed_anywhere_ends_with_the_samples_of_one_left_in_peace(tmp_path_factory, lives):
    end, done = 300, 0
    killed, calm = RunFiles(tmp_path_factory.mktemp("a")), RunFiles(tmp_path_factory.mktemp("b"))
    for attempt, (steps, back) in enumerate([*lives, (end, 0)], start=1):
        write(killed, range(done + 1, min(end, done + steps) + 1), attempt)
        done = max(0, min(end, done + steps) - (back if done + steps < end else 0))
    write(calm, range(1, end + 1))
    told = [row | {"attempt": 1} for row in read_samples(killed.samples)]
    assert told == read_samples(calm.samples)


@pytest.mark.parametrize("tear", [1, 10, 40])
def test_a_torn_tail_costs_nothing_but_itself(run, tear):
    write(run, range(1, 4))
    data = run.samples.read_bytes()
    run.samples.write_bytes(data[:-tear] if tear > 1 else data + b'{"step": 4, "pro')
    whole = 3 if tear == 1 else 2
    assert steps_of(run) == list(range(1, whole + 1))
    write(run, [whole + 1], attempt=2)
    assert steps_of(run) == list(range(1, whole + 2))


def test_corrupted_lines_are_passed_over(run):
    write(run, [1])
    with run.samples.open("ab") as file:
        file.write(b'\0\xff{[\n[]\n{"step": "2"}\n{"step": 2, "reward": NaN}\n{"step": 2}\n')
    write(run, [3])
    assert [sample.step for sample in choose_samples(run, None, "best", 9)] == [3, 1]


def test_a_resumed_run_has_the_samples_of_an_undisturbed_one(tmp_path):
    undisturbed = train(tmp_path / "a", LONG)
    stopped = make_run(tmp_path / "b", LONG)
    ends = [worker.run(stopped.directory, StopAfterStep(stopped, step)) for step in (5, 11, 100)]
    assert ends == [130, 130, 0]
    told = [row | {"attempt": 1} for row in read_samples(stopped.samples)]
    assert told == read_samples(undisturbed.samples)
    assert {row["step"] for row in told} == set(range(1, 31))


def test_samples_can_be_switched_off(tmp_path):
    files = train(tmp_path / "run", SMALL | {"logging": {"samples_per_step": 0}})
    assert not files.samples.exists()


def batch_of(rewards, text="text"):
    groups = [
        Group(
            prompt := Prompt(number, f"prompt {number}", "answer"),
            tuple(
                Rollout(prompt, f"{text} {number}.{i}", (1, 2), np.zeros(2), ("a", "b"), truncated=False)
                for i in range(len(row))
            ),
        )
        for number, row in enumerate(rewards)
    ]
    return ScoredBatch(groups, np.array(rewards, dtype=float))


def test_some_of_one_prompt_the_best_the_worst_and_a_tie_are_chosen():
    batch = batch_of([[0.5, 0.4, 0.5], [0.9, 0.1, 0.5], [0.3, 0.3, 0.3]])
    shown = choose_shown(batch, np.array([[0.25] * 3, [0.25] * 3, [0.0] * 3]), 2)
    assert [(row.completion, row.reward, row.tie) for row in shown] == [
        ("text 0.0", 0.5, False),
        ("text 0.1", 0.4, False),
        ("text 1.0", 0.9, False),
        ("text 1.1", 0.1, False),
        ("text 2.0", 0.3, True),
    ]


pieces_and_advantages = st.lists(st.tuples(st.text(max_size=9), st.sampled_from([-1.0, 0.0, 0.25])))


@given(pieces_and_advantages, st.integers(1, 3000), st.integers(0, 20))
def test_each_character_that_is_kept_has_the_advantage_of_its_token(tokens, times, dropped):
    pieces, advantages = [piece for piece, _ in tokens] * times, [value for _, value in tokens] * times
    whole = "".join(pieces)
    text = whole[: max(0, len(whole) - dropped)]
    spans = advantage_spans(text, pieces, advantages)
    assert sum(count for count, _ in spans) == len(shortened(text))
    each = [value for piece, value in zip(pieces, advantages, strict=True) for _ in piece][: len(text)]
    told = [value for count, value in spans for _ in range(count)]
    half = LONGEST_TEXT // 2
    if len(text) <= LONGEST_TEXT:
        assert told == each
    else:
        assert (told[:half], told[-half:]) == (each[:half], each[-half:])
        assert set(told[half:-half]) == {None}


def test_pieces_of_another_text_tell_of_no_character():
    assert advantage_spans("abc", ["ab", "d"], [1.0, 2.0]) == ()


def test_what_a_run_trains_on_is_kept_with_the_advantages_of_its_tokens(tmp_path):
    files = train(tmp_path / "run", SMALL | {"data": {"task": "copy"}, "reward": {"reward": "partial"}})
    trained = [one for one in samples_of(files.samples) if one.advantage and one.completion]
    assert trained
    for sample in trained:
        assert sum(count for count, _ in sample.token_advantages) == len(sample.completion)
        assert {value for _, value in sample.token_advantages} == {float(f"{sample.advantage:.3g}")}


def test_the_same_held_out_prompts_are_kept_at_each_evaluation_also_after_a_stop(tmp_path):
    measured = SMALL | {
        "training": SMALL["training"] | {"eval_every": 2},
        "data": {"task": "successor", "eval_prompts": 9},
        "logging": {"samples_per_step": 3},
    }
    whole, broken = train(tmp_path / "whole", measured), make_run(tmp_path / "broken", measured)
    assert worker.run(broken.directory, StopAfterStep(broken, step=3)) == 130
    assert worker.run(broken.directory, threading.Event()) == 0
    kept = list(samples_of(whole.held_out))
    steps = {sample.step: [] for sample in kept}
    for sample in kept:
        steps[sample.step].append(sample.prompt_id)
    assert list(steps) == [0, 2, 4, 6]
    assert len({tuple(prompts) for prompts in steps.values()}) == 1
    assert len(steps[2]) == 3
    assert list(samples_of(broken.held_out)) == kept


def test_nothing_is_chosen_twice():
    shown = choose_shown(batch_of([[1.0, 1.0]]), np.zeros((1, 2)), 4)
    assert [row.completion for row in shown] == ["text 0.0", "text 0.1"]


def test_an_advantage_that_is_no_number_is_null():
    assert choose_shown(batch_of([[1.0, 0.0]]), np.full((1, 2), np.nan), 1)[0].advantage is None


def test_calls_of_tools_are_written_only_where_there_are_any():
    prompt = Prompt(0, "?", "")
    episodes = (Episode(rewards=(1.0,), tool_calls=3, tool_errors=1), Episode(rewards=(0.0,)))
    rollouts = (Rollout(prompt, "a", (1,), np.zeros(1), ("a",), truncated=False, episode=e) for e in episodes)
    batch = ScoredBatch([Group(prompt, tuple(rollouts))], np.array([[1.0, 0.0]]))
    first, second = (row.as_dict() for row in choose_shown(batch, np.zeros((1, 2)), 2))
    assert (first["tool_calls"], first["tool_errors"]) == (3, 1)
    assert not {"tool_calls", "tool_errors"} & set(second)


def test_a_conversation_is_written_as_people_read_it():
    schema = {"name": "add", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}}
    tools = json.dumps([{"type": "function", "function": schema}, {"function": {"name": "now"}}])
    said = (("system", "Be brief."), ("user", "2+3?"))
    prompt = Prompt(0, tools + json.dumps(said), "5", said, tools=tools)
    other = Rollout(prompt, "", (), np.zeros(0), (), truncated=False)
    rollout = replace(other, episode=Episode(rewards=(0.5,), others=(other, other)))
    batch = ScoredBatch([Group(prompt, (rollout, rollout))], np.array([[0.5, 0.5]]))
    (row, *_) = choose_shown(batch, np.zeros((1, 2)), 1)
    assert row.prompt == "function add(a, b)\nfunction now()\nsystem: Be brief.\nuser: 2+3?"
    assert row.as_dict()["other_conversations"] == 2
    assert Prompt(0, "2+3?", "5").shown == "2+3?"


def test_the_conversations_that_are_not_shown_are_counted(run, retrain):
    write(run, [1], turns=[{"policy": "p"}], other_conversations=2)
    assert "1 turn  2 other conversations" in retrain("samples", run.directory).stdout


def test_an_unscored_rollout_is_shown_as_such_and_is_neither_best_nor_worst():
    batch = batch_of([[np.nan, 0.4], [np.nan, np.nan], [0.9, 0.9]])
    shown = choose_shown(batch, np.zeros((3, 2)), 1)
    assert [(row.completion, row.reward, row.advantage) for row in shown] == [
        ("text 0.0", None, None),
        ("text 2.0", 0.9, 0.0),
        ("text 0.1", 0.4, 0.0),
    ]


def test_a_rollout_with_a_sign_of_cheating_is_kept_and_says_which():
    batch = batch_of([[0.0, 0.4, 0.4, 1.0], [0.0, 0.3, 0.5, 0.9]])
    late = Score(0.3, Outcome.TIMEOUT)
    batch = replace(batch, marked={5: late, 6: replace(late, outcome=Outcome.FAULT, message="it forked")})
    shown = choose_shown(batch, np.zeros((2, 4)), 1)
    assert [row.completion for row in shown] == ["text 0.0", "text 0.3", "text 1.1"]
    assert [row.as_dict().get("sign") for row in shown] == [None, None, "took too long"]
    assert replace(late, is_over_limit=True).sign == "ran out of memory or files"
    assert Score(None, Outcome.TIMEOUT).sign == ""  # of a judge, not of the completion


def test_an_unscored_sample_is_read_and_shown_but_not_ranked(run, retrain):
    write(run, [1])
    write(run, [2], reward=None, advantage=None)
    assert [sample.step for sample in choose_samples(run, None, "", 9)] == [2]
    assert [sample.step for sample in choose_samples(run, None, "best", 9)] == [1]
    assert "reward unscored" in retrain("samples", run.directory).stdout


def test_a_choice_of_samples_that_is_empty_says_why(run):
    write(run, [2], reward=None, advantage=None, tie=False)
    for which, why in (("--best", "has a reward"), ("--ties", "belongs to a tied prompt")):
        answer = CliRunner().invoke(app, ["samples", str(run.directory), which])
        assert answer.output == f"no kept sample {why}\n"


def test_a_long_text_keeps_its_beginning_and_end():
    text = "a" * LONGEST_TEXT + "b" * LONGEST_TEXT
    short = shortened(text)
    assert len(short) < LONGEST_TEXT + 50
    assert (short[0], short[-1]) == ("a", "b")
    assert f"{LONGEST_TEXT} characters" in short


@given(text=st.text(max_size=300))
def test_no_text_can_command_a_terminal(text):
    for line in plain_lines(text):
        assert line == "" or line.isprintable()


def test_code_keeps_its_lines_and_indentation():
    assert plain_lines("def f():\r\n\treturn 1\x1b[2J\n") == ["def f():", "    return 1"]


@given(text=st.text(max_size=50))
@settings(max_examples=30, deadline=None)
def test_any_text_comes_back_as_it_was(tmp_path_factory, text):
    run = RunFiles(tmp_path_factory.mktemp("run"))
    write(run, [1], completion=text)
    assert choose_samples(run, 1, "", 1)[0].completion == text


@pytest.mark.parametrize(
    ("which", "steps"), [("", [9]), ("best", [9, 8, 7]), ("worst", [1, 2, 3]), ("ties", [8, 6, 4])]
)
def test_best_worst_and_ties_are_chosen_from_all_kept_steps(run, which, steps):
    write(run, range(1, 10))
    assert [sample.step for sample in choose_samples(run, None, which, 3)] == steps


def test_the_highest_reward_of_a_step_comes_first(run):
    writer = SamplesWriter(run.samples, 1)
    rewards = [0.25, None, 1.0, 0.0]
    writer.append(1, [{"prompt": "p", "completion": "c", "reward": reward} for reward in rewards])
    writer.close()
    assert [sample.reward for sample in choose_samples(run, None, "", 4)] == [1.0, 0.25, 0.0, None]


@pytest.mark.parametrize("turns", [5, True, 0.5, {"policy": "a"}, "text", None, [5, None]])
def test_a_row_with_turns_of_a_wrong_type_is_passed_over(run, turns):
    write(run, [1])
    write(run, [2], turns=turns)
    assert [sample.step for sample in choose_samples(run, None, "best", 9)] == [1]


def test_a_step_that_was_not_kept_names_its_neighbours(run):
    write(run, range(1, 501))
    with pytest.raises(ConfigError, match="no samples of step 101; the nearest are of step 96 and 104"):
        choose_samples(run, 101, "", 3)


def test_a_run_without_samples_says_so(run):
    with pytest.raises(RecordsError, match="holds no samples"):
        choose_samples(run, None, "", 3)


def test_the_command_shows_a_run_of_a_campaign(campaign_file, retrain):
    assert retrain("run", campaign_file, "--set", "campaign.launcher=inline").returncode == 0
    (campaign,) = (campaign_file.parent / "logs").iterdir()
    shown = retrain("samples", campaign, "grpo_s0", "--best", "-n", 2).stdout
    assert shown.count("reward") == 2
    printed = retrain("samples", campaign / "runs" / "grpo_s0", "--step", 1, "--json").stdout
    rows = json.loads(printed)["samples"]
    assert {row["step"] for row in rows} == {1}
    assert {"prompt", "completion", "reward", "advantage"} <= rows[0].keys()
    unnamed = retrain("samples", campaign)
    assert unnamed.returncode == 2
    assert "grpo_s0, grpo_s1, maxrl_s0, maxrl_s1" in unnamed.stderr


def test_hostile_completions_are_shown_without_what_a_terminal_obeys(run, retrain):
    write(run, [1], completion="\x1b]0;evil\x07\u202e[bold]not markup[/bold]\n\ud800 \x00next line")
    shown = retrain("samples", run.directory)
    assert shown.returncode == 0
    assert "[bold]not markup[/bold]\n" in shown.stdout
    assert not [c for c in "\x1b\x07\u202e\x00" if c in shown.stdout]
    json.loads(retrain("samples", run.directory, "--json").stdout)
