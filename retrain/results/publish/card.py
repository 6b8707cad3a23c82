"""The model card of a published run: README.md with the front matter that hubs read.

It shows what decides the result and what came out: of paths only their last part, of servers and secrets
nothing, of prompts only those of generated tasks, and the system prompt unless it is to stay private. Rewards
and comparisons are those of `retrain compare`.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrain.backends import Exported
from retrain.base import registry
from retrain.base.distribution import version
from retrain.config.files import KEY as ADAPTER
from retrain.config.files import mapped
from retrain.config.keys import as_toml
from retrain.config.resolve import by_source, values_of
from retrain.plugins.loggers import without_secrets
from retrain.records.layout import RunFiles
from retrain.records.samples import samples_of
from retrain.records.text import count_of, dollars, format_duration, plain
from retrain.records.windows import Window
from retrain.results.publish.choice import Choice
from retrain.results.publish.merging import Merged
from retrain.results.report.compare import SideResult, compare
from retrain.results.report.gather import RunHistory
from retrain.results.report.sides import Match, Side, deciding, describe, final_value, known_metrics, side_of
from retrain.results.report.tables import Table, footnotes, heading, interval, remarks, results, significant

if TYPE_CHECKING:
    from retrain.results.publish import Published, Wishes


REWARDS = ("eval_reward", "mean_reward")
SHOWN = {  # keys in every card, although they may be defaults
    *("model.lora_rank", "training.max_steps", "training.batch_size", "training.group_size"),
    *("training.max_tokens", "training.temperature", "training.lr", "algorithm.advantage_mode"),
    *("algorithm.loss_mode", "data.task", "reward.reward", "backend.backend"),
}
LEFT_OUT = ("model.model", ADAPTER, "model.base_url")  # shown elsewhere, or of no use to others
LONGEST_PROMPT = 200  # characters of the example's
FALLBACK_PROMPT = "Hello"
SYSTEM_PROMPT = "system_prompt"  # an option of backends with a chat template
PRIVATE = "(not published)"
PATH = re.compile(r"(?<![\w.~/])(?:~\w*|\.{1,2})?(?:/[^\s/'\":;,=]+){2,}/?")  # within a command, for example
KINDS = {
    "adapter": "LoRA adapters for `{}`, trained",
    "merged": "`{}` merged with LoRA adapters that were trained",
    "model": "`{}`, all parameters trained",
}


@dataclass(frozen=True)
class Subject:
    """What a card describes."""

    choice: Choice
    exported: Exported
    wishes: Wishes
    published: Published  # what its directory holds

    @property
    def base(self) -> str:
        """The base model's name for others; a directory's if it has none."""
        return self.published.base_model


def system_prompt(choice: Choice) -> str:
    """Return the system prompt that a run had; "" if it had none."""
    options = choice.config.backend.options
    return str(options.get(SYSTEM_PROMPT) or "") if options.get("chat_template") else ""


def card(subject: Subject) -> str:
    """Return the text of README.md."""
    lines = chain(
        _head(subject),
        _example(subject),
        _result(subject.choice, subject.published.merged),
        _cost(subject.choice),
        _training(subject),
        _provenance(subject),
    )
    return "\n".join(lines).rstrip() + "\n"


def renamed(text: str, before: str, name: str) -> str:
    """Return a card whose example loads from another name."""
    return text.replace(f"name = {quoted(before)}", f"name = {quoted(name)}", 1)


def quoted(value: Any) -> str:
    """Return texts, or lists and tables of them, as Python writes them: with double quotes."""
    return json.dumps(value, ensure_ascii=False)


def is_local(model: str) -> bool:
    """Whether a model is named by a directory of this machine, which tells others nothing."""
    return model.startswith(("/", ".", "~")) or Path(model).is_dir()


def _head(subject: Subject) -> Iterator[str]:
    """Iterate over the lines of the front matter, and of what was trained on what."""
    choice, config = subject.choice, subject.choice.config
    is_adapter = subject.published.kind == "adapter"
    relation = "adapter" if is_adapter else "finetune"
    base = {} if is_local(subject.base) else {"base_model": subject.base, "base_model_relation": relation}
    tags = ["retrain", "reinforcement-learning", config.algorithm.advantage_mode]
    facts: dict[str, str | list[str]] = {
        **base,
        "library_name": "peft" if is_adapter else "transformers",
        "license": subject.wishes.license or "unknown",
        "pipeline_tag": "text-generation",
        "tags": [*tags, "lora"] if is_adapter else tags,
    }
    yield "---"
    yield from (f"{key}: {json.dumps(value)}" for key, value in facts.items())  # JSON is YAML
    yield "---\n"
    yield f"# {plain(choice.campaign.id)} {plain(choice.run.name)}\n"
    what = KINDS[subject.published.kind].format(_last_part(subject.base))
    rewards = ", ".join(dict.fromkeys(own.reward.reward for own in by_source(config).values()))
    yield (
        f"{what} by reinforcement learning on the task `{config.data.tasks}` with the reward "
        f"`{rewards}`, {choice.checkpoint.step} of {config.training.max_steps} steps.\n"
    )


def _example(subject: Subject) -> Iterator[str]:
    exported, is_adapter = subject.exported, subject.published.kind == "adapter"
    base = quoted(subject.base) + (f", revision={quoted(exported.revision)}" if exported.revision else "")
    dtype = f", dtype={quoted(exported.dtype)}" if exported.dtype else ""
    yield "## Load it\n\n```python"
    if is_adapter:
        yield "from peft import PeftModel"
    yield "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
    yield f"name = {quoted(subject.published.name)}"
    if is_adapter:
        is_base = exported.tokenizer == exported.base or (
            is_local(exported.tokenizer) and not is_local(subject.base)  # others have only the base model's
        )
        has_own = isinstance(subject.choice.config.backend.options.get("chat_template"), str)
        tokenizer = "name" if has_own else base if is_base else quoted(exported.tokenizer)
        yield f"model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained({base}{dtype}), name)"
        yield f"tokenizer = AutoTokenizer.from_pretrained({tokenizer})"
    else:
        yield 'model = AutoModelForCausalLM.from_pretrained(name, dtype="auto")'
        yield "tokenizer = AutoTokenizer.from_pretrained(name)"
    choice = subject.choice
    options, text = choice.config.backend.options, _prompt(choice)
    prompt = f'tokenizer({quoted(text)}, return_tensors="pt")'  # as the run encoded it
    if options.get("chat_template"):
        chat = [{"role": "user", "content": text}]
        if system := system_prompt(choice):
            system = PRIVATE if subject.wishes.is_prompt_private else system
            chat.insert(0, {"role": "system", "content": system})
        variables = options.get("chat_template_kwargs", {}).items()
        how = 'add_generation_prompt=True, return_dict=True, return_tensors="pt"'
        how += "".join(f", {key}={value!r}" for key, value in variables)
        prompt = f"tokenizer.apply_chat_template({quoted(chat)}, {how})"
    yield f"prompt = {prompt}"
    yield "print(tokenizer.decode(model.generate(**prompt, max_new_tokens=64)[0]))\n```\n"


def _prompt(choice: Choice) -> str:
    """Return a prompt of the run if its task is generated: others' data is not to be published."""
    data, run = choice.config.data, choice.config.run
    has_files = any(key.startswith("data.") for key in (run.files if run else ()))
    tasks = [source.task for source in data.source] or [data.task]
    if has_files or "datasets" in tasks or not all(registry.is_built_in("tasks", task) for task in tasks):
        return FALLBACK_PROMPT
    kept = (sample.prompt for sample in samples_of(RunFiles(choice.run.directory).samples))
    return next((prompt for prompt in kept if 0 < len(prompt) <= LONGEST_PROMPT), FALLBACK_PROMPT)


