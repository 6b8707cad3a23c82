"""Names of conditions and runs: safe as parts of file names, and never the same twice."""

from __future__ import annotations

import hashlib
import re
import unicodedata

DIGEST_LENGTH = 6  # hex digits that distinguish labels which shortening made equal


def label_of(name: str, room: int = 40) -> str:
    """Return a label that is safe as part of a file name: [a-z0-9+._-], at most `room` long."""
    ascii_name = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()
    label = re.sub(r"[^a-z0-9+._-]+", "-", ascii_name).strip(".-") or "condition"
    if len(label) <= room and ascii_name == name.lower():
        return label
    tag = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:DIGEST_LENGTH]
    return f"{label[: room - DIGEST_LENGTH - 1]}-{tag}"


def label_of_modes(advantage_mode: str, transform_mode: str) -> str:
    """Return the label of a condition without a name: its two modes."""
    modes = [mode.rpartition(".")[2] for mode in (advantage_mode, transform_mode) if mode != "none"]
    return label_of("+".join(modes))
