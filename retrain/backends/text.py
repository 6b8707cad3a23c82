"""From prompts to token ids, from sampled token ids to rollouts, and what an environment said to tokens.

Earlier tokens of a rollout are never rendered again. The chat template is rendered with a mark in the place
of the policy's turn, and what follows the mark is appended. How it writes calls of functions is seen from a
call in it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import count, islice, takewhile
from typing import Any, Protocol, TypeAlias

import numpy as np

from retrain.backends.engines import Drawn, Ids
from retrain.backends.options import template_in
from retrain.base.errors import ConfigError, NonFiniteError, PromptError
from retrain.base.json_lines import Demonstration
from retrain.base.rollouts import CallForm, Given, Group, Messages, NextTurn, Prompt, Rollout

Schemas: TypeAlias = Sequence[Mapping[str, Any]]  # of functions, as chat templates read them: JSON
FIRST_MARK = 58213  # in the place of a completion: a number, because every tokenizer has digits
PARTIAL = "\ufffd"  # in the text of a token that holds some bytes of a character
MOST_SHARING = 8  # tokens that share the bytes of characters
SPARE_TOKENS = 4  # checked beyond a stop string's bytes, because some tokens have no text
MARKS = 100  # that are tried
THOUGHT = "<think>\n5\n</think>\n\n"
KEY = "[backend.options].chat_template"
NAME, ARGUMENTS = "f58217", {"x58218": 58219}  # a call that no template writes by itself
SHOWS_NONE = "does not show functions to the policy"
NEEDS_TEMPLATE = f"{KEY}: functions are shown in the model's chat template; set it to true, or name a file"


class Vocabulary(Protocol):
    """Decodes token ids."""

    def completions(self, rows: Sequence[Ids]) -> list[str]:
        """Return the completions' texts without end token."""

    def pieces(self, tokens: Ids) -> tuple[str, ...]:
        """Return each token's text; a special token's is empty, and that of a character's first bytes."""


