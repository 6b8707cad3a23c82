"""Environments of other packages: games of textarena, environments of skyrl-gym."""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain.base import registry
from retrain.base.errors import ConfigError
from retrain.base.rollouts import Prompt
from retrain.campaign.conformance import dry_run
from retrain.records.metrics import read_metrics
from retrain.trainer import worker
from tests.built_tasks import build
from tests.trainer.test_trainer import SMALL, make_run

pytestmark = pytest.mark.extras
CODE = {"game": "Mastermind-v0", "config": {"code_length": 2}}


def opened(environment: str, **options: object) -> Any:
    return registry.bound("environments", environment, options)()


def problem_with(environment: str, **options: object) -> str:
    with pytest.raises(ConfigError) as problem:
        opened(environment, **options)
    return str(problem.value)


def game(number: int, actions: list[str]) -> list[object]:
    one = opened("textarena", **CODE)
    return [one.start(Prompt(number, "", "")), *map(one.step, actions)]


def test_a_game_tells_what_is_new_and_is_worth_its_reward() -> None:
    told, first, *_ = game(0, ["[1 2]"])
    assert str(told).startswith("You are playing Mastermind.")
    assert first[0].startswith("Submitted [1 2]. Feedback: ")
    assert first[1:] == (0.0, False)
    secrets = (f"[{a} {b}]" for a in range(1, 7) for b in range(1, 7) if a != b)
    ends = [end for secret in secrets if (end := game(0, [secret])[1])[2]]
    assert ends == [("", 1.0, True)]


def test_a_number_is_a_game_whatever_is_played_in_between() -> None:
    guesses = [f"[{a} {b}]" for a, b in ((1, 2), (3, 4), (5, 6))]
    alone = [game(number, guesses) for number in range(12)]
    random.seed(1)
    np.random.seed(1)
    before = random.getstate()
    together = [opened("textarena", **CODE) for _ in range(12)]
    turns = [[one.start(Prompt(number, "", "")) for number, one in enumerate(together)]]
    turns += [[one.step(guess) for one in together] for guess in guesses]
    assert [list(told) for told in zip(*turns, strict=True)] == alone
    assert len({str(told[1:]) for told in alone}) > 3
    assert random.getstate() == before


