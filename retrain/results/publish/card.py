"""The model card of a published run: README.md with the front matter that hubs read.

It shows what decides the result and what came out: of paths only their last part, of servers and secrets
nothing, of prompts only those of generated tasks, and the system prompt unless it is to stay private.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
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
from retrain.config.resolve import values_of
from retrain.config.schema import Config
from retrain.plugins.loggers import without_secrets
from retrain.records.layout import RunFiles
from retrain.records.samples import samples_of
from retrain.records.text import plain
from retrain.results.publish.choice import Choice
from retrain.results.publish.results import cost, result, table

if TYPE_CHECKING:
    from retrain.results.publish import Published, Wishes

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
    found: Published  # what its directory holds

    @property
    def base(self) -> str:
        """The base model's name for others; a directory's if it has none."""
        return self.found.base_model

    @property
    def system_prompt(self) -> str:
        """The system prompt as the card shows it; "" if the run had none."""
        known = system_prompt(self.choice)
        return PRIVATE if known and self.wishes.is_prompt_private else known


def system_prompt(choice: Choice) -> str:
    """Return the system prompt that a run had; "" if it had none."""
    options = choice.config.backend.options
    return str(options.get(SYSTEM_PROMPT) or "") if options.get("chat_template") else ""


def card(subject: Subject) -> str:
    """Return the text of README.md."""
    parts = (
        *(_front_matter(subject), _summary(subject), _example(subject)),
        *(result(subject.choice, subject.found.merged), cost(subject.choice)),
        *(_training(subject), _provenance(subject)),
    )
    return "\n".join(chain(*parts)).rstrip() + "\n"


def renamed(text: str, before: str, name: str) -> str:
    """Return a card whose example loads from another name."""
    return text.replace(f"name = {quoted(before)}", f"name = {quoted(name)}", 1)


def quoted(value: Any) -> str:
    """Return texts, or lists and tables of them, as Python writes them: with double quotes."""
    return json.dumps(value, ensure_ascii=False)


def is_local(model: str) -> bool:
    """Whether a model is named by a directory of this machine, which tells others nothing."""
    return model.startswith(("/", ".", "~")) or Path(model).is_dir()


def _front_matter(subject: Subject) -> Iterator[str]:
    is_adapter = subject.found.kind == "adapter"
    relation = "adapter" if is_adapter else "finetune"
    base = {} if is_local(subject.base) else {"base_model": subject.base, "base_model_relation": relation}
    mode = subject.choice.config.algorithm.advantage_mode
    facts: dict[str, str | list[str]] = {
        **base,
        "library_name": "peft" if is_adapter else "transformers",
        "license": subject.wishes.license or "unknown",
        "pipeline_tag": "text-generation",
        "tags": ["retrain", "reinforcement-learning", mode, *(["lora"] if is_adapter else [])],
    }
    yield "---"
    yield from (f"{key}: {json.dumps(value)}" for key, value in facts.items())  # JSON is YAML
    yield "---\n"


def _summary(subject: Subject) -> Iterator[str]:
    choice, config = subject.choice, subject.choice.config
    yield f"# {plain(choice.campaign.id)} {plain(choice.run.name)}\n"
    yield (
        f"{KINDS[subject.found.kind].format(_last_part(subject.base))} by reinforcement learning on the task "
        f"`{config.data.task}` with the reward `{config.reward.reward}`, "
        f"{choice.checkpoint.step} of {config.training.max_steps} steps.\n"
    )


def _example(subject: Subject) -> Iterator[str]:
    exported = subject.exported
    base = quoted(subject.base) + (f", revision={quoted(exported.revision)}" if exported.revision else "")
    dtype = f", dtype={quoted(exported.dtype)}" if exported.dtype else ""
    yield "## Load it\n\n```python"
    if subject.found.kind == "adapter":
        yield "from peft import PeftModel"
    yield "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
    yield f"name = {quoted(subject.found.name)}"
    if subject.found.kind == "adapter":
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
    yield f"prompt = {_tokenized(subject.choice, subject.system_prompt)}"
    yield "print(tokenizer.decode(model.generate(**prompt, max_new_tokens=64)[0]))\n```\n"


def _tokenized(choice: Choice, system_prompt: str) -> str:
    """Return the expression that encodes a prompt as the run did."""
    options, text = choice.config.backend.options, _prompt(choice)
    if not options.get("chat_template"):
        return f'tokenizer({quoted(text)}, return_tensors="pt")'
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    chat = quoted([*system, {"role": "user", "content": text}])
    variables = "".join(
        f", {key}={value!r}" for key, value in options.get("chat_template_kwargs", {}).items()
    )
    how = f'add_generation_prompt=True, return_dict=True, return_tensors="pt"{variables}'
    return f"tokenizer.apply_chat_template({chat}, {how})"


def _prompt(choice: Choice) -> str:
    """Return a prompt of the run if its task is generated: others' data is not to be published."""
    data, run = choice.config.data, choice.config.run
    has_files = any(key.startswith("data.") for key in (run.files if run else ()))
    if has_files or data.task == "datasets" or not registry.is_built_in("tasks", data.task):
        return FALLBACK_PROMPT
    kept = (sample.prompt for sample in samples_of(RunFiles(choice.run.directory).samples))
    return next((prompt for prompt in kept if 0 < len(prompt) <= LONGEST_PROMPT), FALLBACK_PROMPT)


