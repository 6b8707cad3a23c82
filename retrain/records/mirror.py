"""A campaign's copy in a bucket, or at any other address of fsspec: its layout, its readers, who writes it.

    data/<sha256>          a part of a file, at most PART_BYTES long, named by its content: written once
    index/<number>.json    the copy's files, and their parts: written last, so it names only what is there
    claim.json             who copies at present, renewed every RENEW_S

A reader takes the newest index that is whole. The files that it names are as a kill would have left them:
each run's rows reach its newest checkpoint. A `Place` raises what the store raises; `cause_of` puts that in
words.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from retrain.base.distribution import install_command
from retrain.base.errors import (
    ConfigError,
    LaunchError,
    RecordsError,
    RetrainError,
    first_line,
    records_error,
)
from retrain.base.locks import LockHolder, locked, start_mark
from retrain.base.redaction import redacted
from retrain.records.files import (
    FILE_MODE,
    make_directory,
    read_json,
    readable,
    record_of,
    remove_file,
    write_atomic,
    write_json,
)
from retrain.records.layout import CampaignFiles, own_temporary_folder
from retrain.records.text import plain

VERSION = 1
ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/+(.+)")  # a Path of one has a single slash
PART_BYTES = 8 * 2**20  # one request each: a large file goes on where its upload was cut off
BATCH_BYTES = 4 * PART_BYTES  # in memory, and under way side by side
BATCH_PARTS = 64
RENEW_S = 20.0
WATCH_S = 2.5 * RENEW_S  # without a renewal in this time, who claimed it is dead
STALE_S = 600.0  # longer than clocks of machines differ: no need to watch
WATCH_PAUSE_S = 1.0
SETTLE_S = 1.0  # after which the later of two claims at once stands
CONNECT_S = 10.0
QUICK_S = 5.0  # until a store must answer before a campaign starts without it
USUAL_S = 30.0  # while a user waits for it
PATIENT_S = 300.0  # until it must have taken a part
TRIES = 5  # to read a copy that is replaced meanwhile
LASTING = ("NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "ParamValidationError")
_NAME = re.compile(r"[A-Za-z0-9+._-]+")
_INDEX = re.compile(r"(\d+)\.json")

Part = tuple[int, str]  # its bytes, and their SHA-256


@dataclass(frozen=True)
class Claim:
    """Who copies to a place."""

    owner: str  # of the copy: kept in the directory that it is of, so that a resume there goes on
    holder: LockHolder
    is_released: bool = False

    @property
    def is_certainly_over(self) -> bool:
        """Whether nobody can hold it any more, as far as can be told without watching it."""
        if self.is_released or time.time() - self.holder.renewed_at > STALE_S:
            return True
        return self.holder.is_here and start_mark(self.holder.pid) != self.holder.started


@dataclass(frozen=True)
class Index:
    """What a copy has."""

    version: int
    number: int
    campaign: str  # name of its directory
    at: float  # when its files were as they are here, in seconds since 1970
    steps: Mapping[str, int]  # by run id: from where it goes on
    held: tuple[str, ...]  # the locks that were held
    files: Mapping[str, tuple[Part, ...]]  # by path


@dataclass(frozen=True)
class MirrorState:
    """mirror.json: how far a directory's copy is; written by the process that copies."""

    url: str
    owner: str
    number: int = 0  # of the newest index that is this directory's
    copied_at: float = 0.0  # when what is copied was as it is there, in seconds since 1970; 0: never
    behind_bytes: int = 0  # not copied yet, when it was last looked
    is_whole: bool = False  # nothing has changed since
    steps: Mapping[str, int] = field(default_factory=dict)  # by run id: from where the copy goes on
    problem: str = ""  # why nothing can be copied now


def is_address(text: str | os.PathLike[str]) -> bool:
    """Whether a text names a place of a copy, not a path; also as a Path shortens it."""
    return ADDRESS.fullmatch(str(text)) is not None


def as_address(text: str | os.PathLike[str]) -> str:
    """Return an address as it is written, without a slash at its end."""
    match = ADDRESS.fullmatch(str(text))
    if match is None:
        return str(text)
    slashes = "///" if match[1] in ("file", "local") else "//"
    return f"{match[1]}:{slashes}{match[2].rstrip('/')}"


def read_state(files: CampaignFiles) -> MirrorState | None:
    """Return what mirror.json says; None if there is none, or it cannot be read."""
    record = readable(read_json, files.mirror)
    with suppress(ValueError):
        return record_of(MirrorState, record) if record else None
    return None