OWN = '''
def lowest(told):
    """Take the first free square."""
    return told.rpartition("Available Moves: ")[2].split(",")[0].strip("'")


class Echo:
    def __init__(self, env_config=None, extras=None):
        self.wanted, self.times = extras["reward_spec"]["ground_truth"], env_config.times

    def init(self, messages):
        return messages, {}

    def step(self, text):
        self.times -= 1
        reward, done = float(text == self.wanted), self.times == 0
        return {"observations": [{"role": "user", "content": "again"}], "reward": reward, "done": done}

    def close(self):
        pass
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "own_players.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    return "own_players"


def test_a_function_plays_the_second_player(own: str) -> None:
    board = opened("textarena", game="TicTacToe-v0", opponent=f"{own}.lowest")
    assert "You are Player 0 in Tic Tac Toe." in board.start(Prompt(0, "", ""))
    told, reward, done = board.step("[4]")
    assert "Player 1 placed their symbol (X) in cell 0." in told
    assert (reward, done) == (0.0, False)
    board.step("[2]")
    assert board.step("[6]") == ("", 1.0, True)
    lost = opened("textarena", game="TicTacToe-v0", opponent=f"{own}.lowest")
    lost.start(Prompt(0, "", ""))
    ends = [lost.step(move) for move in ("[3]", "[4]", "[8]")]
    assert ends[-1] == ("", -1.0, True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"game": "Mastermnd-v0"}, "did you mean 'Mastermind-v0'?"),
        ({"game": "Wordle-v0"}, "'Wordle-v0' downloads words or asks a hosted model"),
        (
            {"game": "TicTacToe-v0"},
            "cannot be played by one player (The number of players has to be 2, received 1)",
        ),
        ({"game": "Mastermind-v0", "config": {"pegs": 1}}, "unexpected keyword argument 'pegs'"),
        ({"game": "UsedCar-v0-balanced"}, "textarena cannot load 'UsedCar-v0-balanced' here"),
        ({"game": "Mastermind-v0", "opponent": "nobody.there"}, "nobody"),
    ],
)
def test_a_game_that_cannot_be_played_is_refused(options: dict[str, object], said: str) -> None:
    assert said in problem_with("textarena", **options)


def test_the_games_that_are_refused_are_those_that_need_the_network() -> None:
    import textarena

    from retrain.plugins.environments.textarena import ONLINE

    online = ("nltk", "EnglishDictionary", "OpenRouter")
    folders = [path for path in (Path(textarena.__file__).parent / "envs").iterdir() if path.is_dir()]
    needing = {
        folder.name
        for folder in folders
        if any(word in path.read_text() for path in folder.rglob("*.py") for word in online)
    }
    assert needing - {"utils"} == set(ONLINE)


@pytest.mark.parametrize(
    "name", ["TowerOfHanoi-v0", "FrozenLake-v0", "GuessTheNumber-v0", "Sudoku-v0", "Minesweeper-v0"]
)
def test_games_answer_whatever_they_are_told(name: str) -> None:
    (table,) = [{"game": name}]
    play = registry.bound("environments", "textarena", table)
    assert dry_run(play, Prompt(1, "", ""), ["", "[1]", "a" * 500, "[A B]", "[0 0]", "\x00"]) == ""


def test_skyrl_gym_gets_the_answer_and_the_columns_of_the_row() -> None:
    sums = opened("skyrl_gym", name="gsm8k_multi_turn")
    said = [{"role": "user", "content": "2 + 3"}]
    assert sums.start(Prompt(1, "2 + 3", "5", row={"extra_info": {"max_turns": 2}})) == said
    told, reward, done = sums.step("#### 4")
    assert "#### ANSWER" in told[0]["content"]
    assert (reward, done) == (0.1, False)
    assert sums.step("#### 5") == ([], 1.0, True)
    sums.close()


def test_a_class_with_init_and_step_is_an_environment(own: str) -> None:
    play = registry.bound("environments", "skyrl_gym", {"name": f"{own}.Echo", "config": {"times": 2}})
    assert dry_run(play, Prompt(0, "a", "b"), ["a", "b"]) == ""
    echo = play()
    echo.start(Prompt(0, "a", "b"))
    assert [echo.step(text)[1:] for text in "ab"] == [(0.0, False), (1.0, True)]


def test_skyrl_gym_names_what_it_has() -> None:
    assert "did you mean 'gsm8k'?" in problem_with("skyrl_gym", name="gsm8")
    assert "nobody" in problem_with("skyrl_gym", name="nobody.There")


@pytest.mark.parametrize(
    ("environment", "options"),
    [
        ("textarena", {"game": "GuessTheNumber-v0", "config": {"max_number": 5}}),
        ("skyrl_gym", {"name": "gsm8k_multi_turn", "extras": {"max_turns": 3}}),
    ],
)
def test_a_run_plays_and_trains(tmp_path: Path, environment: str, options: dict[str, object]) -> None:
    table = {"environment": environment, "options": options, "max_turns": 3, "max_turn_tokens": 3}
    size = {**SMALL["training"], "max_steps": 2, "max_tokens": 9}
    data = {"task": "numbered", "options": {"count": 8, "held_out": 0.25}}
    run = make_run(tmp_path / "run", {"training": size, "data": data, "environment": table})
    assert worker.run(run.directory, threading.Event()) == 0
    rows = read_metrics(run.directory)
    assert [row["episode_errors"] for row in rows] == [0, 0]
    assert all(row["turns_mean"] > 1 for row in rows)


def test_numbers_are_prompts_that_a_policy_of_characters_can_read() -> None:
    task = build("numbered", count=10, held_out=0.2, seed=1)
    assert sorted(p.text for p in [*task.train, *task.held_out]) == sorted(map(str, range(10)))
    assert len(task.held_out) == 2
    assert {*"0aZ [\n"} <= set(task.alphabet)
