"""Pushes a published directory to a hub, the one of `HF_ENDPOINT` or Hugging Face's, with huggingface_hub.

The token is found where that package looks for it: `HF_TOKEN`, or what `hf auth login` left. A push never
changes the directory, and one that fails says how to try again.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from retrain.base import extras
from retrain.base.errors import ConfigError, LaunchError, RetrainError, first_line, records_error
from retrain.base.http_client import is_address
from retrain.base.redaction import without_user
from retrain.records.text import as_typed, plain

EXTRA, WHO = "hub", "publish --push"
# of what was pushed there before: transformers prefers adapters to a whole model beside them
WEIGHTS_OF_EARLIER = (
    *("adapter_config.json", "adapter_model.safetensors"),
    *("model.safetensors", "model-?????-of-?????.safetensors", "model.safetensors.index.json"),
)
# what huggingface_hub raises when an answer is not what it expects: a page, a list, a missing key
NO_ANSWERS = (json.JSONDecodeError, UnicodeDecodeError, LookupError, TypeError, AttributeError)


def check_name(repository: str) -> None:
    """Raise a ConfigError for what no repository can be called, or if huggingface_hub is not installed."""
    utils = extras.load("huggingface_hub.utils", EXTRA, WHO)
    try:
        utils.validate_repo_id(repository)
        if "/" not in repository:
            raise ValueError("needs the form USER/NAME")
    except ValueError as error:
        raise ConfigError(f"--push {plain(repository)}: {plain(str(error))}") from error


def push(content: Path, directory: Path, repository: str, message: str, *, private: bool) -> str:
    """Push the content of a directory as one commit to a repository, made if there is none.

    The commit also deletes weights that were pushed before, unless it replaces them. Returns the address.

    Raises:
        ConfigError: the hub refuses the token, the name or the content.
        LaunchError: the hub cannot be reached, or fails.
    """
    hub = extras.load("huggingface_hub", EXTRA, WHO)
    if not sys.stderr.isatty():
        extras.load("huggingface_hub.utils", EXTRA, WHO).disable_progress_bars()
    address = os.environ.get("HF_ENDPOINT")
    if address:
        if not is_address(address) or without_user(address) != address:  # errors would show a password
            raise ConfigError("HF_ENDPOINT: needs https://HOST without a user; a token goes into HF_TOKEN")
        # others' hubs may have no Xet storage, which hf_xet would ask for minutes
        extras.load("huggingface_hub.constants", EXTRA, WHO).HF_HUB_DISABLE_XET = True
    api = hub.HfApi(endpoint=address or None)
    with _explained(api.endpoint, directory, repository, private=private):
        url = api.create_repo(repository, private=private or None, exist_ok=True)
        if private and not api.model_info(repository).private:
            raise ConfigError("it exists and is public; make it private there, or name another")
        api.upload_folder(
            repo_id=repository,
            folder_path=content,
            commit_message=message,
            delete_patterns=list(WEIGHTS_OF_EARLIER),
        )
    return str(url)


@contextmanager
def _explained(hub_url: str, directory: Path, repository: str, *, private: bool) -> Iterator[None]:
    """Convert what the package raises into what is wrong, and how to try again."""
    kind: type[RetrainError]
    again = f"retrain publish {as_typed(directory)} --push {repository}" + (" --private" if private else "")
    answers: type[Exception] = extras.load("huggingface_hub.errors", EXTRA, WHO).HfHubHTTPError
    network: tuple[Any, ...] = answers.__bases__  # what all errors of its HTTP library are, and OSError
    try:
        yield
    except (*network, ConfigError, ValueError, RuntimeError, *NO_ANSWERS) as error:
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
        kind, what = ConfigError, plain(first_line(cause))
        if isinstance(cause, answers):
            kind, what = _refusal(cause, repository)
        elif isinstance(cause, OSError) and cause.filename is not None:
            raise records_error(directory, "read it", cause, f"try again with: {again}") from error
        elif isinstance(cause, network):
            unreachable = f"the hub at {hub_url} or its storage cannot be reached ({what})"
            kind, what = LaunchError, f"{unreachable}; check the network and HF_ENDPOINT"
        elif isinstance(cause, NO_ANSWERS):
            what = f"what answers at {hub_url} is no hub ({type(cause).__name__}: {what}); check HF_ENDPOINT"
        raise kind(
            f"--push {repository}: {what}\n{directory} is complete; try again with: {again}"
        ) from error


def _refusal(error: Any, repository: str) -> tuple[type[RetrainError], str]:
    """Return what an answer of the hub means."""
    status, answer = error.response.status_code, plain(error.server_message or first_line(error))
    if status == 401:
        what = "the hub refuses the token, or found none"
        return ConfigError, f"{what} ({answer}); `hf auth login`, or set HF_TOKEN to one that may write"
    if status == 403:
        what = f"the token may not write to {repository}"
        return ConfigError, f"{what} ({answer}); check the name and what the token is allowed"
    if status >= 500 or status == 429:
        return LaunchError, f"the hub fails ({status}: {answer}); try again later"
    return ConfigError, f"the hub refuses it ({status}: {answer})"
