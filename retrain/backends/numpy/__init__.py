"""The embedded backend: a small recurrent policy over characters, trained on one core with numpy.

The policy is imported when a run connects: planning reads only options and alphabets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from retrain.backends import ENGINE, SELF, BackendSpec, always, functions_of, shows_no_functions
from retrain.backends.options import number, one_of, parsed, problems_of
from retrain.base import registry
from retrain.base.errors import ConfigError, Problem
from retrain.base.rollouts import Prompt
from retrain.config.files import NUMPY, REMOTE, adapter_problem, runs_instead, weights_of
from retrain.config.resolve import teachers_of
from retrain.config.schema import Config

if TYPE_CHECKING:
    from retrain.backends.numpy.policy import NumpyBackend
    from retrain.plugins.tasks import Task

MAX_WIDTH = 4096  # above this, one core needs minutes per step
CONTEXT = 1 << 14  # characters, which take half a second to read
_readable: list[Task] = []  # the last task without a problem: thousands of conditions may share it
LATENCY = "seconds from 0 (no API) to 3600"


@dataclass(frozen=True, slots=True)
class NumpyOptions:
    """Size, dtype and optimizer of the policy, and the simulated API latency."""

    embedding: int = number(24, 1, MAX_WIDTH)  # numbers per character
    hidden: int = number(64, 1, MAX_WIDTH)  # numbers in the recurrent state
    dtype: str = one_of("float32", "float64")  # float64 is slower; for gradient checks
    optimizer: str = one_of("adam", "sgd")  # or sgd, for which [scaling].rule = "adascale" was derived
    api_latency_s: float = number(0.0, 0, 3600, LATENCY)  # above 0: simulate an API, whose calls hold permits


def connect(spec: BackendSpec) -> NumpyBackend:
    """Return a policy with fresh weights."""
    from retrain.backends.numpy.policy import NumpyBackend

    return NumpyBackend(spec, parsed(NumpyOptions, spec.options, check_options(spec.options)))


def takes_permits(options: Mapping[str, object]) -> bool:
    """Whether calls hold permits: only if an API is simulated."""
    return bool(options.get("api_latency_s"))


reports_calls = takes_permits
samples_as_it_trains = spells = takes_adapters = always


def computes_here(options: Mapping[str, object]) -> bool:
    """Whether steps keep CPU cores busy: with a simulated API they mostly wait."""
    return not takes_permits(options)


def check_options(options: Mapping[str, object]) -> list[str]:
    """Return the problems of a `[backend.options]` table, one line each, starting with the key."""
    return problems_of(NumpyOptions, options)


def check(config: Config, task: Task) -> Iterator[Problem]:
    """Iterate over what an adapter, the prompts or the environment have that the policy cannot use."""
    if config.model.adapter:
        yield from (Problem(("model", "adapter"), what) for what in _adapter_problems(config, task.alphabet))
    for teacher, where in teachers_of(config).items():
        yield from (
            Problem(where, what) for what in _teacher_problems(teacher, task.alphabet, config.logging.log_dir)
        )
    if functions_of(config):
        yield shows_no_functions("numpy")
    is_readable = bool(_readable) and _readable[0] is task
    prompts = [] if is_readable else [*task.train, *task.held_out]
    too_long = filter(None, map(length_problem, prompts))
    problems = [Problem(("data",), problem) for problem in islice(too_long, 1)]
    problems += _alphabet_problems(config, prompts, task)
    if not problems:
        _readable[:] = [task]
    yield from problems


def text_of(prompt: Prompt) -> str:
    """Return what the policy reads of a prompt: without a chat template, the messages follow each other."""
    return "".join(content for _, content in prompt.messages) if prompt.messages else prompt.text


def length_problem(prompt: Prompt) -> str:
    """Return the problem of a prompt that is too long to be read; "" if it is not."""
    length = len(prompt.ids or text_of(prompt))
    if length <= CONTEXT:
        return ""
    return f"prompt {prompt.id} has {length} characters, and the policy's context is {CONTEXT}; shorten it"


def _adapter_problems(config: Config, alphabet: str) -> Iterator[str]:
    """Iterate over why a run cannot start from another's weights."""
    from retrain.backends.numpy.policy import NumpyBackend  # few runs need it

    adapter, options = config.model.adapter, parsed(NumpyOptions, config.backend.options, [])
    file = None if adapter.startswith(REMOTE) else weights_of(adapter)
    if file is None or file.name != NUMPY:
        yield f"{adapter!r} is no run of the numpy backend, which starts from nothing else"
        return
    if config.algorithm.kl_coef and config.algorithm.kl_reference == "base":
        yield 'the numpy backend has no base model; set [algorithm].kl_reference = "start"'
    try:
        NumpyBackend(BackendSpec(seed=0, alphabet=alphabet), options).start_from(adapter, is_reference=False)
    except ConfigError as error:
        yield from (registry.read_problem(problem, registry.PLACED).what for problem in error.problems)


