"""Merges adapters into their base model, and checks the result against the two apart.

What is compared are log-probabilities of texts that the run sampled: under the base model with adapters, and
under the merged model as it is read back from disk, both in float32. In shorter types many weights are
rounded back to what they were before training: of what the adapters change, only a share may be lost.
Source: LoRA, arXiv:2106.09685.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from retrain.backends import Exported
from retrain.backends.options import template_in
from retrain.backends.text import Text
from retrain.base import extras
from retrain.base.errors import ConfigError, PromptError, RunFailedError, first_line
from retrain.base.rollouts import Prompt
from retrain.records.layout import RunFiles
from retrain.records.samples import samples_of
from retrain.results.publish.choice import Choice

WHO = "publish --merge"
MOST_PROBES, MOST_TOKENS = 16, 256
TEXT = "The quick brown fox jumps over the lazy dog. 12 + 30 = 42"  # of a run that kept no samples
DTYPES = ("float32", "bfloat16")
EXACT = 1e-3  # nats per token, mean absolute difference; what rounding in float32 stays well below
MOST_LOST = 0.25  # share of what the adapters change, if the merged weights are of a shorter type

Ids = tuple[int, ...]
Model = Any  # torch and transformers are imported only where they are needed
Tensor = Any


@dataclass(frozen=True, slots=True)
class Probe:
    """Token ids of a text; those from `start` on are scored."""

    ids: Ids
    start: int


@dataclass(frozen=True)
class Merged:
    """How far log-probabilities under the merged model are from those before, in nats per token."""

    dtype: str
    tokens: int
    mean_difference: float
    largest_difference: float
    tolerance: float  # for the mean
    adapters_change: float  # mean difference between the base model with and without adapters

    def __str__(self) -> str:
        return (
            f"log-probabilities of {self.tokens} tokens differ by {self.mean_difference:.2g} on average, "
            f"{self.largest_difference:.2g} at most ({self.dtype}; tolerance {self.tolerance:.2g} on "
            f"average; the adapters change them by {self.adapters_change:.2g})"
        )


def merge(
    exported: Exported, adapter: Path, directory: Path, probes: Sequence[Probe], dtype: str = "float32"
) -> Merged:
    """Write the merged model into a directory, in transformers' format and with weights of a type.

    Raises:
        ConfigError: the base model cannot be loaded, or the adapters do not fit it.
        RunFailedError: log-probabilities before and after differ by more than the tolerance.
    """
    torch, transformers = (extras.load(name, "local", WHO) for name in ("torch", "transformers"))
    load = partial(transformers.AutoModelForCausalLM.from_pretrained, trust_remote_code=False)
    with extras.quiet_transformers():
        peft = extras.load("peft", "local", WHO)
        try:
            base = load(exported.base, revision=exported.revision or None, dtype="float32")
            adapted = peft.PeftModel.from_pretrained(base, str(adapter)).eval()
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise _unusable(f"the base model {exported.base!r} with these adapters", error) from error
        before = _logprobs(torch, adapted, probes)
        with adapted.disable_adapter():
            change = float((before - _logprobs(torch, adapted, probes)).abs().mean())
        model = adapted.get_base_model()  # merged into shared weights, adapters of one would change the other
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        heads, embeddings = (getattr(layer, "base_layer", layer) for layer in (head, embedding))
        if heads.weight is embeddings.weight and (heads is not head or embeddings is not embedding):
            heads.weight = torch.nn.Parameter(heads.weight.detach().clone(), requires_grad=False)
            model.config.tie_word_embeddings = False
        merged = adapted.merge_and_unload().to(getattr(torch, dtype))
        merged.save_pretrained(str(directory))
        del base, adapted, merged  # before the same is loaded again
        after = _logprobs(torch, load(str(directory), dtype="float32"), probes)
    gap = (after - before).abs()
    tolerance = EXACT if dtype == "float32" else MOST_LOST * change
    check = Merged(dtype, gap.numel(), float(gap.mean()), float(gap.max()), tolerance, change)
    if not check.mean_difference <= tolerance:  # NaN is no agreement
        fix = "publish the adapters alone" if dtype == "float32" else "merge in float32"
        raise RunFailedError(f"--merge: the merged model is not the policy: {check}; {fix}")
    return check


def loaded_tokenizer(exported: Exported, template: bool | str = False) -> Any:
    """Load the run's tokenizer with transformers; `template` is the run's for chats, perhaps a file's."""
    transformers = extras.load("transformers", "local", WHO)
    revision = exported.revision if exported.tokenizer == exported.base else ""
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            exported.tokenizer, revision=revision or None, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise _unusable(f"the tokenizer {exported.tokenizer!r}", error) from error
    if chat_template := template_in(template):
        tokenizer.chat_template = chat_template
    return tokenizer


def _unusable(what: str, error: Exception) -> ConfigError:
    return ConfigError(f"{what} cannot be loaded ({first_line(error)}); check its name and your access")


def _logprobs(torch: Any, model: Model, probes: Sequence[Probe]) -> Tensor:
    """Return the log-probability of every token that is scored."""
    logprobs = []
    with torch.no_grad():
        for probe in probes:
            ids = torch.tensor([probe.ids])
            logits = model(input_ids=ids).logits[0, probe.start - 1 : -1].float()
            logprobs.append(logits.log_softmax(-1).gather(-1, ids[0, probe.start :, None])[:, 0])
    return torch.cat(logprobs)


def probes_of(choice: Choice, tokenizer: Any) -> list[Probe]:
    """Return the last samples that a run kept: prompts, and completions to be scored."""
    options = choice.config.backend.options
    text = Text(
        tokenizer,
        choice.config.model.model,
        chat=options.get("chat_template", False),
        system=str(options.get("system_prompt", "")),
        template_kwargs=options.get("chat_template_kwargs"),
    )
    probes = []
    for sample in list(samples_of(RunFiles(choice.run.directory).samples))[-4 * MOST_PROBES :]:
        try:
            start = text.encode(Prompt(0, sample.prompt, ""))[-MOST_TOKENS:]
        except PromptError:  # an episode's, which began with more than a text
            continue
        if completion := text.tokens_of(sample.completion)[:MOST_TOKENS]:
            probes.append(Probe((*start, *completion), len(start)))
    return probes[-MOST_PROBES:] or [Probe(text.tokens_of(TEXT), 1)]
