"""The strongest sandbox that works here, as a self-test at the start proves."""

from __future__ import annotations

from functools import cache

from retrain.base.errors import ConfigError
from retrain.plugins.sandbox import Sandbox, SandboxError


@cache
def open_sandbox() -> Sandbox:
    """Return bubblewrap if nothing gets out of it here, else a process with limits.

    Raises:
        ConfigError: there is no directory for the files that every sandbox needs.
    """
    from retrain.plugins.sandbox import bubblewrap, process  # not at the top: every plan reads this file
    from retrain.plugins.sandbox.cell import holes

    for warm in (True, False):
        try:
            sandbox = bubblewrap.open_sandbox(warm=warm)
            if not holes(sandbox):
                return sandbox
        except (ConfigError, SandboxError):
            continue  # not installed, or no namespaces for this user
        except FileNotFoundError as error:
            what = "programs need a directory for temporary files"
            raise ConfigError(f"{what} ({error.strerror}); make one writable, or set TMPDIR") from error
    return process.open_sandbox()