def teacher_modes(options: Mapping[str, object]) -> tuple[str, ...]:
    """Return the modes of `[teacher]`: all of them, because every distribution is at hand."""
    return ("reverse_kl", "jsd")


def _teacher_problems(teacher: str, alphabet: str, log_dir: str) -> Iterator[str]:
    """Iterate over why a run cannot learn from another's policy."""
    from retrain.backends.numpy.policy import weights_of_run  # few runs need them
    from retrain.backends.numpy.sampling import Characters

    if teacher == SELF:
        return
    if teacher == ENGINE:
        yield 'got "engine"; a teacher at a server needs backend = "local"'
        return
    if not Path(teacher).is_dir():
        name, slash, _ = teacher.partition("/")
        if others := runs_instead(teacher, Path(log_dir)):
            yield f"{teacher!r} is no directory; {others}; name one of them"
            return
        first = f"finish that run first, as with `retrain {name}.toml`, or " if name and slash else ""
        yield f"{teacher!r} is no directory, and no run in log_dir; {first}name a finished run"
        return
    if problem := adapter_problem(teacher):
        yield problem
        return
    try:
        weights_of_run(teacher, Characters(alphabet))
    except ConfigError as error:
        yield from (registry.read_problem(problem, registry.PLACED).what for problem in error.problems)


def _alphabet_problems(config: Config, prompts: Sequence[Prompt], task: Task) -> Iterator[Problem]:
    """Iterate over the task's prompts and [warmup] rows with characters outside the task's alphabet."""
    texts = [(("data", "task"), f"prompt {prompt.id}", text_of(prompt)) for prompt in prompts]
    if hint := config.teacher.prompt:
        texts += [
            (("teacher", "prompt"), f"for prompt {prompt.id} it", text_of(prompt.hinted(hint)))
            for prompt in task.train
        ]
    warmup = config.warmup
    if warmup.steps:
        from retrain.base.json_lines import read_demonstrations  # not at the top: few files have a warm-up

        try:
            rows = read_demonstrations(warmup.path)
        except ConfigError:
            rows = []  # reported with the problems of the file
        texts += [
            (("warmup", "path"), f"{warmup.path}:{row.prompt.id}", row.prompt.text + row.completion)
            for row in rows
        ]
    characters = set(task.alphabet)
    if set("".join(text for _, _, text in texts)) <= characters:
        return  # without a look at each character, in a sweep of thousands of conditions
    named = f"the alphabet of task {config.data.tasks!r}: {''.join(sorted(characters))[:80]!r}"
    for where in dict.fromkeys(where for where, _, _ in texts):
        odd = [
            f"{what} holds {character!r}, which is not in {named}"
            for place, what, text in texts
            if place == where and (character := next((each for each in text if each not in characters), ""))
        ]
        if odd:
            others = f" ({len(odd) - 1} others hold such characters too)" if odd[1:] else ""
            yield Problem(where, odd[0] + others)
