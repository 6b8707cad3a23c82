"""How busy episodes keep a sampler while their tools take time, and what it costs to play them.

    python -m benchmarks.environments [--episodes 256] [--rounds 5] [--json]

The sampler is simulated: 32 rows, 4 ms a token, 10 to 70 tokens a turn; a turn that finds no row waits. It is
a server that is called, or samples in process, where turns are fed to it or sampled by one call at a time.
A tool takes 50 to 500 ms, and an episode calls one after each of its 8 turns but the last. All that plays the
episodes is the product's. It is compared with loops that sample turn by turn, and with TRL's, if it is
installed, which is given the same sampler and the same tool. See `environments_verifiers` for another loop.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from benchmarks.simulated_samplers import ROWS, WRITTEN, InProcess, Instant, Sampler, SimulatedBackend
from benchmarks.suite import script_parser
from retrain.backends import Sampling
from retrain.base.event_loop import EventLoopThread
from retrain.base.rollouts import NextTurn, Prompt
from retrain.config.schema import EnvironmentSection
from retrain.plugins.environments.single_turn import open_episode as open_question
from retrain.trainer.episodes import Episodes
from retrain.trainer.turn_sampling import TurnSampler

TURNS, TOOL_S = 8, (0.05, 0.5)
AT_ONCE = 4  # calls, as many as there are permits by default
IN_PROCESS = "episodes, a sampler in process"
HOW = Sampling(group_size=1, max_tokens=10**6, temperature=1.0)


class Tool:
    """An environment that calls a tool after each turn but the last."""

    chance = random.Random(1)

    def __init__(self, *, takes_time: bool = True) -> None:
        self._turns, self._takes_time = 0, takes_time

    async def start(self, prompt: Prompt) -> str:
        return prompt.text

    async def step(self, completion: str) -> tuple[str, float, bool]:
        self._turns += 1
        if self._turns == TURNS:
            return "", 1.0, True
        if self._takes_time:
            await asyncio.sleep(self.chance.uniform(*TOOL_S))
        return "result", 0.0, False


class Quick(Tool):
    """The same with a tool that takes no time."""

    def __init__(self) -> None:
        super().__init__(takes_time=False)


def prompts_of(count: int) -> list[Prompt]:
    return [Prompt(number, "question", "") for number in range(count)]


def play(
    sampler: Sampler, count: int, open_episode: Callable[[], Any], calls_at_once: int, turns: int = TURNS
) -> float:
    """Play episodes with the product's machinery; return the seconds that they took.

    With 0 calls at once, turns are fed to the sampler while it samples others.
    """
    calls = EventLoopThread()
    turn_sampler, table = (
        TurnSampler(SimulatedBackend(sampler, calls), 0),
        EnvironmentSection(max_turns=turns),
    )
    episodes = Episodes(
        table,
        open_episode,
        turn_sampler,
        calls_at_once=calls_at_once,
        sample_live=None if calls_at_once else sampler.sample_turns,  # type: ignore[attr-defined]
    )
    try:
        began_s = time.perf_counter()
        groups = episodes.play(prompts_of(count), HOW)
        took_s = time.perf_counter() - began_s
    finally:
        episodes.close()
        calls.close()
    assert [len(group.rollouts[0].episode.rewards) for group in groups] == [turns] * count  # type: ignore[union-attr]
    return took_s


async def turn_by_turn(sampler: Sampler, count: int, at_a_time: int) -> float:
    """Sample a turn of `at_a_time` episodes, wait for all of their tools, and go on; return the seconds."""
    began_s = time.perf_counter()
    for start in range(0, count, at_a_time):
        prompts = prompts_of(min(at_a_time, count - start))
        tools = [Tool() for _ in prompts]
        rollouts = [group.rollouts[0] for group in await sampler.sample(prompts, HOW)]
        for _ in range(TURNS - 1):
            answers = await asyncio.gather(*(tool.step(WRITTEN) for tool in tools))
            asked = [
                NextTurn(rollout, (("user", answer[0]),), HOW.max_tokens)
                for rollout, answer in zip(rollouts, answers, strict=True)
            ]
            rollouts = [rollout for rollout in await sampler.extend(asked, HOW) if rollout]
    return time.perf_counter() - began_s


def busy(sampler: Sampler, took_s: float) -> float:
    return 100 * sampler.row_s / (ROWS * took_s)


def overlap(count: int) -> list[dict[str, Any]]:
    """Return how busy each loop keeps the rows."""
    loops: dict[str, tuple[int, Callable[[Any, int], float]]] = {
        "episodes, a server": (count, lambda sampler, n: play(sampler, n, Tool, AT_ONCE)),
        IN_PROCESS: (count, lambda sampler, n: play(sampler, n, Tool, 0)),
        f"{IN_PROCESS}, one call at a time": (count, lambda sampler, n: play(sampler, n, Tool, 1)),
        "turn by turn, all at once": (count, lambda sampler, n: asyncio.run(turn_by_turn(sampler, n, n))),
        "turn by turn, 32 at a time": (count, lambda sampler, n: asyncio.run(turn_by_turn(sampler, n, ROWS))),
    }
    if find_spec("trl"):
        from benchmarks.environments_trl import play_with_trl

        loops["TRL's loop, 32 at a time"] = (ROWS, play_with_trl)
    return [measured(name, *loop) for name, loop in loops.items()]


def measured(name: str, episodes: int, loop: Callable[[Any, int], float]) -> dict[str, Any]:
    """Return how busy a loop keeps the rows, and its processor time, that of its processes included."""
    sampler, before_s = InProcess() if name.startswith(IN_PROCESS) else Sampler(), with_children_s()
    took_s = loop(sampler, episodes)
    turn_ms = 1000 * (with_children_s() - before_s) / (episodes * TURNS)
    return {
        "loop": name,
        "episodes": episodes,
        "seconds": took_s,
        "busy_percent": busy(sampler, took_s),
        "turn_cpu_ms": turn_ms,
        "load": os.getloadavg()[0],
    }


def shown(row: dict[str, Any]) -> str:
    facts = f"{row['seconds']:7.1f} s  rows busy {row['busy_percent']:5.1f} %"
    return f"{row['loop']:<52}{facts}  {row['turn_cpu_ms']:8.2f} ms of processor time a turn"


def with_children_s() -> float:
    """Return the processor time of this process and of those that it started and that ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def overhead(count: int, rounds: int) -> dict[str, float]:
    """Return milliseconds of processor time per turn that playing episodes takes, all else taking none.

    The same turns without the machinery are subtracted, round by round.
    """

    async def bare() -> None:
        sampler, prompts = Instant(), prompts_of(count)
        tools = [Quick() for _ in prompts]
        rollouts = [group.rollouts[0] for group in await sampler.sample(prompts, HOW)]
        for turn in range(TURNS):
            answers = await asyncio.gather(*(tool.step(WRITTEN) for tool in tools))
            if turn < TURNS - 1:
                asked = [
                    NextTurn(rollout, (("user", answer[0]),), 1)
                    for rollout, answer in zip(rollouts, answers, strict=True)
                ]
                rollouts = [rollout for rollout in await sampler.extend(asked, HOW) if rollout]

    found: dict[str, float] = {"rounds": rounds}
    per_turn: dict[str, list[float]] = {"turn_ms": [], "fed_turn_ms": []}
    for _ in range(rounds):
        bare_s = cpu_s(lambda: asyncio.run(bare()))
        for at_once, took in zip((1, 0), per_turn.values(), strict=True):
            whole_s = cpu_s(lambda at_once=at_once: play(Instant(), count, Quick, at_once))  # type: ignore[misc]
            took.append(1000 * (whole_s - bare_s) / (count * TURNS))
    for name, took in per_turn.items():
        found |= {name: statistics.median(took), f"worst_{name}": max(took)}
    return found


