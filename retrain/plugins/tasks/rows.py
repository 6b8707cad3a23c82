"""Common parts of tasks that read rows: fields, template, and held-out split.

Prompts are plain text here, or conversations. A backend with a tokenizer can apply the model's chat template
and a system prompt (`[backend.options]`); `template` is for the wording of the task.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from retrain.base.errors import ConfigError
from retrain.base.json_lines import conversation, object_of, read_rows
from retrain.base.rollouts import Prompt, as_prompt
from retrain.plugins.tasks import Task
from retrain.plugins.tasks.generated import check, held_out_count, held_out_problem

PLACEHOLDER = "{prompt}"


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of a row to read, and the wording of the prompt."""

    prompt: str
    answer: str  # "": rows have none
    template: str
    columns: Sequence[str] = ()  # further ones that a reward gets, or "*" for all


def option_problems(fields: Fields, held_out: float, **required: str) -> list[str]:
    """Return the problems of the shared options and of required strings."""
    texts = {**required, "prompt_field": fields.prompt}
    problems = [f"{key}: got ''; needs a non-empty string" for key, value in texts.items() if not value]
    if PLACEHOLDER not in fields.template:
        problems.append(f"template: got {fields.template!r}; needs {PLACEHOLDER} where the prompt goes")
    return problems + held_out_problem(held_out)


def check_columns(available: Sequence[str], fields: Fields, source: str) -> list[str]:
    """Return the columns to read; if one is missing, a ConfigError lists the available ones."""
    named = [("prompt_field", _prompt_key(available, fields)), ("answer_field", fields.answer)]
    named += [("columns", name) for name in fields.columns]
    required = [(option, name) for option, name in named if name not in ("", "*")]
    check(
        [
            f"{option}: {source} has no column {name!r}; it has {', '.join(available)}"
            for option, name in required
            if name not in available
        ]
    )
    return list(available if "*" in fields.columns else dict.fromkeys(name for _, name in required))


def read_prompts(
    rows: Iterable[tuple[int, Mapping[str, Any] | str]], fields: Fields, source: str, unit: str = " row "
) -> list[Prompt]:
    """Return prompts numbered as their rows, of which texts are JSON; a ConfigError if any row is invalid."""

    def read(number: int, row: Mapping[str, Any] | str) -> list[Prompt]:
        if isinstance(row, str):
            row = object_of(row, f"an object with {fields.prompt!r} and {fields.answer!r}")
        messages = _messages(row, fields)
        answer = _text(row, fields.answer, "answer_field") if fields.answer else ""
        if fields.answer and not answer.strip():
            raise ValueError(
                f"{fields.answer!r} is empty, so an empty completion would be correct; give an answer, "
                'or set answer_field = "" if the reward needs none'
            )
        names = row if "*" in fields.columns else fields.columns
        columns = {name: _value(row, name, "columns") for name in names}
        return [Prompt(number, *as_prompt(messages, answer), row=columns)]

    needs = f"at least one with {fields.prompt!r} and {fields.answer!r}"
    return read_rows(rows, read, source, unit=unit, needs=needs)


def task_of_files(read: Callable[[str, str, Fields], list[Prompt]]) -> Callable[..., Task]:
    """Return a plugin's `build` that reads files: `read` is path, option that names it, fields -> prompts."""

    def build(
        *,
        path: str = "",
        held_out_path: str = "",
        prompt_field: str = "prompt",
        answer_field: str = "answer",
        template: str = PLACEHOLDER,
        columns: Sequence[str] = (),
        held_out: float = 0.1,
        seed: int,
    ) -> Task:
        """Read the file and split it by prompt text; rows of one prompt stay on one side.

        Args:
            path: the file, UTF-8, relative to the file that names it.
            held_out_path: a second file to evaluate on; then all of the first is used for training.
            prompt_field: field of the prompt text, not empty.
            answer_field: field of the reference answer; "" if the reward needs none.
            template: wording of the prompt; {prompt} is replaced by the text.
            columns: further fields that a reward gets in `prompt.row`; ["*"] is all.
            held_out: fraction of the distinct prompts that training never sees; unused with `held_out_path`.
            seed: determines the order and the split.

        Raises:
            ConfigError: a file cannot be read, or rows are invalid; lists their line numbers.
        """
        fields = Fields(prompt_field, answer_field, template, columns)
        check(option_problems(fields, held_out, path=path))
        prompts = read(path, "path", fields)
        held_out_prompts = read(held_out_path, "held_out_path", fields) if held_out_path else []
        return split_prompts(prompts, held_out_prompts, held_out, seed)

    return build


