"""Rows that take the place of others: the same draws as alone, prompts run once, no place left empty."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode

from retrain.backends.local.policy import LocalBackend
from retrain.backends.progress import SamplingProgress
from retrain.backends.rows import Row, uniforms
from tests.extras.local_policies import UNEVEN, as_samples, chosen, draw, open_backend, plain_logprobs, stir
from tests.extras.tiny_models import save_tiny_model

CPU = torch.device("cpu")
# SplitMix64 seeded with 1234567, as published with the algorithm
PUBLISHED = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
LONG, SHORT = (7, 8, 9, 10, 11, 12, 13), (5, 6)
LIMITS = [3, 40, 1, 7, 22, 2, 9, 5, 31, 4]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, context=64)


@pytest.fixture
def backend(model: str) -> LocalBackend:
    backend = open_backend(model)
    stir(backend)
    backend.text.end_ids = ()  # rows end at their limits
    return backend


def skewed() -> list[Row]:
    """Rows of two prompts, of very different lengths."""
    return [Row(LONG if number < 5 else SHORT, limit, stream=number) for number, limit in enumerate(LIMITS)]


def fill(backend: LocalBackend, rows: list[Row], budget: int = 10**6) -> list[list[int]]:
    backend.sampler.budgets["sample"] = budget
    backend.sampler.fill(rows, 1.0, CPU, "sample")
    return [row.tokens for row in rows]


@contextmanager
def passes_of(backend: LocalBackend) -> Iterator[list[tuple[int, int]]]:
    """The shapes of the token ids that the model is run on."""
    shapes: list[tuple[int, int]] = []
    hook = backend.policy.body.register_forward_pre_hook(
        lambda module, arguments, named: shapes.append(tuple(named["input_ids"].shape)), with_kwargs=True
    )
    yield shapes
    hook.remove()


def test_a_row_s_random_numbers_are_those_of_its_stream_from_where_it_is():
    row = Row((1,), 9, stream=1234567)
    expected = [(number >> 11) * 2.0**-53 for number in PUBLISHED]
    assert uniforms([row], 4)[:, 0].tolist() == expected
    row.tokens = [5, 5]
    assert uniforms([Row((1,), 9, stream=3), row], 2)[:, 1].tolist() == expected[2:]


@pytest.mark.parametrize("budget", [1, 30, 60, 100, 10**6])
def test_a_row_draws_the_same_whichever_rows_share_its_batch(backend, budget):
    alone = [fill(backend, [row])[0] for row in skewed()]
    assert fill(backend, skewed(), budget) == alone
    assert list(map(len, alone)) == LIMITS


def test_several_steps_without_a_look_draw_the_same(model):
    backend = open_backend(model, stop=["1", "b2"])
    stir(backend)
    texts = []
    for backend.sampler.steps_per_sync in (1, 8):
        backend.generator.manual_seed(5)
        texts.append([r.text for g in draw(backend, group_size=16, max_tokens=30) for r in g.rollouts])
    assert texts[0] == texts[1]


class Reads(TorchFunctionMode):
    """Names of the operations that wait for the device to read what is in a tensor."""

    WAIT = ("tolist", "item", "cpu", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func.__name__ in self.WAIT:
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("count", [3, 24])
def test_the_host_reads_what_was_drawn_every_few_tokens_for_all_rows_at_once(backend, count):
    backend.sampler.steps_per_sync = 8
    rows = [Row(LONG, 32, stream=number) for number in range(count)]
    with Reads() as reads:
        fill(backend, rows)
    assert reads.names == ["tolist"] * 3 * (32 // 8)  # tokens, log-probabilities, entropies


def test_a_model_whose_rows_cannot_be_joined_draws_the_same_in_passes(backend):
    joined = fill(backend, skewed())
    backend.sampler.windows = None
    assert fill(backend, skewed()) == joined
    assert fill(backend, skewed(), budget=100) == joined


def test_rows_that_come_and_go_have_the_log_probabilities_of_a_plain_forward_pass(model):
    backend = open_backend(model, tokens_per_sampling_batch=90)
    stir(backend)
    samples = as_samples(draw(backend, UNEVEN, group_size=6, max_tokens=30))
    for sample, logps in zip(samples, plain_logprobs(backend, samples, 0.8), strict=True):
        assert np.allclose(chosen(logps, sample).detach(), sample.rollout.logprobs, atol=1e-5)


def test_a_place_is_taken_as_soon_as_it_is_free(backend):
    rows = [Row(SHORT, 40), *(Row(SHORT, 4) for _ in range(10))]
    with passes_of(backend) as shapes:
        fill(backend, rows, budget=60)
    tokens = [count for count, length in shapes if length == 1]
    assert len(tokens) < 45  # two rows side by side: 40 steps, not 40 + 4 * 5 as in passes
    assert sum(tokens) == 39 + 10 * 3  # and none is run for a row that has ended


def test_rows_join_several_at_a_time_because_each_time_costs_a_pass(backend):
    rows = [Row((2 + number, 3), 8 + number % 16) for number in range(32)]  # they end one by one
    with passes_of(backend) as shapes:
        fill(backend, rows, budget=320)
    joined = [count for count, length in shapes if length > 1]
    assert len(joined) > 1  # some were sent back
    assert min(joined) > 1


def test_a_prompt_is_run_once_though_its_group_comes_in_parts(backend):
    rows = [Row(prompt, 1) for prompt in (LONG, SHORT) for _ in range(40)]
    with passes_of(backend) as shapes:
        fill(backend, rows, budget=100)
    assert [shape for shape in shapes if shape[1] > 1] == [(1, len(LONG)), (1, len(SHORT))]


@pytest.mark.parametrize("layers", [["sliding_attention"] * 2, ["sliding_attention", "full_attention"]])
def test_a_layer_with_a_window_keeps_no_more_than_that(tmp_path, layers):
    path = save_tiny_model(tmp_path, hidden=32, context=128)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"use_sliding_window": True, "sliding_window": 6, "layer_types": layers}
    (tmp_path / "config.json").write_text(json.dumps(config))
    backend = open_backend(path)
    stir(backend)
    backend.text.end_ids = ()
    rows = [Row(LONG, 110, stream=number) for number in range(4)]  # buffers are copied several times
    kept = {1: 6, 2: (6 + 117) // 2 + 1}[len(set(layers))]  # tokens of cache that a row takes in all layers
    with passes_of(backend) as shapes:
        fill(backend, [*rows, Row(SHORT, 20)], budget=4 * kept + 40)
    assert [shape for shape in shapes if shape[1] > 1] == [(2, len(LONG))]  # none waited and was run again
    for row in rows:
        logits = backend.policy.causal(input_ids=torch.tensor([row.ids])).logits[0, len(LONG) - 1 : -1]
        ours = logits.log_softmax(-1)[torch.arange(110), torch.tensor(row.tokens)]
        assert np.allclose(ours.detach(), row.logprobs, atol=1e-4)


def test_rows_that_outgrow_the_cache_wait_and_go_on_where_they_were(backend):
    rows = [Row(SHORT, 40, stream=number) for number in range(8)]
    with passes_of(backend) as shapes:
        fill(backend, rows, budget=8 * 10)
    assert max(count * length for count, length in shapes) <= 8 * 10
    assert any(length > len(SHORT) for _, length in shapes)  # prompt and completion so far, in one pass
    assert [row.length for row in rows] == [len(SHORT) + 40] * 8


def test_a_long_call_tells_how_far_it_is(backend):
    told: list[SamplingProgress] = []
    backend.sampler.observe, backend.sampler.observe_every_s = told.append, 0.0
    fill(backend, [Row(SHORT, limit) for limit in (2, 3, 3)])
    seen = [(p.rollouts, p.finished, p.tokens, p.longest) for p in told]
    assert seen == [(3, 0, 3, 1), (3, 1, 6, 2), (3, 3, 8, 3)]
