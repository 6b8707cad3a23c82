"""Frozen weights that the processes of a user share: one file, mapped by each of them.

Runs that train adapters on the CPU read the same weights. The first one writes them, under a digest of their
content, among the user's own temporary files; each maps the file copy-on-write, so that none can change what
another reads. A file is removed once no process uses it.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from filelock import FileLock

from retrain.base.locks import LockFile
from retrain.records.layout import own_temporary_folder

ALIGNED = 64  # bytes, as PyTorch allocates: kernels may round differently at other addresses
FOLDER_LOCK = "folder.lock"  # held while a file is written, taken into use or removed
Parameters = Sequence[torch.nn.Parameter]


class SharedWeights:
    """This process's share in a file of weights."""

    def __init__(self, path: Path, lock: LockFile) -> None:
        self.path = path
        self._lock = lock

    def close(self) -> None:
        """Stop using the file, and remove it if nobody else does; safe to call twice."""
        if self._lock.is_open:
            self._lock.close()
            with contextlib.suppress(OSError), _folder(self.path.parent):
                _remove_unused(self.path.parent)


def share(causal: torch.nn.Module) -> SharedWeights | None:
    """Let a model's frozen parameters be views of a file that other processes map as well.

    Values stay the same to the bit. Returns None if the file cannot be written: the model keeps its own.
    """
    parameters = [p for p in causal.parameters() if not p.requires_grad]  # tied ones once
    folder = own_temporary_folder("weights")
    path = folder / f"{_digest(parameters)}.bin"
    try:
        with _folder(folder):
            _remove_unused(folder)
            lock = LockFile(f"{path}.lock")
            lock.try_lock(shared=True)  # others only share it
            if not path.exists():
                _write(path, parameters)
    except OSError:
        return None
    storage = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=path.stat().st_size)
    for parameter, (begin, _) in zip(parameters, _places(parameters), strict=True):
        view = torch.empty(0, dtype=parameter.dtype)
        first = begin // parameter.dtype.itemsize
        parameter.data = view.set_(storage, first, parameter.shape)
    with contextlib.suppress(AttributeError, OSError):  # glibc keeps what the copy took
        ctypes.CDLL(None).malloc_trim(0)
    return SharedWeights(path, lock)


def _folder(folder: Path) -> FileLock:
    return FileLock(folder / FOLDER_LOCK, mode=0o600)


def _places(parameters: Parameters) -> Iterator[tuple[int, int]]:
    """Iterate over where each parameter's bytes begin and end."""
    end = 0
    for parameter in parameters:
        begin = -(-end // ALIGNED) * ALIGNED
        end = begin + parameter.nbytes
        yield begin, end


def _bytes(parameter: torch.nn.Parameter) -> memoryview:
    flat = parameter.detach().contiguous().view(-1).view(torch.uint8)
    return memoryview(flat.numpy())


def _digest(parameters: Parameters) -> str:
    digest = hashlib.sha256()
    for parameter in parameters:  # in the model's order: adapters change names
        digest.update(f"{tuple(parameter.shape)} {parameter.dtype}\n".encode())
        digest.update(_bytes(parameter))
    return digest.hexdigest()[:32]


def _write(path: Path, parameters: Parameters) -> None:
    """Write all bytes and rename, so that a file that exists is complete."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        with temporary.open("xb") as file:
            for parameter, (begin, _) in zip(parameters, _places(parameters), strict=True):
                file.seek(begin)
                file.write(_bytes(parameter))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _remove_unused(folder: Path) -> None:
    for path in (*folder.glob("*.bin"), *folder.glob("*.tmp")):
        lock = LockFile(f"{path}.lock")
        if lock.try_lock():
            path.unlink(missing_ok=True)
            Path(f"{path}.lock").unlink(missing_ok=True)
        lock.close()
