"""Checks once, for all runs, that the servers they use answer.

A backend or reward lists them in `servers(config)` or `servers(params)`: address -> the key that sets it.
Any response counts as an answer, including an HTTP error; no secrets are sent.
"""

from __future__ import annotations

import http.client
import re
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from retrain import registry
from retrain.errors import LaunchError

if TYPE_CHECKING:
    from retrain.config.schema import Config

PATIENCE_S = 10.0  # per address: a running server answers at once, unless it is very busy


@dataclass(frozen=True, slots=True)
class Server:
    """An address, the key that names it, and why it does not answer ("" if it does)."""

    address: str  # without a user or password
    key: str
    silence: str


def servers_of(configs: Iterable[Config]) -> Iterator[Server]:
    """Iterate over the servers of runs, each contacted once."""
    named: dict[str, str] = {}
    for config in configs:
        backend = registry.hook("backends", config.backend.backend, "servers")
        reward = registry.hook("rewards", config.reward.reward, "servers")
        named |= backend(config) if backend else {}
        for address, key in (reward(config.reward.params) if reward else {}).items():
            named[address] = f"[reward.params].{key}"
    for address, key in named.items():
        if not re.match(r"https?://", address):  # reported elsewhere
            continue
        yield Server(re.sub(r"//[^/@]*@", "//", address), key, _silence(address))


def check_servers(configs: Iterable[Config], source: str) -> None:
    """Refuse to launch runs whose servers do not answer.

    Raises:
        LaunchError: a server does not answer; the message names all of them.
    """
    silent = [
        f"{source} {server.key}: no answer from {server.address} ({server.silence}); "
        "start the server or correct the address"
        for server in servers_of(configs)
        if server.silence
    ]
    if silent:
        raise LaunchError("\n".join(silent))


def _silence(address: str) -> str:
    try:
        with urllib.request.urlopen(address, timeout=PATIENCE_S):
            return ""
    except urllib.error.HTTPError as refusal:
        refusal.close()
        return ""
    except urllib.error.URLError as error:
        return getattr(error.reason, "strerror", None) or str(error.reason)
    except (OSError, http.client.HTTPException, ValueError) as error:
        return str(error) or type(error).__name__
