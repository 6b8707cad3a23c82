"""One policy on several ranks: the draws and gradients of one, whatever fails on any of them."""

from __future__ import annotations

import importlib
import ipaddress
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from numpy.typing import NDArray

from retrain.backends import Optimization, Sampling, UpdateStats
from retrain.backends.local.policy import LocalBackend
from retrain.backends.local.ranks import digests, other_version, shares, versions
from retrain.base.errors import BackendMemoryError, ConfigError, RunFailedError
from retrain.base.rollouts import Floats, Group, Loss, LossTerms, Prompt
from retrain.control.rules.scaling import FIRST_SETTLED_STEP
from retrain.trainer.scoring import Scorer
from tests.extras.local_policies import (
    UNEVEN,
    as_samples,
    draw,
    gradient_of,
    loss_named,
    open_backend,
    stir,
)
from tests.extras.test_local_live_turns import follow, turns
from tests.extras.tiny_models import character_tokenizer, save_tiny_model
from tests.feeds import Script

pytestmark = [pytest.mark.extras, pytest.mark.timeout(600)]  # each rank takes seconds to start
HOW = Optimization(lr=1e-3, max_grad_norm=1e9, temperature=0.8)
PPO = loss_named("ppo")
PROMPTS = [*UNEVEN, *(Prompt(10 + number, f"{number}+{number}=", "1") for number in range(3))]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, context=64)


