"""What a program asks the policy in one episode, and the conversations that come of it.

A request that repeats a conversation, the policy's turns included, and adds messages to it continues that
conversation: its tokens stay as they were sampled, and only those of the new messages are appended. Any other
request begins a conversation, which is a sample of its own.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from retrain.base.errors import ConfigError, PromptError
from retrain.base.rollouts import CallForm, FirstTurn, Messages, NextTurn, Prompt, Rollout, next_prompt
from retrain.plugins.environments.endpoint.chat import (
    Called,
    ChatRequest,
    GenerateRequest,
    Message,
    Refusal,
    Turn,
)
from retrain.plugins.environments.episode import EpisodeError
from retrain.plugins.environments.tools import calls_in

FormOf: TypeAlias = Callable[[str], CallForm]  # JSON schemas -> how the model's template writes calls
Ask: TypeAlias = Callable[[FirstTurn | NextTurn], Awaitable[Rollout | None]]
Ids: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Where an episode ends."""

    turns: int  # of all conversations
    tokens: int  # sampled ones of a conversation
    turn_tokens: int


@dataclass(eq=False, slots=True)
class SampledConversation:
    """A conversation with the policy, whose tokens are one sample."""

    said: Messages | None  # up to the policy's last turn, which is included; None: known by token ids only
    schemas: str  # of the functions that it was shown
    rollout: Rollout
    ids: Ids = ()  # as a program that renders itself knows it: with every token of the policy
    is_continued: bool = False  # a turn is being sampled

    def leads_to(self, said: Messages, schemas: str) -> bool:
        """Whether messages are these and more, none of them another turn of the policy."""
        if self.said is None or schemas != self.schemas or said[: len(self.said)] != self.said:
            return False
        new = said[len(self.said) :]
        return bool(new) and all(role != "assistant" for role, _ in new)

    def leads_to_ids(self, ids: Ids) -> bool:
        """Whether token ids are these and more."""
        return self.said is None and len(self.ids) < len(ids) and ids[: len(self.ids)] == self.ids


@dataclass(frozen=True, slots=True)
class Rendering:
    """How the backend turns conversations into tokens."""

    has_template: bool = False  # without one, the texts of messages follow each other
    read: Callable[[Rollout], Ids | None] = lambda rollout: None  # token ids, the prompt's first, if told
    shown: Callable[[Ids], str | None] = lambda ids: None  # the text of token ids; None: not told
    form_of: FormOf | None = None  # how the policy writes calls of functions; without, it is shown none


