"""What many tests start from: a tiny campaign that finishes in about a second."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

from tests.warm import WarmCommandLine, WarmServer, starts_alike

# A shell lets what it starts with `&` ignore Ctrl-C, and so would what tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
gc.disable()  # while the tests are imported, which leaves little garbage

# A machine with other work makes no example wrong, and two runs of the tests try the same examples.
BUSY = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("same", derandomize=True, **BUSY)
settings.register_profile("other", **BUSY)  # pytest --hypothesis-profile=other
settings.load_profile("same")
# Else examples hold constants of all modules that this process happens to have imported, which it parses.
providers._get_local_constants = lambda: providers._local_constants
# Hundreds of processes import the same modules; one compiles them, whatever is the default of a container.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

TINY = """
[training]
batch_size = 2
group_size = 4
max_tokens = 4
temperature = 1.0
lr = 5e-3
save_every = 2

[data]
task = "successor"

[campaign]
seeds = [0, 1]
max_steps = 4
parallel = true
max_workers = 2

[[campaign.conditions]]
name = "grpo"
advantage_mode = "grpo"

[[campaign.conditions]]
name = "maxrl"
"""
LIMIT_S = 500.0  # of a command; that of a test is shorter in the core
SERVER = pytest.StashKey[WarmServer]()
ONE_RUN = ("campaign.seeds=[0]", 'campaign.conditions=[{name="grpo", advantage_mode="grpo"}]')  # of TINY's


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """Import a share of the tests before all: workers that all begin with the same file all compile it."""
    tests, worker = Path(__file__).parent, getattr(session.config, "workerinput", None)
    if worker is None or [Path(asked).resolve() for asked in session.config.args] != [tests]:
        return
    for path in sorted(tests.glob("test_*.py"))[int(worker["workerid"][2:]) :: worker["workercount"]]:
        with contextlib.suppress(Exception, pytest.skip.Exception):  # told when the file is collected
            importlib.import_module(f"tests.{path.stem}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Look for garbage from now on, but not among what was imported: with PyTorch, 0.3 s each time."""
    gc.freeze()
    gc.enable()


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextlib.contextmanager
def temporary_files_in(directory: Path) -> Iterator[Path]:
    """Have this process, and those that it starts, put temporary files into a directory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(directory))
        patch.setenv("TMPDIR", str(directory))
        yield directory


@pytest.fixture
def temporary(tmp_path: Path) -> Iterator[Path]:
    """The test's own directory, with all temporary files."""
    with temporary_files_in(tmp_path):
        yield tmp_path


@pytest.fixture
def campaign_file(here: Path) -> Path:
    """A file of 2 conditions x 2 seeds x 4 steps."""
    path = here / "tiny.toml"
    path.write_text(TINY)
    return path


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Let all workers of pytest-xdist use one process that imports what commands import."""
    if SERVER not in node.config.stash:
        node.config.stash[SERVER] = server = WarmServer()
        node.config.add_cleanup(server.close)
    node.workerinput["warm"] = node.config.stash[SERVER].address


@pytest.fixture(scope="session")
def warm(pytestconfig: pytest.Config) -> Iterator[WarmCommandLine]:
    """A process that has imported what commands import."""
    with contextlib.ExitStack() as stack:
        address = getattr(pytestconfig, "workerinput", {}).get("warm")
        address = address or stack.enter_context(contextlib.closing(WarmServer())).address
        yield stack.enter_context(contextlib.closing(WarmCommandLine(address)))


@pytest.fixture
def retrain(here: Path, warm: WarmCommandLine) -> Callable[..., subprocess.CompletedProcess[str]]:
    """The command line as a user calls it, in an empty directory."""

    def call(
        *arguments: object, cwd: Path = here, env: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        words = [str(argument) for argument in arguments]
        if starts_alike(env):
            return warm.run(words, cwd, env, timeout_s=LIMIT_S)
        command = [sys.executable, "-m", "retrain", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, cwd=cwd, env=env)

    return call