def split_prompts(train: Sequence[Prompt], given: Sequence[Prompt], held_out: float, seed: int) -> Task:
    """Return a task that evaluates on the given prompts; without any, a fraction of its own is held out.

    The numbering of given ones continues that of the others.

    Raises:
        ConfigError: a prompt is in both sources.
    """
    if not given:
        return split_by_fraction(train, held_out, seed)
    both = {prompt.text for prompt in train} & {prompt.text for prompt in given}
    if both:
        what = "1 training prompt is" if len(both) == 1 else f"{len(both)} training prompts are"
        raise ConfigError(f"{what} also held out, such as {min(both)[:60]!r}; remove what is in both")
    shuffled = random.Random(seed).sample(list(train), len(train))
    after = max(prompt.id for prompt in train)
    return _task(shuffled, [replace(prompt, id=after + prompt.id) for prompt in given])


def split_by_fraction(prompts: Sequence[Prompt], held_out: float, seed: int) -> Task:
    """Return a task with a fraction of the prompt texts held out; rows of one prompt stay on one side."""
    texts = list(dict.fromkeys(prompt.text for prompt in prompts))
    generator = random.Random(seed)
    generator.shuffle(texts)
    shuffled = list(prompts)
    generator.shuffle(shuffled)
    kept = set(texts[: held_out_count(len(texts), held_out)])
    return _task([p for p in shuffled if p.text not in kept], [p for p in shuffled if p.text in kept])


def _task(train: Sequence[Prompt], held_out: Sequence[Prompt]) -> Task:
    both = [*train, *held_out]
    return Task(
        tuple(train),
        tuple(held_out),
        "".join(sorted({character for p in both for text in (p.text, p.answer) for character in set(text)})),
        max(len(prompt.answer) for prompt in both),
    )


def _messages(row: Mapping[str, Any], fields: Fields) -> tuple[tuple[str, str], ...]:
    """Return a prompt's messages, the last of them in the template's wording; a text is a user's message."""
    key = _prompt_key(row, fields)
    content = row.get(key)
    if isinstance(content, list):
        messages = conversation(key, content)
        if key == "messages" and messages and messages[-1][0] == "assistant":
            messages = messages[:-1]  # without the completion, as in [warmup]
        *before, last = messages or (("", ""),)
        if last[0] in ("", "assistant"):
            raise ValueError(f"{key!r} needs a last message that the model answers")
    else:
        before, last = [], ("user", _text(row, fields.prompt, "prompt_field"))
        if not last[1]:
            raise ValueError(f"{fields.prompt!r} is empty; a prompt needs text")
    return (*before, (last[0], fields.template.replace(PLACEHOLDER, last[1])))


def _prompt_key(names: Container[str], fields: Fields) -> str:
    """Return the field of a row's prompt: without `prompt` it is `messages`, as in [warmup]."""
    has_messages = "prompt" not in names and "messages" in names
    return "messages" if fields.prompt == "prompt" and has_messages else fields.prompt


def _value(row: Mapping[str, Any], field: str, option: str) -> Any:
    if field not in row:
        none = ', or set answer_field = "" if the reward needs none' if option == "answer_field" else ""
        raise ValueError(f"no field {field!r}; add it, or name another with {option}{none}")
    return row[field]


def _text(row: Mapping[str, Any], field: str, option: str) -> str:
    value = _value(row, field, option)
    if type(value) is int:  # not true or false
        return str(value)
    if not isinstance(value, str):
        shown = json.dumps(value, default=str)[:40]
        raise ValueError(f"{field!r} is {shown}; needs a text or a whole number")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{field!r} holds half a surrogate pair; write the whole character") from error
    return value
