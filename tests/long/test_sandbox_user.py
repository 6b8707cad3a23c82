"""Sandboxes of an ordinary user, where the other tests run as root."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.namespaces import BUBBLEWRAP

# Mounts what may lie where only root looks, such as root's home, at a place that everybody can read.
AS_NOBODY = """
set -e
mount -t tmpfs none /mnt
for path in "$PYTHON" "$SOURCE" $PACKAGES; do
  mkdir -p "/mnt$path"
  mount --bind "$path" "/mnt$path"
done
exec setpriv --reuid 65534 --regid 65534 --clear-groups env -i -C / PATH=/usr/bin:/bin \\
  PYTHONPATH="/mnt$SOURCE$(printf ':/mnt%s' $PACKAGES)" "/mnt$PYTHON/bin/python3" "$@"
"""
SCORES = """
import os, sys
from retrain.plugins.rewards import python
from retrain.base.rollouts import Prompt
assert os.getuid() != 0
cases = '[{"input": "1", "output": "1"}]'
print(python.score("print(input())", Prompt(0, "?", cases), tests="stdio", sandbox=sys.argv[1]))
print(python.score("def f(): return 1", Prompt(0, "?", "assert f() == 1"), sandbox=sys.argv[1]))
"""


def run_as_nobody(*arguments: str) -> subprocess.CompletedProcess[str]:
    packages = [
        path for path in sys.path if path.endswith("-packages") and not path.startswith(sys.base_prefix)
    ]
    places = {
        "PYTHON": sys.base_prefix,
        "SOURCE": str(Path(__file__).parents[2]),
        "PACKAGES": " ".join(packages),
    }
    command = ["unshare", "--mount", "sh", "-c", AS_NOBODY, "sh", *arguments]
    return subprocess.run(command, env={**os.environ, **places}, capture_output=True, text=True)


@pytest.mark.skipif(sys.platform != "linux" or os.getuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("name", [BUBBLEWRAP, "process"])
def test_programs_run_for_an_ordinary_user(name: str) -> None:
    if "CI" not in os.environ:
        if (tried := run_as_nobody("-c", "")).returncode:
            pytest.skip(f"this root may not mount: {tried.stderr}")
        own = ("unshare", "--user", "--map-root-user", "--mount", "true")
        namespaces = f"import subprocess; subprocess.run({own}, check=True)"
        if name == "bubblewrap" and run_as_nobody("-c", namespaces).returncode:
            pytest.skip("this machine refuses user namespaces to ordinary users")
    found = run_as_nobody("-c", SCORES, name)
    assert (found.stdout.split(), found.returncode) == (["1.0", "1.0"], 0), found.stderr
