"""Programs with a loop of their own: what they ask is sampled, stitched token by token, and limited."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain.backends import BackendSpec, Optimization, Sampling
from retrain.backends.numpy import CONTEXT
from retrain.base import registry
from retrain.base.errors import ConfigError
from retrain.base.rollouts import CallForm, FirstTurn, Given, Group, Loss, Prompt, Rollout, TrainingSample
from retrain.campaign.conformance import check_plugin
from retrain.config.load import parse
from retrain.config.schema import EnvironmentSection
from retrain.plugins.environments.endpoint.chat import Called, Message, Refusal
from retrain.plugins.environments.endpoint.session import Calling, Rendering
from retrain.plugins.environments.harness import Program
from retrain.records.metrics import read_metrics
from retrain.records.samples import read_samples
from retrain.trainer import worker
from retrain.trainer.batch import BoundAlgorithm, ScoredBatch
from retrain.trainer.episodes import Episodes, summary_of
from retrain.trainer.journal import choose
from retrain.trainer.programs import Programs
from retrain.trainer.turn_sampling import TurnSampler
from tests.asking import complete, post, spoken, user
from tests.trainer.test_trainer import SMALL, make_run

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
GUESSED = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
IMAGE = {"type": "image_url", "image_url": {"url": "board.png"}}
HOW = Sampling(group_size=1, max_tokens=8, temperature=1.0)
Run = Callable[[Prompt, str, str], Any]


def numpy_policy() -> Any:
    return registry.bound("backends", "numpy", {})(BackendSpec(seed=0, alphabet="abc<>?"))


def tells_none(tokens: tuple[int, ...]) -> None:
    """Return no text for token ids, as the base class of backends does."""


def opened(
    settings: EnvironmentSection, run: Run, backend: Any = None, shown: Callable[..., str | None] = tells_none
) -> tuple[Programs, TurnSampler]:
    backend = backend or numpy_policy()
    programs = Programs(settings, lambda: Program(run), Rendering(read=backend.read, shown=shown))
    return programs, TurnSampler(backend, settings.max_turn_tokens)


def play(
    run: Run,
    how: Sampling = HOW,
    prompts: int = 1,
    *,
    fails: bool = False,
    backend: Any = None,
    shown: Callable[..., str | None] = tells_none,
    **table: object,
) -> list[Rollout]:
    """Return the episodes of a program on the numpy policy; one that asserts something may not fail."""
    settings = EnvironmentSection(**table)
    programs, sample = opened(settings, run, backend, shown)
    episodes = Episodes(settings, lambda: Program(run), sample, programs)
    try:
        groups = episodes.play([Prompt(n, f"p{n}", "") for n in range(prompts)], how)
    finally:
        episodes.close()
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    assert fails or not [one.episode.error for one in rollouts if one.episode and one.episode.error]
    return rollouts


def converse(turns: int, answers: list[Any], **more: object) -> Run:
    """Return a program that asks so many times, and keeps what it is answered with."""

    def run(prompt: Prompt, base_url: str, api_key: str) -> float:
        said = [user("?")]
        for _ in range(turns):
            answers.append(complete(base_url, api_key, said, **more))
            said += [spoken(answers[-1]), user("<")]
        return 0.5

    return run


def test_the_turns_of_a_program_are_one_rollout() -> None:
    answers: list[Any] = []
    (rollout,) = play(converse(3, answers), max_turn_tokens=2)
    assert rollout.turns == [spoken(answer)["content"] for answer in answers]
    assert (rollout.prompt.text, [given.text for given in rollout.given]) == ("?", ["<", "<"])
    assert rollout.episode
    assert (rollout.episode.reward, rollout.episode.rewards) == (0.5, (None, None, 0.5))
    assert rollout.episode.others == ()


def test_token_ids_and_logprobs_are_those_that_are_trained_on() -> None:
    answers: list[Any] = []
    (rollout,) = play(converse(3, answers), max_turn_tokens=2)
    choices = [answer["choices"][0] for answer in answers]
    assert [token for choice in choices for token in choice["token_ids"]] == list(rollout.tokens)
    told = [one["logprob"] for choice in choices for one in choice["logprobs"]["content"]]
    assert told == rollout.logprobs.tolist()
    last = answers[-1]["prompt_token_ids"]
    question, end = 2, 6  # the latter is written, and never read before an answer
    assert last + choices[-1]["token_ids"] == [question, *rollout.placed(unread=end)[0]]
    assert answers[-1]["usage"]["prompt_tokens"] == len(last)


def generate(base_url: str, api_key: str, ids: list[int], **more: object) -> tuple[int, Any]:
    """Ask as clients do that render conversations themselves: not below /v1."""
    body = {"token_ids": ids, "sampling_params": {}, **more}
    return post(base_url.removesuffix("/v1"), api_key, body, "/inference/v1/generate")


def test_token_ids_are_refused_where_the_backend_reads_none() -> None:
    answers: list[Any] = []
    play(lambda prompt, base_url, api_key: answers.append(generate(base_url, api_key, [1])))
    ((status, answer),) = answers
    assert (status, answer["error"]["param"]) == (400, "token_ids")
    assert "this backend reads none; ask at /v1/chat/completions" in answer["error"]["message"]


def test_tokens_in_and_tokens_out_are_one_sample() -> None:
    asked: list[Any] = []
    lower, question, end = 0, 2, 6  # tokens of the alphabet <>?abc, and the end of a turn

    def run(prompt: Prompt, base_url: str, api_key: str) -> float:
        ids = [question]
        for _ in range(3):
            status, answer = generate(base_url, api_key, ids)
            assert status == 200, answer
            asked.append(answer["choices"][0])
            ids += [*asked[-1]["token_ids"], lower]
        return 0.5

    backend = numpy_policy()
    (rollout,) = play(run, backend=backend, shown=backend.shown, max_turn_tokens=2)
    assert rollout.samples == (rollout,)
    assert [token for one in asked for token in one["token_ids"]] == list(rollout.tokens)
    told = [entry["logprob"] for one in asked for entry in one["logprobs"]["content"]]
    assert told == rollout.logprobs.tolist()
    assert backend.read(rollout) == (question, *rollout.placed(unread=end)[0])
    assert [given.text for given in rollout.given] == ["<", "<"]
    trained = [TrainingSample(rollout, np.ones(len(rollout.tokens)), 1.0 / len(rollout.tokens))]
    loss = Loss("importance_sampling", registry.find_plugin("losses", "importance_sampling"), {})
    stats = backend.update(trained, loss, Optimization(lr=1e-3))
    assert stats.loss == pytest.approx(-1.0, rel=1e-3)  # every ratio is 1


@pytest.mark.parametrize(
    ("ids", "more", "said"),
    [
        ([2, 7], {}, "token_ids: got token 7; needs some of 0 to 5, and 6 after each turn"),
        ([6], {}, "token_ids: got token 6; needs some of 0 to 5, and 6 after each turn"),
        ([2] * (CONTEXT + 1), {}, f"prompt 0 has {CONTEXT + 1} characters"),
        ([2], {"stream": True}, "stream: Input should be False; got True"),
    ],
)
def test_wrong_token_ids_are_answered_and_cost_no_turn(ids: list[int], more: Any, said: str) -> None:
    answers: list[Any] = []

    def run(prompt: Prompt, base_url: str, api_key: str) -> float:
        answers.append(generate(base_url, api_key, ids, **more))
        return 0.0

    backend = numpy_policy()
    (rollout,) = play(run, backend=backend, shown=backend.shown)
    ((status, answer),) = answers
    assert (status, rollout.tokens) == (400, ())
    assert said in answer["error"]["message"]


def test_a_stream_has_the_same_turn_in_events() -> None:
    events: list[Any] = []
    options = {"stream": True, "stream_options": {"include_usage": True}}

    def run(prompt: Prompt, base_url: str, api_key: str) -> float:
        events.extend(complete(base_url, api_key, [user("?")], **options))
        return 0.0

    (rollout,) = play(run)
    first, last, usage = events
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": rollout.text}
    assert first["choices"][0]["token_ids"] == list(rollout.tokens)
    assert last["choices"][0]["finish_reason"] == ("length" if rollout.truncated else "stop")
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], len(rollout.tokens))


def asking_apart(prompt: Prompt, base_url: str, api_key: str) -> float:
    """Ask twice, with the policy's own turn changed in between."""
    said = [user("?")]
    complete(base_url, api_key, said)
    complete(base_url, api_key, [*said, {"role": "assistant", "content": "cab"}, user("<")])
    return 1.0


