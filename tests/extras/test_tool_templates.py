"""Functions in chat templates: shown by the template, and called in the form that it writes."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from retrain.backends import Sampling, local
from retrain.backends.text import offer_functions
from retrain.base import registry
from retrain.base.errors import ConfigError
from retrain.base.rollouts import CallForm, Prompt
from retrain.config.load import parse
from retrain.config.schema import EnvironmentSection
from retrain.plugins.environments import opened
from retrain.plugins.environments.tools import ToolCall, calls_in
from retrain.plugins.tasks import Task
from retrain.trainer.episodes import Episodes
from retrain.trainer.turn_sampling import TurnSampler
from tests.extras.local_policies import open_backend
from tests.extras.test_local_turns import EMPTY_THOUGHT, SMOLLM2, take_random_turns, text_of, tokenizer
from tests.extras.tiny_models import save_tiny_model

pytestmark = pytest.mark.extras
LINE = "{{ '\n' }}"  # a newline that follows a block would be left out
HEAD = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}" + LINE + "{% endfor %}"
    "<|im_end|>\n{% endif %}"
)
TAIL = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CALL = '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
CONTENT = "{% if m.content %}" + LINE + "{{ m.content }}{% endif %}"
QWEN = (  # as Qwen2.5 and Hermes
    HEAD + "{% for m in messages %}"
    "{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}" + CONTENT + "{% for call in m.tool_calls or [] %}"
    "{{ '\n<tool_call>\n' }}"
    + CALL
    + "{{ '\n</tool_call>' }}{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    + TAIL
)
LLAMA = (
    HEAD + "{% for m in messages %}<|im_start|>{{ 'ipython' if m.role == 'tool' else m.role }}\n"
    "{% if m.tool_calls %}"
    '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
    "{{ m.tool_calls[0].function.arguments | tojson }}}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}" + TAIL
)
LISTED = QWEN.replace("{{ '\n<tool_call>\n' }}", "{{ '\n<eos> [' }}").replace("{{ '\n</tool_call>' }}", "]")
TAGGED = QWEN.replace(CALL, "<function={{ call.function.name }}>{{ call.function.arguments.x58218 }}")
ALONE = QWEN.replace("{% if m.role == 'tool' %}", "{% if m.role == 'tool' %}{{ 1 / 0 }}")
UNCALLED = HEAD + SMOLLM2
HERMES = CallForm("<tool_call>", "name", "arguments")


def schema(name: str = "add") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "Add.", "parameters": {}}}


@pytest.mark.parametrize(
    ("template", "form", "written"),
    [
        (
            QWEN,
            CallForm("<tool_call>", "name", "arguments"),
            '<tool_call>{"name": "f", "arguments": {"x": 1}}',
        ),
        (LLAMA, CallForm("", "name", "parameters"), '{"name": "f", "parameters": {"x": 1}}'),
        (LISTED, CallForm("", "name", "arguments"), ' [{"name": "f", "arguments": {"x": 1}}]'),
    ],
)
def test_the_form_of_a_call_is_that_of_the_template(template: str, form: CallForm, written: str) -> None:
    assert offer_functions(text_of(template), [schema()]) == form
    assert calls_in(written, form) == [ToolCall("f", {"x": 1})]


@pytest.mark.parametrize("template", [QWEN, LLAMA, LISTED])
def test_random_turns_are_never_tokenized_again(template: str) -> None:
    made = tokenizer(template)
    take_random_turns(text_of(template), made, made.convert_tokens_to_ids(list("ab <|im_start")))


def test_the_policy_is_shown_the_functions_in_every_conversation() -> None:
    text = text_of(QWEN)
    offer_functions(text, [schema("add"), schema("sub")])
    assert text.shown((("user", "1"),)).startswith(f"<|im_start|>system\n{json.dumps(schema('add'))}\n")


def test_reasoning_is_kept_between_a_call_and_its_result() -> None:
    """As Qwen3's template does, which drops it before a user's message only."""
    kept = QWEN.replace(
        "{% if m.content %}\n{{ m.content }}", "{# <think> #}{% if m.content %}\n{{ m.content }}"
    )
    offer_functions(text_of(kept), [schema()])


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (SMOLLM2, "chat template does not show functions to the policy; name a file with another in"),
        (UNCALLED, "does not write calls of functions as JSON"),
        (TAGGED, "does not write calls of functions as JSON with a name and arguments"),
        (ALONE, "the tokenizer's template fails on a conversation"),
        (HEAD + EMPTY_THOUGHT, "drops the reasoning of earlier turns"),
    ],
)
def test_a_template_without_support_for_tools_is_refused(template: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        offer_functions(text_of(template), [schema()])


def chat_model(directory: Path, template: str | None) -> str:
    model = save_tiny_model(directory, hidden=32, context=4096, characters=string.printable)
    made = AutoTokenizer.from_pretrained(model)
    made.chat_template = template
    made.save_pretrained(model)
    return model


def test_a_model_reads_what_its_calls_return(tmp_path: Path) -> None:
    """The random model's turns are replaced by a call, which only the environment reads."""
    backend = open_backend(chat_model(tmp_path / "model", QWEN), chat_template=True)
    as_text = backend.text.completions
    backend.text.completions = lambda rows: ['<tool_call>{"name": "python", "arguments": {}}'] * len(rows)
    options = {"tools": ["python"], "sandbox": "process"}
    form = backend.offer_tools([schema("python")])
    with opened(registry.plugin("environments", "tools"), options, form) as open_one:
        sample = TurnSampler(backend, 4)
        episodes = Episodes(
            EnvironmentSection("tools", options, max_turns=3, max_turn_tokens=4), open_one, sample, form=form
        )
        (group,) = episodes.play([Prompt(0, "7=", "")], Sampling(1, 12, 1.0))
        episodes.close()
    (rollout,) = group.rollouts
    assert rollout.episode
    assert rollout.episode.error == ""
    assert (rollout.episode.tool_calls, rollout.episode.tool_errors, rollout.truncated) == (3, 3, True)
    assert [given.text for given in rollout.given] == ["error: python: program: Field required"] * 2
    (shown,) = as_text([rollout.given[0].tokens])
    assert "error" in shown


def test_functions_need_the_chat_template(tmp_path: Path) -> None:
    backend = open_backend(chat_model(tmp_path / "model", None))
    with pytest.raises(ConfigError, match="functions are shown in the model's chat template"):
        backend.offer_tools([schema()])


@pytest.mark.parametrize(
    ("template", "options", "said"),
    [
        (QWEN, {}, "functions are shown in the model's chat template; set it to true"),
        (SMOLLM2, {"chat_template": True}, "chat template does not show functions to the policy"),
        (QWEN, {"chat_template": True}, ""),
    ],
)
def test_what_functions_lack_is_told_before_the_run(
    tmp_path: Path, template: str, options: dict[str, Any], said: str
) -> None:
    """Also by a template in a file of its own, as transformers saves it."""
    model = chat_model(tmp_path / "model", template)
    tables = {
        "model": {"model": model},
        "backend": {"backend": "local", "options": options},
        "environment": {"environment": "tools"},
    }
    (problem,) = map(str, local.check(parse(tables, "c.toml"), Task((), (), "", 0)) or [""])
    assert said in problem
    assert bool(said) == bool(problem)
