"""A published directory is replaced by another one, killed before each of its operations on files."""

from __future__ import annotations

import os
import signal
import sys
from itertools import count
from pathlib import Path

from retrain.backends.squeeze import CONFIG, WEIGHTS
from retrain.results.publish import CARD, FACTS, Wishes, publish
from retrain.results.publish.choice import Choice, choose
from tests.extras.test_publish_records import campaign
from tests.simulated import flat

OPERATIONS = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.chmod", "shutil.rmtree", "open"}
FILES = {CARD, FACTS, CONFIG, WEIGHTS, "templates"}


def replace(choice: Choice, out: Path) -> None:
    publish(choice, Wishes(out, force=True), lambda _: None)


def killed_before(operation: int, choice: Choice, out: Path) -> bool:
    """Replace what is published in a process that ends itself; return whether it came so far."""
    child = os.fork()
    if child == 0:
        counted = count(1)

        def kill(event: str, _: object) -> None:
            if event in OPERATIONS and next(counted) == operation:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(kill)
        replace(choice, out)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, -signal.SIGKILL)
    return code != 0


def test_one_of_two_directories_is_whole_whenever_a_replacement_is_killed(tmp_path):
    logs = campaign(tmp_path, {("grpo", 0): flat(0.5)})
    before, after = (choose(logs, "", step=step) for step in (10, 20))
    out, aside = tmp_path / "out", tmp_path / ".out.replaced"
    contents = {b"grpo_s0 10", b"grpo_s0 20"}
    places = set()
    replace(before, out)
    for operation in count(1):
        if not killed_before(operation, after, out):
            break
        place = out if out.exists() else aside
        places.add(place)
        assert {path.name for path in place.iterdir()} == FILES
        assert (place / WEIGHTS).read_bytes() in contents
        replace(before, out)
        assert (out / WEIGHTS).read_bytes() == b"grpo_s0 10"
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert operation > 20
    assert places == {out, aside}  # between the two renames as well
    assert (out / WEIGHTS).read_bytes() == b"grpo_s0 20"