def test_what_does_not_stitch_is_a_sample_of_its_own() -> None:
    (rollout,) = play(asking_apart)
    assert rollout.episode
    (other,) = rollout.episode.others
    assert (other.prompt.text, rollout.prompt.text) == ("?", "?cab<")
    summary = summary_of([rollout])
    assert summary
    assert (summary.separate_samples, summary.turns_mean) == (1, 2.0)


def test_all_samples_of_an_episode_are_trained_on_with_its_advantage() -> None:
    first, second = (play(asking_apart)[0] for _ in range(2))
    batch = ScoredBatch([Group(first.prompt, (first, second))], np.array([[1.0, 0.0]]))
    config = parse({"algorithm": {"advantage_mode": "grpo"}}, "c")
    algorithm = BoundAlgorithm(config, lambda *_: batch)
    samples = algorithm.transform(batch, np.array([[1.0, -1.0]]), 0.0)
    assert [sample.rollout for sample in samples] == [*first.samples, *second.samples]
    assert [sample.advantages[0] for sample in samples] == [1.0, 1.0, -1.0, -1.0]
    total = sum(len(sample.rollout.tokens) for sample in samples)
    assert batch.summary(np.array([[1.0, -1.0]]), 1.0).tokens_per_step == total


@pytest.mark.parametrize(
    ("body", "status", "param", "said"),
    [
        (b"{", 400, None, "Invalid JSON"),
        ({}, 400, "messages", "Field required"),
        ({"messages": []}, 400, "messages", "at least 1 item"),
        ({"messages": [{"role": "judge", "content": "a"}]}, 400, "messages.0.role", "got 'judge'"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "messages.0.content.0.type", "be 'text'"),
        ({"messages": [user("?")], "n": 2}, 400, "n", "got 2"),
        ({"messages": [user("?")], "max_tokens": 0}, 400, "max_tokens", "got 0"),
        ({"messages": [user("?")], "stop": ["a"]}, 400, "stop", "at most 0 items"),
        ({"messages": [user("?")], "top_logprobs": 3}, 400, "top_logprobs", "got 3"),
        ({"messages": [user("?")], "tools": [ADD]}, 400, "tools", "no chat template that shows functions"),
        ({"messages": [user("?")], "tool_choice": "required"}, 400, "tool_choice", "got 'required'"),
        (
            {"messages": [user("?"), {"role": "assistant", "tool_calls": [GUESSED]}]},
            400,
            "messages",
            "tool_calls: not what the policy wrote in this episode",
        ),
        ({"messages": [user("x")]}, 400, "messages", "holds 'x', which is not in the task's alphabet"),
    ],
)
def test_a_bad_request_is_answered_and_costs_no_turn(
    body: Any, status: int, param: str | None, said: str
) -> None:
    found: list[Any] = []

    def run(prompt: Prompt, base_url: str, api_key: str) -> float:
        found.extend(post(base_url, api_key, body))
        return 0.5

    (rollout,) = play(run)
    error = found[1]["error"]
    assert (found[0], error["type"], error["param"]) == (status, "invalid_request_error", param)
    assert said in error["message"]
    assert rollout.episode
    assert (rollout.tokens, rollout.episode.reward) == ((), 0.5)


