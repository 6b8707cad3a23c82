"""Calls of functions in OpenAI's form: read from what the policy wrote, and shown again as it wrote them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from retrain.base.errors import ConfigError
from retrain.base.rollouts import CallForm
from retrain.plugins.environments.endpoint.chat import Called, Message, Refusal
from retrain.plugins.environments.tools.calls import calls_in

FormOf: TypeAlias = Callable[[str], CallForm]  # JSON schemas -> how the model's template writes calls


class Calling:
    """The calls of one episode."""

    def __init__(self, form_of: FormOf | None) -> None:
        """Without `form_of`, the policy can be shown no functions."""
        self._form_of = form_of
        self._written: dict[tuple[str, ...], str] = {}  # content and calls -> the policy's turn
        self._names = itertools.count(1)
        self.count = 0

    def check(self, schemas: str) -> None:
        """Refuse functions that cannot be shown to the policy."""
        if not schemas:
            return
        if self._form_of is None:
            raise Refusal("tools: the policy has no chat template that shows functions", param="tools")
        try:
            self._form_of(schemas)
        except ConfigError as error:
            raise Refusal(f"tools: {error}", param="tools") from error

    def as_written(self, message: Message) -> tuple[str, str]:
        """Return role and content of a message, a turn with calls as the policy wrote it."""
        role, content = message.plain()
        if not message.tool_calls:
            return role, content
        written = self._written.get((content, *(call.key for call in message.tool_calls)))
        if written is None:
            why = "tool_calls: not what the policy wrote in this episode; repeat its messages as you got them"
            raise Refusal(why, param="messages")
        return role, written

    def read(self, text: str, schemas: str) -> tuple[str, tuple[Mapping[str, Any], ...]]:
        """Return a turn's text without calls, and its calls; a call that cannot be read leaves it a text."""
        form = self._form_of(schemas) if self._form_of and schemas else None
        written_calls = calls_in(text, form) if form else []
        if form is None or not written_calls or any(call.problem for call in written_calls):
            return text, ()
        content = text.partition(form.opening)[0].strip() if form.opening else ""
        calls = tuple(
            {
                "id": f"call_{next(self._names)}",
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for call in written_calls
        )
        self._written[(content, *(Called.model_validate(call).key for call in calls))] = text
        self.count += len(calls)
        return content, calls
