"""Environments behind an OpenEnv server: sessions, actions, observations, and what a server may do wrong."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from retrain.backends import Sampling
from retrain.base import registry
from retrain.base.errors import ConfigError
from retrain.base.rollouts import Prompt, Rollout
from retrain.config.load import parse
from retrain.config.schema import EnvironmentSection
from retrain.plan.preflight import servers_of
from retrain.plugins.environments import opened, openenv
from retrain.records.metrics import read_metrics
from retrain.trainer import worker
from retrain.trainer.episodes import Episodes
from tests.extras.openenv_server import NONSENSE, Server, serving
from tests.plugins.test_environments import write
from tests.trainer.test_trainer import SMALL, make_run

pytestmark = pytest.mark.extras
HOW = Sampling(group_size=1, max_tokens=100, temperature=1.0)


@pytest.fixture
def server() -> Iterator[Server]:
    with serving(Server()) as one:
        yield one


def play(server: Server, policy: str, prompts: int = 1, **options: Any) -> list[Rollout]:
    """Play an episode of each prompt with a policy that always writes the same."""
    given = {"url": server.url, "observation": "told", **options}
    limit_s = given.pop("time_limit_s", 60.0)
    settings = EnvironmentSection("openenv", given, max_turns=3, time_limit_s=limit_s)
    with opened(registry.plugin("environments", "openenv"), given) as open_one:
        episodes = Episodes(settings, open_one, write(policy))
        try:
            groups = episodes.play([Prompt(n, "p", "", row={"level": "easy"}) for n in range(prompts)], HOW)
        finally:
            episodes.close()
    return [rollout for group in groups for rollout in group.rollouts]


def error_of(rollout: Rollout) -> str:
    assert rollout.episode
    return rollout.episode.error


def test_a_session_is_an_episode(server: Server) -> None:
    above, right, below = play(server, "1", prompts=3)
    assert [given.text for given in above.given] == ["lower", "lower"]
    assert (right.prompt.text, right.given) == ("guess", ())
    assert [given.text for given in below.given] == ["higher", "higher"]
    rewards = [one.episode.reward for one in (above, right, below) if one.episode]
    assert rewards == [0.0, 1.0, 0.0]
    assert server.resets[2] == {"seed": 2, "level": "easy"}
    assert server.active == 0


def test_an_address_may_be_written_in_capitals(server: Server) -> None:
    (rollout,) = play(server, "0", url=server.url.replace("http", "HTTP"))
    assert error_of(rollout) == ""


def test_options_say_what_reset_and_the_policy_get(server: Server) -> None:
    options = {"number": "index", "reset": {"split": "train"}, "observation": "", "action": "guess"}
    (rollout,) = play(server, "1", **options)
    assert server.resets == [{"index": 0, "split": "train", "level": "easy"}]
    assert rollout.prompt.text == '{"told": "guess"}'
    (rollout,) = play(server, '{"guess": "0"}', action="json")
    assert rollout.episode
    assert rollout.episode.reward == 1.0


@pytest.mark.parametrize(
    ("policy", "options", "read"),
    [
        ("two", {}, "error: Invalid message; guess: Input should be a valid integer"),
        ("two", {"wrong_action": "write a number"}, "write a number"),
        ("[2]", {"action": "json"}, "error: the action is not valid JSON: needs a JSON object"),
        ("[" * 100_000, {"action": "json"}, "error: the action is not valid JSON: nested too deeply"),
    ],
)
def test_a_policy_reads_why_its_action_is_refused(
    server: Server, policy: str, options: dict[str, str], read: str
) -> None:
    (rollout,) = play(server, policy, **options)
    assert error_of(rollout) == ""
    assert [given.text for given in rollout.given] == [read, read]


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ("die", "closed the connection in step (no close frame received or sent)"),
        ("raise", "the server failed in step: the board is on fire (EXECUTION_ERROR)"),
        ("nan", "step returned the reward nan; needs a finite number"),
        *((name, "the server answered step with") for name in NONSENSE if name != "nan"),
    ],
)
def test_a_server_that_fails_costs_the_episode(server: Server, policy: str, said: str) -> None:
    failed, *_ = play(server, policy)
    assert said in error_of(failed)
    (after,) = play(server, "0")
    assert error_of(after) == ""


def test_a_slow_server_costs_the_episode(server: Server) -> None:
    (rollout,) = play(server, "sleep", time_limit_s=3.0)  # of which a busy machine may need one to connect
    assert error_of(rollout) == "prompt 0: step took longer than 3 s"
    assert rollout.episode
    assert rollout.episode.timed_out


def test_an_observation_without_the_field_is_named(server: Server) -> None:
    (rollout,) = play(server, "1", observation="tld")
    assert error_of(rollout) == "prompt 0: the observation has no 'tld'; it has told, metadata"


def test_episodes_wait_for_a_free_session(server: Server) -> None:
    server.sessions = 2
    rollouts = play(server, "1", prompts=8)
    assert [error_of(one) for one in rollouts] == [""] * 8
    assert server.most == 2
    assert server.refused > 0


def test_episodes_do_not_wait_for_ever(server: Server) -> None:
    server.sessions = 0
    (rollout,) = play(server, "1", session_wait_s=0.3)
    assert "had no free session for 0.3 s (all 0 sessions are active); let it serve as many" in error_of(
        rollout
    )


def test_a_server_that_is_gone_costs_the_episode(server: Server) -> None:
    with serving(Server()) as other:
        gone = openenv.OpenEnvServer(other.url, action="json")
    (rollout,) = play(server, "1", url=gone.url, action="json")
    assert error_of(rollout).startswith(f"prompt 0: no connection to {gone.url} (")


def test_a_key_is_sent_and_shown_nowhere(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    server.key = "s3cret"
    monkeypatch.setenv("OPENENV_KEY", "s3cret")
    assert error_of(play(server, "0", key_env="OPENENV_KEY")[0]) == ""
    monkeypatch.setenv("OPENENV_KEY", "0ther")
    with pytest.raises(ConfigError, match=r"\*\*\* is wrong") as problem:
        play(server, "0", key_env="OPENENV_KEY")
    assert "0ther" not in str(problem.value)
    (rollout,) = play(server, "0", key_env="OPENENV_KEY", action="json")
    assert "HTTP 401" in error_of(rollout)
    assert "0ther" not in error_of(rollout)


@pytest.mark.parametrize(
    ("action", "options", "said"),
    [
        ({"properties": {"a": {}, "b": {}}}, {}, "knows a, b, and requires none"),
        ({"properties": {"a": {"type": "array"}}, "required": ["a"]}, {}, "knows a, and requires a"),
        (
            {"properties": {"a": {}}},
            {"action": "b"},
            r"^\[environment.options\].action: got 'b'; of an action, h",
        ),
        ([], {}, "/schema is no schema of an OpenEnv server"),
    ],
)
def test_what_an_action_is_must_be_known(action: Any, options: dict[str, str], said: str) -> None:
    with serving(Server(action=action)) as server, pytest.raises(ConfigError, match=said):
        play(server, "1", **options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"url": "localhost:8000"}, "url: got 'localhost:8000'; needs an address, such as http://localhost"),
        ({"url": "http://a", "key_env": "NO_SUCH_KEY"}, "the environment variable NO_SUCH_KEY is not set"),
        ({"url": "http://a", "session_wait_s": 0}, "session_wait_s: got 0; needs a finite number above 0"),
        ({}, "url: is needed by 'openenv'"),
    ],
)
def test_what_can_be_known_before_a_run_is(options: dict[str, Any], said: str) -> None:
    (problem,) = registry.problems_with_table("environments", "openenv", options)
    assert said in problem.in_table


def test_a_server_must_answer_before_a_run(server: Server) -> None:
    table = {"environment": "openenv", "options": {"url": server.url, "session_wait_s": 60}}
    config = parse({"environment": table}, "c")
    (problem,) = openenv.check_run(config)
    assert "session_wait_s: got 60; needs less than [environment].time_limit_s = 60" in problem
    (found,) = servers_of([config])
    assert (found.address, found.key, found.silence) == (server.url, "[environment.options].url", "")


def test_a_server_of_an_evaluation_is_named_by_the_key_that_the_evaluation_has(server: Server) -> None:
    own = {"name": "hard", "environment": "openenv", "environment_options": {"url": server.url}}
    (found,) = servers_of([parse({"eval": [own]}, "c")])
    assert found.key == '[[eval]] "hard" [environment_options].url'


def test_a_run_plays_and_trains(server: Server, tmp_path: Path) -> None:
    table = {"environment": "openenv", "options": {"url": server.url, "observation": "told"}, "max_turns": 3}
    size = {**SMALL["training"], "max_steps": 2, "max_tokens": 6}
    data = {"task": "numbered", "options": {"count": 8, "held_out": 0.25}}
    settings = {"training": size, "data": data, "environment": {**table, "max_turn_tokens": 2}}
    run = make_run(tmp_path / "run", settings)
    assert worker.run(run.directory, threading.Event()) == 0
    rows = read_metrics(run.directory)
    assert [row["episode_errors"] for row in rows] == [0, 0]
    assert all(row["turns_mean"] > 1 for row in rows)
