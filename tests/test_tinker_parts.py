"""What the tinker backend decides before it talks to anybody: options, losses, datums, permits."""

from __future__ import annotations

import asyncio
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from retrain.backends import BackendSpec
from retrain.backends.tinker import advise_run, check_run, connect
from retrain.backends.tinker.losses import ApiLoss, api_loss
from retrain.backends.tinker.options import check_options
from retrain.backends.tinker.permits import Permits
from retrain.backends.tinker.policy import State, read_state, write_state
from retrain.backends.tinker.wire import check_advantages, datum_arrays
from retrain.blocking import in_thread
from retrain.config.schema import Algorithm, Config, Model, Training
from retrain.distribution import install_command
from retrain.errors import ConfigError, InfrastructureError, NonFiniteError, RecordsError, RunFailedError
from retrain.losses import cispo, gspo, importance_sampling, ppo
from retrain.rollouts import Loss, Prompt, Rollout, TrainingSample
from retrain.semaphore import FileSemaphore
from tests.semaphore_processes import wait_until


def sample(
    tokens: tuple[int, ...] = (7, 8, 9),
    logprobs: tuple[float, ...] = (-1.0, -2.0, -3.0),
    advantages: tuple[float, ...] = (0.5, 1.0, -1.0),
    weight: float = 0.1,
) -> TrainingSample:
    rollout = Rollout(Prompt(3, "ab", "c"), "", tokens, np.array(logprobs), ("",) * len(tokens), False)
    return TrainingSample(rollout, np.array(advantages), weight)


def test_a_datum_is_shifted_by_one_and_silent_on_the_prompt() -> None:
    arrays = datum_arrays((5, 6), sample())
    assert arrays.inputs == (5, 6, 7, 8)
    assert arrays.targets.tolist() == [6, 7, 8, 9]
    assert arrays.logprobs.tolist() == [0, -1, -2, -3]
    assert arrays.advantages.tolist() == pytest.approx([0, 0.05, 0.1, -0.1])
    assert arrays.completion.tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"logprobs": (-1.0, -2.0)},
        {"advantages": (1.0,) * 4},
        {"tokens": (7,)},
        {"tokens": (), "logprobs": (), "advantages": ()},
    ],
)
def test_lengths_that_differ_are_refused_here_because_servers_accept_them(wrong: dict) -> None:
    with pytest.raises(RunFailedError, match="prompt 3 has"):
        datum_arrays((5,), sample(**wrong))


@pytest.mark.parametrize(
    "wrong",
    [
        {"logprobs": (-1.0, np.nan, -1.0)},
        {"advantages": (np.inf, 0, 0)},
        {"weight": np.nan},
        {"advantages": (1e39, 0, 0), "weight": 1.0},
    ],
)
def test_numbers_that_are_not_finite_as_float32_are_refused(wrong: dict) -> None:
    with pytest.raises(NonFiniteError, match="prompt 3 are not finite"):
        datum_arrays((5,), sample(**wrong))


def test_a_prompt_without_a_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="no token"):
        datum_arrays((), sample())


@pytest.mark.parametrize(
    ("loss", "config"),
    [
        (Loss("importance_sampling", importance_sampling.evaluate), {}),
        (Loss("ppo", ppo.evaluate), {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}),
        (
            Loss("ppo", partial(ppo.evaluate, clip_high=0.28)),
            {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28},
        ),
        (Loss("cispo", cispo.evaluate), {"clip_low_threshold": 0.0, "clip_high_threshold": 5.0}),
        (Loss("gspo", gspo.evaluate), {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4}),
    ],
)
def test_clip_distances_become_absolute_bounds(loss: Loss, config: dict[str, float]) -> None:
    assert api_loss(loss) == ApiLoss(loss.name, pytest.approx(config))


def test_a_loss_that_the_api_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"my\.loss.*importance_sampling, ppo, cispo, gspo only"):
        api_loss(Loss("my.loss", ppo.evaluate))