def test_a_key_is_good_for_its_episode_only() -> None:
    keys: list[tuple[str, str]] = []
    everyone = threading.Barrier(2)
    answers: dict[int, str] = {}

    def run(prompt: Prompt, base_url: str, api_key: str) -> float:
        keys.append((base_url, api_key))
        everyone.wait()
        answers[prompt.id] = spoken(complete(base_url, api_key, [user("?")]))["content"]
        everyone.wait()
        status, refusal = post(base_url, "sk-other", {"messages": [user("?")]})
        assert (status, refusal["error"]["code"]) == (401, "invalid_api_key")
        return 0.0

    rollouts = play(run, prompts=2)
    assert {rollout.prompt.id: rollout.text for rollout in rollouts} == answers
    assert len(set(keys)) == 2
    with pytest.raises(OSError, match="refused"):
        post(*keys[0], {"messages": [user("?")]})


def test_samples_show_the_rewards_of_the_turns_that_they_show() -> None:
    def run(prompt: Prompt, base_url: str, api_key: str) -> float:
        for said in "abc":
            complete(base_url, api_key, [user(said)])
        return 0.5

    (rollout,) = play(run)
    batch = ScoredBatch([Group(rollout.prompt, (rollout, rollout))], np.array([[0.5, 0.5]]))
    (shown, *_) = choose(batch, np.zeros((1, 2)), 1)
    assert [turn.reward for turn in shown.turns] == [0.5]