def to_groups(
    vocabulary: Vocabulary, prompts: Sequence[Prompt], drawn: Sequence[Drawn], group_size: int, version: int
) -> list[Group]:
    """Return sampled completions as groups of rollouts; a log-probability must be finite."""
    check_finite(drawn)
    rollouts = (
        Rollout(
            prompt=prompts[number // group_size],
            text=text,
            tokens=completion.tokens,
            logprobs=completion.logprobs,
            pieces=vocabulary.pieces(completion.tokens),
            truncated=not completion.ended,
            policy_version=version,
            mean_entropy=completion.entropy,
        )
        for number, (completion, text) in enumerate(
            zip(drawn, vocabulary.completions([completion.tokens for completion in drawn]), strict=True)
        )
    )
    return [Group(prompt, tuple(islice(rollouts, group_size))) for prompt in prompts]


def check_finite(drawn: Sequence[Drawn]) -> None:
    """Raise NonFiniteError if a log-probability is not finite."""
    if drawn and not np.isfinite(np.concatenate([completion.logprobs for completion in drawn])).all():
        raise NonFiniteError(
            "the policy's log-probabilities are not finite: its weights grew without bound; lower lr"
        )


def extended(vocabulary: Vocabulary, rollout: Rollout, drawn: Drawn) -> Rollout:
    """Return a rollout, whose last tokens were given, with another turn."""
    (text,) = vocabulary.completions([drawn.tokens])
    tokens = rollout.tokens + drawn.tokens
    nats = rollout.mean_entropy * len(rollout.tokens) + drawn.entropy * len(drawn.tokens)
    return replace(
        rollout,
        text=text,
        tokens=tokens,
        logprobs=np.concatenate([rollout.logprobs, drawn.logprobs]),
        pieces=rollout.pieces + vocabulary.pieces(drawn.tokens),
        truncated=not drawn.ended,
        mean_entropy=nats / len(tokens),
    )


def as_written(vocabulary: Vocabulary, demonstration: Demonstration, tokens: Ids) -> Rollout:
    """Return a written completion, given with its end token, as a rollout with log-probabilities 0."""
    text, pieces = demonstration.completion, vocabulary.pieces(tokens)
    return Rollout(demonstration.prompt, text, tokens, np.zeros(len(tokens)), pieces, truncated=False)


def messages_of(prompt: Prompt) -> Messages:
    """Return a prompt's messages; a text is a user's."""
    return prompt.messages or (("user", prompt.text),)


class Text:
    """Encodes prompts and decodes completions with a model's transformers tokenizer."""

    def __init__(
        self,
        tokenizer: Any,
        model: str,
        *,
        chat: bool | str,
        system: str,
        template_kwargs: Mapping[str, Any] | None = None,
        ends: Collection[int | None] = (),
        hidden: Collection[int] = (),
        stop: Sequence[str] = (),
        known: int | None = None,
        key: str = "[model].model",
    ) -> None:
        """Wrap a tokenizer; without an end-of-sequence token or the chat template, a ConfigError.

        Args:
            model, key: name of the model and the key that gives it, for errors.
            chat: apply the tokenizer's chat template, or that of a file.
            system: the system prompt in it; "" for none.
            template_kwargs: variables of the template, such as enable_thinking.
            ends: further token ids that end a completion; chat models often have two.
            hidden: further token ids without text.
            stop: strings that end a completion.
            known: number of tokens that the model has an embedding for.
        """
        self._tokenizer, self.chat, self._system, self.stop = tokenizer, bool(chat), system, stop
        if own := template_in(chat):
            tokenizer.chat_template = own
        self._template_kwargs = {**(template_kwargs or {}), "add_generation_prompt": True, "tokenize": False}
        self._named = f"{key}: the tokenizer of {model!r}"
        self._known = known
        self.end_ids = tuple(sorted({int(i) for i in (tokenizer.eos_token_id, *ends) if i is not None}))
        if not self.end_ids:
            raise ConfigError(
                f"{self._named} has no end-of-sequence token, so completions could not end; "
                "set eos_token in its tokenizer_config.json"
            )
        if chat and not tokenizer.chat_template:
            raise ConfigError(
                f"[backend.options].chat_template: the tokenizer of {model!r} has none; set it to false, or "
                "name a file with a template"
            )
        self._special = {*tokenizer.all_special_ids, *self.end_ids, *hidden}
        self._pieces: dict[int, str] = {}
        # a token of whole letters or digits, which decoding does not strip
        texts = ((token, self._decode_all([[token]])[0]) for token in range(len(tokenizer)))
        plain = ((token, text) for token, text in texts if text.isascii() and text.isalnum())
        self._anchor, anchor = next(plain, (0, ""))
        self._anchor_length = len(anchor)
        # a token covers at least one byte, so this many always contain the longest stop string
        self._window = max((len(words.encode()) for words in stop), default=0) + SPARE_TOKENS

    def encode(self, prompt: Prompt) -> Ids:
        """Return a prompt's token ids, ready to be followed by a completion; at least one."""
        if prompt.ids:
            return self.checked(prompt.ids)
        if self.chat:
            ids = self.tokens_of(self.of(prompt).shown(messages_of(prompt), f"prompt {prompt.id}"))
        elif prompt.messages:
            raise PromptError(
                f"prompt {prompt.id} is a conversation; set [backend.options].chat_template = true"
            )
        else:
            ids = self.checked(self._ids_of(prompt.text))
            if len(ids) > 1 and ids[-1] in self.end_ids:  # which the tokenizer may have added
                plain = self._ids_of(prompt.text, add_special_tokens=False)
                if not plain or plain[-1] not in self.end_ids:
                    ids = ids[:-1]
        if not ids:
            raise PromptError(f"prompt {prompt.id} is {prompt.text!r}, which has no token")
        return ids

    @property
    def vocabulary(self) -> dict[str, int]:
        """The id of each token."""
        return dict(self._tokenizer.get_vocab())

    def written(self, demonstration: Demonstration) -> Rollout:
        """Return a demonstration as a rollout that ends as the chat template ends a turn.

        Some models have two ends: Gemma's `<end_of_turn>` and `<eos>`, Phi's `<|end|>` and `<|endoftext|>`.
        """
        end = int(self._tokenizer.eos_token_id or self.end_ids[0])
        if self.chat:
            conversation = [
                {"role": "user", "content": "1"},
                {"role": "assistant", "content": str(FIRST_MARK)},
            ]
            shown = self.rendered(conversation, "an answer", add_generation_prompt=False)
            after = self.tokens_of(shown.rpartition(str(FIRST_MARK))[2])
            if after and after[0] in self.end_ids:
                end = after[0]
        return as_written(self, demonstration, (*self.tokens_of(demonstration.completion), end))

    def is_stopped(self, tails: Sequence[Sequence[int]]) -> list[bool]:
        """Return for each completion so far whether its last tokens contain a stop string."""
        shown = self._decode_all([tail[-self._window :] for tail in tails])
        return [any(stop in text for stop in self.stop) for text in shown]

    def completions(self, rows: Sequence[Ids]) -> list[str]:
        """Return the completions' texts without end token, cut before a stop string."""
        texts = self._decode_all(rows)
        return [min((text.partition(stop)[0] for stop in self.stop), key=len, default=text) for text in texts]

    def pieces(self, tokens: Ids) -> tuple[str, ...]:
        for token in tokens:
            if token not in self._pieces:
                self._pieces[token] = self._shown_in_text([token])
        pieces = [self._pieces[token] for token in tokens]
        first = 0  # token of those that a character may begin in
        for place, piece in enumerate(pieces):
            if PARTIAL not in piece:
                first = place + 1
                continue
            for begin in range(place - 1, max(first, place - MOST_SHARING + 1) - 1, -1):
                text = self._shown_in_text(tokens[begin : place + 1])
                if PARTIAL not in text:  # the last of them gets the whole characters
                    pieces[begin : place + 1] = [*[""] * (place - begin), text]
                    first = place + 1
                    break
        return tuple(pieces)

    @property
    def may_reason(self) -> bool:
        """Whether the chat template knows of reasoning, and its variables do not switch it off."""
        off = self._template_kwargs.get("enable_thinking") is False
        return "<think>" in (self._tokenizer.chat_template or "") and not off

    def of(self, prompt: Prompt) -> Text:
        """Return the same, which shows the functions of a prompt."""
        return self.with_variables(tools=json.loads(prompt.tools)) if prompt.tools else self

    def with_variables(self, **variables: Any) -> Text:
        """Return the same with further variables of the template."""
        other = copy(self)
        other._template_kwargs = {**self._template_kwargs, **variables}
        return other

    def tokens_of(self, text: str) -> Ids:
        """Return a text's token ids; special tokens are those that it spells out."""
        return self.checked(self._ids_of(text, add_special_tokens=False))

    def shown(self, said: Messages, where: str = "a conversation") -> str:
        """Return a conversation in the chat template, ready for the assistant's turn; errors name `where`."""
        return self.rendered([{"role": role, "content": content} for role, content in said], where)

    def offer(self, tools: Schemas) -> None:
        """Show functions to the policy, by their JSON schemas, in every conversation from now on."""
        self._template_kwargs["tools"] = list(tools)

    def without_special(self, text: str) -> str:
        """Return a text without the special tokens that it spells out, as a completion is shown."""
        for token in self._tokenizer.convert_ids_to_tokens(sorted(self._special)):
            text = text.replace(token or "", "")
        return text

    def rendered(self, messages: Sequence[Mapping[str, Any]], where: str, **variables: Any) -> str:
        """Return messages in the chat template, with variables of it in addition; errors name `where`."""
        if self._system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._system}, *messages]
        try:
            how = {**self._template_kwargs, **variables}
            return str(self._tokenizer.apply_chat_template(messages, **how))
        except Exception as error:  # a template is a program and may raise anything
            advice = (
                "try it without system_prompt" if self._system else "set it to false, or fix the template"
            )
            raise PromptError(
                f"[backend.options].chat_template: the tokenizer's template fails on {where} "
                f"({type(error).__name__}: {error}); {advice}"
            ) from error

    def _ids_of(self, text: str, **how: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise PromptError(
                f"the text {text[error.start : error.start + 20]!a} begins with half a character (a lone "
                "surrogate), which no tokenizer reads; decode texts with errors='replace'"
            ) from error
        ids: list[int] = self._tokenizer(text, **how)["input_ids"]
        return ids

    def checked(self, ids: Sequence[int]) -> Ids:
        if self._known is not None and max(ids, default=0) >= self._known:
            raise PromptError(
                f"{self._named} gives token {max(ids)}, and the model knows {self._known}: "
                "they do not belong together"
            )
        return tuple(ids)

    def _shown_in_text(self, tokens: Sequence[int]) -> str:
        """Return tokens decoded after another one: some tokenizers drop the space before the first."""
        (text,) = self._decode_all([[self._anchor, *tokens]])
        return text[self._anchor_length :]

    def _decode_all(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """Return the text of each row, without special and end tokens."""
        shown = [[token for token in row if token not in self._special] for row in rows]
        fast = getattr(self._tokenizer, "backend_tokenizer", None)
        if fast is not None:  # one call for all rows is ten times faster
            return list(fast.decode_batch(shown, skip_special_tokens=False))
        return [str(self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)) for ids in shown]


def tokens_given(text: Text, turn: NextTurn) -> Given:
    """Return the tokens to append: the end of the policy's turn if it has none, then the messages."""
    text, said = text.of(turn.rollout.prompt), turn.messages
    place, shown = len(turn.rollout.tokens), "\n".join(content for _, content in said)
    if turn.tokens:
        return Given(place, text.checked(turn.tokens), shown)
    if not text.chat:
        return Given(place, text.tokens_of(shown), shown)
    tokens = text.tokens_of(_after(text, messages_of(turn.rollout.prompt), said))
    has_ended = turn.rollout.tokens[-1] in text.end_ids and tokens[0] in text.end_ids
    return Given(place, tokens[1:] if has_ended else tokens, shown)


def with_messages(text: Text, turn: NextTurn, context: int | None) -> Rollout:
    """Return a rollout with what was said after its last turn; PromptError if that fills the context."""
    new = tokens_given(text, turn)
    if context is not None and len(new.tokens) >= context:
        raise PromptError(
            f"an observation has {len(new.tokens)} tokens, which leaves no room in the model's context "
            f"of {context}; shorten what the environment says"
        )
    return replace(turn.rollout, given=(*turn.rollout.given, new))


def offer_functions(text: Text, schemas: Schemas, *, is_extended: bool = True) -> CallForm:
    """Show functions to the policy, and return how it writes calls; a ConfigError if it cannot."""
    if not text.chat:
        raise ConfigError(NEEDS_TEMPLATE)
    text.offer(schemas)
    if is_extended:
        check_turns(text, (("tool", "2"), ("tool", "3")))
    return form_of(text, schemas)


def check_turns(text: Text, asked: Messages = (("user", "2"),)) -> None:
    """Raise a ConfigError if the template would render earlier turns, answered so, in another way."""
    if not text.chat:
        return
    first: Messages = (("user", "1"),)
    marks = ("58211", "58212")
    conversation = (*first, ("assistant", marks[0]), *asked, ("assistant", marks[1]), *asked)
    after = _after(text, first, asked)
    parts = [text.shown(first), marks[0], after, marks[1], after]
    whole = text.shown(conversation)
    if whole != "".join(parts):
        raise _refused("renders earlier turns of a conversation in another way")
    if text.tokens_of(whole) != sum(map(text.tokens_of, parts), ()):
        raise _refused("has no special token between turns, so tokens would span two of them")
    thought = text.shown((*first, ("assistant", THOUGHT + marks[0]), *asked))
    if text.may_reason and THOUGHT.strip() not in thought:
        advice = "; chat_template_kwargs = { enable_thinking = false } trains it without"
        try:
            check_turns(text.with_variables(enable_thinking=False), asked)
        except ConfigError:
            advice = ""
        raise _refused(f"drops the reasoning of earlier turns, which the policy would still read{advice}")


def _after(text: Text, before: Messages, said: Messages) -> str:
    """Return what the template shows after a turn of the assistant that answers `before`."""
    for mark in map(str, islice(count(FIRST_MARK), MARKS)):
        shown = text.shown((*before, ("assistant", mark), *said))
        if shown.count(mark) == 1:
            return shown.partition(mark)[2]
    raise _refused("does not show the assistant's turns as they are")


def _refused(what: str) -> PromptError:
    return PromptError(
        f"{KEY}: the tokenizer's template {what}, so turns cannot be appended token by token; "
        "set [environment].separate_turns = true, which trains each turn as a sample of its own, or "
        "name a file with another template"
    )


def form_of(text: Text, schemas: Schemas) -> CallForm:
    """Return the form of the calls of functions that were offered; a ConfigError if there is none."""
    question = {"role": "user", "content": "1"}
    shown = text.rendered([question], "a conversation with functions")
    if not all(schema["function"]["name"] in shown for schema in schemas):
        raise form_refused(SHOWS_NONE)
    call = {"type": "function", "function": {"name": NAME, "arguments": ARGUMENTS}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    with_call = text.rendered([question, turn], "the call of a function", add_generation_prompt=False)
    same = takewhile(lambda pair: pair[0] == pair[1], zip(shown, with_call, strict=False))
    written = with_call[len(list(same)) :]
    for place, value in _values(written):
        shown_call = value[0] if isinstance(value, list) and value else value
        if isinstance(shown_call, dict) and isinstance(shown_call.get("function"), dict):
            shown_call = shown_call["function"]
        parts = shown_call.items() if isinstance(shown_call, dict) else ()
        keys = {kind: key for key, part in parts if (kind := _kind(part))}
        if sorted(keys) == ["arguments", "name"]:
            return CallForm(text.without_special(written[:place]).strip(), **keys)
    raise form_refused("does not write calls of functions as JSON with a name and arguments")


def _values(text: str) -> Iterator[tuple[int, Any]]:
    """Iterate over the JSON values that begin in a text, each with its place."""
    for place, character in enumerate(text):
        if character in "{[":
            try:
                yield place, json.JSONDecoder().raw_decode(text, place)[0]
            except ValueError:
                continue


def _kind(value: Any) -> str:
    """Return which part of the call a value is; "" for neither."""
    if value == NAME:
        return "name"
    return "arguments" if value in (ARGUMENTS, json.dumps(ARGUMENTS)) else ""


def form_refused(what: str) -> ConfigError:
    """Return the error of a template that cannot be used for calls."""
    return ConfigError(
        f"[environment].environment: the chat template {what}; name a file with another in {KEY}, or set "
        '[environment.options].calls = "python", with which a turn such as add(2, 3) is a call'
    )
