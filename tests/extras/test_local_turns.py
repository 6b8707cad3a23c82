"""Turns of a chat model: earlier tokens stay as sampled, and the template frames the new message."""

from __future__ import annotations

import random
import re
import string
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from retrain.backends import Optimization, Sampling
from retrain.backends.text import Text, check_turns, tokens_given
from retrain.base.errors import ConfigError, PromptError
from retrain.base.rollouts import NextTurn, Prompt, Rollout, TrainingSample
from retrain.config.schema import EnvironmentSection
from retrain.records.metrics import read_metrics
from retrain.records.samples import read_samples
from retrain.trainer import worker
from retrain.trainer.episodes import Episodes
from retrain.trainer.turn_sampling import TurnSampler
from tests.extras.local_policies import loss_named, open_backend
from tests.extras.tiny_models import save_tiny_model
from tests.trainer.test_trainer import make_run

pytestmark = pytest.mark.extras
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TRIMMED = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content | trim }}<|im_end|>"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LAST_ONLY = "<|im_start|>{{ messages[-1].content }}<|im_end|><|im_start|>"
NUMBERED = "{% for m in messages %}{{ loop.revindex }}{{ m.content }}<|im_end|>{% endfor %}"
THOUGHTLESS = (
    "{# <think> #}{% for m in messages %}<|im_start|>"
    "{{ m.content.split('</think>')[-1] | trim }}<|im_end|>{% endfor %}"
    "<|im_start|>"
)
EMPTY_THOUGHT = (  # as Qwen3's
    THOUGHTLESS + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
)
WITHOUT = {"enable_thinking": False}
END, OTHER_END = "<|im_end|>", "<eos>"


def tokenizer(template: str) -> PreTrainedTokenizerFast:
    """One token per printable character, and those of a chat."""
    special = ["<pad>", "<eos>", "<|im_start|>", END]
    words = {word: number for number, word in enumerate([*special, *string.printable])}
    made = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, pad_token="<pad>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<eos>"]})
    fast.chat_template = template
    return fast


def text_of(template: str, **options: object) -> Text:
    made = tokenizer(template)
    return Text(made, "m", chat=True, system="", ends=[made.convert_tokens_to_ids(OTHER_END)], **options)


def said_after(text: Text, rollout: Rollout, observation: str) -> Rollout:
    given = tokens_given(text, NextTurn(rollout, (("user", observation),), 9))
    return replace(rollout, given=(*rollout.given, given))


@pytest.mark.parametrize("template", [SMOLLM2, TRIMMED])
def test_random_turns_are_never_tokenized_again(template: str) -> None:
    """Here, with the templates of tools and with a real model's: 2,000 turns each, over 10,000."""
    made = tokenizer(template)
    take_random_turns(text_of(template), made, made.convert_tokens_to_ids(list("ab <|im_start")))


def take_random_turns(text: Text, made: Any, letters: list[int], episodes: int = 500) -> None:
    """Check that no sampled token of random episodes changes, and that the template frames what is told."""
    check_turns(text)
    choice = random.Random(0)
    for _ in range(episodes):
        rollout = Rollout(Prompt(0, "2+3?", ""), "", (), np.zeros(0), (), truncated=False)
        for turn in range(4):
            before = rollout.placed()[0]
            end = choice.choice([(), text.end_ids[:1], text.end_ids[1:]])
            sampled = (*choice.choices(letters, k=choice.randrange(1, 6)), *end)
            rollout = replace(rollout, tokens=rollout.tokens + sampled)
            rollout = said_after(text, rollout, f"no {turn}")
            after = rollout.placed()[0]
            assert after[: len(before) + len(sampled)] == before + sampled
            told = made.decode(rollout.given[-1].tokens)
            assert f"<|im_start|>user\nno {turn}<|im_end|>" in told
            assert told.count("<|im_start|>assistant") == 1


