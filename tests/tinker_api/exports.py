"""Policies exported in peft's format, and the signed addresses from which their files are downloaded.

What the server trains has no transformer's layers, so an export adapts two attention layers of the tests'
tiny model with factors that are taken from the policy's weights: each state has adapters of its own.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.tinker_api.policies import Policy
from tests.tinker_api.states import EXTERNAL, States

RANK, HIDDEN, LAYERS = 4, 32, 2
FILES = ("adapter_config.json", "adapter_model.safetensors")
LIFE = timedelta(minutes=15)


def write_adapter(directory: Path, policy: Policy) -> None:
    """Write adapters; as the API's, their configuration does not name the base model."""
    flat = policy.weights.flat
    shapes = {"lora_A": (RANK, HIDDEN), "lora_B": (HIDDEN, RANK)}
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.{name}.weight": np.ascontiguousarray(
            np.resize(np.roll(flat, layer), shape), dtype=np.float32
        )
        for layer in range(LAYERS)
        for name, shape in shapes.items()
    }
    facts = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8, "target_modules": ["q_proj"]}
    (directory / FILES[0]).write_text(json.dumps({**facts, "base_model_name_or_path": None}))
    save_file(tensors, directory / FILES[1])


class Signed:
    """Addresses that need no key and are valid for a while."""

    def __init__(self, states: States, url: str) -> None:
        self._states, self._url, self._secret = states, url, secrets.token_bytes(16)

    def urls(self, path: str) -> dict[str, Any]:
        """Return the address of each file of an export."""
        self._states.facts(path, EXTERNAL)
        expires = datetime.now(UTC) + LIFE
        until, place = int(expires.timestamp()), self._states.directory(path).name
        found = {}
        for name in FILES:
            what = f"/signed/{place}/{name}?expires={until}"
            found[name] = f"{self._url}{what}&signature={self._signature(what)}"
        return {"urls": found, "expires": expires.isoformat()}

    def file(self, what: str) -> tuple[int, bytes]:
        """Return the status and content of an address."""
        signed, _, signature = what.partition("&signature=")
        place, _, until = signed.partition("?expires=")
        if signature != self._signature(signed) or int(until) < datetime.now(UTC).timestamp():
            return 403, b"invalid signature"
        _, _, state, name = place.split("/")
        file = self._states.directory(f"tinker://{state}") / name
        return (200, file.read_bytes()) if file.is_file() else (404, b"no such file")

    def _signature(self, what: str) -> str:
        return hmac.new(self._secret, what.encode(), hashlib.sha256).hexdigest()
