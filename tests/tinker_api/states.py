"""States that the API has saved: files that survive the server, for training on or for sampling only."""

from __future__ import annotations

import json
import re
import shutil
import threading
from pathlib import Path
from typing import Any

from tests.tinker_api.policies import Policy

Json = dict[str, Any]
FACTS = "facts.json"
EXTERNAL = "external_weights"  # exported for others
SHORTEST_TTL_S, LONGEST_TTL_S = 3600, 10 * 366 * 86400


class RefusalError(Exception):
    """An HTTP status instead of an answer."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class States:
    """A directory of states, each known by its path, tinker://MODEL/KIND/NAME."""

    def __init__(self, directory: Path, *, keeps_names: bool = False) -> None:
        self._all, self._keeps_names = directory, keeps_names

    def check_name(self, name: str) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_-]{1,128}", name):
            raise RefusalError(400, f"invalid checkpoint name {name!r}")

    def check_free(self, model: str, kind: str, name: str) -> None:
        """Refuse a name that is taken, where names are given once."""
        if self._keeps_names and self.directory(f"tinker://{model}/{kind}/{name}").is_dir():
            raise RefusalError(409, f"checkpoint {name!r} of {model} exists")

    def save(self, model: str, kind: str, request: Json, policy: Policy, rank: int) -> str:
        """Save a policy; return its path."""
        path, ttl_s = f"tinker://{model}/{kind}/{request['path']}", request.get("ttl_seconds")
        self._check_ttl(ttl_s)
        directory = self.directory(path)
        if directory.is_dir() and not request.get("overwrite"):
            raise RefusalError(400, f"checkpoint {path} exists")
        new = directory.with_suffix(f".new{threading.get_ident()}")  # whole or not there after a kill
        new.mkdir(parents=True)
        policy.save(new)
        (new / FACTS).write_text(json.dumps({"lora_rank": rank, "ttl_seconds": ttl_s}))
        shutil.rmtree(directory, ignore_errors=True)
        new.rename(directory)
        return path

    def facts(self, path: str, *kinds: str) -> Json:
        """Return what is known of a state; refuse one that is not there, or is for another purpose."""
        match = re.fullmatch(r"tinker://[^/]+/(\w+)/[^/]+", path)
        if match is None or match[1] not in kinds:
            raise RefusalError(400, f"Path is invalid: {path}; needs one of {kinds}")
        if not self.directory(path).is_dir():
            raise RefusalError(404, f"no checkpoint {path}")
        return json.loads((self.directory(path) / FACTS).read_text())

    def delete(self, path: str) -> Json:
        self.facts(path, "weights", "sampler_weights", EXTERNAL)
        shutil.rmtree(self.directory(path))
        return {}

    def set_ttl(self, path: str, ttl_s: int | None) -> Json:
        self._check_ttl(ttl_s)
        facts = self.facts(path, "weights", "sampler_weights") | {"ttl_seconds": ttl_s, "was_extended": True}
        (self.directory(path) / FACTS).write_text(json.dumps(facts))
        return {}

    def directory(self, path: str) -> Path:
        return self._all / path.removeprefix("tinker://").replace("/", "--").replace(":", "-")

    def _check_ttl(self, ttl_s: int | None) -> None:
        if ttl_s is not None and not SHORTEST_TTL_S <= ttl_s <= LONGEST_TTL_S:
            raise RefusalError(400, f"ttl_seconds is out of range: {ttl_s}")
