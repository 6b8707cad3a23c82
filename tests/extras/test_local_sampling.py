"""Sampling with a transformer: the right distribution, the right log-probabilities, the right ends."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from retrain.backends import Sampling
from retrain.backends.local.loading import Cut
from retrain.base.errors import ConfigError, NonFiniteError
from retrain.base.rollouts import Prompt, TrainingSample
from tests.extras.local_policies import UNEVEN, as_samples, chosen, draw, open_backend, plain_logprobs, stir
from tests.extras.tiny_models import CHARACTERS, save_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, context=64)


def stirred(model: str, **options: object):
    backend = open_backend(model, **options)
    stir(backend)
    return backend


def without_cache(backend, prompt: Prompt, max_tokens: int) -> list[int]:
    """Greedy decoding that runs everything again for each token."""
    ids = list(backend.text.encode(prompt))
    start = len(ids)
    while len(ids) - start < max_tokens and (len(ids) == start or ids[-1] not in backend.text.end_ids):
        with torch.no_grad():
            ids.append(int(backend.policy.causal(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[start:]


def test_left_padding_and_cache_change_nothing(model):
    backend = stirred(model)
    groups = draw(backend, group_size=1, max_tokens=12, temperature=0.0)
    assert [list(g.rollouts[0].tokens) for g in groups] == [without_cache(backend, p, 12) for p in UNEVEN]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0, 1.6])
def test_the_sampler_s_logprobs_are_those_of_a_plain_forward_pass(model, temperature):
    backend = stirred(model)
    samples = as_samples(draw(backend, temperature=temperature))
    plain = plain_logprobs(backend, samples, temperature or 1.0)
    for sample, logps in zip(samples, plain, strict=True):
        assert np.allclose(chosen(logps, sample).detach(), sample.rollout.logprobs, atol=1e-5)
        nats = float(-(logps.exp() * logps).sum(-1).mean().detach())
        assert sample.rollout.mean_entropy == pytest.approx(nats, abs=1e-5)


def test_tokens_come_as_often_as_the_policy_says(model):
    backend = stirred(model)
    (group,) = draw(backend, UNEVEN[:1], group_size=20_000, max_tokens=1, temperature=0.7)
    counts = np.bincount([r.tokens[0] for r in group.rollouts], minlength=len(CHARACTERS) + 2)
    probabilities = plain_logprobs(backend, as_samples([group])[:1], 0.7)[0][0].exp().detach().numpy()
    expected = probabilities * 20_000
    statistic = ((counts - expected) ** 2 / expected).sum()
    assert statistic < 80  # chi-square, 39 degrees of freedom: exceeded once in 10,000 seeds


def test_a_batch_that_is_cut_draws_whole_groups_in_order(model):
    backend = stirred(model, tokens_per_sampling_batch=100)
    groups = draw(backend, group_size=4)
    assert [g.prompt for g in groups] == list(UNEVEN)
    assert all(r.prompt is g.prompt for g in groups for r in g.rollouts)
    samples = as_samples(groups)
    for sample, logps in zip(samples, plain_logprobs(backend, samples, 0.8), strict=True):
        assert np.allclose(chosen(logps, sample).detach(), sample.rollout.logprobs, atol=1e-5)


def test_an_end_token_ends_a_rollout_and_leaves_no_text(model):
    backend = open_backend(model)
    groups = draw(backend, group_size=64, max_tokens=20, temperature=1.5)
    end = backend.text.end_ids[0]
    rollouts = [r for g in groups for r in g.rollouts]
    assert any(not r.truncated for r in rollouts)
    for rollout in rollouts:
        assert (rollout.tokens[-1] == end) is not rollout.truncated
        assert end not in rollout.tokens[:-1]
        assert rollout.text == "".join(rollout.pieces)
        assert "<" not in rollout.text


def test_a_stop_string_ends_a_rollout_and_is_cut_off(model):
    backend = open_backend(model, stop=["1", "b2"])
    rollouts = [r for g in draw(backend, group_size=64, max_tokens=30, temperature=2.0) for r in g.rollouts]
    at_string = [r for r in rollouts if not r.truncated and r.tokens[-1] not in backend.text.end_ids]
    assert len(at_string) > 20
    for rollout in rollouts:
        assert "1" not in rollout.text
        assert "b2" not in rollout.text
        assert "1" not in "".join(rollout.pieces[:-1])
    assert all("".join(r.pieces).endswith(("1", "b2")) for r in at_string)


def test_the_same_seed_draws_the_same_and_another_does_not(model):
    def texts(seed: int) -> list[str]:
        return [r.text for g in draw(open_backend(model, seed=seed)) for r in g.rollouts]

    assert texts(3) == texts(3) != texts(4)


def test_no_completion_goes_past_the_model_s_context(model):
    backend = open_backend(model)
    prompts = (Prompt(0, "1" * 60, ""), Prompt(1, "1" * 40, ""))
    groups = backend.sample(prompts, Sampling(32, 1000, 0.3))
    assert max(len(r.tokens) for r in groups[0].rollouts) <= 4
    assert max(len(r.tokens) for r in groups[1].rollouts) <= 24


def test_a_prompt_that_fills_the_context_is_refused_by_name(model):
    with pytest.raises(ConfigError, match=r"^prompt 7 has 64"):
        open_backend(model).check_prompts([Prompt(7, "1" * 64, "")])


def test_weights_without_bounds_are_told(model):
    backend = open_backend(model)
    with torch.no_grad():
        next(iter(backend.policy.trainable().values())).fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="log-probabilities are not finite"):
        draw(backend)


def test_a_chat_template_frames_prompts(tmp_path: Path):
    path = save_tiny_model(tmp_path / "chat", hidden=32)
    (tmp_path / "chat" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m['role'] }}={{ m['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}a={% endif %}"
    )
    plain = open_backend(path)
    framed = open_backend(path, chat_template=True, system_prompt="sum up")
    wanted = plain.text.encode(Prompt(0, "system=sum up user=39= a=", ""))
    assert framed.text.encode(Prompt(0, "39=", "")) == wanted


def test_a_file_s_chat_template_replaces_the_tokenizer_s(tmp_path: Path):
    path = save_tiny_model(tmp_path / "chat", hidden=32)
    (tmp_path / "chat" / "chat_template.jinja").write_text("{{ raise_exception('not this one') }}")
    (tmp_path / "own.jinja").write_text("{{ messages[0]['content'] }} a=")
    framed = open_backend(path, chat_template=str(tmp_path / "own.jinja"))
    assert framed.text.encode(Prompt(0, "39=", "")) == open_backend(path).text.encode(Prompt(0, "39= a=", ""))


def test_variables_of_a_chat_template_are_set(tmp_path: Path):
    path = save_tiny_model(tmp_path / "chat", hidden=32)
    (tmp_path / "chat" / "chat_template.jinja").write_text(
        "{{ messages[0]['content'] }}{{ '' if enable_thinking | default(true) else ' no' }}"
    )
    plain = open_backend(path)
    for variables, wanted in (({}, "39="), ({"enable_thinking": False}, "39= no")):
        framed = open_backend(path, chat_template=True, chat_template_kwargs=variables)
        assert framed.text.encode(Prompt(0, "39=", "")) == plain.text.encode(Prompt(0, wanted, ""))


def test_a_sample_s_tokens_and_texts_agree(model):
    for group in draw(open_backend(model)):
        for rollout in group.rollouts:
            assert len(rollout.tokens) == len(rollout.logprobs) == len(rollout.pieces)
            assert isinstance(TrainingSample(rollout, rollout.logprobs, 1.0).token_weight, float)


def test_a_long_completion_is_the_one_that_is_run_anew_for_each_token(model):
    backend = stirred(model)
    backend.text.end_ids = (10**6,)  # no end: the cache's buffers grow, and are copied when rows are
    (group,) = draw(backend, UNEVEN[:1], group_size=2, max_tokens=60, temperature=0.0)
    assert list(group.rollouts[1].tokens) == without_cache(backend, UNEVEN[0], 60)


def test_only_prompts_that_may_be_too_long_are_looked_at_beforehand(model):
    backend = open_backend(model)
    encoded = []
    plain = backend.text.encode
    backend.text.encode = lambda prompt: encoded.append(prompt.id) or plain(prompt)
    backend.check_prompts([Prompt(number, f"{number}=", "") for number in range(100)])
    assert encoded == [0]


def test_a_prompt_that_is_too_long_only_as_it_is_sampled_is_refused(model):
    with pytest.raises(ConfigError, match="prompt 7 has 64"):
        draw(open_backend(model), [Prompt(7, "1" * 64, "")])


@pytest.mark.parametrize(
    ("cut", "kept"),
    [
        (Cut(1.0, 2, 0.0), [0.5, 0.3]),
        (Cut(0.8, 0, 0.0), [0.5, 0.3]),
        (Cut(0.81, 0, 0.0), [0.5, 0.3, 0.15]),
        (Cut(1e-6, 0, 0.0), [0.5]),
        (Cut(1.0, 0, 0.29), [0.5, 0.3, 0.15]),
        (Cut(0.6, 2, 0.0), [0.5]),  # the most likely of the two that are left has 0.625
        (Cut(1.0, 9, 0.0), [0.5, 0.3, 0.15, 0.05]),
    ],
)
def test_what_is_left_of_a_distribution_keeps_its_proportions(cut, kept):
    order = torch.tensor([2, 0, 3, 1])
    logp = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    wanted = torch.tensor([kept + [0.0] * (4 - len(kept))]) / sum(kept)
    assert torch.allclose(cut.of(logp[:, order]).exp(), wanted[:, order])


def test_log_probabilities_are_those_that_tokens_were_drawn_with(model):
    backend = open_backend(model, top_k=3)
    stir(backend)
    groups = draw(backend, max_tokens=6, temperature=0.8)
    samples = as_samples(groups)
    for sample, logps in zip(samples, plain_logprobs(backend, samples, 0.8), strict=True):
        left = logps.topk(3)
        wanted = left.values.log_softmax(-1)
        places = (left.indices == torch.tensor(sample.rollout.tokens)[:, None]).nonzero()[:, 1]
        assert len(places) == len(sample.rollout.tokens)
        drawn = wanted[torch.arange(len(places)), places].detach()
        assert np.allclose(drawn, sample.rollout.logprobs, atol=1e-4)
        assert 0 <= sample.rollout.mean_entropy <= np.log(3) + 1e-6