@pytest.mark.parametrize(
    ("how", "table", "code"),
    [
        (HOW, {"max_turns": 2}, "max_turns"),
        (replace(HOW, max_tokens=2), {"max_turn_tokens": 1}, "max_tokens"),
    ],
)
@pytest.mark.parametrize(("tries_again", "reward"), [(False, 0.0), (True, 0.25)])
def test_a_limit_refuses_further_turns(
    how: Sampling, table: dict[str, object], code: str, tries_again: bool, reward: float
) -> None:
    def run(prompt: Prompt, base_url: str, api_key: str) -> float:
        said = [user("?")]
        while True:
            status, answer = post(base_url, api_key, {"messages": said})
            if status != 200:
                break
            said += [spoken(answer), user("<")]
        assert (status, answer["error"]["code"]) == (400, code)
        if not tries_again:
            raise RuntimeError(answer["error"]["message"])
        return 0.25

    (rollout,) = play(run, how, **table)
    assert rollout.episode
    assert (rollout.truncated, rollout.episode.reward, rollout.episode.error) == (True, reward, "")
    (rollout,) = play(run, how, truncated_reward=-1.0, **table)
    assert rollout.episode
    assert rollout.episode.reward == -1.0


def asking(base_url: str, api_key: str) -> http.client.HTTPConnection:
    """Ask for a turn whose answer may be left unread."""
    connection, body = http.client.HTTPConnection(base_url.split("/")[2]), {"messages": [user("?")]}
    said = {"Authorization": f"Bearer {api_key}"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), said)
    return connection


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("is_looked_after", [True, False])
def test_a_turn_whose_client_has_left_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, is_looked_after: bool, resets: bool
) -> None:
    """Whether it is noticed while the turn is sampled, or when it is answered."""
    monkeypatch.setattr("retrain.plugins.environments.endpoint.POLL_S", 0.01 if is_looked_after else 60.0)
    asked, has_left = threading.Event(), threading.Event()

    def run(prompt: Prompt, base_url: str, api_key: str) -> float:
        connection = asking(base_url, api_key)
        asked.wait()
        if resets:  # the connection, as a client does that ends with an answer unread
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        ((session, _),) = programs._endpoint._server.served.values()
        while is_looked_after and not session.idle_s():
            time.sleep(0.001)
        has_left.set()
        complete(base_url, api_key, [user("?")])
        return 1.0

    def sample(wanted: Sequence[Any], how: Sampling) -> list[Any]:
        asked.set()
        has_left.wait()
        return sampler(wanted, how)

    programs, sampler = opened(EnvironmentSection(), run)
    episodes = Episodes(EnvironmentSection(), lambda: Program(run), sample, programs)
    (group,) = episodes.play([Prompt(0, "?", "")], HOW)
    episodes.close()
    (rollout,) = group.rollouts
    assert rollout.episode
    assert (rollout.episode.error, rollout.episode.rewards, rollout.samples) == ("", (1.0,), (rollout,))