def write_state(files: CampaignFiles, state: MirrorState) -> None:
    """Replace mirror.json."""
    write_json(files.mirror, asdict(state), durable=False)


def cause_of(error: BaseException) -> str:
    """Return what a store's error says, and what helps."""
    text = redacted(plain(first_line(error), 300))
    if isinstance(error, PermissionError):
        return f"access is denied ({text}); allow this user to list, read, write and delete below it"
    if isinstance(error, FileNotFoundError):
        return f"the bucket is not there ({text}); create it, or correct the address"
    if type(error).__name__ in LASTING:
        fix = "set them as its client reads them, as AWS_ACCESS_KEY_ID, or by `aws configure`"
        return f"no credentials ({text}); {fix}"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def is_lasting(error: BaseException) -> bool:
    """Whether a store's error is one that does not pass by itself."""
    kinds = PermissionError | FileNotFoundError | NotADirectoryError
    return isinstance(error, kinds) or type(error).__name__ in LASTING


class Place:
    """Where a copy is."""

    def __init__(self, url: str, longest_s: float = USUAL_S) -> None:
        """Open nothing yet; `longest_s` is how long one request may take.

        Raises ConfigError if a package is missing, or nothing is known of such an address.
        """
        self.url = as_address(url)
        if not is_address(url):
            raise ConfigError(f'got "{plain(url)}"; needs an address of fsspec, as s3://BUCKET/PREFIX')
        try:
            from fsspec.core import url_to_fs  # an extra
        except ImportError as error:
            what = f"{redacted(self.url)}: needs the extra 'mirror': {install_command('mirror')}"
            raise ConfigError(what) from error
        protocol = self.url.partition(":")[0]
        options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": protocol != "memory"}
        if protocol in ("file", "local"):
            options["auto_mkdir"] = True
        if protocol in ("s3", "s3a"):
            retries = {"max_attempts": 1}
            timeouts = {"connect_timeout": CONNECT_S, "read_timeout": longest_s}
            options["config_kwargs"] = {**timeouts, "retries": retries}
        try:
            self.fs, root = url_to_fs(self.url, **options)
        except ImportError as error:
            command = install_command("mirror") if protocol in ("s3", "s3a") else "install that package"
            raise ConfigError(f"{redacted(self.url)}: {first_line(error)}: {command}") from error
        except ValueError as error:
            what = f"{redacted(self.url)}: {first_line(error)}; needs an address of fsspec, as s3://BUCKET/PREFIX"
            raise ConfigError(what) from error
        self.fs.retries = 2  # of s3fs; whoever calls tries again, and says so
        self._root = str(root).rstrip("/")

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def check(self) -> None:
        """Raise what is wrong with the bucket, if anything is: an empty prefix is right."""
        bucket = self._root.partition("/")[0]  # "" of a path, which begins with a slash
        if not self.numbers() and bucket and not self.fs.exists(bucket):
            raise FileNotFoundError(f"no bucket {bucket}")

    def _names(self, folder: str) -> dict[str, int]:
        """Return the names in a folder, with their sizes."""
        entries = self.fs.find(self._at(folder), detail=True, refresh=True)
        return {path.rpartition("/")[2]: int(each["size"]) for path, each in entries.items()}

    def parts(self) -> dict[str, int]:
        """Return which parts are there, with their sizes."""
        return self._names("data")

    def numbers(self) -> list[int]:
        """Return the numbers of the indices, the newest first."""
        matches = map(_INDEX.fullmatch, self._names("index"))
        return sorted((int(match[1]) for match in matches if match), reverse=True)

    def newest(self) -> Index | None:
        """Return the newest index that is whole; None if there is none.

        Raises RecordsError if there is one that this version cannot read.
        """
        for number in self.numbers():
            try:
                record = json.loads(self.fs.cat_file(self._at(_index_name(number))))
            except (FileNotFoundError, ValueError):  # removed meanwhile, or its writer was killed
                continue
            if record.get("version", 0) > VERSION:
                raise RecordsError(f"{redacted(self.url)}: was written by a later retrain; upgrade this one")
            with suppress(ValueError):
                index = record_of(Index, record)
                if _NAME.fullmatch(index.campaign) and all(map(_is_inside, index.files)):
                    return index
        return None

    def write_index(self, index: Index) -> None:
        self.fs.pipe_file(self._at(_index_name(index.number)), json.dumps(asdict(index)).encode())

    def write_parts(self, parts: Mapping[str, bytes]) -> None:
        """Write parts, side by side where the store can."""
        if parts:
            self.fs.pipe({self._at(f"data/{sha}"): content for sha, content in parts.items()})

    def read_parts(self, parts: Iterable[Part]) -> dict[str, bytes]:
        """Return parts by digest; FileNotFoundError if one is gone, RecordsError if it is damaged."""
        names = {self._at(f"data/{sha}"): sha for _, sha in parts}
        contents = self.fs.cat(list(names)) if names else {}
        for name, content in contents.items():
            if hashlib.sha256(content).hexdigest() != names[name]:
                raise RecordsError(
                    f"{redacted(self.url)}: data/{names[name]} is damaged; remove it and copy again"
                )
        return {names[name]: content for name, content in contents.items()}

    def read_text(self, index: Index, path: str) -> str:
        """Return a file of a copy."""
        try:
            contents = self.read_parts(index.files[path])
        except FileNotFoundError as error:
            raise self.incomplete() from error
        return b"".join(contents[sha] for _, sha in index.files[path]).decode("utf-8-sig")

    def incomplete(self) -> RecordsError:
        """Return an error for a copy from which something was deleted."""
        return RecordsError(f"{redacted(self.url)}: parts of the copy are gone; copy it again")

    def remove_old(self, numbers: Iterable[int], parts: Iterable[str]) -> None:
        """Remove indices, then parts that no other one names; some may be gone."""
        for names in ([_index_name(number) for number in numbers], [f"data/{sha}" for sha in parts]):
            if names:
                with suppress(FileNotFoundError):
                    self.fs.rm([self._at(name) for name in names])

    def claim(self) -> Claim | None:
        """Return who claims the place; None if nobody does."""
        try:
            record = json.loads(self.fs.cat_file(self._at("claim.json")))
            return record_of(Claim, record)
        except (FileNotFoundError, ValueError):
            return None

    def write_claim(self, owner: str, *, is_released: bool = False) -> None:
        """Claim the place for this process, or renew that, or release it."""
        pid, now = os.getpid(), time.time()
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
        holder = LockHolder(pid, os.uname().nodename, since, start_mark(pid), round(now, 3))
        content = json.dumps(asdict(Claim(owner, holder, is_released)))
        self.fs.pipe_file(self._at("claim.json"), content.encode())

    def require_free(self, owner: str, say: Callable[[str], None]) -> None:
        """Raise LaunchError if another owner copies to this place; watch a claim that may be dead.

        A directory that was copied to another machine has the same owner there.
        """
        claim = self.claim()
        if claim is None or claim.is_certainly_over or (claim.owner == owner and claim.holder.is_here):
            return
        if not claim.holder.is_here:
            say(f"{redacted(self.url)}: waiting {WATCH_S:g} s for a sign of life of {claim.holder}")
            until = time.monotonic() + WATCH_S
            while (now := self.claim()) == claim:
                if time.monotonic() > until:
                    return
                time.sleep(WATCH_PAUSE_S)
            if now is None or now.is_certainly_over:
                return
        raise self.taken(claim)

    def taken(self, claim: Claim) -> LaunchError:
        """Return an error that names who copies."""
        return LaunchError(
            f"{redacted(self.url)}: its campaign runs elsewhere, with {claim.holder}; stop it there first "
            f"(`retrain stop`), or wait: {WATCH_S:g} s after that machine is gone, this one may resume"
        )

    @contextmanager
    def claimed(self, owner: str) -> Iterator[threading.Event]:
        """Claim the place meanwhile, and renew that; the event is set once another owner has claimed it."""
        self.write_claim(owner)
        over, lost = threading.Event(), threading.Event()

        def go_on() -> None:
            while not over.wait(RENEW_S):
                try:
                    claim = self.claim()
                    if claim is not None and claim.owner != owner:
                        lost.set()
                        return
                    self.write_claim(owner)
                except Exception:  # noqa: BLE001 - a store that is away: what copies says so
                    continue

        thread = threading.Thread(target=go_on, name="claim", daemon=True)
        thread.start()
        try:
            yield lost
        finally:
            over.set()