@dataclass(eq=False)
class EpisodeSession:
    """The conversations of one episode; used by one event loop."""

    prompt: Prompt  # of the task; its number and answer are those of every conversation
    ask: Ask  # samples a turn; None if the context leaves no room, EpisodeError for unreadable messages
    limits: EpisodeLimits
    rendering: Rendering
    is_stitched: bool = True  # requests continue conversations; else each is a sample of its own

    def __post_init__(self) -> None:
        self.calling = Calling(self.rendering.form_of)
        self.conversations: list[SampledConversation] = []  # that with the newest turn last
        self.turns = 0
        self.is_cut = False  # a limit has refused a turn
        self.cut_turns: list[int] = []  # numbers of turns that their own limit has cut
        self.refused = ""  # why the newest request was refused; a client may not show it
        self._since_s, self.waited_s = time.perf_counter(), 0.0
        self._names = itertools.count(1)
        self._is_over = False
        self._tasks: set[asyncio.Task[Any]] = set()  # that sample turns

    def idle_s(self) -> float:
        """Return for how long the program has not asked for a turn; 0 while it waits for one."""
        return 0.0 if self._tasks else time.perf_counter() - self._since_s

    def end(self) -> None:
        """Cancel the turns that are being sampled, and refuse others."""
        self._is_over = True
        for task in self._tasks:
            task.cancel()

    async def chat(self, request: ChatRequest, has_left: Callable[[], bool]) -> tuple[Turn, str]:
        """Sample the turn that a client asks for; return it with the answer's name.

        Raises:
            CancelledError: the episode is over, or the client has left, whose next try costs no other turn.
            Refusal: a limit of the episode is reached, or the policy cannot read the messages.
        """
        self._check_turns()
        messages, schemas = tuple(map(self.calling.as_written, request.messages)), request.schemas
        self.calling.check(schemas)
        begun = self._newest(lambda earlier: earlier.leads_to(messages, schemas))
        if begun is None:
            begun = SampledConversation(messages, schemas, Rollout(self._as_prompt(messages, schemas)))
        new = messages[len(begun.said or ()) :]
        rollout = await self._taken(begun, new, (), request.limit, has_left)
        self.conversations.append(
            SampledConversation((*messages, ("assistant", rollout.text)), schemas, rollout)
        )
        return self._turn(rollout, len(begun.rollout.tokens), schemas), f"chatcmpl-{next(self._names)}"

    async def generate(self, request: GenerateRequest, has_left: Callable[[], bool]) -> tuple[Turn, str]:
        """Sample a turn after token ids; errors as of `chat`."""
        self._check_turns()
        ids = tuple(request.token_ids)
        earlier = self._newest(lambda conversation: conversation.leads_to_ids(ids))
        tokens = ids[len(earlier.ids) :] if earlier else ids
        try:
            text, told = self.rendering.shown(ids), self.rendering.shown(tokens)
        except PromptError as error:
            raise Refusal(f"token_ids: {error}", code="invalid_prompt", param="token_ids") from error
        if text is None or told is None:
            raise Refusal(
                "token_ids: this backend reads none; ask at /v1/chat/completions", param="token_ids"
            )
        # the ids are in the text as well, which identifies a prompt
        whole = f"{text}\n(token ids {' '.join(map(str, ids))})"
        prompt = replace(self.prompt, text=whole, messages=(), ids=ids)
        begun = earlier or SampledConversation(None, "", Rollout(prompt))
        new = (("user", told),)
        limit = request.sampling_params.max_tokens
        rollout = await self._taken(begun, new, tokens, limit, has_left)
        turn = self._turn(rollout, len(begun.rollout.tokens), "")
        self.conversations.append(SampledConversation(None, "", rollout, (*ids, *turn.tokens)))
        return turn, f"generate-{next(self._names)}"

    def _check_turns(self) -> None:
        """Raise an error if the episode is over, or has no turn left."""
        if self._is_over:
            raise asyncio.CancelledError
        if self.turns + len(self._tasks) >= self.limits.turns:
            why = f"the episode has had its {self.limits.turns} turns ([environment].max_turns)"
            raise self._cut(why, "max_turns")

    async def _taken(
        self,
        begun: SampledConversation,
        new: Messages,
        tokens: Ids,
        limit: int | None,
        has_left: Callable[[], bool],
    ) -> Rollout:
        """Return a conversation with another turn, whose earlier form is forgotten."""
        with self._waits():
            rollout = await self._sampled(begun, new, tokens, limit)
        if has_left():
            raise asyncio.CancelledError
        if rollout.truncated and len(rollout.tokens) >= self.limits.tokens:
            self.is_cut = True
        elif rollout.truncated and len(rollout.tokens) - len(begun.rollout.tokens) >= self.limits.turn_tokens:
            self.cut_turns.append(self.turns)
        self.turns += 1
        self.refused = ""
        self.conversations = [other for other in self.conversations if other is not begun]
        return rollout

    def _newest(self, leads: Callable[[SampledConversation], bool]) -> SampledConversation | None:
        """Return the newest conversation that leads to what is asked, if it may be continued."""
        free = (earlier for earlier in reversed(self.conversations) if not earlier.is_continued)
        return next(filter(leads, free), None) if self.is_stitched else None

    async def _sampled(
        self, begun: SampledConversation, new: Messages, tokens: Ids, limit: int | None
    ) -> Rollout:
        left = self.limits.tokens - len(begun.rollout.tokens)
        if left <= 0:
            why = f"the conversation has had its {self.limits.tokens} tokens ([training].max_tokens)"
            raise self._cut(why, "max_tokens")
        limit = min(left, self.limits.turn_tokens, limit or left)
        question: FirstTurn | NextTurn = NextTurn(begun.rollout, new, limit, tokens)
        if not begun.rollout.tokens:  # it may repeat what was said in other conversations
            messages = begun.said or ()
            place = max((n for n, (role, _) in enumerate(messages, 1) if role == "assistant"), default=0)
            rest = messages[place:] if place else ()
            shown = self._as_prompt(rest, begun.schemas) if rest else None
            question = FirstTurn(begun.rollout.prompt, limit, shown)
        begun.is_continued = True
        try:
            rollout = await self.ask(question)
        except EpisodeError as error:
            raise Refusal(str(error), code="invalid_prompt", param="messages") from error
        finally:
            begun.is_continued = False
        if rollout is None:
            raise self._cut("the model's context has no room for a turn", "context_length_exceeded")
        return rollout

    def _as_prompt(self, said: Messages, schemas: str) -> Prompt:
        if schemas and self.rendering.has_template:  # in the text as well, which identifies a prompt
            text = schemas + json.dumps(said, ensure_ascii=False)
            return replace(self.prompt, text=text, messages=said, tools=schemas)
        return next_prompt(self.prompt, said, has_template=self.rendering.has_template)

    def _turn(self, rollout: Rollout, start: int, schemas: str) -> Turn:
        tokens, logprobs, pieces = rollout.tokens, rollout.logprobs, rollout.pieces
        before = replace(rollout, tokens=tokens[:start], logprobs=logprobs[:start], pieces=pieces[:start])
        content, calls = self.calling.read(rollout.text, schemas)
        return Turn(
            tokens[start:],
            logprobs[start:],
            pieces[start:],
            ended=not rollout.truncated,
            read=self.rendering.read(before),
            content=content,
            calls=calls,
        )

    def _cut(self, why: str, code: str) -> Refusal:
        self.is_cut = True
        return Refusal(why, code=code)

    @contextmanager
    def _waits(self) -> Iterator[None]:
        """Count the task among those that wait for a turn, and the time in which any does."""
        task = asyncio.current_task()
        assert task is not None
        if not self._tasks:
            self._since_s = time.perf_counter()
        self._tasks.add(task)
        try:
            yield
        finally:
            self._tasks.remove(task)
            if not self._tasks:
                now_s = time.perf_counter()
                self.waited_s += now_s - self._since_s
                self._since_s = now_s


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
