"""The cheats that work, by sandbox; docs/rewards.md names each."""

from __future__ import annotations

WORKING = {
    "bubblewrap": frozenset[str](),
    "process": frozenset({"a full disk"}),  # 16 MB a file, but any number of files
    "command": frozenset({"a full disk"}),  # as the command limits it
}
# in `process` on a kernel without Landlock, in addition
WITHOUT_LANDLOCK = frozenset({"the file of the tests", "folders of other programs", "a file outside"})
