"""Removes passwords, keys and tokens from a configuration before it leaves the machine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"
_SECRET_KEY = re.compile(
    r"(?i)(^|_|-)(keys?|apikeys?|token|secrets?|passwords?|passwd|credentials?|auth|authorization)$"
)
_USER_IN_URL = re.compile(r"(?<=://)[^/@\s]+@")
_SECRET_IN_URL = re.compile(r"(?i)([?&][^=&]*(?:key|token|secret|password|sig)[^=&]*=)[^&\s]+")


def without_secrets(value: Any, key: str = "") -> Any:
    """Return a copy with possible secrets hidden, recognised by key or within a URL."""
    if isinstance(value, Mapping):
        return {str(k): without_secrets(v, str(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(one, key) for one in value]
    if not isinstance(value, str):
        return value
    if value and _SECRET_KEY.search(key):
        return HIDDEN
    return _SECRET_IN_URL.sub(rf"\1{HIDDEN}", _USER_IN_URL.sub(f"{HIDDEN}@", value))
