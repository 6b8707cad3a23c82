"""Choice of device, limits on its memory, and detection of out-of-memory errors."""

from __future__ import annotations

import gc
import os
import time

import torch

from retrain.backends import Trainers
from retrain.base.errors import ConfigError
from retrain.control.machine import memory_available_bytes, memory_limit_bytes, own_memory_bytes
from retrain.control.machine.nvidia import gpu_count

CACHE_SHARE = 0.6  # of free memory; buffers are up to a quarter larger than the cache, and logits need some


def choose_device(name: str) -> torch.device:
    """Return the device that an option names; one that does not exist is a ConfigError."""
    count = torch.cuda.device_count()
    if name == "auto":
        name = "cuda" if count else "cpu"
    device = torch.device("cuda:0" if name == "cuda" else name)  # limits and statistics need a number
    if device.type == "cuda" and device.index >= count:
        there = f"cuda:0 to cuda:{count - 1}" if count else "no GPU that PyTorch can use"
        raise ConfigError(f"[backend.options].device: got {name!r}; this process sees {there}")
    return device


def finished_s(device: torch.device) -> float:
    """Wait until the device has finished all submitted work; return the time (monotonic clock, seconds)."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


class DeviceMemory:
    """Limit and peak use of a device's memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._share = 1.0
        on_gpu = device.type == "cuda"
        self._total = float(
            torch.cuda.get_device_properties(device).total_memory if on_gpu else memory_limit_bytes()
        )

    def limit(self, share: float) -> None:
        """Limit this process to a fraction of a GPU's memory; other devices have no limit."""
        if self._device.type == "cuda" and share != self._share:
            torch.cuda.set_per_process_memory_fraction(share, self._device)
            self._share = share

    def cache_bytes(self) -> float:
        """Memory that a key-value cache may take: on a GPU of what is free now.

        On the CPU half of the machine's, whatever is free, so that a resumed run draws the same.
        """
        if self._device.type != "cuda":
            return self._total / 2
        free = torch.cuda.mem_get_info(self._device)[0]
        unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return float(CACHE_SHARE * min(free + unused, self._total * self._share))

    def begin_peak(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def peak_fraction(self) -> float:
        """Peak fraction in use since `begin_peak`; on the CPU, the process's current memory."""
        if self._device.type == "cuda":
            used = int(torch.cuda.max_memory_allocated(self._device))
        else:
            used = own_memory_bytes([os.getpid()])
        return min(1.0, used / (self._total * self._share))

    def free(self) -> None:
        """Free cached blocks that no tensor uses, so that a smaller attempt gets contiguous memory."""
        gc.collect()  # reference cycles in an exception's frames may hold tensors
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def left_for_engine(trainers: Trainers | None, device: torch.device, *, in_turn: bool) -> float | None:
    """Return the bytes of a device that trainers leave to an engine; None if their need is not known."""
    if trainers is None:
        return None
    if device.type == "cuda":
        free, count = torch.cuda.mem_get_info(device)[0], -(-trainers.count // max(1, gpu_count()))
    else:
        free, count = memory_available_bytes(), trainers.count
    return float(free - trainers.to_come(count, in_turn=in_turn))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed; CPU and CUDA libraries raise a plain RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    words = ("out of memory", "can't allocate memory", "not enough memory", "STATUS_ALLOC_FAILED")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)