def _result(choice: Choice, merged: Merged | None) -> Iterator[str]:
    """Iterate over the lines on the rewards of the run at this step, and on its campaign's comparison."""
    run, step, campaign = choice.run, choice.checkpoint.step, choice.campaign
    window = Window() if run.is_done and step == run.last_step else Window(end=step)
    evaluations = [name for name in run.result if name.startswith("eval_") and name.endswith("_reward")]
    values = {name: final_value(run, name, window) for name in (*REWARDS, *evaluations)}
    rewards = [
        f"{name} {significant(value)} ({describe(name, window, [run])})"
        for name, value in values.items()
        if value is not None
    ]
    yield "## Result\n"
    yield f"Run `{plain(run.name)}` at step {step}: {', '.join(rewards) or 'no reward is known'}."
    if choice.why:
        yield f"It is {choice.why}, and so better than what another run may be expected to reach: see below."
    yield ""
    if merged is not None:
        yield f"Merged and checked: {merged}.\n"
    sides: Sequence[Side] = deciding(campaign)
    if len(sides) < 2:
        sides = (side_of(campaign, run.condition),)
    metrics = [name for name in REWARDS if name in known_metrics(campaign.runs)]
    comparison = compare(Match("", tuple(sides), campaign), metrics)
    for metric in comparison.metrics:
        yield f"`{metric.metric}`, {heading(metric)}:\n"
        yield from _table(results(metric) if metric.differences else _alone(metric.sides[0]))
        yield from (f"- {line}" for line in remarks(metric))
        yield ""
    yield from (f"{line}\n" for line in footnotes([comparison] if comparison.metrics else []))


