"""What of a run's texts a policy over characters cannot read or write, found before anything is created."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from retrain.config.schema import Config
from retrain.demonstrations import MAX_PROBLEMS, read_demonstrations
from retrain.errors import ConfigError
from retrain.rollouts import Prompt


def check_alphabet(config: Config, prompts: Sequence[Prompt], alphabet: str) -> list[str]:
    """List prompts of the task and rows of [warmup] that hold a character which the task's alphabet lacks."""
    texts = [(f"[data].task: prompt {prompt.id}", prompt.text) for prompt in prompts]
    warmup = config.warmup
    if warmup.steps:
        try:
            rows = read_demonstrations(warmup.path)
        except ConfigError:
            rows = []  # its problems are told with the file's
        texts += [
            (f"[warmup].path: {warmup.path}:{row.prompt.id}", row.prompt.text + row.completion)
            for row in rows
        ]
    return list(islice(_strangers(texts, set(alphabet), config.data.task), MAX_PROBLEMS))


def _strangers(texts: Sequence[tuple[str, str]], alphabet: set[str], task: str) -> Iterator[str]:
    for where, text in texts:
        strange = next((character for character in text if character not in alphabet), None)
        if strange is not None:
            known = "".join(sorted(alphabet))
            yield f"{where} holds {strange!r}, which is not in the alphabet of task {task!r}: {known[:80]!r}"
