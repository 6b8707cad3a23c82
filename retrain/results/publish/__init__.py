"""Makes a run's policy usable without retrain: weights in others' formats, checked, with a model card.

`FACTS` in a published directory says what it is and marks it as ours: nothing else is ever overwritten.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from retrain.backends import BackendPlugin, Exported, plugin_of
from retrain.backends.squeeze import CONFIG, WEIGHTS
from retrain.base.distribution import version
from retrain.base.errors import ConfigError, RecordsError, records_error
from retrain.records.files import read_json, record_of
from retrain.results.publish.card import Subject, card, is_local, renamed, system_prompt
from retrain.results.publish.choice import Choice
from retrain.results.publish.directory import AGAIN, FACTS, made_beside
from retrain.results.publish.hub import push
from retrain.results.publish.merging import Merged, loaded_tokenizer, merge, probes_of

CARD = "README.md"
PARENT = Path("published")
NEEDS_NAME = (
    "--push {}: the base model is a directory of this machine, so others could not use its adapters; publish "
    "them with --base-model ORG/NAME"
)


@dataclass(frozen=True)
class Wishes:
    """How to publish."""

    output: Path | None = None  # None: in `PARENT`, named after campaign and run
    force: bool = False  # replace what was published there before
    merge: bool = False
    dtype: str = "float32"  # of merged weights
    base_model: str = ""  # what others call the base model; "": as the run does
    license: str = ""
    repository: str = ""  # to which it will be pushed; "": it will not be
    is_prompt_private: bool = False  # the card leaves the system prompt out


@dataclass(frozen=True)
class Published:
    """What a directory holds."""

    directory: str
    name: str  # from which the card's example loads it; never an absolute path
    kind: str  # adapter, merged (into the base model), model (every parameter was trained)
    campaign: str
    run_id: str
    run_name: str  # what it is called wherever it is shown
    step: int
    chosen: str  # why this seed, of several; "" if there was no choice
    base_model: str
    digest: str  # SHA-256 of the trained weights
    weights_bytes: int
    merged: Merged | None = None
    shows_system_prompt: bool = False
    url: str = ""  # of the repository that it was pushed to


OF_THIS_MACHINE = ("directory", "url")  # not in `FACTS`


def publish(choice: Choice, wishes: Wishes, say: Callable[[str], object]) -> Published:
    """Write a run's policy into a directory: weights, model card and facts.

    Raises:
        ConfigError: the directory exists, or the run's backend cannot do what is wished.
        RunFailedError: the merged model differs from the policy.
    """
    export = plugin_of(choice.config.backend.backend).export
    directory = wishes.output or PARENT / f"{choice.campaign.id}-{choice.run.run_id}"
    if export is BackendPlugin.export:  # which refuses, before anything is made
        export(choice.config, choice.checkpoint.directory, directory)
    with made_beside(directory, force=wishes.force) as made:
        say(f"{choice.run.name}: fetching the weights of step {choice.checkpoint.step}")
        exported = export(choice.config, choice.checkpoint.directory, made)
        digest = _digest(made)
        merged = _complete(choice, exported, wishes, made, say)
        published = Published(
            directory=str(directory),
            name=directory.name if directory.is_absolute() or ".." in directory.parts else str(directory),
            kind="model" if exported.is_whole else "merged" if merged else "adapter",
            campaign=choice.campaign.id,
            run_id=choice.run.run_id,
            run_name=choice.run.name,
            step=choice.checkpoint.step,
            chosen=choice.why,
            base_model=wishes.base_model or exported.base,
            digest=digest,
            weights_bytes=sum(path.stat().st_size for path in made.glob("*.safetensors")),
            merged=merged,
            shows_system_prompt=bool(system_prompt(choice)) and not wishes.is_prompt_private,
        )
        _describe(published, card(Subject(choice, exported, wishes, published)), made)
        for path in made.rglob("*"):  # some writers let nobody else read what they write
            if path.is_file():  # tokenizers with several chat templates save a directory of them
                path.chmod((made / CARD).stat().st_mode)
    return published


def read_published(directory: Path) -> Published | None:
    """Return what was published in a directory; None if nothing was."""
    facts = read_json(directory / FACTS)
    if facts is None:
        return None
    try:
        return record_of(Published, {"run_name": facts.get("run_id")} | facts | {"directory": str(directory)})
    except ValueError as error:
        raise RecordsError(f"{directory / FACTS}: is damaged ({error!r}); publish the run again") from error


def push_published(published: Published, repository: str, *, private: bool) -> Published:
    """Push a directory to a hub, with a card that loads it from there; the directory stays as it is."""
    directory, base = Path(published.directory), published.base_model
    if published.kind == "adapter" and is_local(base):
        raise ConfigError(NEEDS_NAME.format(repository))
    pushed = replace(published, name=repository, base_model=Path(base).name if is_local(base) else base)
    message = f"{published.run_name} at step {published.step}, by retrain {version()}"
    with TemporaryDirectory(prefix="retrain-push-") as place:
        staged = Path(place) / "staged"
        try:
            text = (directory / CARD).read_text(encoding="utf-8", errors="surrogateescape")
            shutil.copytree(directory.resolve(), staged, copy_function=os.symlink)
            for name in (CARD, FACTS):
                (staged / name).unlink()
            _describe(pushed, renamed(text, published.name, repository), staged)
        except OSError as error:
            raise records_error(directory, "push it", error, AGAIN) from error
        url = push(staged, directory, repository, message, private=private)
    return replace(pushed, url=url)


def _describe(published: Published, text: str, directory: Path) -> None:
    """Write the card and the facts into a directory."""
    facts = {key: value for key, value in asdict(published).items() if key not in OF_THIS_MACHINE}
    if published.kind != "adapter" and is_local(
        published.base_model
    ):  # whole weights load without their base
        facts["base_model"] = Path(published.base_model).name
    (directory / CARD).write_text(text, encoding="utf-8", errors="surrogateescape")
    (directory / FACTS).write_text(json.dumps(facts, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _complete(
    choice: Choice, exported: Exported, wishes: Wishes, made: Path, say: Callable[[str], object]
) -> Merged | None:
    """Complete the weights in a directory as they are wished; return the check of merged ones."""
    template = choice.config.backend.options.get("chat_template", False)
    if wishes.merge and exported.is_whole:
        raise ConfigError("--merge: the run trained every parameter, so it is a whole model already")
    if not wishes.merge:
        if exported.is_whole or isinstance(template, str):  # the base model's tokenizer lacks this template
            loaded_tokenizer(exported, template).save_pretrained(str(made))
        if not exported.is_whole:
            base = wishes.base_model or exported.base
            if wishes.repository and is_local(base):
                raise ConfigError(NEEDS_NAME.format(wishes.repository))
            try:
                facts = json.loads((made / CONFIG).read_text(encoding="utf-8"))
                facts["base_model_name_or_path"] = base  # as others call it
                facts["task_type"] = facts.get("task_type") or "CAUSAL_LM"
            except (OSError, ValueError, TypeError, AttributeError) as error:
                raise RecordsError(f"{CONFIG}: what the backend wrote cannot be read ({error})") from error
            text = json.dumps(facts, indent=2, sort_keys=True) + "\n"
            (made / CONFIG).write_text(text, encoding="utf-8")
        return None
    if exported.unmergeable:
        raise ConfigError(f"--merge: {exported.unmergeable}")
    say("merging, and comparing log-probabilities before and after")
    whole, tokenizer = made / "merged", loaded_tokenizer(exported)
    merged = merge(exported, made, whole, probes_of(choice, tokenizer), wishes.dtype)
    tokenizer.save_pretrained(str(whole))
    for path in made.glob("adapter_*"):
        path.unlink()
    for path in whole.iterdir():
        path.rename(made / path.name)
    whole.rmdir()
    return merged


def _digest(directory: Path) -> str:
    """Return the SHA-256 of the weights; of several files, that of their digests in the order of names."""
    digests = []
    for path in sorted(directory.glob("*.safetensors")):
        with path.open("rb") as file:
            digests.append(hashlib.file_digest(file, "sha256").hexdigest())
    if not digests:
        raise RecordsError(f"the backend wrote no {WEIGHTS} and no model; use another step")
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
