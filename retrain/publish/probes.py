"""Texts on which two models are compared: what the run sampled last, as its backend tokenized it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from retrain.backends.text import Text
from retrain.errors import PromptError
from retrain.publish.choice import Choice
from retrain.publish.merging import Probe
from retrain.records.layout import RunFiles
from retrain.records.samples import read_samples
from retrain.rollouts import Prompt

MOST_PROBES, MOST_TOKENS = 16, 256
TEXT = "The quick brown fox jumps over the lazy dog. 12 + 30 = 42"  # of a run that kept no samples


def probes_of(choice: Choice, tokenizer: Any) -> list[Probe]:
    """Return the last samples that a run kept: prompts, and completions to be scored."""
    options = choice.config.backend.options
    text = Text(
        tokenizer,
        choice.config.model.model,
        chat=bool(options.get("chat_template")),
        system=str(options.get("system_prompt", "")),
        template_kwargs=options.get("chat_template_kwargs"),
    )
    found = [probe for probe in _sampled(choice, text) if len(probe.ids) > probe.start]
    return found[-MOST_PROBES:] or [Probe(text.tokens_of(TEXT), 1)]


def _sampled(choice: Choice, text: Text) -> Iterator[Probe]:
    for row in read_samples(RunFiles(choice.run.directory).samples)[-4 * MOST_PROBES :]:
        prompt, completion = str(row.get("prompt", "")), str(row.get("completion", ""))
        try:
            start = text.encode(Prompt(0, prompt, ""))[-MOST_TOKENS:]
        except PromptError:  # an episode's, which began with more than a text
            continue
        yield Probe((*start, *text.tokens_of(completion)[:MOST_TOKENS]), len(start))