@pytest.fixture(scope="module")
def start(model: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of a policy whose adapters do something."""
    backend, directory = open_backend(model), tmp_path_factory.mktemp("start")
    stir(backend)
    backend.save(directory)
    return directory


@pytest.fixture(scope="module")
def opened(model: str) -> Iterator[Callable[[int], LocalBackend]]:
    """What opens a backend with so many ranks, or returns the one that is open: one number at a time."""
    alone = open_backend(model)
    several: dict[int, LocalBackend] = {}

    def close() -> None:
        while several:
            several.popitem()[1].close()

    def open_ranks(count: int) -> LocalBackend:
        if count == 1:
            return alone
        if count not in several:
            close()
            several[count] = open_backend(model, devices=count)
        return several[count]

    yield open_ranks
    close()


def tokens_of(groups: Sequence[Group]) -> list[tuple[int, ...]]:
    return [rollout.tokens for group in groups for rollout in group.rollouts]


@dataclass
class Steps:
    """What some steps of a policy gave."""

    draws: list[list[Group]]
    gradients: list[dict[str, torch.Tensor]]
    stats: list[UpdateStats]


def steps_of(
    backend: LocalBackend, start: Path, how: Optimization, prompts: Sequence[Prompt] = PROMPTS, count: int = 2
) -> Steps:
    backend.load(start)
    steps = Steps([], [], [])
    for seed in range(count):
        steps.draws.append(draw(backend, prompts))
        samples = as_samples(steps.draws[-1], seed=seed, drift=0.3)
        steps.stats.append(backend.update(samples, PPO, how))
        kept = {name: values.clone() for name, values in backend.optimizer.state().items()}
        steps.gradients.append({name: kept[name] for name in kept if name.startswith("exp_avg.")})
    return steps


def assert_alike(steps: Steps, wanted: Steps) -> None:
    assert [tokens_of(groups) for groups in steps.draws] == [tokens_of(groups) for groups in wanted.draws]
    for own, whole in zip(steps.gradients, wanted.gradients, strict=True):
        apart = torch.cat([(own[name] - whole[name]).flatten() for name in whole]).norm()
        assert apart <= 1e-6 * torch.cat([gradient.flatten() for gradient in whole.values()]).norm()
    for stats, others in zip(steps.stats, wanted.stats, strict=True):
        for name in ("loss", "grad_norm", "entropy", "clip_fraction", "approx_kl", "reference_kl"):
            pair = getattr(stats, name), getattr(others, name)
            assert pair == (None, None) or pair[0] == pytest.approx(pair[1], rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize(
    "how", [HOW, replace(HOW, micro_batches=3), replace(HOW, kl_coef=0.1, entropy_bonus=0.01)]
)
@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[:3]], ids=len)  # the fourth rank has none of three
@pytest.mark.parametrize("count", [4, 2])
def test_ranks_draw_and_learn_as_one(opened, start, count, how, prompts):
    """Both steps: the draws of the second one need the first one's update on every rank."""
    assert_alike(steps_of(opened(count), start, how, prompts), steps_of(opened(1), start, how, prompts))


def test_turns_of_episodes_are_drawn_as_by_one(opened, start):
    found = {}
    for count in (1, 2):
        opened(count).load(start)
        script = Script(turns(8), follow)
        opened(count).sample_turns(script, Sampling(1, 12, 1.0, seed=3))
        found[count] = {stream: rollout.tokens for stream, rollout in script.rollouts.items()}
    assert len(found[1]) == 24
    assert found[1] == found[2]


def test_the_gradients_noise_is_measured_between_ranks(opened, start):
    """As on one rank in as many parts; groups are dealt to ranks whatever their lengths."""
    count = FIRST_SETTLED_STEP + 2
    of_parts = replace(HOW, micro_batches=2, wants_moments=True)
    alone = steps_of(opened(1), start, of_parts, count=count)
    together = steps_of(opened(2), start, replace(of_parts, micro_batches=8), count=count)
    pairs = [*zip(alone.stats, together.stats, strict=True)]
    assert pairs[-1][0].moments.local_sqr_norms.shape == (2, 1)
    for one, other in pairs:
        for name in ("local_sqr_norms", "mean_sqr_norm") if one.moments else ():
            assert np.allclose(getattr(one.moments, name), getattr(other.moments, name), rtol=1e-3)
    assert_alike(together, alone)


class FullOnRankOne:
    """A loss in whose place memory runs out, on all ranks but one, for more than so many sequences."""

    def __init__(self, most: int) -> None:
        self.home, self.most = os.getpid(), most

    def __call__(
        self, logprobs: Floats, sampler_logprobs: Floats, advantages: Floats, sequence: NDArray[np.int64]
    ) -> LossTerms:
        if os.getpid() != self.home and sequence.max() >= self.most:
            raise MemoryError
        return PPO.evaluate(logprobs, sampler_logprobs, advantages, sequence)


def test_a_rank_that_does_not_fit_makes_all_cut_alike(opened, start):
    whole = steps_of(opened(1), start, HOW)
    backend = opened(2)
    backend.load(start)
    samples = as_samples(draw(backend, PROMPTS), drift=0.3)
    before = backend.learner.tokens_at_a_time
    gradient = gradient_of(backend, samples, Loss("ppo", FullOnRankOne(2)), HOW)
    assert backend.learner.tokens_at_a_time < before
    for name, values in whole.gradients[0].items():
        assert torch.allclose(gradient[name], values * 10, rtol=1e-4, atol=1e-6)
    with pytest.raises(BackendMemoryError, match="one sequence of"):
        backend.update(samples, Loss("ppo", FullOnRankOne(0)), HOW)
    assert_alike(steps_of(backend, start, HOW), whole)


def fail_elsewhere(home: int, *arrays: Floats) -> LossTerms:
    if os.getpid() != home:
        raise ZeroDivisionError("a loss of mine")
    return PPO.evaluate(*arrays)


def fail_here(home: int, *arrays: Floats) -> LossTerms:
    if os.getpid() == home:
        raise ZeroDivisionError("a loss of mine")
    return PPO.evaluate(*arrays)


@pytest.mark.parametrize(("fail", "kind"), [(fail_elsewhere, RunFailedError), (fail_here, ZeroDivisionError)])
def test_an_error_on_any_rank_is_raised_and_leaves_the_policy_as_it_was(opened, start, fail, kind):
    backend = opened(2)
    backend.load(start)
    samples = as_samples(draw(backend, PROMPTS))
    with pytest.raises(kind, match="a loss of mine"):
        backend.update(samples, Loss("ppo", partial(fail, os.getpid())), HOW)
    assert backend.optimizer.steps == 0
    assert_alike(steps_of(backend, start, HOW), steps_of(opened(1), start, HOW))


def test_a_loss_of_ones_own_is_found_on_all_ranks_and_one_without_a_name_is_refused(
    opened, start, tmp_path, monkeypatch
):
    backend = opened(2)
    backend.load(start)
    samples = as_samples(draw(backend, PROMPTS))
    with pytest.raises(
        ConfigError, match=r"\[backend.options\].devices: .*lambda.* at the top level of its file"
    ):
        backend.update(samples, Loss("mine", lambda *arrays: PPO.evaluate(*arrays)), HOW)
    (tmp_path / "loss_of_mine.py").write_text(
        "from retrain.plugins.losses.ppo import evaluate as of_retrain\n"
        "def evaluate(*arrays): return of_retrain(*arrays)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)  # as when the trainer finds it, after the ranks have begun
    mine = importlib.import_module("loss_of_mine")
    assert backend.update(samples, Loss("mine", mine.evaluate), HOW).grad_norm > 0


PURE_REWARD = "tests.plugins.pure.score"


def test_a_pure_reward_is_scored_on_all_ranks_if_that_is_worth_it(opened, start, tmp_path):
    opened(2).load(start)
    groups = draw(opened(2))
    alone, everywhere = ({"notes": str(tmp_path / name), "wait_s": 0.01} for name in ("alone", "everywhere"))
    scorer, known = Scorer(PURE_REWARD, everywhere), Scorer(PURE_REWARD, alone).score(groups)
    scorer.use_ranks(opened(2))
    assert np.array_equal(scorer.score(groups).rewards, known.rewards)
    by = Counter((tmp_path / "everywhere").read_text().split())
    assert by[str(os.getpid())] == 8
    assert len(by) == 2
    assert scorer._reward.scored == sum(by.values()) == 15
    cheap = Scorer(PURE_REWARD, {"notes": str(tmp_path / "cheap")})
    cheap.use_ranks(opened(2))
    for _ in range(2):
        cheap.score(groups)
    assert Counter((tmp_path / "cheap").read_text().split())[str(os.getpid())] == 8 + 15


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"only": os.getpid()}, r"rank 1: \S*pure.py:\d+: ValueError: a reward of mine"),
        ({"is_bound": True}, r"rank 1: \S*pure.py:\d+: TypeError: a number of mine"),
    ],
)
def test_a_reward_that_fails_on_another_rank_fails_the_run_and_leaves_the_rank(opened, params, message):
    groups = draw(opened(2))
    failing, right = Scorer(PURE_REWARD, params), Scorer(PURE_REWARD, {})
    for scorer in (failing, right):
        scorer.use_ranks(opened(2))
    with pytest.raises(RunFailedError, match=message):
        failing.score(groups)
    assert right.score(groups).rewards.max() > 0


