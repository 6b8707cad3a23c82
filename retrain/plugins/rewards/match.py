r"""All or nothing: 1 for the answer, alone or in the last `\boxed{...}`, 0 for anything else."""

from __future__ import annotations

from retrain.base.rollouts import Prompt

RANGE = (0.0, 1.0)
PURE = True
BOXED = r"\boxed{"


def score(completion: str, prompt: Prompt) -> float:
    r"""Return 1 if the completion, or the content of its last `\boxed{...}`, equals the answer as text.

    Surrounding whitespace is ignored. If the answer is boxed itself, its content is compared.
    """
    reference = prompt.answer.strip()
    if completion.strip() == reference:
        return 1.0
    boxed, wanted_boxed = last_boxed(completion), last_boxed(reference)
    return float(boxed is not None and boxed == (reference if wanted_boxed is None else wanted_boxed))


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
