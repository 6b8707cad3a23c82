"""A run's life through the product's own writers, cut short at chosen file operations, and its judge.

What it trains is a chain of numbers: each step's value follows from the last one, so that a lost,
repeated or mixed-up step cannot end in the right metrics.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from retrain.base import locks as locks
from retrain.base.errors import RecordsError
from retrain.campaign.endings import conclude, ended_attempts
from retrain.records import files as on_disk
from retrain.records import metrics, run_state, samples
from retrain.records.files import FILE_MODE, make_directory, write_all
from retrain.records.layout import CampaignFiles, RunFiles
from retrain.records.manifest import Manifest, new_manifest, read_manifest, refresh, write_manifest
from retrain.records.run_row import RunEntry
from retrain.trainer import checkpoint
from tests.crash_disk import MOMENTS, Disk, deaths_at
from tests.scanned import scan_metrics

REWRITE_EVERY = 3  # steps: samples are rewritten in a short life too
STEPS, SAVE_EVERY, HASH, RUN = 5, 2, "hash", "grpo_s0"
LIVES = 6  # at most so many are cut short in one plan
KEEPS_POWER = 0.3  # of the lives among power losses end by a kill


def value_after(step: int) -> int:
    value = 1
    for number in range(1, step + 1):
        value = (value * 48271 + number) % 2147483647
    return value


@dataclass
class Verdict:
    """What was found over many plans."""

    plans: int = 0
    kills: int = 0
    operations: int = 0
    lost: int = 0
    twice: int = 0
    unreadable: int = 0
    problems: list[str] = field(default_factory=list)

    def note(self, kind: str, what: str) -> None:
        setattr(self, kind, getattr(self, kind) + 1)
        self.problems.append(f"{kind}: {what}")


def live(root: Path, manifest: Manifest, on_saved: Callable[[int], None] = lambda step: None) -> None:
    """Orchestrator and worker in one: everything that is written, in the product's order."""
    campaign, files = CampaignFiles(root), RunFiles(root / "runs" / RUN)
    if (supervising := locks.hold(campaign.lock)) is None:
        return
    with supervising:
        on_disk.remove_leftovers(root)
        write_manifest(campaign.manifest, refresh(manifest, campaign))
        if (lock := locks.hold(files.lock)) is not None:
            with lock:
                if run_state.read_done(files.done) is None:
                    before = ended_attempts(files)
                    conclude(files, HASH, -9, None, before)  # of the life before this one
                    train(files, on_saved)
        write_manifest(campaign.manifest, refresh(manifest, campaign, ended=True))


def train(files: RunFiles, on_saved: Callable[[int], None]) -> None:
    on_disk.remove_leftovers(files.directory)
    found = checkpoint.newest(files.checkpoints)
    step = found.step if found else 0
    value = found.state["value"] if found else 1
    number = run_state.begin_attempt(files.attempts, resumed_from_step=step)
    shown = samples.SamplesWriter(files.samples, number, rewrite_every=REWRITE_EVERY)
    with metrics.MetricsWriter(files.metrics, number) as rows, closing(shown):
        while step < STEPS:
            step += 1
            value = (value * 48271 + step) % 2147483647
            rows.append({"step": step, "value": value})
            shown.append(step, [{"value": value, "rollout": 0}, {"value": value, "rollout": 1}])
            run_state.write_progress(
                files.status, run_state.Progress("running", "train", step, STEPS, number)
            )
            if step % SAVE_EVERY == 0 or step == STEPS:
                rows.sync()
                shown.sync()
                checkpoint.save(files.checkpoints, step, {"value": value}, save_weights, keep=1)
                on_saved(step)
    run_state.write_done(files.done, HASH, {"value": value})
    run_state.end_attempt(files.attempts, number, "done")