def test_a_client_that_gave_up_was_refused_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retrain.plugins.environments.endpoint.POLL_S", 0.01)
    asked, has_failed = threading.Event(), threading.Event()

    def run(prompt: Prompt, base_url: str, api_key: str) -> float:
        connection = asking(base_url, api_key)
        asked.wait()
        connection.close()
        ((session, _),) = programs._endpoint._server.served.values()
        while not session.idle_s():
            time.sleep(0.001)
        time.sleep(0.1)  # in which the server would note a refusal
        has_failed.set()
        raise OSError("the request timed out")

    def sample(wanted: Sequence[Any], how: Sampling) -> list[Any]:
        asked.set()
        has_failed.wait()
        return sampler(wanted, how)

    programs, sampler = opened(EnvironmentSection(), run)
    episodes = Episodes(EnvironmentSection(), lambda: Program(run), sample, programs)
    (group,) = episodes.play([Prompt(0, "?", "")], HOW)
    episodes.close()
    assert group.rollouts[0].episode
    assert group.rollouts[0].episode.error.endswith("OSError: the request timed out")


def test_programs_are_served_in_a_process_with_many_open_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 1024  # descriptors that `select` knows
    if hard < 2 * most:
        pytest.skip("this user may not open so many files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2 * most), hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(most)]
    try:
        (rollout,) = play(converse(2, []), max_turn_tokens=2)
    finally:
        for one in held:
            os.close(one)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert rollout.episode
    assert rollout.episode.reward == 0.5


@pytest.mark.parametrize(
    ("separate_turns", "named", "advice"),
    [(False, "an observation has", " what the environment says"), (True, "prompt 0 has", " it")],
)
def test_what_the_context_has_no_room_for_is_refused_with_the_numbers(
    separate_turns: bool, named: str, advice: str
) -> None:
    found: list[Any] = []

    def run(prompt: Prompt, base_url: str, api_key: str) -> float:
        said = [user("a" * 500_000)]
        found.append(post(base_url, api_key, {"messages": said}))
        said = [user("?")]
        said.append(spoken(complete(base_url, api_key, said)))
        found.append(post(base_url, api_key, {"messages": [*said, user("a" * 500_000)]}))
        found.append(post(base_url, api_key, {"messages": [*said, user("a" * (CONTEXT - 1))]}))
        found.append(post(base_url, api_key, b" " * (5 << 20)))
        return 0.5

    play(run, separate_turns=separate_turns)
    context = f"500000 characters, and the policy's context is {CONTEXT}; shorten"
    said = [
        (400, f"prompt 0 has {context} it"),
        (400, f"{named} {context}{advice}"),
        (400, "the model's context has no room for a turn"),
        (413, f"the request has {5 << 20} bytes; at most {4 << 20} are read"),
    ]
    assert [(status, answer["error"]["message"]) for status, answer in found] == said


def test_a_client_may_ask_for_fewer_tokens() -> None:
    answers: list[Any] = []
    play(converse(2, answers, max_completion_tokens=1))
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [1, 1]


def refused(prompt: Prompt, base_url: str, api_key: str) -> float:
    status, _ = post(base_url, api_key, {"messages": [user("?")], "n": 2})
    raise OSError(f"HTTP Error {status}: Bad Request")


def failing(prompt: Prompt, base_url: str, api_key: str) -> float:
    complete(base_url, api_key, [user("?")])
    raise OSError("the board is gone")


async def silent(prompt: Prompt, base_url: str, api_key: str) -> float:
    await asyncio.Event().wait()
    return 0.0


async def blocking(prompt: Prompt, base_url: str, api_key: str) -> float:
    return converse(2, [])(prompt, base_url, api_key)


def test_a_coroutine_may_block_while_it_asks_for_turns() -> None:
    rollouts = play(blocking, prompts=3)
    assert [(one.episode.reward, len(one.turns)) for one in rollouts if one.episode] == [(0.5, 2)] * 3


def exiting(prompt: Prompt, base_url: str, api_key: str) -> float:
    raise SystemExit(1)


async def exiting_later(prompt: Prompt, base_url: str, api_key: str) -> float:
    raise SystemExit(1)


async def cancelled(prompt: Prompt, base_url: str, api_key: str) -> float:
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("run", "said"),
    [
        (exiting, "SystemExit: 1"),
        (exiting_later, "SystemExit: 1"),
        (cancelled, "CancelledError"),
        (failing, "OSError: the board is gone"),
        (refused, "400: Bad Request; the endpoint had refused its request: n: Input should be 1; got 2"),
        (silent, "run neither asked for a turn nor ended for 0.05 s"),
        (lambda *_: float("nan"), "run returned the reward nan; needs a finite number"),
        (lambda *_: "much", "run returned the reward 'much'; needs a number or None"),
    ],
)
def test_a_failure_costs_its_episode(run: Run, said: str) -> None:
    limit_s = 0.05 if run is silent else 60.0
    (rollout,) = play(run, time_limit_s=limit_s, error_reward=-1.0, fails=True)
    assert rollout.episode
    assert said in rollout.episode.error
    assert (rollout.episode.reward, rollout.episode.timed_out) == (-1.0, run is silent)


