"""Copies a campaign to a bucket while it runs, one way, and takes such a copy over on another machine.

A process of its own copies, so that no run waits for a bucket that is slow, full, forbidding or down. It
looks at files, as `status` does, and copies after each checkpoint and at the end. The orchestrator starts it,
reads from mirror.json how far it is, and gives it a bounded time at the end.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import shlex
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from retrain.base.errors import (
    EXIT_LAUNCH,
    ConfigError,
    LaunchError,
    RecordsError,
    RetrainError,
    records_error,
)
from retrain.base.locks import is_held
from retrain.base.redaction import redacted
from retrain.config.keys import table_at
from retrain.config.schema import LoggingSection
from retrain.records.files import make_directory, readable
from retrain.records.layout import CampaignFiles, RunFiles, files_of_runs
from retrain.records.lines import Mark, read_end
from retrain.records.metrics import read_ends
from retrain.records.mirror import (
    PART_BYTES,
    PATIENT_S,
    QUICK_S,
    SETTLE_S,
    Index,
    MirrorState,
    Part,
    Place,
    answering,
    as_address,
    batches,
    cause_of,
    download,
    is_lasting,
    no_copy,
    read_state,
    write_state,
)
from retrain.records.mirror import VERSION as INDEX_VERSION
from retrain.records.provenance import known_origin, write_provenance
from retrain.records.text import about, as_typed, count_of
from retrain.trainer.checkpoint import NAME, STATE

LOOK_S = 1.0  # at least, between two looks at the files
SHARE = 0.02  # of a core, for them
NICE = 10  # behind the runs
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0  # after a failure, doubled each time
RESTART_S = 60.0  # after the process ended without being asked to
REFUSED_S = 30.0  # at the end, while the store refuses
SILENT_S = 120.0  # at the end, without an answer: a batch of parts takes so long at 0.3 MB/s
LAST_S = 600.0  # at the end, in all
ALONE_S = 60.0  # for the last copy once the orchestrator is gone
ADDRESS = "RETRAIN_MIRROR"  # for the process that copies
LEFT_OUT = ("mirror.json",)
FIRST = ("done.json", "rung.json")  # what they speak of is complete when they are written, and opened after
RANK = dict.fromkeys(FIRST, 0) | {"checkpoints": 1, "runs": 3}  # of other names: 2
# what a copy is made for, besides checkpoints; the rest waits for these
DUE = (*FIRST, "attempts.jsonl", "campaign.toml", "manifest.json", "proposals.jsonl", "decision.jsonl")


class _RemovedError(Exception):
    """The directory is being removed: its copy stays as it is."""


@dataclass(frozen=True)
class _Known:
    """A file as it was copied."""

    mark: Mark | None  # None: by an earlier process
    parts: tuple[Part, ...]

    @property
    def size(self) -> int:
        return sum(size for size, _ in self.parts)


class Copier:
    """Copies a directory to a place, as often as it is asked; what is there already is not sent again."""

    def __init__(self, files: CampaignFiles, place: Place, state: MirrorState) -> None:
        """Read and write nothing yet."""
        self.state = state
        self._files, self._place = files, place
        self._known: dict[str, _Known] = {}
        self._there: dict[str, int] = {}
        self._numbers: list[int] = []
        self._index: Index | None = None
        self._told: MirrorState | None = None
        self._told_s = 0.0
        self._open: dict[str, int] = {}

    def begin(self, say: Callable[[str], None] = lambda text: None) -> None:
        """Read what the place has; raise LaunchError if another owner copies there, or has copied more."""
        place, name = self._place, self._files.directory.name
        place.require_free(self.state.owner, say)
        claim, index = place.claim(), place.newest()
        if index is not None:
            if index.campaign != name:
                holds = f"holds the campaign {index.campaign}, not {name}; choose another prefix"
                raise ConfigError(f"{redacted(place.url)}: {holds}")
            if index.number > self.state.number and (claim is None or claim.owner != self.state.owner):
                raise LaunchError(f"{redacted(place.url)}: {continued(self._files, place.url)}")
            self._known = {path: _Known(None, parts) for path, parts in index.files.items()}
        self._index = index
        self.refresh()

    def refresh(self) -> None:
        """Read what the place has now: after a failure, or if somebody has deleted there, it may be less."""
        self._there, self._numbers = self._place.parts(), self._place.numbers()
        if self._index is not None and self._index.number not in self._numbers:
            self._index = None
        for path, known in self._known.items():
            if self._lacks(known):
                self._known[path] = _Known(None, known.parts)

    def scan(self) -> bool:
        """Look how much is not copied yet; return whether it is time to copy it."""
        behind_bytes, is_due = 0, self._index is None
        for path, mark in _walk(self._files.directory):
            known = self._known.get(path)
            if known is not None and known.mark == mark:
                continue
            grown = mark[1] - known.size if known else mark[1]
            behind_bytes += grown if grown >= 0 else mark[1]
            is_due |= path.rpartition("/")[2] in DUE or "checkpoints" in path.split("/")
        is_whole = not behind_bytes and not is_due
        state = replace(self.state, behind_bytes=behind_bytes, is_whole=is_whole)
        self._tell(state, is_urgent=is_whole != self.state.is_whole)
        return is_due

    def copy(self, lost: threading.Event | None = None) -> None:
        """Copy all that has changed, then write the index that names it; raise what the store raises."""
        began_s, held = time.time(), tuple(self._held())
        before = self._index.files if self._index is not None else {}
        files: dict[str, tuple[Part, ...]] = {}
        steps: dict[str, int] = {}
        runs = {run.directory: run_id for run_id, run in files_of_runs(self._files).items()}
        units = [unit for unit, _ in groupby(_walk(self._files.directory), key=lambda each: _unit(each[0]))]
        for unit in units:
            with self._opened(unit) as opened:
                changed = self._send(opened, lost)
            files |= {path: known.parts for path, known in opened.items() if path not in changed}
            for path in changed & before.keys():
                files[path] = before[path]
            directory = self._files.directory / unit
            if directory in runs:
                steps[runs[directory]] = _steps_kept(RunFiles(directory), files, unit)
        if "campaign.toml" not in files:
            raise _RemovedError(f"{self._files.directory} was removed")
        files |= {path: parts for path, parts in before.items() if _unit(path) not in units}  # removed here
        last = self._index
        if last is None or files != before or held != last.held:
            number = max([0, self.state.number, *self._numbers]) + 1
            name = self._files.directory.name
            index = Index(INDEX_VERSION, number, name, began_s, steps, held, files)
            self._require_claim()
            self._place.write_index(index)
            self._index = index
            self._numbers.append(number)
        self._known = {path: self._known[path] for path in files if path in self._known}
        number = self._index.number if self._index else 0
        self._tell(
            replace(self.state, number=number, copied_at=began_s, steps=steps, problem=""), is_urgent=True
        )
        self._prune(last)

    def _require_claim(self) -> None:
        """Raise LaunchError if another owner has claimed the place."""
        claim = self._place.claim()
        if claim is not None and claim.owner != self.state.owner:
            raise LaunchError(f"{redacted(self._place.url)}: {continued(self._files, self._place.url)}")

    def told(self, problem: str) -> None:
        """Write why nothing can be copied now."""
        self._tell(replace(self.state, problem=redacted(problem)), is_urgent=True)

    def _tell(self, state: MirrorState, *, is_urgent: bool = False) -> None:
        self.state = state
        is_due = is_urgent or time.monotonic() - self._told_s >= LOOK_S / 2
        if state == self._told or not is_due:
            return
        self._told, self._told_s = state, time.monotonic()
        with suppress(RecordsError):  # a full disk, or a directory that was removed
            write_state(self._files, state)

    def _held(self) -> Iterator[str]:
        locks = [self._files.lock, *(run.lock for run in files_of_runs(self._files).values())]
        for lock in dict.fromkeys(locks):
            if readable(is_held, lock):
                yield str(lock.relative_to(self._files.directory))

    @contextmanager
    def _opened(self, unit: str) -> Iterator[dict[str, _Known]]:
        """Open what has changed of a run, or of the campaign beside its runs, and yield its parts by path.

        A file that is open stays as it is, whatever is renamed or removed meanwhile: all are written once,
        replaced by a rename, or appended to.
        """
        self._open = {}
        files: dict[str, _Known] = {}
        vanished: set[str] = set()
        try:
            for path, mark in _walk(self._files.directory / unit, unit):
                if _unit(path) != unit:  # the runs, which come last
                    break
                known = self._known.get(path)
                if known is not None and known.mark == mark:
                    files[path] = known
                    continue
                try:
                    fd = os.open(self._files.directory / path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
                except FileNotFoundError:
                    vanished.add(path.rpartition("/")[0])  # an old checkpoint that is being removed
                    continue
                except OSError as error:
                    raise records_error(self._files.directory / path, "read", error) from error
                self._open[path] = fd
                status = os.fstat(fd)
                size = status.st_size
                if path.endswith(".jsonl"):  # without an incomplete last line
                    start, end = read_end(fd, 0)
                    size = start + end.rfind(b"\n") + 1
                parts = _parts_of(fd, size, known.parts if known else ())
                files[path] = _Known((status.st_ino, status.st_size, status.st_mtime_ns), parts)
            yield {
                path: each
                for path, each in files.items()
                if "/checkpoints/" not in f"/{path}" or path.rpartition("/")[0] not in vanished
            }
        finally:
            for fd in self._open.values():
                os.close(fd)

    def _send(self, files: Mapping[str, _Known], lost: threading.Event | None) -> set[str]:
        """Send the parts of files that the place lacks; return which files have changed meanwhile.

        Those are not ours, as the database of a logger: they are copied once nothing writes to them.
        """
        missing: dict[str, tuple[tuple[int, int], Part]] = {}
        for path, known in files.items():
            offset = 0
            for size, sha in known.parts if path in self._open else ():
                if self._there.get(sha) != size:
                    missing[sha] = (self._open[path], offset), (size, sha)
                offset += size
        for batch in batches(missing.values()):
            if lost is not None and lost.is_set():
                self._require_claim()
            contents = {}
            for (fd, offset), (size, sha) in batch:
                content = os.pread(fd, size, offset)
                if hashlib.sha256(content).hexdigest() == sha:
                    contents[sha] = content
            self._place.write_parts(contents)
            self._there |= {sha: len(content) for sha, content in contents.items()}
            sent = sum(map(len, contents.values()))
            self._tell(replace(self.state, behind_bytes=max(0, self.state.behind_bytes - sent)))
        changed = {path for path, known in files.items() if self._lacks(known)}
        self._known |= {path: known for path, known in files.items() if path not in changed}
        return changed

    def _lacks(self, known: _Known) -> bool:
        """Whether the place lacks a part of a file."""
        return any(self._there.get(sha) != size for size, sha in known.parts)

    def _prune(self, before: Index | None) -> None:
        """Remove what neither this index nor the one before names, which somebody may be reading."""
        if before is None or self._index is None or before.number == self._index.number:
            return
        kept = {sha for index in (before, self._index) for parts in index.files.values() for _, sha in parts}
        old = [number for number in self._numbers if number < before.number]
        parts = [sha for sha in self._there if sha not in kept]
        try:
            self._place.remove_old(old, parts)
        except Exception as error:  # noqa: BLE001 - the copy is whole without it
            self.told(f"what is old cannot be deleted: {cause_of(error)}")
            return
        self._numbers = [number for number in self._numbers if number >= before.number]
        for sha in parts:
            del self._there[sha]

    def follow(self, end: _End) -> int:
        """Copy until the end, and then once more; return the exit code."""
        wait_s, lost = 0.0, None
        with ExitStack() as stack:
            while True:
                is_last = end.is_asked
                began_s, failed = time.thread_time(), False
                try:
                    is_due = self.scan()
                    if lost is None:
                        self.begin()
                        lost = stack.enter_context(self._place.claimed(self.state.owner))
                    elif lost.is_set():
                        self._require_claim()
                    elif wait_s or is_last:
                        self.refresh()
                    if is_due or is_last:
                        self.copy(lost)
                    if is_last:
                        self.scan()
                        if end.is_proper:
                            self._place.write_claim(self.state.owner, is_released=True)
                        return 0
                except _RemovedError as error:
                    self.told(str(error))
                    return EXIT_LAUNCH
                except Exception as error:  # noqa: BLE001 - told, and tried again
                    failed = True
                    self.told(str(error) if isinstance(error, RetrainError) else cause_of(error))
                    if lost is not None and lost.is_set():
                        return EXIT_LAUNCH
                wait_s = min(LONGEST_WAIT_S, 2 * wait_s or FIRST_WAIT_S) if failed else 0.0
                spent_s = time.thread_time() - began_s
                pause_s = max(LOOK_S, min(spent_s / SHARE, LONGEST_WAIT_S), wait_s)
                if not is_last:
                    end.wait(pause_s)
                else:  # until it works, or whoever waits for it has waited enough
                    time.sleep(min(pause_s, 2.0))


class _End:
    """Standard input, whose end ends this process; an orchestrator that was not killed writes to it first."""

    def __init__(self) -> None:
        self.is_proper = False
        self._event = threading.Event()
        threading.Thread(target=self._read, name="end", daemon=True).start()

    @property
    def is_asked(self) -> bool:
        return self._event.is_set()

    def wait(self, seconds: float) -> None:
        self._event.wait(seconds)

    def _read(self) -> None:
        self.is_proper = bool(sys.stdin.buffer.read())
        if not self.is_proper:
            signal.alarm(int(ALONE_S))
        self._event.set()


def main() -> None:
    """Copy a directory to an address until standard input ends."""
    directory, url = sys.argv[1], os.environ.pop(ADDRESS)
    os.nice(NICE)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # a checkpoint's files are open at once
    files = CampaignFiles(Path(directory))
    state = read_state(files)
    if state is None or state.url != as_address(url):
        state = MirrorState(as_address(url), os.urandom(8).hex())
    code = Copier(files, Place(url, PATIENT_S), replace(state, problem="")).follow(_End())
    sys.stdout.flush()
    os._exit(code)  # threads of clients may hang


class Mirror:
    """The process that copies a campaign, for the holder of its lock; does nothing without an address."""

    def __init__(self, files: CampaignFiles, url: str, notice: Callable[[str], None]) -> None:
        """Start it if there is an address."""
        self._files, self._url, self._notice = files, url, notice
        self._process: subprocess.Popen[bytes] | None = None
        self._restart_s = 0.0
        self._problem = ""
        if url:
            self._start()

    def _start(self) -> None:
        command = (
            "retrain.base.hide_process",
            "retrain.campaign.mirror",
            str(self._files.directory.absolute()),
        )
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", *command],
                env={**os.environ, ADDRESS: self._url},  # not an argument: it may hold a password
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # no Ctrl-C from the terminal
            )
        except OSError as error:
            self._notice(f"mirror: cannot be started ({error.strerror}); nothing is copied")
        self._restart_s = time.monotonic() + RESTART_S

    def look(self) -> MirrorState | None:
        """Return the state if it has a problem that was not told yet; never waits."""
        if self._process is None:
            return None
        state = read_state(self._files)
        code = self._process.poll()
        if code not in (None, EXIT_LAUNCH) and time.monotonic() > self._restart_s:
            self._notice(f"mirror: its process ended with code {code}, and is started again")
            self._start()
        if state is None or bool(state.problem) == bool(self._problem):
            return None
        self._problem = state.problem
        if not state.problem:
            self._notice("mirror: copies again")
            return None
        self._notice(f"mirror: {redacted(self._url)}: {state.problem}; the campaign runs on without a copy")
        return state

    def end(self, is_hurried: Callable[[], bool], say: Callable[[str], None]) -> None:
        """Have the last copy made while it gets on, for LAST_S at most, and tell what is not copied.

        `say` is for what need not be recorded, as that would not be in the copy.
        """
        process = self._process
        if process is None:
            return
        if process.stdin is not None:
            with suppress(OSError):  # it has ended
                process.stdin.write(b"end\n")
                process.stdin.close()
        until_s, since_s, before = time.monotonic() + LAST_S, time.monotonic(), -1
        told_s, given_up = time.monotonic() + 2.0, ""
        while process.poll() is None:
            now_s, state = time.monotonic(), read_state(self._files)
            if state is not None and state.behind_bytes != before:
                before, since_s = state.behind_bytes, now_s
            idle_s = REFUSED_S if state is not None and state.problem else SILENT_S
            if is_hurried():
                given_up = "you ended it"
            elif now_s > since_s + idle_s:
                given_up = f"nothing was sent for {about(idle_s)}"
            elif now_s > until_s:
                given_up = f"it took longer than {about(LAST_S)}"
            if given_up:
                process.kill()
                process.wait()
                break
            if now_s > told_s:
                told_s = now_s + LAST_S
                say(f"mirror: the last copy is made, for {about(LAST_S)} at most; Ctrl-C ends it")
            time.sleep(0.05)
        if process.returncode:
            state = read_state(self._files)
            why = state.problem if state and state.problem else given_up or f"exit code {process.returncode}"
            left = f", {count_of(state.behind_bytes, 'byte')} left" if state and state.behind_bytes else ""
            again = f"`retrain resume {as_typed(self._files.directory)}` tries again"
            self._notice(f"mirror: {redacted(self._url)} lacks what is newest{left}: {why}; {again}")


def place_of(url: str, source: str) -> Place:
    """Return the place of a copy; a ConfigError says what its address or this environment lacks."""
    try:
        return Place(url, QUICK_S)
    except ConfigError as error:
        raise ConfigError(f"{source} [logging].mirror: {error}") from error


def reserved(url: str, source: str, say: Callable[[str], None]) -> MirrorState:
    """Claim a place for a new campaign.

    A bucket that does not answer is told and tried again later; raises ConfigError if what is wrong does not
    pass, or the place holds another campaign, and LaunchError if one is about to be copied there.
    """
    at = f'{source} [logging].mirror: got "{redacted(url)}"'
    place = place_of(url, source)
    state = MirrorState(place.url, os.urandom(8).hex())
    try:
        if (index := place.newest()) is not None:
            resume = f"`retrain resume {shlex.quote(redacted(place.url))}`"
            what = (
                f"holds the campaign {index.campaign}; choose another prefix, or continue that with {resume}"
            )
            raise ConfigError(f"{at}, which {what}")
        place.require_free(state.owner, say)
        place.write_claim(state.owner)
    except RetrainError:
        raise
    except Exception as error:
        if is_lasting(error):
            raise ConfigError(f"{at}: {cause_of(error)}") from error
        say(f"mirror: {redacted(url)}: {cause_of(error)}; the campaign starts, and the copy is tried again")
    return state


def require_ours(files: CampaignFiles, url: str, source: str, say: Callable[[str], None]) -> None:
    """Raise if a campaign was continued from its copy, is being so, or its place is not its own."""
    state = read_state(files)
    if state is None or state.url != as_address(url):
        state = MirrorState(as_address(url), os.urandom(8).hex())
    place = place_of(url, source)
    try:
        place.check()
        Copier(files, place, state).begin(say)
    except RetrainError:
        raise
    except Exception as error:
        if is_lasting(error):
            what = f'{source} [logging].mirror: got "{redacted(url)}": {cause_of(error)}'
            raise ConfigError(what) from error
        say(f"mirror: {redacted(url)}: {cause_of(error)}; the campaign goes on, and the copy is tried again")


def continued(files: CampaignFiles, url: str) -> str:
    """Return what to do with a directory whose campaign went on from its copy."""
    return (
        f"the campaign was continued from there since, so {files.directory} is older; move that away and "
        f"`retrain resume {shlex.quote(redacted(url))}`"
    )


def take_over(url: str, say: Callable[[str], None]) -> Path:
    """Claim a copy's place and download it into its log directory; return the campaign's directory.

    If that is there already, and as new as the copy, nothing is downloaded.

    Raises:
        ConfigError: there is no copy, or the directory is there and older.
        LaunchError: another machine runs the campaign, or the store does not answer.
    """
    place = Place(url)
    with answering(url):
        index, claim = place.newest(), place.claim()
        if index is None:
            place.check()
            raise no_copy(place.url)
        file = tomllib.loads(place.read_text(index, "campaign.toml"))
        log_dir = Path(str(table_at(file, "logging").get("log_dir", LoggingSection.log_dir)))
        final = log_dir / index.campaign
        files = CampaignFiles(final)
        here = read_state(files)
        is_ours = here is not None and here.url == place.url
        if here is not None and is_ours and here.number < index.number:  # unless killed before it noted that
            is_ours = claim is not None and claim.owner == here.owner
        if final.exists() and not is_ours:
            raise ConfigError(f"{redacted(place.url)}: {continued(files, place.url)}")
        owner = here.owner if here else os.urandom(8).hex()
        place.require_free(owner, say)
        if final.exists():
            return final
        with place.claimed(owner) as lost:
            time.sleep(SETTLE_S)
            claim = place.claim()
            if claim is not None and claim.owner != owner:
                raise place.taken(claim)
            say(f"downloading {redacted(place.url)} into {final}")
            folder = log_dir / f".{index.campaign}.download"
            make_directory(folder)
            index, directory = download(place, folder)
            if lost.is_set() and (claim := place.claim()) is not None:
                raise place.taken(claim)
        copied = CampaignFiles(directory)
        declared = str(table_at(file, "logging").get("mirror", ""))
        origin, _ = known_origin(copied)
        for override in origin.overrides:
            key, _, value = override.partition("=")
            declared = value.strip("\"' ") if key.strip() == "logging.mirror" else declared
        if as_address(declared) != place.url:  # the copy was moved: it goes on where it is
            moved = (*origin.overrides, f"logging.mirror={json.dumps(place.url)}")
            write_provenance(copied, replace(origin, overrides=moved))
        write_state(copied, MirrorState(place.url, owner, index.number, index.at, steps=index.steps))
    directory.replace(final)
    folder.rmdir()
    return final


def _walk(directory: Path, prefix: str = "") -> Iterator[tuple[str, Mark]]:
    """Iterate over the files of a campaign or run in the order in which they are opened.

    First what says that others are complete, then checkpoints, then rows, which reach them; runs come last.
    """
    try:
        with os.scandir(directory) as found:
            entries = sorted(found, key=lambda entry: (RANK.get(entry.name, 2), entry.name))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        is_lock = entry.name.endswith(".lock")
        if entry.name.startswith(".") or is_lock or (not prefix and entry.name in LEFT_OUT):
            continue
        path = f"{prefix}/{entry.name}" if prefix else entry.name
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path), path)
        elif entry.is_file(follow_symlinks=False):
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                yield path, (status.st_ino, status.st_size, status.st_mtime_ns)


def _unit(path: str) -> str:
    """Return the directory of the run that a file belongs to, "" for the campaign's own."""
    top, _, rest = path.partition("/")
    return f"runs/{rest.partition('/')[0]}" if top == "runs" and rest else ""