def save_weights(directory: Path) -> None:
    fd = os.open(directory / "weights", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
    try:
        write_all(fd, b"w" * 100)
        write_all(fd, b"v" * 100)
    finally:
        os.close(fd)


def look(root: Path, verdict: Verdict, where: str, saved_step: int = 0) -> None:
    """Read everything that counts, after a death; status.json is not synced, and readers know that."""
    files = RunFiles(root / "runs" / RUN)
    try:
        read_manifest(CampaignFiles(root).manifest)
        found = run_state.read_attempts(files.attempts)
        scan = scan_metrics(files.directory)
        shown = samples.read_samples(files.samples)
        done = run_state.read_done(files.done)
        saved = checkpoint.newest(files.checkpoints)
    except (RecordsError, ValueError, OSError) as error:
        verdict.note("unreadable", f"{where}: {error!r}")
        return
    steps = [row["step"] for row in scan.rows]
    if steps != list(range(1, len(steps) + 1)) or scan.skipped_lines > 1:
        verdict.note("lost" if len(steps) == len(set(steps)) else "twice", f"{where}: steps {steps}")
    if any(row["value"] != value_after(row["step"]) for row in scan.rows):
        verdict.note("twice", f"{where}: values of two lives are mixed")
    if any(row["value"] != value_after(row["step"]) for row in shown):
        verdict.note("twice", f"{where}: samples of two lives are mixed")
    if saved is not None and not set(range(1, saved.step + 1)) <= {row["step"] for row in shown}:
        verdict.note("lost", f"{where}: samples of steps before a checkpoint of step {saved.step}")
    if saved is not None and (saved.step > len(steps) or saved.state["value"] != value_after(saved.step)):
        verdict.note("lost", f"{where}: a checkpoint of step {saved.step}, rows to {len(steps)}")
    if (saved.step if saved else 0) < saved_step:
        verdict.note("lost", f"{where}: a checkpoint of step {saved_step} that was saved")
    if [a.number for a in found] != list(range(1, len(found) + 1)):
        verdict.note("twice", f"{where}: attempts {[a.number for a in found]}")
    if done is not None and len(steps) != STEPS:
        verdict.note("lost", f"{where}: done, with rows to {len(steps)}")


def judge(root: Path, verdict: Verdict, where: str) -> None:
    """After the last, undisturbed life nothing may show what happened before."""
    look(root, verdict, where)
    files = RunFiles(root / "runs" / RUN)
    try:
        scan, done = scan_metrics(files.directory), run_state.read_done(files.done)
        manifest = read_manifest(CampaignFiles(root).manifest)
        shown = [(row["step"], row["rollout"]) for row in samples.read_samples(files.samples)]
    except RecordsError as error:
        verdict.note("unreadable", f"{where}, at the end: {error}")
        return
    if shown != [(step, rollout) for step in range(1, STEPS + 1) for rollout in (0, 1)]:
        verdict.note("lost", f"{where}, at the end: samples {shown}")
    if len(scan.rows) != STEPS or done is None or done.result["value"] != value_after(STEPS):
        verdict.note("lost", f"{where}, at the end: {len(scan.rows)} rows, done {done}")
    if scan.skipped_lines:
        verdict.note("unreadable", f"{where}, at the end: {scan.skipped_lines} lines")
    if manifest is None or manifest.runs[0].state != "done":
        verdict.note("lost", f"{where}, at the end: {manifest}")
    if leftovers := [p for p in root.rglob("*") if p.name.endswith((".tmp", ".partial"))]:
        verdict.note("unreadable", f"{where}, at the end: leftovers {leftovers}")


def fresh(root: Path) -> Manifest:
    make_directory(root / "runs" / RUN)
    return _manifest()


@cache  # it asks git where it is
def _manifest() -> Manifest:
    return new_manifest("crash", HASH, [RunEntry(RUN, "grpo", 0, STEPS, HASH)], Path("/"))


def undisturbed(root: Path) -> Disk:
    """Return the disk of a life that nothing ends."""
    manifest, disk = fresh(root), Disk(root)
    with disk.installed():
        live(root, manifest)
    return disk


def every_point(root: Path) -> Verdict:
    """Stop at every operation in turn, in every way, and go on once."""
    verdict, whole = Verdict(), undisturbed(root / "count")
    for at in range(1, whole.operations + 1):
        for moment in (*deaths_at(at, whole), "intrude"):
            _plan(root / "plan", [(at, moment)], verdict)
    return verdict


def random_kills(root: Path, plans: int, seed: int = 0) -> Verdict:
    """Stop several lives in a row, each at a random operation in a random way; until the first problem."""
    chance, verdict = random.Random(seed), Verdict()
    most = undisturbed(root / "count").operations
    while verdict.plans < plans and not verdict.problems:
        lives = range(chance.randint(1, LIVES))
        _plan(root / "plan", [(chance.randint(1, most), chance.choice(MOMENTS)) for _ in lives], verdict)
    return verdict


def _live_on(
    disk: Disk,
    root: Path,
    manifest: Manifest,
    verdict: Verdict,
    on_saved: Callable[[int], None] = lambda step: None,
) -> None:
    try:
        with disk.installed():
            live(root, manifest, on_saved)
    except Exception as error:  # noqa: BLE001 - a life that cannot go on is what is looked for
        verdict.note("unreadable", f"a life ended with {error!r}")
    verdict.kills += disk.is_dead
    verdict.operations += disk.operations


def _plan(root: Path, kills: list[tuple[int, str]], verdict: Verdict) -> None:
    manifest = fresh(root)
    verdict.plans += 1
    for at, moment in kills:
        disk = Disk(root, at, moment, lambda: live(root, manifest))
        _live_on(disk, root, manifest, verdict)
        if disk.is_dead:  # of one that ended by itself, the end is judged
            look(root, verdict, f"{kills} after {moment} {at}")
    _live_on(Disk(root), root, manifest, verdict)
    judge(root, verdict, str(kills))
    shutil.rmtree(root)


def power_losses(root: Path, plans: int, seed: int = 0) -> Verdict:
    """Lose power at random operations, several times in a row; go on from what the disk kept.

    Some lives end by a kill instead, which leaves what is not synced to the lives after it.
    """
    chance, verdict = random.Random(seed), Verdict()
    most = undisturbed(root / "count").operations
    while verdict.plans < plans and not verdict.problems:
        _plan_of_losses(root / f"plan-{verdict.plans}", most, chance, verdict)
    return verdict


def losses_after_kills(root: Path) -> Verdict:
    """Kill one life right after it gave something a name, and take the power from the next, anywhere."""
    verdict = Verdict()
    for made in undisturbed(root / "count").made:
        _lose_power_after(made, root / "plan", root / "after", verdict)
    return verdict


def _lose_power_after(made: int, now: Path, after: Path, verdict: Verdict) -> None:
    manifest, saved = fresh(now), [0]
    killed = Disk(now, made, "after", loses_power=True)
    _live_on(killed, now, manifest, verdict, saved.append)

    def lose_power() -> None:
        after.mkdir()
        disk.image(Unlucky(), after)
        look(after, verdict, f"killed at {made}, power lost at {disk.operations}", saved_step=saved[-1])
        shutil.rmtree(after)
        verdict.plans += 1

    disk = Disk(now, loses_power=True, before=killed, before_sync=lose_power)
    _live_on(disk, now, manifest, verdict, saved.append)
    lose_power()
    shutil.rmtree(now)


class Unlucky(random.Random):
    """Nothing that was not synced is kept."""

    def randint(self, a: int, b: int) -> int:
        return a


def _plan_of_losses(now: Path, most: int, chance: random.Random, verdict: Verdict) -> None:
    name, lives, before = now.name, chance.randint(1, 4), None
    manifest, saved = fresh(now), [0]
    verdict.plans += 1
    for life in range(lives):
        at, moment = chance.randint(1, most), chance.choice(("before", "half", "after"))
        disk = Disk(now, at, moment, loses_power=True, before=before)
        _live_on(disk, now, manifest, verdict, saved.append)
        if chance.random() < KEEPS_POWER and life < lives - 1:
            before = disk
        else:
            after = now.with_name(f"{name}-{life}")
            after.mkdir()
            disk.image(chance, after)
            shutil.rmtree(now)
            now, before = after, None
        look(now, verdict, f"{name}, life {life}, {moment} {at}", saved_step=saved[-1])
    _live_on(Disk(now), now, manifest, verdict)
    judge(now, verdict, name)
    shutil.rmtree(now)