def test_the_text_of_a_turn_has_characters_that_are_several_tokens() -> None:
    words = {
        word: number for number, word in enumerate(["<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())])
    }
    bytewise = Tokenizer(models.BPE(words, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bytewise.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<eos>")
    text, said = Text(made, "m", chat=False, system=""), "für 日本 🙂🙂!"
    tokens = (*text.tokens_of(said), made.eos_token_id)
    rollout = Rollout(Prompt(0, "?", ""), "", tokens, np.zeros(len(tokens)), text.pieces(tokens))
    assert rollout.turns == [said]
    assert len(rollout.pieces) == len(tokens)
    cut_off = text.pieces(tokens[-4:])  # in the middle of a character
    assert cut_off[-2:] == ("!", "")


def test_a_whole_turn_is_followed_by_what_the_template_would_show() -> None:
    text, made = text_of(SMOLLM2), tokenizer(SMOLLM2)
    prompt = Prompt(0, "2+3?", "")
    tokens = tuple(made("six" + END, add_special_tokens=False)["input_ids"])
    rollout = Rollout(prompt, "six", tokens, np.zeros(4), ("s", "i", "x", ""), truncated=False)
    after = said_after(text, rollout, "no")
    whole = text.shown((("user", "2+3?"), ("assistant", "six"), ("user", "no")))
    assert text.encode(prompt) + after.placed()[0] == text.tokens_of(whole)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (LAST_ONLY, "does not show the assistant's turns as they are"),
        (NUMBERED, "renders earlier turns of a conversation in another way"),
        (THOUGHTLESS, "drops the reasoning of earlier turns.* enable_thinking = false } trains it without"),
        (EMPTY_THOUGHT, "drops the reasoning of earlier turns, which the policy would still read, so"),
    ],
)
def test_a_template_that_cannot_be_extended_is_refused(template: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_turns(text_of(template))


def test_a_model_that_does_not_reason_may_have_a_template_that_drops_reasoning() -> None:
    check_turns(text_of(THOUGHTLESS, template_kwargs=WITHOUT))
    with pytest.raises(ConfigError, match="renders earlier turns of a conversation in another way"):
        check_turns(text_of(EMPTY_THOUGHT, template_kwargs=WITHOUT))


def test_a_template_that_drops_reasoning_renders_each_turn_anew(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", hidden=32, context=256, characters=string.printable)
    made = AutoTokenizer.from_pretrained(model)
    made.chat_template = THOUGHTLESS
    made.save_pretrained(model)
    tables = {
        "model": {"model": model},
        "training": {"batch_size": 2, "group_size": 2, "max_tokens": 6, "max_steps": 1, "seed": 0},
        "data": {"task": "successor"},
        "backend": {"backend": "local", "options": {"chat_template": True, "device": "cpu"}},
        "environment": {"environment": "tests.extras.test_local_turns.Twice", "max_turn_tokens": 3},
    }
    refused = make_run(tmp_path / "refused", tables)
    assert worker.run(refused.directory, threading.Event()) == 2
    assert "separate_turns = true, which trains each turn" in refused.attempts.read_text()
    tables["environment"]["separate_turns"] = True
    run = make_run(tmp_path / "run", tables)
    assert worker.run(run.directory, threading.Event()) == 0
    (row,) = read_metrics(run.directory)
    assert (row["turns_mean"], row["separate_samples"], row["episode_errors"]) == (2.0, 4, 0)
    for sample in read_samples(run.samples):
        assert re.fullmatch(r"(?s)user: \d+=?\nassistant: .*\nuser: again", sample["prompt"])


class Twice:
    """Asks a second time."""

    def start(self, prompt: Prompt) -> str:
        self.turns = 0
        return prompt.text

    def step(self, completion: str) -> tuple[str, float, bool]:
        self.turns += 1
        return "again", float(len(completion)), self.turns == 2


def test_a_model_samples_turns_and_trains_on_its_own_tokens_only(tmp_path: Path) -> None:
    backend = open_backend(save_tiny_model(tmp_path / "model", hidden=32, context=48))
    backend.text.end_ids = ()  # turns are as long as their limits
    turn = Sampling(group_size=1, max_tokens=4, temperature=1.0)
    prompts = [Prompt(0, "7=", ""), Prompt(1, "12+30=", "")]
    first = [group.rollouts[0] for group in backend.sample(prompts, turn)]
    asked = [NextTurn(one, (("user", "no 3"),), limit) for one, limit in zip(first, (4, 2), strict=True)]
    second = [rollout for rollout in backend.extend(asked, turn) if rollout is not None]
    for before, after, limit in zip(first, second, (4, 2), strict=True):
        assert after.tokens[: len(before.tokens)] == before.tokens
        assert len(after.tokens) - len(before.tokens) == limit
        assert [given.text for given in after.given] == ["no 3"]
    alone = backend.extend([replace(asked[1], max_tokens=1)], replace(turn, seed=1))[0]
    beside = backend.extend([replace(asked[1], max_tokens=1), asked[0]], replace(turn, seed=1))[0]
    assert alone
    assert beside
    assert beside.mean_entropy == pytest.approx(alone.mean_entropy)
    full = NextTurn(second[0], (("user", "x" * 40),), 4)
    assert backend.extend([full], turn) == [None]
    with pytest.raises(
        PromptError, match="an observation has 60 tokens, which leaves no room in the model's"
    ):
        backend.extend([replace(full, messages=(("user", "x" * 60),))], turn)
    count = sum(len(one.tokens) for one in second)
    samples = [TrainingSample(one, np.ones(len(one.tokens)), 1.0 / count) for one in second]
    stats = backend.update(samples, loss_named("importance_sampling"), Optimization(lr=1e-3))
    assert stats.loss == pytest.approx(-1.0, rel=1e-3)  # every ratio is 1


def test_messages_that_the_model_cannot_read_cost_their_episode(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", hidden=32, context=48)
    template = (
        "{% for m in messages %}{% if m.role == 'tool' %}{{ 1 / 0 }}{% endif %}{{ m.content }};{% endfor %}"
    )
    made = AutoTokenizer.from_pretrained(model)
    made.chat_template = template
    made.save_pretrained(model)
    numbers = iter(range(3))

    class Some:
        def __init__(self) -> None:
            self.number = next(numbers)

        def start(self, prompt: Prompt) -> str:
            return "1" * 60 if self.number == 0 else "7="

        def step(self, completion: str) -> object:
            return [{"role": "tool" if self.number == 1 else "user", "content": "3"}], 1.0, False

    sample = TurnSampler(open_backend(model, chat_template=True), 4)
    episodes = Episodes(EnvironmentSection(max_turns=2), Some, sample)
    (group,) = episodes.play([Prompt(0, "7=", "")], Sampling(3, 12, 1.0))
    episodes.close()
    said = [one.episode.error for one in group.rollouts if one.episode]
    assert said[0].startswith("prompt 0 has 61 tokens, which leaves no room in the model's context")
    assert "the tokenizer's template fails" in said[1]
    assert said[2] == ""


@pytest.mark.parametrize("what", ["a\ud800b", ""])
def test_a_text_without_tokens_costs_its_episode_and_not_the_run(what: str) -> None:
    plain = Text(tokenizer(SMOLLM2), "m", chat=False, system="")
    with pytest.raises(PromptError, match=r"which no tokenizer reads|which has no token"):
        plain.encode(Prompt(0, what, ""))