def test_a_program_without_a_reward_is_left_to_the_reward_of_the_run() -> None:
    (rollout,) = play(lambda prompt, url, key: complete(url, key, [user("?")]) and None)
    assert rollout.episode
    assert (rollout.episode.reward, rollout.episode.error) == (None, "")


@pytest.mark.parametrize("streams", [False, True])
def test_calls_of_functions_are_answered_and_continued(streams: bool) -> None:
    asked: list[Any] = []

    def sample(wanted: Sequence[Any], how: Sampling) -> list[Any]:
        (turn,) = wanted
        asked.append(turn)
        if isinstance(turn, FirstTurn):
            text = f"Let me see. {CALL}"
            return [Rollout(turn.prompt, text, (1,), np.zeros(1), (text,), truncated=False)]
        given = (Given(1, (7,), turn.messages[0][1]),)
        more = {"tokens": (1, 2), "logprobs": np.zeros(2), "pieces": (turn.rollout.text, "5"), "given": given}
        return [replace(turn.rollout, text="5", **more)]

    def run(prompt: Prompt, base_url: str, api_key: str) -> float:
        said: list[dict[str, Any]] = [user("2+3")]
        answer = complete(base_url, api_key, said, tools=[ADD], stream=streams)
        choice = (answer[0] if streams else answer)["choices"][0]
        message = choice["delta" if streams else "message"]
        (call,) = message["tool_calls"]
        assert (message["content"], call["function"]["name"]) == ("Let me see.", "add")
        total = sum(json.loads(call["function"]["arguments"]).values())
        result = {"role": "tool", "tool_call_id": call["id"], "content": str(total)}
        last = complete(base_url, api_key, [*said, message, result], tools=[ADD])["choices"][0]
        assert (spoken({"choices": [last]})["content"], last["finish_reason"]) == ("5", "stop")
        return 1.0

    form = CallForm("<tool_call>", "name", "arguments")
    programs = Programs(
        EnvironmentSection(), lambda: Program(run), Rendering(has_template=True, form_of=lambda _: form)
    )
    episodes = Episodes(EnvironmentSection(), lambda: Program(run), sample, programs)
    (group,) = episodes.play([Prompt(0, "2+3", "")], HOW)
    episodes.close()
    (rollout,) = group.rollouts
    assert rollout.episode
    assert (rollout.episode.error, rollout.episode.tool_calls, rollout.samples) == ("", 1, (rollout,))
    assert json.loads(asked[0].prompt.tools) == [ADD]
    assert asked[1].messages == (("tool", "5"),)


def test_a_call_that_cannot_be_read_is_a_text() -> None:
    calling = Calling(lambda _: CallForm("<tool_call>", "name", "arguments"))
    broken = '<tool_call>{"name": "add", "arguments": {'
    assert calling.read(broken, "[]") == (broken, ())
    assert calling.read("5", "[]") == ("5", ())
    assert calling.count == 0


def test_only_a_call_as_the_policy_wrote_it_continues_its_conversation() -> None:
    calling = Calling(lambda _: CallForm("<tool_call>", "name", "arguments"))
    _, (call,) = calling.read(CALL, "[]")

    def repeated(arguments: str) -> Message:
        function = {**call["function"], "arguments": arguments}
        called = Called.model_validate({"id": call["id"], "function": function})
        return Message(role="assistant", tool_calls=[called])

    assert calling.as_written(repeated('{"b":3, "a":2}')) == ("assistant", CALL)
    with pytest.raises(Refusal, match="not what the policy wrote in this episode"):
        calling.as_written(repeated('{"a": 2, "b": 4}'))


