"""Common parts of generated tasks: distinct random problems, and the held-out split.

A problem is a whole number below the number of possible problems; each task converts it to a prompt and
an answer.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence

from retrain.base.errors import ConfigError
from retrain.base.rollouts import Prompt
from retrain.plugins.tasks import Task

DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"  # up to base 36
MAX_COUNT = 1_000_000  # prompts are kept in memory
DEFAULT_COUNT = 1000
MAX_LENGTH = 64


def check_options(*, base: int, count: int, held_out: float, **size: int) -> None:
    """Raise one ConfigError for all options out of range; `size` is the digits or symbols of a problem."""
    problems = [p for key, value in size.items() for p in range_problem(key, value, 1, MAX_LENGTH)]
    problems += range_problem("base", base, 2, len(DIGITS))
    problems += range_problem("count", count, 0, MAX_COUNT)
    check(problems + held_out_problem(held_out))


def range_problem(key: str, value: int, least: int, most: int) -> list[str]:
    """Return the problem of a whole number's range, if any; the registry has checked its type."""
    what = f"{key}: got {value}; needs a whole number from {least} to {most}"
    return [] if least <= value <= most else [what]


def held_out_problem(held_out: float) -> list[str]:
    """Return the problem of a held-out fraction's range, if any."""
    what = f"held_out: got {held_out}; needs a fraction of the prompts, 0 to below 1"
    return [] if 0 <= held_out < 1 else [what]


def check(problems: Sequence[str]) -> None:
    """Raise one ConfigError with all problems, if there are any."""
    if problems:
        raise ConfigError(problems)


def held_out_count(available: int, held_out: float) -> int:
    """Return how many prompts to hold out; a ConfigError if a fraction above 0 leaves either side none."""
    kept = round(available * held_out)
    if held_out > 0 and not 0 < kept < available:
        raise ConfigError(
            f"held_out: {held_out} of {available} distinct prompts is {kept}; that must leave "
            "at least one prompt on each side, so use more prompts, or held_out = 0 to hold out none"
        )
    return kept


def task_of_symbols(answer: Callable[[str], str]) -> Callable[..., Task]:
    """Return a plugin's `build` for rows of symbols: a prompt is a row and "=", its answer made of it."""

    def build(*, length: int = 3, base: int = 10, count: int = 0, held_out: float = 0.1, seed: int) -> Task:
        """Return the task.

        Args:
            length: symbols in a row, 1 to 64.
            base: distinct symbols, 2 to 36.
            count: distinct prompts, including held-out ones; 0 takes all, at most 1000.
            held_out: fraction of the prompts that training never sees.
            seed: decides which prompts are drawn, their order and the split.

        Raises:
            ConfigError: an option is out of range, or there are too few prompts for it.
        """
        check_options(length=length, base=base, count=count, held_out=held_out)

        def write(number: int) -> tuple[str, str]:
            row = in_base(number, base, length)
            return row + "=", answer(row)

        alphabet = DIGITS[:base] + "="
        return generate(base**length, write, alphabet=alphabet, count=count, held_out=held_out, seed=seed)

    return build


def generate(
    possible: int,
    write: Callable[[int], tuple[str, str]],
    *,
    alphabet: str,
    count: int,
    held_out: float,
    seed: int,
) -> Task:
    """Return a task of distinct random problems, split into training and held-out prompts.

    Args:
        possible: number of possible problems; `write` maps each to a distinct prompt.
        write: problem number -> (prompt, answer).
        alphabet: characters of prompts and answers.
        count: number of problems to draw; 0 takes all, at most 1000.
        held_out: fraction of the problems that training never sees.
        seed: determines the problems, their order and the split.

    Raises:
        ConfigError: count exceeds `possible`, or there are too few problems to split.
    """
    if count > possible:
        raise ConfigError(
            f"count: got {count}; these options make only {possible} distinct prompts, "
            "so lower count (0 takes all) or enlarge the problems"
        )
    count = count or min(possible, DEFAULT_COUNT)
    generator, numbers = random.Random(seed), dict[int, None]()
    if possible <= sys.maxsize:
        numbers = dict.fromkeys(generator.sample(range(possible), count))
    while len(numbers) < count:  # of so many possible ones, duplicates are rare
        numbers[generator.randrange(possible)] = None
    prompts = [Prompt(id, *write(number)) for id, number in enumerate(numbers)]
    cut = held_out_count(len(prompts), held_out)
    longest = max(len(prompt.answer) for prompt in prompts)
    return Task(tuple(prompts[cut:]), tuple(prompts[:cut]), "".join(sorted(set(alphabet))), longest)


def in_base(number: int, base: int, width: int = 1) -> str:
    """Return a whole number in a base, zero-padded to at least `width` digits."""
    digits: list[str] = []
    while number or len(digits) < width:
        number, digit = divmod(number, base)
        digits.append(DIGITS[digit])
    return "".join(reversed(digits))
