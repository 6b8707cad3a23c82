"""Calls a reward function: for one completion, or once for many if it has TRL's signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from retrain.errors import ConfigError
from retrain.registry import lacking_problem
from retrain.rewards import Answer
from retrain.rollouts import Prompt


def call_for_one(function: Callable[..., Any], answer: Answer, params: Mapping[str, Any]) -> Any:
    """Return what a function returns for a completion and its prompt, or the answer if it names that."""
    reference = answer.prompt.answer if _names_answer(function) else answer.prompt
    return function(answer.completion, reference, **params)


@lru_cache
def _names_answer(function: Callable[..., Any]) -> bool:
    try:
        return list(inspect.signature(function).parameters)[1:2] == ["answer"]
    except (TypeError, ValueError):  # written in C
        return False


def call_with_columns(
    function: Callable[..., Any], answers: Sequence[Answer], params: Mapping[str, Any]
) -> Any:
    """Return what a function returns for the names in `SPEC.by_name_given` and the columns of prompts' rows.

    It gets all of them if it takes any keyword, else those that it names, and `params`.

    Raises:
        ConfigError: it needs a column that the task has not.
    """
    given = {**_columns_of(answers), **params}
    if wrong := lacking_problem(function, given):
        raise ConfigError(f"the reward {wrong}")
    known = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in known):
        return function(**given)
    return function(**{p.name: given[p.name] for p in known if p.name in given})


def _columns_of(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return what TRL passes, one value per completion; with messages in the form that TRL has for them."""
    prompts = [answer.prompt for answer in answers]
    shared = set(prompts[0].row).intersection(*(prompt.row for prompt in prompts))
    return {
        "answer": [prompt.answer for prompt in prompts],
        **{name: [prompt.row[name] for prompt in prompts] for name in shared},
        "completion_ids": [list(answer.tokens) for answer in answers],
        "trainer_state": answers[0].state,
        "prompts": [_said(prompt, prompt.messages, prompt.text) for prompt in prompts],
        "completions": [_said(a.prompt, [("assistant", a.completion)], a.completion) for a in answers],
    }


def _said(prompt: Prompt, messages: Iterable[tuple[str, str]], text: str) -> list[dict[str, str]] | str:
    return [{"role": role, "content": said} for role, said in messages] if prompt.messages else text