OWN = """
async def solve(prompt, base_url, api_key, *, word="?"):
    import asyncio
    from tests.asking import complete, spoken, user
    said = spoken(await asyncio.to_thread(complete, base_url, api_key, [user(word)]))
    return float(said["content"][:1] == "1")


def elsewhere(prompt, base_url, api_key):
    return 1.0  # asked another model


def mute(prompt):
    return 0.0


def broken(prompt, base_url, api_key):
    raise OSError("the board is gone")


def wordy(prompt, base_url, api_key):
    return "much"


class Agent:
    def run(self, prompt, base_url, api_key):
        return solve(prompt, base_url, api_key, word="2")
"""


@pytest.mark.parametrize(
    "table",
    [
        {"environment": "harness", "options": {"run": "own_programs.solve", "config": {"word": "1"}}},
        {"environment": "own_programs.Agent"},
    ],
)
def test_a_run_trains_on_what_its_programs_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: dict[str, object]
) -> None:
    (tmp_path / "own_programs.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    run = make_run(tmp_path / "run", {**SMALL, "environment": table})
    assert worker.run(run.directory, threading.Event()) == 0
    rows = read_metrics(run.directory)
    assert [(row["turns_mean"], row["separate_samples"], row["episode_errors"]) for row in rows] == [
        (1.0, 0, 0)
    ] * 6
    assert any(row["updates"] for row in rows)
    words = {"harness": "1", "own_programs.Agent": "2"}
    assert {row["prompt"] for row in read_samples(run.samples)} == {words[str(table["environment"])]}


def test_a_run_whose_programs_do_not_ask_its_policy_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_programs.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    table = {"environment": "harness", "options": {"run": "own_programs.elsewhere"}}
    run = make_run(tmp_path / "run", {**SMALL, "environment": table})
    assert worker.run(run.directory, threading.Event()) != 0
    assert "episodes got a turn of the policy; let the program ask at the base_url" in capfd.readouterr().err


def test_a_program_that_opens_too_late_is_closed() -> None:
    may_open, closed = threading.Event(), threading.Event()

    class Slow(Program):
        def __init__(self) -> None:
            super().__init__(lambda *_: 1.0)
            may_open.wait()

        def close(self) -> None:
            closed.set()

    settings = EnvironmentSection(time_limit_s=0.05)
    programs, sample = opened(settings, lambda *_: 1.0)
    programs.open_episode = Slow
    episodes = Episodes(settings, Slow, sample, programs)
    ((rollout,),) = (
        group.rollouts for group in episodes.play([Prompt(0, "p", "")], replace(HOW, group_size=1))
    )
    episodes.close()
    assert rollout.episode
    assert rollout.episode.timed_out
    may_open.set()
    assert closed.wait(60)


def test_a_program_is_tried_out_without_a_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_programs.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    fine = check_plugin("environments", "harness", {"run": "own_programs.solve"})
    assert not [finding for finding in fine if finding.problem]
    for run, said in (("broken", "OSError: the board is gone"), ("wordy", "run returned the reward 'much'")):
        wrong = check_plugin("environments", "harness", {"run": f"own_programs.{run}"})
        assert any(said in finding.problem for finding in wrong)


@pytest.mark.parametrize(
    ("run", "said"), [("own_programs.mute", "is (prompt), and is called with"), ("own_programs.gone", "gone")]
)
def test_a_function_that_is_no_program_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: str, said: str
) -> None:
    (tmp_path / "own_programs.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError) as refusal:
        registry.bound("environments", "harness", {"run": run})()
    assert said in str(refusal.value)


def test_turns_of_a_program_cut_at_their_own_limit_are_counted() -> None:
    answers: list[Any] = []
    (rollout,) = play(converse(3, answers), max_turn_tokens=2)
    ends = [answer["choices"][0]["finish_reason"] for answer in answers]
    assert rollout.episode
    assert rollout.episode.cut_turns == tuple(n for n, end in enumerate(ends) if end == "length")
    assert rollout.episode.cut_turns