@pytest.mark.parametrize("name", ["ppo", "importance_sampling", "cispo", "gspo"])
def test_a_weight_inside_the_advantages_is_a_weight_of_the_loss(name: str) -> None:
    evaluate = {"ppo": ppo, "importance_sampling": importance_sampling, "cispo": cispo, "gspo": gspo}[
        name
    ].evaluate
    random = np.random.default_rng(0)
    new, old, advantages = random.normal(size=(3, 12))
    weights = np.repeat(random.random(3), 4)
    sequence = np.repeat(np.arange(3), 4)
    outside, inside = (
        evaluate(new, old, advantages, sequence),
        evaluate(new, old, weights * advantages, sequence),
    )
    np.testing.assert_allclose(inside.value, weights * outside.value)
    np.testing.assert_allclose(inside.slope, weights * outside.slope)


def test_gspo_needs_equal_advantages_within_a_rollout() -> None:
    check_advantages([sample(advantages=(1.0, 1.0, 1.0))], api_loss(Loss("gspo", gspo.evaluate)))
    with pytest.raises(ConfigError, match="transform_mode"):
        check_advantages([sample()], api_loss(Loss("gspo", gspo.evaluate)))


def test_options_out_of_range_or_misspelt_are_named() -> None:
    wrong = {"tokeniser": "x", "beta1": 1.0, "requests_at_once": 2.5, "call_timeout_s": True}
    problems = check_options({**wrong, "system_prompt": "Count."})
    assert [problem.split(":")[0] for problem in problems] == [*wrong, "system_prompt"]
    assert "did you mean 'tokenizer'" in problems[0]


def test_what_would_stop_a_run_is_said_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    monkeypatch.delenv("TINKER_CREDENTIAL_CMD", raising=False)
    algorithm = Algorithm(loss_mode="gspo", transform_mode="gtpo", kl_coef=0.1)
    problems = check_run(Config(algorithm=algorithm, training=Training(entropy_bonus=0.1)))
    for part in ("TINKER_API_KEY", "[model].model", "gspo", "entropy_bonus", "kl_coef"):
        assert any(part in problem for problem in problems)


def test_a_temperature_at_which_the_api_does_not_score_is_warned_of() -> None:
    (line,) = advise_run(Config(training=Training(temperature=0.7)))
    assert "training.temperature = 1.0 keeps them exact" in line
    assert advise_run(Config(training=Training(temperature=1.0))) == []


def test_a_run_that_the_api_can_do_has_no_problem_but_a_missing_sdk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-key")
    assert all(install_command("tinker") in p for p in check_run(Config(model=Model(model="some/model"))))


def test_a_missing_key_is_an_error_before_anything_is_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    monkeypatch.delenv("TINKER_CREDENTIAL_CMD", raising=False)
    with pytest.raises(ConfigError, match="set the environment variable TINKER_API_KEY"):
        connect(BackendSpec(seed=0, model="some/model"))


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    write_state(tmp_path, State("tinker://m/weights/a", 5), "some/model", 32)
    assert read_state(tmp_path, "some/model", 32) == State("tinker://m/weights/a", 5)
    with pytest.raises(RecordsError, match="lora_rank is 32, the run's is 16"):
        read_state(tmp_path, "some/model", 16)
    (tmp_path / "tinker.json").write_text("{}")
    with pytest.raises(RecordsError, match="not a readable checkpoint"):
        read_state(tmp_path, "some/model", 32)


def holders(directory: Path) -> int:
    return len(FileSemaphore.inspect(directory).holders)


def permits(directory: Path, count: int, timeout_s: float = 60.0) -> Permits:
    return Permits(lambda: FileSemaphore(directory, count), timeout_s)