def test_columns_that_cannot_be_sent_are_needed_by_a_reward_only(opened, start):
    opened(2).load(start)
    groups = draw(opened(2), [replace(prompt, row={"check": lambda: None}) for prompt in PROMPTS])
    assert opened(2).update(as_samples(groups), PPO, HOW).grad_norm > 0
    scorer = Scorer(PURE_REWARD, {})
    scorer.use_ranks(opened(2))
    with pytest.raises(
        ConfigError, match=r"devices: .*lambda.*the columns of prompts for a reward with PURE"
    ):
        scorer.score(groups)


def test_a_checkpoint_does_not_depend_on_the_number_of_ranks(opened, start, tmp_path):
    files = {}
    for count in (1, 2):
        steps_of(opened(count), start, HOW)
        directory = tmp_path / str(count)
        directory.mkdir()
        opened(count).save(directory)
        files[count] = sorted(path.relative_to(directory) for path in directory.rglob("*"))
    assert files[1] == files[2]
    steps = {count: steps_of(opened(3 - count), tmp_path / str(count), HOW) for count in (1, 2)}
    assert_alike(steps[1], steps[2])


def test_the_same_number_of_ranks_gives_the_same_bits(opened, start):
    backend = opened(2)
    once, again = (steps_of(backend, start, replace(HOW, micro_batches=2)) for _ in range(2))
    for one, other in zip(once.gradients, again.gradients, strict=True):
        assert all(torch.equal(values, other[name]) for name, values in one.items())


def test_ranks_of_one_machine_do_not_listen_to_its_networks(opened):
    opened(2)
    sockets = psutil.Process().net_connections("inet")
    listening = {each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN}
    assert listening
    assert all(ipaddress.ip_address(ip).is_loopback for ip in listening)


def test_the_heaviest_groups_are_dealt_first_to_whoever_has_least():
    assert shares([1, 5, 2, 4, 3], [0.0, 0.0]) == [[0, 1, 2], [3, 4]]
    assert shares([3], [1.0, 0.0, 0.0]) == [[], [0], []]


def test_ranks_with_other_packages_are_refused():
    own = versions()
    assert other_version(1, own, own) == ""
    assert "rank 1 has torch 1.0, and rank 0 " in other_version(1, own, {**own, "torch": "1.0"})
    without = {name: number for name, number in own.items() if name != "peft"}
    assert "rank 2 has peft not installed" in other_version(2, own, without)


def test_ranks_that_read_other_weights_or_words_are_refused(model):
    """One frozen weight by its last bit; those that are trained are sent to all."""
    backend, tokenizer = open_backend(model), character_tokenizer()
    own = digests(backend.policy.causal, tokenizer)
    with torch.no_grad():
        for parameter in backend.policy.trainable().values():
            parameter += 1
        assert digests(backend.policy.causal, tokenizer) == own
        weights = backend.policy.causal.get_input_embeddings().weight
        weights[0, 0] = torch.nextafter(weights[0, 0], torch.tensor(9.0))
    other = digests(backend.policy.causal, character_tokenizer(characters="abc"))
    assert not {*own.values()} & {*other.values()}
    assert re.match(
        r"rank 1 has the model with digest \w+, and rank 0 \w+; all", other_version(1, own, other)
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": 0}, "devices: got 0; needs a whole number from 1 to 1024, or 'all'"),
        ({"devices": True}, "devices: got True"),
        ({"devices": "some"}, "devices: got 'some'"),
        ({"devices": 2, "device": "cuda:1"}, "devices: 'cuda:1' is one device"),
        ({"devices": 2, "engine": "openai"}, 'devices: needs engine = "torch" or "vllm"'),
    ],
)
def test_devices_that_cannot_be_used_are_refused(model, options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        open_backend(model, **options)