def _index_name(number: int) -> str:
    return f"index/{number:09d}.json"


def _is_inside(path: str) -> bool:
    return bool(path) and "\0" not in path and not {"", ".", ".."} & set(path.split("/"))


def batches(parts: Iterable[tuple[Any, Part]]) -> Iterator[list[tuple[Any, Part]]]:
    """Group parts, each with what it belongs to, so that a group fits into memory."""
    batch: list[tuple[Any, Part]] = []
    size = 0
    for owner, part in parts:
        if batch and (size + part[0] > BATCH_BYTES or len(batch) == BATCH_PARTS):
            yield batch
            batch, size = [], 0
        batch.append((owner, part))
        size += part[0]
    if batch:
        yield batch


def _has_parts(path: Path, parts: Sequence[Part]) -> bool:
    """Whether a file consists of exactly these parts."""
    try:
        with path.open("rb") as file:
            return all(
                hashlib.sha256(file.read(size)).hexdigest() == sha for size, sha in parts
            ) and not file.read(1)
    except OSError:
        return False


def download(
    place: Place, folder: Path, wants: Callable[[str], bool] = lambda path: True
) -> tuple[Index, Path]:
    """Make a directory in a folder hold the files that a copy has and `wants` accepts, and no others.

    Files that are there already are not read again, so a download that was cut off goes on. Returns the
    index and the directory, which has the campaign's name.

    Raises:
        ConfigError: there is no copy.
        RecordsError: the directory cannot be written, or the copy is damaged.
    """
    gone: Exception | None = None
    for _ in range(TRIES):
        index = place.newest()
        if index is None:
            raise no_copy(place.url)
        directory = folder / index.campaign
        wanted = {path: parts for path, parts in index.files.items() if wants(path)}
        make_directory(directory)
        for path in directory.rglob("*"):
            if path.is_file() and str(path.relative_to(directory)) not in wanted:
                remove_file(path)
        try:
            _download(place, directory, wanted)
        except FileNotFoundError as error:  # a part of an index that is old by now
            gone = error
            continue
        return index, directory
    raise place.incomplete() from gone


