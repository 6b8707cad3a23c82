"""What sites do to campaigns: limits on jobs, settings in the environment, names of directories."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.base.errors import EXIT_LAUNCH, ClusterDownError, LaunchError
from retrain.campaign.launchers import slurm as plugin
from retrain.campaign.launchers.slurm import commands, job_name
from retrain.campaign.launchers.slurm.commands import QueueFullError, list_tasks, parse, submit
from retrain.config.schema import SlurmSection
from tests.slurm_pieces import assignment, command, squeue, submitted_before

Retrain = Callable[..., subprocess.CompletedProcess[str]]


SBATCH = """
import sys
from pathlib import Path
home, allows = Path(sys.argv[1]), int(sys.argv[2])
array = next(word for word in sys.argv if word.startswith("--array=")).removeprefix("--array=")
parts = [part.partition("-") for part in array.partition("%")[0].split(",")]
size = sum(int(last or first) - int(first) + 1 for first, _, last in parts)
taken = list(map(int, (home / "taken").read_text().split()))
if sum(taken) + size > allows:
    sys.exit("sbatch: error: QOSMaxSubmitJobPerUserLimit")
(home / "taken").write_text(" ".join(map(str, [*taken, size])))
print(101 + len(taken))
"""


def a_site(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: int, allows: int
) -> tuple[plugin.SlurmLauncher, Callable[[], list[int]]]:
    """A Slurm that takes so many tasks in all; gives how many each array had that it took."""
    (tmp_path / "taken").touch()
    (tmp_path / "sbatch.py").write_text(SBATCH)
    here = f'"{sys.executable}" -S -E "{tmp_path}/sbatch.py" "{tmp_path}" {allows} "$@"'
    command(tmp_path, "scontrol", "echo MaxArraySize = 1001")
    monkeypatch.setenv("PATH", command(tmp_path, "sbatch", f"exec {here}"))
    launcher = plugin.SlurmLauncher(
        submitted_before(assignment(tmp_path / "camp", runs, workers=4)), SlurmSection()
    )
    return launcher, lambda: [int(size) for size in (tmp_path / "taken").read_text().split()]


def test_a_site_that_allows_fewer_jobs_gets_what_it_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, sizes = a_site(tmp_path, monkeypatch, runs=100, allows=30)
    taken = launcher.submit([f"r{n}" for n in range(100)])
    assert (len(taken), sizes()) == (25, [25])
    again = [f"r{n}" for n in range(100) if f"r{n}" not in taken]
    for _ in range(8):  # the supervisor asks again every ten seconds
        more = launcher.submit(again)
        again = [run_id for run_id in again if run_id not in more]
    assert (len(again), sum(sizes())) == (70, 30)


def test_a_site_that_allows_no_job_at_all_is_no_reason_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher, _ = a_site(tmp_path, monkeypatch, runs=3, allows=0)
    with pytest.raises(QueueFullError):
        launcher.submit(["r0", "r1", "r2"])


def test_a_site_whose_sbatch_prints_more_than_the_jobs_number_is_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = ["Welcome to the 7th cluster", "2 checks passed", "1234;c7", "--> done"]
    monkeypatch.setenv("PATH", command(tmp_path, "sbatch", "\n".join(f"echo '{line}'" for line in said)))
    assert submit([]) == 1234


def test_a_job_whose_number_was_not_told_is_looked_up_before_it_is_submitted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = plugin.SlurmLauncher(submitted_before(assignment(tmp_path / "camp", 3)), SlurmSection())
    squeue(tmp_path, "7_0|RUNNING|camp|None|/x 0", "8_1|PENDING|camp|None|/x 0")
    command(tmp_path, "scontrol", "echo MaxArraySize = 1001")
    monkeypatch.setenv("PATH", command(tmp_path, "sbatch", "echo 7"))
    launcher.submit(["r0"])
    command(tmp_path, "sbatch", "echo accepted")
    with pytest.raises(ClusterDownError, match="sbatch answered 'accepted' instead of a job ID"):
        launcher.submit(["r1"])
    command(tmp_path, "sbatch", f'echo "$@" > "{tmp_path}/told"; echo 9')
    assert launcher.submit(["r1", "r2"]) == {"r1", "r2"}
    assert "--array=2%3 " in (tmp_path / "told").read_text()


@pytest.mark.parametrize(
    "script",
    [
        'echo "sbatch: error: Batch job submission failed: Connection reset by peer" >&2; exit 1',
        'echo "sbatch: error: fork: Resource temporarily unavailable" >&2; exit 1',
        "",  # not even an interpreter
    ],
)
def test_trouble_that_may_pass_is_no_refusal(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", command(tmp_path, "sbatch", script))
    if not script:
        (tmp_path / "sbatch").write_text("\0")
        monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterDownError, match=r"Connection reset|unavailable|Exec format"):
        submit([])


def test_an_scancel_that_fails_without_a_word_has_not_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", command(tmp_path, "scancel", "exit 9"))
    with pytest.raises(LaunchError, match="exit code 9"):
        commands.cancel(["7_1"], [])


def test_the_cap_of_an_array_that_has_ended_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "echo 7_0: Job has already finished >&2; echo 7_1: No error >&2; exit 1"
    monkeypatch.setenv("PATH", command(tmp_path, "scontrol", said))
    commands.set_cap(7, 3)


def poll(launcher: plugin.SlurmLauncher) -> None:
    launcher.asking.least_s = 0.0
    launcher.asking.hurry()
    launcher.poll(0)


def test_a_resumed_campaign_has_its_present_cap_on_what_was_submitted_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command(tmp_path, "scontrol", f'echo "$@" >> "{tmp_path}/told"')
    monkeypatch.setenv(
        "PATH", squeue(tmp_path, "7_0|PENDING|camp|Priority|/x 0", "7_1|RUNNING|camp|None|/x 0")
    )
    for workers in (2, 0):  # none: it is being stopped
        given = submitted_before(assignment(tmp_path / "camp", 2, workers=workers))
        launcher = plugin.SlurmLauncher(given, SlurmSection())
        launcher.adopt(list(launcher.queued()))
        poll(launcher)
        poll(launcher)
    assert (tmp_path / "told").read_text() == "update jobid=7 arraytaskthrottle=2\n"


def test_a_reason_to_wait_that_comes_and_goes_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    given = submitted_before(assignment(tmp_path / "camp", 2, say=said.append))
    launcher = plugin.SlurmLauncher(given, SlurmSection())
    for reason in ("QOSMaxJobsPerUserLimit", "Priority", "QOSMaxJobsPerUserLimit"):
        monkeypatch.setenv("PATH", squeue(tmp_path, f"7_0|PENDING|camp|{reason}|/x 0"))
        poll(launcher)
    assert said == ["Slurm holds 1 run back: QOSMaxJobsPerUserLimit"]


@pytest.mark.parametrize(
    "words",
    [
        "AssocMaxSubmitJobLimit; Batch job submission failed: Job violates accounting/QOS policy "
        "(job submit limit, user's size and/or time limits)",
        "QOSMaxSubmitJobPerUserLimit",
        "Slurm temporarily unable to accept job, sleeping and retrying",
    ],
)
def test_a_full_queue_is_told_from_a_refusal(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = command(
        tmp_path, "sbatch", f'echo "sbatch: error: {words}" >&2\n case "$*" in *now*) exit 1;; esac'
    )
    monkeypatch.setenv("PATH", fake)
    with pytest.raises(QueueFullError):
        submit(["now"])


def test_an_sbatch_that_waits_for_a_place_in_the_queue_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = command(tmp_path, "sbatch", "echo Slurm job queue full, sleeping and retrying >&2; exec sleep 60")
    monkeypatch.setenv("PATH", fake)
    with pytest.raises(QueueFullError):
        submit([])


def test_an_sbatch_that_takes_its_time_gets_the_whole_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "SLICE_S", 0.02)
    monkeypatch.setenv("PATH", command(tmp_path, "sbatch", f'sleep 0.2; cat > "{tmp_path}/got"'))
    script = "#!/bin/bash\n" + "# a long line\n" * 20_000  # more than a pipe holds
    commands.try_submit(script, [])
    assert (tmp_path / "got").read_text() == script


def test_what_sbatch_would_take_from_the_environment_is_not_there_and_named_when_it_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = command(tmp_path, "sbatch", 'echo "$SBATCH_PARTITION,$SLURM_CONF: invalid partition" >&2; exit 1')
    monkeypatch.setenv("PATH", fake)
    monkeypatch.setenv("SBATCH_PARTITION", "debug")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    with pytest.raises(LaunchError) as refused:
        submit([])
    assert ": ,/etc/slurm.conf: invalid partition" in str(refused.value)
    assert "SBATCH_PARTITION in the environment" in str(refused.value)


@given(st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1))
def test_no_name_of_a_directory_breaks_a_question_for_its_tasks(name: str) -> None:
    named = job_name(name)
    assert not set(named) & set(",|% \n")
    assert parse(f"7_1|RUNNING|{named}|None|/x/job.sh 4")[0].first == 4


def test_a_campaign_that_was_renamed_finds_its_tasks_by_the_name_they_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command(tmp_path, "scontrol", "echo MaxArraySize = 1001")
    said = f'echo "$@" >> "{tmp_path}/asked"; echo "7_1|RUNNING|camp|None|/gone/job.sh 0"'
    monkeypatch.setenv("PATH", command(tmp_path, "squeue", said))
    plugin.SlurmLauncher(assignment(tmp_path / "camp", 2), SlurmSection()).submit([])
    (tmp_path / "camp").rename(tmp_path / "a,b|c")
    launcher = plugin.SlurmLauncher(assignment(tmp_path / "a,b|c", 2), SlurmSection())
    assert launcher.queued() == {"r1"}
    assert (tmp_path / "asked").read_text().count("--name=") == 1
    assert " --name=camp " in (tmp_path / "asked").read_text()


def test_a_users_settings_for_looking_by_hand_hide_no_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", command(tmp_path, "squeue", 'echo "$SQUEUE_PARTITION,$SLURM_CONF:" "$@"'))
    monkeypatch.setenv("SQUEUE_PARTITION", "debug")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    said = list_tasks("camp")
    assert said.startswith(",/etc/slurm.conf:")
    assert " -a " in said


def test_a_machine_without_a_cluster_is_told_of_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = [
        "scontrol: error: resolve_ctls_from_dns_srv: res_nsearch error: Unknown host",
        "scontrol: error: fetch_config: DNS SRV lookup failed",
        "scontrol: error: _establish_config_source: failed to fetch config",
        "scontrol: fatal: Could not establish a configuration source",
    ]
    fake = command(tmp_path, "scontrol", "\n".join(f"echo '{line}' >&2" for line in said) + "\nexit 1")
    monkeypatch.setenv("PATH", fake)
    with pytest.raises(LaunchError) as refused:
        commands.array_limit()
    assert str(refused.value) == (
        "Slurm finds neither its configuration nor a controller from here; log in to a node of the cluster, "
        'set SLURM_CONF, or use launcher = "local"'
    )


def test_who_starts_while_slurm_falls_silent_is_told_how_to_continue(
    retrain: Retrain, campaign_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = campaign_file.parent
    for name, script in {"sbatch": "", "scancel": "", "scontrol": "", "squeue": "exit 1"}.items():
        monkeypatch.setenv("PATH", command(here, name, script))
    done = retrain("run", campaign_file, "--set", "campaign.launcher=slurm")
    (campaign,) = (here / "logs").iterdir()
    assert done.returncode == EXIT_LAUNCH
    assert done.stderr.endswith(f"continue with: retrain resume logs/{campaign.name}\n"), done.stderr


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ("MaxArraySize            = 10001", 10001),
        ("MaxArraySize = 10001\nSchedulerParameters = defer,max_array_tasks=300,bf_interval=1", 300),
        ("ClusterName = x", 1001),
    ],
)
def test_an_array_is_no_larger_than_either_limit_of_a_site(
    config: str, limit: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config").write_text(config)
    monkeypatch.setenv("PATH", command(tmp_path, "scontrol", f'cat "{tmp_path}/config"'))
    assert commands.array_limit() == limit


def test_explain_counts_the_runs_that_have_a_permit_each(retrain: Retrain, campaign_file: Path) -> None:
    api = ("--set", "campaign.max_workers=4", "--set", "backend.max_concurrent=3")
    latency = ("--set", "backend.options.api_latency_s=0.01")
    for launcher, at_a_time in (("slurm", 3), ("local", 4)):
        asked = retrain(
            "explain", campaign_file, "--json", *api, *latency, "--set", f"campaign.launcher={launcher}"
        )
        assert json.loads(asked.stdout)["effective_parallelism"] == at_a_time, asked.stderr
