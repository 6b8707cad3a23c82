"""Every way to start a run computes on one thread, or on as many as the user says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from retrain.records.layout import find_campaigns

# an audit hook tells the variable when numpy is first imported, which then makes its threads
HOOK = """
import os, sys
def tell(event, arguments):
    if event == "import" and arguments[0] == "numpy" and "numpy" not in sys.modules:
        os.write(1, f"numpy on {os.environ.get('OMP_NUM_THREADS')}\\n".encode())
sys.addaudithook(tell)
"""
COMMAND = HOOK + "from retrain.__main__ import main; main()"
WORKER = HOOK + "import runpy; runpy.run_module('retrain.trainer.worker', run_name='__main__')"
LIBRARY = HOOK + "import retrain; retrain.run_campaign(sys.argv[1], sys.argv[2:])"
# as a user's script does: numpy first, which has threads of its own
COUNTED = """
import os, sys
import numpy
import threadpoolctl

def count():
    (blas,) = (pool for pool in threadpoolctl.threadpool_info() if pool["user_api"] == "blas")
    os.write(1, f"threads {blas['num_threads']}\\n".encode())

def score(completion, prompt):
    if not told:
        told.append(count())
    return 0.0

told = []
if __name__ == "__main__":
    count()
    import retrain
    retrain.run_campaign(sys.argv[1], sys.argv[2:])
    count()
"""
INLINE = ["campaign.launcher=inline", "campaign.parallel=false", "campaign.seeds=[0]"]
AS_OPTIONS = [part for override in INLINE for part in ("--set", override)]


def threads_of_numpy(code: str, arguments: list[str], **variables: str) -> str:
    """Run code with arguments, without variables of threads but these; return what it says of numpy."""
    own = {name: text for name, text in os.environ.items() if not name.startswith(("OMP", "OPENBLAS"))}
    process = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=own | variables, capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    return next(line for line in process.stdout.splitlines() if line.startswith("numpy on"))


@pytest.mark.parametrize(
    ("code", "arguments"), [(COMMAND, ["run", "tiny.toml", *AS_OPTIONS]), (LIBRARY, ["tiny.toml", *INLINE])]
)
def test_runs_inside_this_process_compute_on_one_thread(
    campaign_file: Path, code: str, arguments: list[str]
) -> None:
    del campaign_file
    assert threads_of_numpy(code, arguments) == "numpy on 1"
    if code == COMMAND:
        (campaign,) = find_campaigns(Path("logs"))
        resume = ["resume", str(campaign), "--seeds", "+1"]
        assert threads_of_numpy(code, resume) == "numpy on 1"
    assert threads_of_numpy(code, arguments, OMP_NUM_THREADS="3") == "numpy on 3"


def test_a_worker_computes_on_one_thread(campaign_file: Path) -> None:
    from retrain.campaign.run import start

    run, *_ = (start(campaign_file).directory / "runs").iterdir()
    assert threads_of_numpy(WORKER, [str(run)]) == "numpy on 1"


@pytest.mark.parametrize(("variables", "threads"), [({}, 1), ({"OMP_NUM_THREADS": "2,1"}, 2)])
def test_what_was_imported_before_computes_on_as_many_for_a_run_inside_this_process(
    campaign_file: Path, variables: dict[str, str], threads: int
) -> None:
    own = {name: text for name, text in os.environ.items() if not name.startswith(("OMP", "OPENBLAS"))}
    own["PYTHONPATH"] = os.pathsep.join([str(campaign_file.parent), os.environ.get("PYTHONPATH", "")])
    campaign_file.with_name("counted.py").write_text(COUNTED)
    reward = ["reward.reward=counted.score", "logging.log_dir=logs"]
    process = subprocess.run(
        [sys.executable, "counted.py", campaign_file, *INLINE, *reward],
        env=own | variables, capture_output=True, text=True,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    before, within, after = (
        int(line.split()[1]) for line in process.stdout.splitlines() if "threads" in line
    )
    assert (within, after) == (min(threads, before), before)  # as many as processors, without a limit