def _steps_kept(run: RunFiles, files: Mapping[str, Sequence[Part]], unit: str) -> int:
    """Return how many steps of a run are not repeated by a resume from its copy."""
    prefix = f"{unit}/" if unit else ""
    if f"{prefix}done.json" in files:
        last = read_ends(run.metrics, 1).last
        return int(last[-1]["step"]) if last else 0
    inside = re.compile(re.escape(f"{prefix}checkpoints/") + NAME.pattern + re.escape(f"/{STATE}"))
    return max((int(match[1]) for match in map(inside.fullmatch, files) if match), default=0)


def _parts_of(fd: int, size: int, before: tuple[Part, ...]) -> tuple[Part, ...]:
    """Cut a file into parts: those before that it still begins with, then new ones.

    A small part is joined with the next that is as long, so that a file that grows line by line has few.
    """
    parts: list[Part] = []
    offset = 0
    for length, sha in before:
        if offset + length > size or _sha256(fd, offset, length) != sha:
            break
        parts.append((length, sha))
        offset += length
    while parts and parts[-1][0] <= size - offset and parts[-1][0] < PART_BYTES and size > offset:
        offset -= parts.pop()[0]
    while offset < size:
        length = min(PART_BYTES, size - offset)
        parts.append((length, _sha256(fd, offset, length)))
        offset += length
    return tuple(parts)


def _sha256(fd: int, offset: int, size: int) -> str:
    return hashlib.sha256(os.pread(fd, size, offset)).hexdigest()


if __name__ == "__main__":
    main()
