"""Games of the package textarena: for one player, or against a function of yours.

The policy reads what the game has told it since its last turn, and the game's reward is the last turn's. The
number of a prompt is the game's seed, so all episodes of a prompt play the same game. Games that download
words or ask a hosted model are refused.

Source: TextArena, arXiv:2504.11442.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np

from retrain.base import registry
from retrain.base.errors import ConfigError
from retrain.base.extras import load
from retrain.base.rollouts import Prompt
from retrain.plugins.environments import Episode

EXTRA = "textarena"
PACKAGES = ("textarena",)
# folders of games that download words of NLTK, or ask a model of OpenRouter
ONLINE = """Codenames Crosswords Debate DontSayIt GuessWho Hangman LetterAuction ScenarioPlanning SpellingBee
TwentyQuestions WordChains WordLadder WordSearch Wordle""".split()
RANDOMNESS = threading.Lock()  # games draw from the generators of the whole process


def open_episode(*, game: str, config: Mapping[str, Any] | None = None, opponent: str = "") -> Game:
    """Return a game.

    Args:
        game: its name in textarena, such as "Mastermind-v0".
        config: table of the game's own settings, such as `code_length`.
        opponent: dotted path of a function, what it is told -> its action, that plays the second player.

    Raises:
        ConfigError: the package is not installed, has no such game, or it cannot be played so.
    """
    play = registry.function_of_option("opponent", opponent) if opponent else None
    episode = Game(_made(game, config or {}), play)
    if (game, opponent) not in _playable:  # begin one, to see whether it takes so many players
        try:
            episode.start(Prompt(0, "", ""))
        except (AssertionError, ValueError) as error:
            players, fix = "one player", "name a function that plays the second one in opponent"
            if opponent:
                players, fix = "two players", "leave opponent out"
            raise ConfigError(f"game: {game!r} cannot be played by {players} ({error}); {fix}") from error
        _playable.add((game, opponent))
    return episode


class Game(Episode):
    """One game; the policy is the first player."""

    def __init__(self, env: Any, opponent: Any) -> None:
        self._env, self._opponent = env, opponent
        self._told = env
        while hasattr(self._told, "env"):  # without wrappers that repeat the whole game each turn
            self._told = self._told.env
        self._random: Any = None

    def start(self, prompt: Prompt) -> str:
        with self._own_randomness(prompt.id):
            self._env.reset(num_players=1 if self._opponent is None else 2, seed=prompt.id)
            self._play_second(done=False)
            return self._observation()

    def step(self, completion: str) -> tuple[str, float, bool]:
        with self._own_randomness():
            done = self._play_second(done=self._env.step(completion)[0])
            if not done:
                return self._observation(), 0.0, False
            rewards, _ = self._env.close()
            return "", float(rewards[0]), True

    def _play_second(self, *, done: bool) -> bool:
        """Let the opponent play until it is the policy's turn; return whether the game is over."""
        while not done and self._told.state.current_player_id != 0:
            done = self._env.step(self._opponent(self._observation()))[0]
        return done

    def _observation(self) -> str:
        """Return what the player whose turn it is has been told since its last turn."""
        player, messages = self._told.get_observation()
        names = self._told.state.role_mapping
        return "\n".join(
            message if sender < 0 else f"[{names.get(sender, sender)}] {message}"
            for sender, message, _ in messages
            if sender != player
        )

    @contextmanager
    def _own_randomness(self, seed: int | None = None) -> Iterator[None]:
        """Let the game draw from random numbers of its own, so that games in between change nothing."""
        with RANDOMNESS:
            others = random.getstate(), np.random.get_state()
            if seed is not None:
                random.seed(seed)
                np.random.seed(seed % 2**32)
            else:
                random.setstate(self._random[0])
                np.random.set_state(self._random[1])
            try:
                yield
            finally:
                self._random = random.getstate(), np.random.get_state()
                random.setstate(others[0])
                np.random.set_state(others[1])


def _made(game: str, config: Mapping[str, Any]) -> Any:
    arena = load("textarena", EXTRA, "textarena")
    games = arena.envs.registration.ENV_REGISTRY
    if game not in games:
        some = f"there are {len(games)}, such as 'Mastermind-v0'"
        raise ConfigError(f"game: textarena has no {game!r}; {registry.hint(game, games, some)}")
    if games[game].entry_point.split(".")[2] in ONLINE:
        raise ConfigError(
            f"game: {game!r} downloads words or asks a hosted model; choose a game that needs no network"
        )
    try:
        return arena.make(game, **config)
    except (ImportError, OSError, SyntaxError) as error:  # some games are not for every Python, or incomplete
        raise ConfigError(f"game: textarena cannot load {game!r} here: {error}") from error
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"config: {game!r} refuses these settings: {error}") from error


_playable: set[tuple[str, str]] = set()  # games and opponents that were begun