def no_copy(url: str) -> ConfigError:
    """Return an error for a place without a copy."""
    return ConfigError(
        f"{redacted(url)}: holds no copy of a campaign; name the address of its [logging].mirror"
    )


def _download(place: Place, directory: Path, wanted: Mapping[str, Sequence[Part]]) -> None:
    missing = {path: parts for path, parts in wanted.items() if not _has_parts(directory / path, parts)}
    for path, parts in missing.items():
        make_directory((directory / path).parent)
        if not parts:
            write_atomic(directory / path, b"", durable=False)
    for batch in batches((path, part) for path, parts in missing.items() for part in parts):
        contents = place.read_parts(part for _, part in batch)
        for path, (_, sha) in batch:
            name = directory / path
            partial = name.with_name(f".{name.name}.download.tmp")  # gets its name once it has its size
            try:
                with open(partial, "ab", opener=lambda file, flags: os.open(file, flags, FILE_MODE)) as file:
                    file.write(contents[sha])
                    is_complete = file.tell() == sum(size for size, _ in missing[path])
                if is_complete:
                    partial.replace(name)
            except OSError as error:
                raise records_error(name, "write", error) from error


@contextmanager
def answering(url: str) -> Iterator[None]:
    """Raise a store's error as ours: a ConfigError if it does not pass by itself, else a LaunchError."""
    try:
        yield
    except RetrainError:
        raise
    except Exception as error:
        kind = ConfigError if is_lasting(error) else LaunchError
        raise kind(f"{redacted(as_address(url))}: {cause_of(error)}") from error


def download_records(url: str) -> Path:
    """Download what `status` reads of a copy, into a folder of this user; return the campaign's directory.

    Its locks are held there as leases of the machine that copies, for as long as that renews its claim.
    """
    place = Place(url)
    folder = own_temporary_folder("mirror") / hashlib.sha256(place.url.encode()).hexdigest()[:16]
    make_directory(folder)
    with locked(folder / "lock"), answering(url):
        index, directory = download(place, folder, lambda path: "checkpoints" not in path.split("/"))
        claim = place.claim()
        is_live = claim is not None and not claim.is_certainly_over
        for path in index.held if claim is not None and is_live else ():
            holder = replace(claim.holder, host=f"{claim.holder.host}, by its copy") if claim else None
            if _is_inside(path) and holder:
                write_json(directory / path, asdict(holder), durable=False)
        state = MirrorState(place.url, "", index.number, index.at, is_whole=not is_live, steps=index.steps)
        write_state(CampaignFiles(directory), state)
    return directory