def single_turn(rounds: int) -> dict[str, float]:
    """Return how many times the backend's call a batch of single turns takes, of real samples.

    `default` is the path of a run without an environment; `as_episodes` plays them as episodes of one turn.
    """
    from contextlib import ExitStack

    from retrain.backends import BackendSpec
    from retrain.backends.numpy import connect
    from retrain.config.schema import Config
    from retrain.trainer.opening import sampler_of

    prompts = [Prompt(number, f"{number:03d}=", "") for number in range(64)]
    how = Sampling(group_size=16, max_tokens=8, temperature=1.0)
    backend = connect(BackendSpec(seed=0, alphabet="0123456789="))
    with ExitStack() as opened:
        default = sampler_of(Config(), backend, opened)
        turn_sampler = TurnSampler(backend, 0)
        episodes = Episodes(
            EnvironmentSection(), open_question, turn_sampler, sample_live=backend.sample_turns
        )
        opened.callback(episodes.close)
        ratios: dict[str, list[float]] = {"default": [], "as_episodes": []}
        ways = {"default": default, "as_episodes": episodes.play}
        for _ in range(rounds):
            bare_s = cpu_s(lambda: backend.sample(prompts, how))
            for name, sample in ways.items():
                ratios[name].append(cpu_s(lambda sample=sample: sample(prompts, how)) / bare_s)  # type: ignore[misc]
    return {name: statistics.median(found) for name, found in ratios.items()}


def cpu_s(call: Callable[[], object]) -> float:
    """Return the processor time of a call, which other load on the machine changes little."""
    began_s = time.process_time()
    call()
    return time.process_time() - began_s


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found: dict[str, Any] = {
        "loops": overlap(options.episodes),
        "overhead": overhead(options.episodes, options.rounds),
        "single_turn": single_turn(4 * options.rounds),
    }
    if options.json:
        print(json.dumps(found, indent=2))
        return
    for row in found["loops"]:
        print(shown(row))
    took = found["overhead"]
    print(f"machinery: {took['turn_ms']:.3f} ms of processor time a turn, fed {took['fed_turn_ms']:.3f} ms")
    single = found["single_turn"]
    print(f"single turns over the backend's call: {single['default']:.3f} x", end="")
    print(f", as episodes of one turn {single['as_episodes']:.1f} x")


if __name__ == "__main__":
    main()
