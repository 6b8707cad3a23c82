"""Labels of conditions in charts: as short as they stay distinct; tooltips and tables have whole names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

LONGEST = 22  # characters, a third of a phone's width
LONGEST_KEY = 5  # of `key=value`
CUT = "…"


def shortened(names: Sequence[str]) -> list[str]:
    """Return a label for each name; names that all fit are kept.

    Otherwise words that all share are left out, then keys are cut, then the middles of labels. A step that
    would make two labels equal, or one empty, is not taken.
    """
    labels = list(names)
    for shorter in (_without_shared, _with_short_keys, _without_middles):
        if max(map(len, labels), default=0) <= LONGEST:
            break
        found = shorter(labels)
        if all(found) and len(set(found)) == len(set(names)):
            labels = found
    return labels


def label_expression(names: Sequence[str]) -> dict[str, Any]:
    """Return the property of an axis or legend that shows names as their labels; none if all are kept."""
    labels = shortened(names)
    if labels == list(names):
        return {}
    return {"labelExpr": f"{json.dumps(labels)}[indexof({json.dumps(list(names))}, datum.label)]"}


def _without_shared(labels: Sequence[str]) -> list[str]:
    shared = set.intersection(*(set(label.split()) for label in labels))
    return [" ".join(word for word in label.split() if word not in shared) for label in labels]


def _with_short_keys(labels: Sequence[str]) -> list[str]:
    keys = {word.partition("=")[0] for label in labels for word in label.split() if "=" in word}
    short = {key: f"{key[: LONGEST_KEY - 1]}{CUT}" if len(key) > LONGEST_KEY else key for key in keys}
    if len(set(short.values())) < len(keys):
        return list(labels)

    def cut(word: str) -> str:
        key, equals, value = word.partition("=")
        return f"{short[key]}={value}" if equals else word

    return [" ".join(map(cut, label.split())) for label in labels]


def _without_middles(labels: Sequence[str]) -> list[str]:
    end = LONGEST // 2
    return [
        label if len(label) <= LONGEST else f"{label[: LONGEST - end - 1]}{CUT}{label[-end:]}"
        for label in labels
    ]
