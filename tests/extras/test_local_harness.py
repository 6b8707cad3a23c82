"""Programs that call a model's policy: what it samples, here or on a server, is what is trained on."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from retrain.backends import Optimization, Sampling
from retrain.backends.local.policy import LocalBackend
from retrain.base.rollouts import Prompt, Rollout, TrainingSample
from retrain.config.schema import EnvironmentSection
from retrain.plugins.environments.endpoint.session import Rendering
from retrain.plugins.environments.harness import Program
from retrain.trainer.episodes import Episodes
from retrain.trainer.programs import Programs
from retrain.trainer.turn_sampling import TurnSampler
from tests.asking import complete, post, spoken, user
from tests.extras.completions_server import serve
from tests.extras.local_policies import loss_named, open_backend, stir
from tests.extras.test_tool_templates import QWEN
from tests.extras.tiny_models import save_tiny_model

pytestmark = pytest.mark.extras
TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    saved = save_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, context=96)
    made = AutoTokenizer.from_pretrained(saved)
    made.chat_template = TEMPLATE
    made.save_pretrained(saved)
    return saved


def played(backend: LocalBackend, run: Any, count: int = 4) -> list[Rollout]:
    settings = EnvironmentSection()
    rendering = Rendering(
        True, backend.read, backend.shown, lambda known: backend.call_form(json.loads(known))
    )
    programs = Programs(settings, lambda: Program(run), rendering)
    sample = TurnSampler(backend, 0)
    episodes = Episodes(settings, lambda: Program(run), sample, programs)
    try:
        (group,) = episodes.play([Prompt(0, "7=", "")], Sampling(count, 24, 1.0))
    finally:
        episodes.close()
    assert not [one.episode.error for one in group.rollouts if one.episode and one.episode.error]
    return list(group.rollouts)


def converse(answers: list[Any]) -> Any:
    def run(prompt: Prompt, base_url: str, api_key: str) -> float:
        said = [{"role": "system", "content": "sums"}, user(prompt.text)]
        for _ in range(3):
            answers.append(complete(base_url, api_key, said, max_tokens=5))
            said += [spoken(answers[-1]), user("no 3")]
        complete(base_url, api_key, [user("another"), {"role": "assistant", "content": "1"}, user("2")])
        return 1.0

    return run


@pytest.mark.parametrize("engine", ["torch", "openai"])
def test_every_sample_of_a_program_is_the_policys_own(model: str, engine: str) -> None:
    with serve(model) as server:
        options = {"engine": engine, "engine_url": server.url} if engine == "openai" else {}
        backend = open_backend(model, chat_template=True, **options)
        stir(backend)
        rollouts = played(backend, converse([]))
        assert [len(one.samples) for one in rollouts] == [2] * 4
        samples = [sample for one in rollouts for sample in one.samples]
        count = sum(len(one.tokens) for one in samples)
        trained = [TrainingSample(one, np.ones(len(one.tokens)), 1.0 / count) for one in samples]
        stats = backend.update(trained, loss_named("importance_sampling"), Optimization(lr=1e-3))
        backend.close()
    assert stats.loss == pytest.approx(-1.0, rel=1e-3)  # every ratio is 1


def test_the_tokens_before_a_turn_are_those_of_the_template_and_earlier_turns(model: str) -> None:
    backend, answers = open_backend(model, chat_template=True), []
    played(backend, converse(answers), count=1)
    made = AutoTokenizer.from_pretrained(model)
    read: list[int] = made("ssums;u7=;a", add_special_tokens=False)["input_ids"]
    for answer in answers:
        (choice,) = answer["choices"]
        assert answer["prompt_token_ids"] == read
        assert answer["usage"]["prompt_tokens"] == len(read)
        has_ended = choice["finish_reason"] == "stop"
        given = made(";uno 3;a", add_special_tokens=False)["input_ids"]
        read = read + choice["token_ids"] + given
        assert has_ended == (choice["token_ids"][-1] in backend.text.end_ids)


def generate(base_url: str, api_key: str, ids: list[int], **more: Any) -> tuple[int, Any]:
    """Ask as clients do that render conversations themselves: not below /v1."""
    body = {"model": "policy", "token_ids": ids, "sampling_params": {"logprobs": 1, **more}}
    return post(base_url.removesuffix("/v1"), api_key, body, "/inference/v1/generate")


def test_tokens_in_and_tokens_out_are_one_sample(model: str) -> None:
    backend = open_backend(model, chat_template=True)
    stir(backend)
    made, contexts, asked = AutoTokenizer.from_pretrained(model), [], []
    first, given = (made(text, add_special_tokens=False)["input_ids"] for text in ("ssums;u7=;a", ";uno 3;a"))

    def run(prompt: Prompt, base_url: str, api_key: str) -> float:
        ids = [*first]
        for _ in range(3):
            status, answer = generate(base_url, api_key, ids, max_tokens=5)
            assert status == 200, answer
            (choice,) = answer["choices"]
            asked.append(choice)
            ids += choice["token_ids"]
            contexts.append([*ids])
            ids += given
        return 1.0

    (rollout,) = played(backend, run, count=1)
    assert rollout.samples == (rollout,)
    assert list(backend.read(rollout)) == contexts[-1]
    assert [token for one in asked for token in one["token_ids"]] == list(rollout.tokens)
    told = [entry for one in asked for entry in one["logprobs"]["content"]]
    assert [entry["logprob"] for entry in told] == rollout.logprobs.tolist()
    assert [entry["token"] for entry in told] == [f"token_id:{token}" for token in rollout.tokens]
    assert [one.text for one in rollout.given] == ["uno 3a"] * 2  # no token is a semicolon
    assert rollout.prompt.shown.startswith("ssumsu7=a\n(token ids ")
    trained = [TrainingSample(rollout, np.ones(len(rollout.tokens)), 1.0 / len(rollout.tokens))]
    stats = backend.update(trained, loss_named("importance_sampling"), Optimization(lr=1e-3))
    assert stats.loss == pytest.approx(-1.0, rel=1e-3)  # every ratio is 1


def test_tokens_that_continue_nothing_are_a_sample_of_their_own(model: str) -> None:
    backend, refused = open_backend(model, chat_template=True), []

    def run(prompt: Prompt, base_url: str, api_key: str) -> float:
        _, answer = generate(base_url, api_key, [5, 6], max_tokens=2)
        generate(base_url, api_key, [5, 7, *answer["choices"][0]["token_ids"], 8], max_tokens=2)
        complete(base_url, api_key, [user("7=")], max_tokens=2)
        refused.extend(generate(base_url, api_key, ids) for ids in ([], [-1], [5, 10**6], [5] * 200))
        return 1.0

    (rollout,) = played(backend, run, count=1)
    assert [one.prompt.ids[:2] for one in rollout.samples] == [(), (5, 6), (5, 7)]
    assert [status for status, _ in refused] == [400] * 4
    said = [answer["error"]["message"] for _, answer in refused]
    assert said[0].startswith("token_ids: List should have at least 1 item")
    assert "token_ids.0: Input should be greater than or equal to 0" in said[1]
    assert "gives token 1000000, and the model knows" in said[2]
    assert "prompt 0 has 200 tokens" in said[3]


def test_functions_of_a_request_are_shown_by_the_template(tmp_path: Path) -> None:
    saved = save_tiny_model(tmp_path / "model", hidden=32, context=512, characters=string.printable)
    made = AutoTokenizer.from_pretrained(saved)
    made.chat_template = QWEN
    made.save_pretrained(saved)
    backend, answers = open_backend(saved, chat_template=True), []
    add = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}

    def run(prompt: Prompt, base_url: str, api_key: str) -> float:
        for tools in ([add], []):
            answers.append(complete(base_url, api_key, [user("2 3")], tools=tools, max_tokens=3))
        return 1.0

    (rollout,) = played(backend, run, count=1)
    said = [{"role": "user", "content": "2 3"}]
    for answer, tools in zip(answers, ([add], None), strict=True):
        whole = made.apply_chat_template(said, tools=tools, add_generation_prompt=True, tokenize=False)
        assert answer["prompt_token_ids"] == made(whole, add_special_tokens=False)["input_ids"]
    assert len(rollout.samples) == 2
    samples = [TrainingSample(one, np.ones(len(one.tokens)), 1.0 / 6) for one in rollout.samples]
    stats = backend.update(samples, loss_named("importance_sampling"), Optimization(lr=1e-3))
    count = sum(len(one.tokens) for one in rollout.samples)
    assert stats.loss == pytest.approx(-count / 6, rel=1e-3)  # every ratio is 1


def test_a_conversation_that_fills_the_context_ends_there(model: str) -> None:
    codes: list[str] = []

    def run(prompt: Prompt, base_url: str, api_key: str) -> float:
        said = [user("?")]
        answer = complete(base_url, api_key, said, max_tokens=4)
        for text in ("1" * 90, "1" * 200):
            status, refusal = post(base_url, api_key, {"messages": [*said, spoken(answer), user(text)]})
            assert status == 400
            codes.append(refusal["error"]["code"])
        status, refusal = post(base_url, api_key, {"messages": [user("1" * 200)]})
        assert status == 400
        codes.append(refusal["error"]["code"])
        return 0.5

    (rollout,) = played(open_backend(model, chat_template=True), run, count=1)
    assert rollout.episode
    assert (rollout.truncated, rollout.episode.reward) == (True, 0.5)
    assert codes == ["context_length_exceeded", "invalid_prompt", "invalid_prompt"]  # longer than the context
