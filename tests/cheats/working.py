"""The cheats that work, by sandbox; docs/rewards-reference.md names each."""

from __future__ import annotations

WORKING = {name: frozenset[str]() for name in ("bubblewrap", "process", "command")}
# in `process` on a kernel without Landlock, in addition
WITHOUT_LANDLOCK = frozenset(
    {
        "the file of the tests",
        "folders of other programs",
        "a file outside",
        "its folder, replaced by a link",
    }
)
