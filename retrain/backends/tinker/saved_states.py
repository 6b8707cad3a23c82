"""Saved states at the API: whether one fits the run that starts from it, its export, and its deletion.

A checkpoint is a JSON file with the path of the state that the API saved.

An export, in peft's format, needs a model of its own at the API, made from the state. It is downloaded by
signed addresses, which appear in no message, and deleted again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from operator import methodcaller
from pathlib import Path
from typing import Any

import httpx
import tinker
from tinker.types import WeightsInfoResponse

from retrain.backends import ENGINE, SELF, BackendSpec, Exported
from retrain.backends.saved import reading, write_facts
from retrain.backends.squeeze import CONFIG, WEIGHTS
from retrain.backends.tinker import TinkerOptions
from retrain.backends.tinker.calls import (
    FAULTS,
    Fault,
    classify,
    describe,
    has_lost_model,
    lacks_route,
    status_told,
)
from retrain.base.errors import ConfigError, LaunchError, Problem, RecordsError, RetrainError, records_error
from retrain.base.event_loop import begun
from retrain.config.files import TINKER as FILE
from retrain.config.files import state_of
from retrain.config.resolve import teachers_of
from retrain.config.schema import Config, ModelSection

FORMAT = 1  # of a checkpoint's file; increment when old ones can no longer be read
ANSWER_S = 30.0  # to a question
SILENCE_S = 60.0  # of a download
GOODBYE_S = 5.0
EXPORT_LIVES_S = 3600  # if it cannot be deleted; the API's shortest
NAME = "retrain-publish"
DELETE_S = 30.0  # for each state
KNOWN_S = 10.0  # until what is not known yet is left to the run
TRAINED = re.compile(r"tinker://[^/]+/weights/[^/]+")
GONE = (Fault.LOST, Fault.WRONG, Fault.REFUSED)


@dataclass(frozen=True, slots=True)
class State:
    """A policy saved at the API's `path` after `version` updates; an empty path is the initial policy."""

    path: str
    version: int
    reference: str = ""  # path of the weights that the KL term compares with; empty: the base model


@dataclass(frozen=True, slots=True, eq=False)
class Sampler:
    """A sampling client of saved weights, and the version of their policy."""

    client: tinker.SamplingClient
    version: int


def start_problems(config: Config, answer_s: float = KNOWN_S) -> Iterator[str]:
    """Iterate over why a run cannot start from its adapter."""
    adapter = config.model.adapter
    path = state_of(adapter)
    if not path:
        yield (
            f"{adapter!r} is no state at the Tinker API, where retrain uploads no weights; name a finished "
            "run of backend 'tinker', or a state, tinker://RUN/weights/NAME"
        )
    elif not TRAINED.fullmatch(path):
        yield (
            f"{path!r} cannot be trained further; name a state that was saved for training, "
            "tinker://RUN/weights/NAME"
        )
    else:
        info = _info(config.model.base_url, path, answer_s)
        if isinstance(info, str):
            yield f"the Tinker API refuses {path} ({info}); name a state that it has"
        elif info and (wrong := mismatch(info.base_model, info.lora_rank, config.model)):
            yield f"{path} {wrong}"


def teacher_problems(config: Config, answer_s: float = KNOWN_S) -> Iterator[Problem]:
    """Iterate over why a run cannot learn from its teachers."""
    named, training = teachers_of(config), config.training
    if named and training.temperature != 1:
        what = f"got {training.temperature:g}; the Tinker API scores a teacher's tokens at 1, so needs 1"
        yield Problem(("training", "temperature"), what)
    if named and config.teacher.refresh:
        what = "got true; at the Tinker API a teacher does not follow the policy; leave it out"
        yield Problem(("teacher", "refresh"), what)
    for name, where in named.items():
        path = state_of(name)
        if name == SELF and config.model.adapter:
            yield Problem(where, f'got "self", with an adapter; name the adapter: "{config.model.adapter}"')
        elif name == ENGINE:
            what = "got \"engine\", which backend 'local' has; name a model of the API, or a run"
            yield Problem(where, what)
        elif Path(name).is_dir() and not path:
            yield Problem(where, f"{name!r} is no finished run of backend 'tinker'; name one, or a state")
        elif path:
            info = _info(config.model.base_url, path, answer_s)
            if isinstance(info, str):
                yield Problem(where, f"the Tinker API refuses {path} ({info}); name a state that it has")
            elif info and info.base_model and info.base_model != config.model.model:
                yield Problem(
                    where, f"{path} was trained on {info.base_model!r}; needs [model].model's tokens"
                )


def mismatch(model: str | None, rank: int | None, wanted: BackendSpec | ModelSection) -> str:
    """Return what a state has not in common with a run; "" if it fits, as far as the API tells."""
    if model and model != wanted.model:
        return f"was trained on {model!r}, not on [model].model = {wanted.model!r}"
    if rank and rank != wanted.lora_rank:
        return f"has rank {rank}, the run [model].lora_rank = {wanted.lora_rank}; make them equal"
    return ""