def _training(subject: Subject) -> Iterator[str]:
    yield "## Training\n"
    yield from table((("key", "value"), [(f"`{key}`", f"`{value}`") for key, value in _keys(subject)]))


def _keys(subject: Subject) -> Iterator[tuple[str, str]]:
    """Iterate over the keys that decide the result and are not at their default, and those of `SHOWN`."""
    for section, key, value in values_of(subject.choice.config):
        name = f"{section}.{key.name}"
        if name in LEFT_OUT or key.affects != "result":
            continue
        if value != key.first_default or name in SHOWN:
            shown = mapped(without_secrets(value, key.name), name, key.path, _shown)
            if name == "backend.options" and SYSTEM_PROMPT in shown:
                shown[SYSTEM_PROMPT] = PRIVATE if subject.wishes.is_prompt_private else value[SYSTEM_PROMPT]
            yield name, plain(as_toml(shown), 1000)


def _shown(value: Any, _: str, __: str) -> Any:
    """Return a value without what is this machine's: directories and addresses."""
    if not isinstance(value, str):
        return value
    if "://" in value:
        return "(a server)"
    text = PATH.sub(lambda found: Path(found[0]).name, value)
    is_path = not re.search(r"\s", text) and (text.count("/") > 1 or _is_found(text))
    return Path(text).name if is_path else text


def _last_part(text: str) -> str:
    return Path(text).name if text.startswith(("/", "~")) else text


def _is_found(text: str) -> bool:
    """Whether a text with one slash names a file rather than a hub's model or data set."""
    return "/" in text and os.path.exists(text)  # noqa: PTH110 - False for what can be no path


def _provenance(subject: Subject) -> Iterator[str]:
    choice, config, run = subject.choice, subject.choice.config, subject.choice.run
    manifest = choice.campaign.manifest
    git = manifest.git if manifest else None
    software = dict.fromkeys(plain(attempt.software) for attempt in run.attempts if attempt.software)
    facts = {
        "base model": " ".join(filter(None, (_last_part(subject.base), subject.exported.revision))),
        "started from": _start(config),
        "campaign": plain(choice.campaign.id),
        "run": f"{plain(run.name)}: condition {plain(run.condition)}, seed {run.seed}",
        "configuration hash": config.run.config_hash if config.run else "",
        "git commit": str(git or ""),
        "trained by": f"retrain {manifest.package_version}" if manifest else "",
        "software": "; ".join(software),
        "SHA-256 of the trained weights": subject.found.digest,
        "published by": f"retrain {version()}",
    }
    yield "## Provenance\n"
    yield from table((("", ""), [(name, value) for name, value in facts.items() if value]))


def _start(config: Config) -> str:
    adapter = config.model.adapter
    digest = config.run.files.get(ADAPTER, "") if config.run else ""
    return f"{_last_part(adapter)} (digest {digest or 'not known'})" if adapter else ""
