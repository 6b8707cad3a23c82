r"""Reads the last `\boxed{...}` of a text, in which many models are trained to put their answer."""

from __future__ import annotations

BOXED = r"\boxed{"


def last_boxed(text: str) -> str | None:
    r"""Return the stripped content of the last complete `\boxed{...}`, or None."""
    start = text.rfind(BOXED)
    if start < 0:
        return None
    depth, escaped = 1, False
    for end in range(start + len(BOXED), len(text)):
        character = text[end]
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = True
        elif character in "{}":
            depth += 1 if character == "{" else -1
            if depth == 0:
                return text[start + len(BOXED) : end].strip()
    return None