def test_waiting_for_a_permit_does_not_stop_the_event_loop(tmp_path: Path) -> None:
    async def check() -> None:
        busy = FileSemaphore(tmp_path, 1)
        busy.acquire()
        waiter = asyncio.ensure_future(_hold(permits(tmp_path, 1)))
        await asyncio.sleep(0)  # the loop turns although the waiter waits
        assert not waiter.done()
        busy.release()
        await waiter
        wait_until(lambda: holders(tmp_path) == 0)

    asyncio.run(check())


def test_a_cancelled_wait_gives_its_permit_back_when_it_comes(tmp_path: Path) -> None:
    async def check() -> None:
        busy = FileSemaphore(tmp_path, 1)
        busy.acquire()
        waiter = asyncio.ensure_future(_hold(permits(tmp_path, 1)))
        await asyncio.sleep(0)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        busy.release()
        await _hold(permits(tmp_path, 1))

    asyncio.run(check())


def test_a_cancelled_call_gives_its_permit_back(tmp_path: Path) -> None:
    async def check() -> None:
        inside = asyncio.Event()
        caller = asyncio.ensure_future(_hold(permits(tmp_path, 1), inside, asyncio.Event()))
        await inside.wait()
        assert holders(tmp_path) == 1
        caller.cancel()
        await asyncio.gather(caller, return_exceptions=True)
        wait_until(lambda: holders(tmp_path) == 0)

    asyncio.run(check())


def test_a_wait_that_takes_too_long_is_an_infrastructure_failure(tmp_path: Path) -> None:
    async def check() -> None:
        with FileSemaphore(tmp_path, 1), pytest.raises(InfrastructureError, match="no permit"):
            await _hold(permits(tmp_path, 1, timeout_s=0.01))

    asyncio.run(check())


@pytest.mark.parametrize(("count", "together"), [(1, False), (2, True)])
def test_two_calls_go_together_only_with_two_permits(tmp_path: Path, count: int, together: bool) -> None:
    most = 0

    async def check() -> None:
        second_began = asyncio.Event()

        async def call(is_second: bool) -> bool:
            nonlocal most
            most = max(most, holders(tmp_path))
            if is_second:
                second_began.set()
            elif together:
                await second_began.wait()
            return is_second

        source = permits(tmp_path, count)
        assert await source.two_in_order(lambda: call(False), lambda: call(True)) == (False, True)

    asyncio.run(check())
    assert most == count
    wait_until(lambda: holders(tmp_path) == 0)  # a wait that was given up returns its permit when it comes


def test_many_runs_with_pairs_never_block_each_other(tmp_path: Path) -> None:
    """Each holds one permit and could use another: with hold-and-wait this would never end."""
    in_flight, most = 0, 0

    async def call() -> None:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        await in_thread(lambda: None)  # a turn of another thread
        in_flight -= 1

    async def check() -> None:
        sources = [permits(tmp_path, 2) for _ in range(6)]
        await asyncio.gather(*(source.two_in_order(call, call) for source in sources for _ in range(5)))

    asyncio.run(check())
    assert most <= 2
    wait_until(lambda: holders(tmp_path) == 0)


def test_a_failed_first_call_ends_the_second(tmp_path: Path) -> None:
    async def fail() -> None:
        raise ConnectionError("gone")

    async def check() -> None:
        with pytest.raises(ConnectionError):
            await permits(tmp_path, 2).two_in_order(fail, asyncio.Event().wait)
        wait_until(lambda: holders(tmp_path) == 0)

    asyncio.run(check())


def test_a_late_result_that_nobody_wants_is_taken_back_while_the_loop_is_busy() -> None:
    may_come, taken_back = threading.Event(), threading.Event()

    async def check() -> None:
        came = in_thread(may_come.wait, unwanted=lambda _: taken_back.set())
        came.cancel()
        may_come.set()
        assert taken_back.wait(60)  # and the loop does not turn

    asyncio.run(check())


async def _hold(
    source: Permits, inside: asyncio.Event | None = None, until: asyncio.Event | None = None
) -> None:
    async with source.one():
        if inside is not None:
            inside.set()
        if until is not None:
            await until.wait()
