"""Tasks: where prompts come from, with a held-out split that training never sees.

A plugin is one file or folder with `build(*, <options>, seed) -> Task`. Building is deterministic for a
seed; the split is too.

Not plugins, but shared: `rows` (tasks that read files), `generated` (tasks that draw problems) and `opening`
(the task of a run).
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from retrain.base.registry import PluginSpec
from retrain.base.rollouts import Prompt


@dataclass(frozen=True, slots=True)
class Task:
    """Prompts to train on and prompts held out for evaluation; no text is in both."""

    train: tuple[Prompt, ...]
    held_out: tuple[Prompt, ...]
    alphabet: str  # sorted characters of prompts and answers, for character vocabularies
    longest_answer: int  # characters; compared with max_tokens


SPEC = PluginSpec("task", "build", given=("seed",), members=tuple(field.name for field in fields(Task)))
