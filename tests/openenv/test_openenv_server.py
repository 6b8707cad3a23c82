"""Episodes on a server of the package openenv.

CI does not run these tests, because openenv brings 150 packages. `pip install '.[test,openenv]' openenv &&
pytest tests/openenv` runs them.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from retrain.base.http_client import answer_of
from tests.extras.openenv_server import Server
from tests.extras.test_openenv import error_of, play
from tests.semaphore_processes import wait_until


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(Path(__file__).parent / "served.py"), str(port), "3"]
    with subprocess.Popen(command) as process:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: answer_of(f"{url}/health")[0] == 200)
        yield Server(url=url)
        process.kill()


def test_more_episodes_than_sessions_are_played(server: Server) -> None:
    rollouts = play(server, "1", prompts=8)
    assert [error_of(one) for one in rollouts] == [""] * 8
    assert [one.episode.reward for one in rollouts if one.episode] == [0, 1, 0, 0, 0, 0, 1, 0]
    told = [[given.text for given in one.given] for one in rollouts]
    assert told[:3] == [["lower", "lower"], [], ["higher", "higher"]]


def test_refused_actions_are_read_and_failures_cost_the_episode(server: Server) -> None:
    (refused,) = play(server, "x")
    assert refused.given[0].text.startswith("error: Invalid message; guess: Input should be a valid integer")
    (refused,) = play(server, '{"gess": 1}', action="json")
    assert "guess: Field required; gess: Extra inputs are not permitted" in refused.given[0].text
    assert error_of(play(server, "9")[0]).endswith("in step: there is no number 9 (EXECUTION_ERROR)")