@cache  # conditions share it
def _info(url: str, path: str, answer_s: float) -> WeightsInfoResponse | str | None:
    """Return what the API knows of a state, or why it has none; None if it does not tell."""
    try:
        info: WeightsInfoResponse = ask(
            url, lambda client: client.get_weights_info_by_tinker_path(path), answer_s
        )
        return info
    except FAULTS as error:
        return describe(error) if classify(error) in GONE and not lacks_route(error) else None


def exported(config: Config, options: TinkerOptions, checkpoint: Path, directory: Path) -> Exported:
    """Download the adapters of a checkpoint's state into an existing directory."""
    path, url = state_of(str(checkpoint)), config.model.base_url
    if not path:
        raise RecordsError(f"{checkpoint}: names no state at the API; use another step")
    try:
        try:
            ask(url, lambda client: client.get_weights_info_by_tinker_path(path), ANSWER_S)
        except FAULTS as error:
            if not lacks_route(error):  # else go on: only the question is missing
                raise
        with _export(url, path, options.call_timeout_s) as files:
            for name in (CONFIG, WEIGHTS):
                download(name, files, directory)
    except TimeoutError as error:
        raise LaunchError(f"the Tinker API does not answer about {path}; try again later") from error
    except FAULTS as error:
        raise _failure(path, error) from error
    return Exported(base=config.model.model, tokenizer=options.tokenizer or config.model.model)


@contextmanager
def _export(url: str, path: str, timeout_s: float) -> Iterator[Mapping[str, str]]:
    """Export a state while entered: the signed address of each file."""
    service = tinker.ServiceClient(base_url=url or None, user_metadata={"run": NAME})
    archive = ""
    try:
        training = service.create_training_client_from_state(path).result(timeout_s)
        archive = training.save_weights_external(NAME, ttl_seconds=EXPORT_LIVES_S).result(timeout_s).path
        urls = ask(url, lambda client: client.get_external_weights_urls(archive), ANSWER_S)
        yield dict(urls.urls)
    finally:
        with suppress(*FAULTS):  # a session without heartbeat ends, and the export expires
            if archive:
                ask(url, lambda client: client.delete_checkpoint_from_tinker_path(archive), ANSWER_S)
            service.close("success").result(GOODBYE_S)


def download(name: str, files: Mapping[str, str], directory: Path) -> None:
    """Write one of a state's files, given their signed addresses, which are in no message."""
    if name not in files:
        raise RecordsError(f"the Tinker API exported {', '.join(files) or 'no file'}, and not {name}")
    try:
        with (
            httpx.stream("GET", files[name], timeout=SILENCE_S, follow_redirects=True) as answer,
            (directory / name).open("wb") as file,
        ):
            answer.raise_for_status()
            for part in answer.iter_bytes():
                file.write(part)
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        raise LaunchError(f"the download of {name} is refused with status {status}; try again") from None
    except OSError as error:
        raise records_error(directory / name, "write it", error, then="publish again") from error
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise LaunchError(f"the download of {name} broke off ({type(error).__name__}); try again") from None


def _failure(path: str, error: Exception) -> RetrainError:
    kind, said = classify(error), describe(error)
    if lacks_route(error):
        return ConfigError(f"[model].base_url: the server cannot export {path} ({said})")
    if kind is Fault.REFUSED:
        return ConfigError(f"the Tinker API refuses the key ({said}); check TINKER_API_KEY")
    if kind in (Fault.LOST, Fault.WRONG) and not has_lost_model(error):
        why = "states expire after [backend.options].state_days, and `retrain states --delete` removes them"
        return RecordsError(f"the Tinker API has no {path} ({said}): {why}")
    return LaunchError(f"the Tinker API cannot export {path} ({said}); try again later")


def ask(url: str, question: Callable[[tinker.RestClient], Any], answer_s: float) -> Any:
    """Return the answer to a question, at the API's default address if `url` is empty.

    Raises a TimeoutError after `answer_s`: the SDK tries again for minutes, without a word. It waits for the
    server even before it has a client, hence the thread.
    """
    with status_told():
        return begun(lambda: question(tinker.RestClient(base_url=url or None)).result()).result(answer_s)


def deleted(config: Config, paths: Sequence[str]) -> Mapping[str, str]:
    """Delete states; return each one's problem, "" if it is deleted or was gone before."""
    problems = dict.fromkeys(paths, "")
    for number, path in enumerate(paths):
        try:
            ask(config.model.base_url, methodcaller("delete_checkpoint_from_tinker_path", path), DELETE_S)
        except TimeoutError:
            unanswered = f"not deleted: the API did not answer within {DELETE_S:g} s; try again later"
            return problems | dict.fromkeys(paths[number:], unanswered)
        except FAULTS as error:
            problems[path] = "" if classify(error) is Fault.LOST else describe(error)
    return problems


def write_state(directory: Path, state: State, model: str, rank: int) -> None:
    """Write the API's path of a saved policy, with its model and rank."""
    facts = {"format": FORMAT, **asdict(state), "model": model, "lora_rank": rank}
    write_facts(directory / FILE, facts)


def read_state(directory: Path, model: str, rank: int) -> State:
    """Return the saved policy; a RecordsError if it is unreadable or of another model."""
    identity = {"format": FORMAT, "model": model, "lora_rank": rank}
    with reading(directory / FILE, "tinker", identity) as facts:
        return State(str(facts["path"]), int(facts["version"]), str(facts.get("reference", "")))
