"""Which GPU a worker gets: the one with the fewest workers, over all campaigns of this user on this machine.

A slot is a locked file whose descriptor the worker inherits. The kernel frees it when the worker's last
process ends, so nothing has to be released, and a restarted launcher finds used slots locked. A GPU
has as many slots as needed: with more workers than GPUs, workers share them evenly.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from retrain.errors import LaunchError, RecordsError
from retrain.locks import Descriptor, LockFile
from retrain.system.nvidia import gpu_uuids, visible

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class GpuSlot:
    """A share of a GPU, ours while its lock is open."""

    environment: Mapping[str, str]  # to add to the worker's
    lock: LockFile | None = None  # whose descriptor the worker inherits

    @property
    def descriptors(self) -> tuple[int, ...]:
        """Return what to pass to the worker."""
        return (self.lock.fileno(),) if self.lock else ()

    def close(self) -> None:
        """Close our descriptor; the worker that inherited the slot keeps it locked."""
        if self.lock:
            Descriptor.close(self.lock)  # `LockFile.close` would unlock it for the worker as well


def visible_gpus(setting: str | None, count: int) -> list[str]:
    """Return GPUs as CUDA names them: CUDA_VISIBLE_DEVICES up to a negative one, else all."""
    if setting is None:
        return [str(number) for number in range(count)]
    gpus: list[str] = []
    for entry in (part.strip() for part in setting.split(",")):
        if not entry or entry.startswith("-"):
            break
        gpus.append(entry)
    return list(dict.fromkeys(gpus))


def take_slot(
    gpus: Sequence[str], directory: Path | None = None, uuids: Sequence[str] | None = None
) -> GpuSlot:
    """Return a slot of the least used GPU; an empty one without GPUs.

    Args:
        gpus: as from `visible_gpus`.
        directory: of the locks; default: one per user of this machine.
        uuids: of this machine's GPUs, by number, so that each GPU counts once whatever its name;
            default: from the driver.

    Raises:
        LaunchError: the directory cannot be used.
    """
    if not gpus:
        return GpuSlot({})
    names = _lock_names(gpus, gpu_uuids() if uuids is None else uuids)
    directory = directory or Path(tempfile.gettempdir()) / f"retrain-gpus-{os.getuid()}"
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        round_ = 0
        while True:  # ends: every round tries locks that fewer workers hold
            for gpu, name in names.items():
                lock = LockFile(str(directory / f"{name}.{round_}.lock"))
                if lock.try_lock():
                    return GpuSlot({VISIBLE: gpu}, lock)
                lock.close()
            round_ += 1
    except (OSError, RecordsError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise LaunchError(f"{directory}: cannot reserve a GPU here ({why})") from error


def _lock_names(gpus: Sequence[str], uuids: Sequence[str]) -> dict[str, str]:
    """Return a unique name for each entry, however its GPU is written."""
    named = {gpu: next(iter(visible(uuids, gpu)), gpu) for gpu in gpus}
    full = {gpu: uuids[name] if isinstance(name, int) else name for gpu, name in named.items()}
    return {gpu: re.sub(r"[^A-Za-z0-9-]", "_", name) for gpu, name in full.items()}