def _cost(choice: Choice) -> Iterator[str]:
    runs = choice.campaign.runs
    yield "## Cost\n"
    yield f"This run: {_spent([choice.run])}."
    if len(runs) > 1:
        yield f"All {count_of(len(runs), 'run')} of its campaign: {_spent(runs)}."
    yield ""


def _alone(side: SideResult) -> Table:
    sample = side.sample
    limits = interval(sample.low, sample.high, signed=False)
    row = side.label, str(sample.n), significant(sample.mean), limits
    return ("condition", ">runs", ">mean", "95 % interval"), [row]


def _spent(runs: Sequence[RunHistory]) -> str:
    took_s = math.fsum(attempt.duration_s or 0.0 for run in runs for attempt in run.attempts)
    costs = [run.cost_usd for run in runs if run.cost_usd is not None]
    price = dollars(math.fsum(costs)) if len(costs) == len(runs) else "price not known"
    return f"{format_duration(took_s)}, {price}"


def _table(table: Table) -> Iterator[str]:
    """Iterate over the lines of a table in Markdown."""
    headers, rows = table
    names = [name.lstrip(">") for name in headers]
    alignment = ["---:" if name.startswith(">") else "---" for name in headers]
    for cells in (names, alignment, *rows):
        yield "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"
    yield ""


def _training(subject: Subject) -> Iterator[str]:
    """Iterate over the keys that decide the result and are not at their default, and those of `SHOWN`."""
    rows = []
    for section, key, value in values_of(subject.choice.config):
        name = f"{section}.{key.name}"
        is_unread = name == "data.task" and subject.choice.config.data.source
        if name in LEFT_OUT or key.affects != "result" or is_unread:
            continue
        if value != key.first_default or name in SHOWN:
            shown = mapped(without_secrets(value, key.name), name, key.path, _shown)
            if name == "backend.options" and SYSTEM_PROMPT in shown:
                shown[SYSTEM_PROMPT] = PRIVATE if subject.wishes.is_prompt_private else value[SYSTEM_PROMPT]
            rows.append((f"`{name}`", f"`{plain(as_toml(shown), 1000)}`"))
    yield "## Training\n"
    yield from _table((("key", "value"), rows))


def _shown(value: Any, _: str, __: str) -> Any:
    """Return a value without what is this machine's: directories and addresses."""
    if not isinstance(value, str):
        return value
    if "://" in value:
        return "(a server)"
    text = PATH.sub(lambda match: Path(match[0]).name, value)
    # with one slash it may be a hub's model; of a text that can be no path, `os.path.exists` is False
    is_file = "/" in text and os.path.exists(text)  # noqa: PTH110
    is_path = not re.search(r"\s", text) and (text.count("/") > 1 or is_file)
    return Path(text).name if is_path else text


def _last_part(text: str) -> str:
    return Path(text).name if text.startswith(("/", "~")) else text


def _provenance(subject: Subject) -> Iterator[str]:
    choice, config, run = subject.choice, subject.choice.config, subject.choice.run
    manifest = choice.campaign.manifest
    adapter = config.model.adapter
    digest = config.run.files.get(ADAPTER) if config.run else None
    software = dict.fromkeys(plain(attempt.software) for attempt in run.attempts if attempt.software)
    facts = {
        "base model": " ".join(filter(None, (_last_part(subject.base), subject.exported.revision))),
        "started from": f"{_last_part(adapter)} (digest {digest or 'not known'})" if adapter else "",
        "campaign": plain(choice.campaign.id),
        "run": f"{plain(run.name)}: condition {plain(run.condition)}, seed {run.seed}",
        "configuration hash": config.run.config_hash if config.run else "",
        "git commit": str((manifest and manifest.git) or ""),
        "trained by": f"retrain {manifest.package_version}" if manifest else "",
        "software": "; ".join(software),
        "SHA-256 of the trained weights": subject.published.digest,
        "published by": f"retrain {version()}",
    }
    yield "## Provenance\n"
    yield from _table((("", ""), [(name, value) for name, value in facts.items() if value]))
