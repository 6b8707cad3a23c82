"""NVIDIA GPUs that this process may use, their processes, and their use by others.

NVML is read through `nvidia-ml-py`, an optional extra, imported only if a device node shows that the
machine has a GPU.
"""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.base.distribution import install_command
from retrain.base.errors import InfrastructureError

UTILIZATION_WINDOW_US = 10_000_000  # processes are sampled at least a few times per second
_UUID = re.compile(r"^GPU UUID:\s+(GPU-[0-9a-f-]+)$", re.MULTILINE)  # until it is known: "?"
UNATTRIBUTED_FRACTION = 0.05  # the driver's contexts and tables use less than this


@dataclass(frozen=True, slots=True)
class Gpu:
    """State of a GPU at one time. Pids are those of this process's namespace."""

    index: int  # NVML's number, by PCI bus; -1 for a slice named by its MIG UUID
    uuid: str
    name: str
    memory_total_bytes: int
    memory_used_bytes: int  # without the driver's reserved memory
    utilization: float | None  # fraction of time with a kernel running; None if not supported
    process_memory_bytes: Mapping[int, int]
    process_utilization: Mapping[int, float] | None  # None if not supported

    @property
    def memory_free_bytes(self) -> int:
        return self.memory_total_bytes - self.memory_used_bytes


def gpu_nodes() -> list[str]:
    """Return the names of the GPU device nodes, each for one or more GPUs; empty without a GPU."""
    patterns = ("nvidia[0-9]*", "dxg", "kfd", "nvhost-gpu")  # Linux, WSL, AMD, Jetson
    return sorted(path.name for pattern in patterns for path in Path("/dev").glob(pattern))


def gpu_count(dev: Path = Path("/dev")) -> int:
    """Return the number of NVIDIA GPUs, counted by device nodes."""
    return len(list(dev.glob("nvidia[0-9]*")))


def gpu_uuids(proc: Path = Path("/proc/driver/nvidia/gpus")) -> list[str]:
    """Return the UUIDs of this machine's NVIDIA GPUs in PCI bus order; empty unless all are known."""
    try:
        texts = [(place / "information").read_text() for place in sorted(proc.iterdir())]
    except OSError:
        return []
    uuids = [match[1] for text in texts if (match := _UUID.search(text))]
    return uuids if len(uuids) == len(texts) else []  # else indices would be off


def gpus(dev: Path = Path("/dev")) -> list[Gpu]:
    """Read every GPU visible under CUDA_VISIBLE_DEVICES; raise InfrastructureError if one cannot be read."""
    if gpu_count(dev) == 0:
        return []
    nvml = _open_nvml(os.getpid())
    try:
        return read_gpus(nvml, os.environ.get("CUDA_VISIBLE_DEVICES"))
    except (nvml.NVMLError, nvml.NVMLLibraryMismatchError) as error:
        raise InfrastructureError(
            f"the GPU cannot be read through NVML: {error}; check nvidia-smi"
        ) from error


def known_gpus() -> list[Gpu]:
    """Read the same GPUs; none if they cannot be read."""
    try:
        return gpus()
    except InfrastructureError:
        return []


def read_gpus(nvml: Any, visible_devices: str | None) -> list[Gpu]:
    """Read the GPUs that `visible_devices` names, through an initialized `pynvml` module."""
    handles = [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]
    chosen = visible([_text(nvml.nvmlDeviceGetUUID(handle)) for handle in handles], visible_devices)
    gpus: list[Gpu] = []
    for place in chosen:
        index = place if isinstance(place, int) else -1
        handle = handles[place] if isinstance(place, int) else nvml.nvmlDeviceGetHandleByUUID(place)
        try:  # the second version, if supported: its `used` excludes the driver's memory
            memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
        except (nvml.NVMLError, AttributeError):
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        compute = _offered(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle) or []
        graphics = _offered(nvml, nvml.nvmlDeviceGetGraphicsRunningProcesses, handle) or []
        rates = _offered(nvml, nvml.nvmlDeviceGetUtilizationRates, handle)
        process_utilization: dict[int, float] | None
        try:
            since_us = time.time_ns() // 1000 - UTILIZATION_WINDOW_US
            samples = nvml.nvmlDeviceGetProcessUtilization(handle, since_us)
            latest = {s.pid: s.smUtil / 100 for s in sorted(samples, key=lambda s: int(s.timeStamp))}
            process_utilization = {pid: share for pid, share in latest.items() if pid}  # 0: an empty slot
        except nvml.NVMLError as error:
            nobody_ran = error.value in (nvml.NVML_ERROR_NOT_FOUND, nvml.NVML_SUCCESS)
            process_utilization = {} if nobody_ran else None
        gpus.append(
            Gpu(
                index=index,
                uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
                name=_text(nvml.nvmlDeviceGetName(handle)),
                memory_total_bytes=int(memory.total),
                memory_used_bytes=int(memory.used),
                utilization=None if rates is None else rates.gpu / 100,
                process_memory_bytes={p.pid: int(p.usedGpuMemory or 0) for p in [*graphics, *compute]},
                process_utilization=process_utilization,
            )
        )
    return gpus


def visible(uuids: Sequence[str], setting: str | None) -> list[int | str]:
    """Return the devices that CUDA_VISIBLE_DEVICES selects: GPU indices, or UUIDs of MIG slices.

    As in CUDA, entries from the first invalid one on are ignored. Indices are in PCI order; a machine
    with different GPUs needs CUDA_DEVICE_ORDER=PCI_BUS_ID for the same order in CUDA.

    Source: CUDA C++ Programming Guide, "CUDA Environment Variables".
    """
    if setting is None:
        return list(range(len(uuids)))
    chosen: list[int | str] = []
    for entry in map(str.strip, setting.split(",")):
        matches = [i for i, uuid in enumerate(uuids) if uuid.startswith(entry)]
        if entry.isdigit() and int(entry) < len(uuids):
            chosen.append(int(entry))
        elif entry.startswith("MIG-"):
            chosen.append(entry)
        elif entry.startswith("GPU-") and len(matches) == 1:  # a unique prefix is enough
            chosen.append(matches[0])
        else:
            break
    return list(dict.fromkeys(chosen))


def taken_by_others(gpu: Gpu, own: Collection[int], is_alive: Callable[[int], bool]) -> dict[str, float]:
    """Return the fractions of a GPU's memory and time used by processes other than `own`.

    If the driver does not report time per process, time is split in proportion to memory.

    Raises:
        InfrastructureError: memory is in use by processes in another pid namespace, so our use cannot
            be separated from theirs.
    """
    seen = {pid: used for pid, used in gpu.process_memory_bytes.items() if is_alive(pid)}
    hidden = gpu.memory_used_bytes - sum(seen.values())
    if hidden > UNATTRIBUTED_FRACTION * gpu.memory_total_bytes:
        raise InfrastructureError(
            f"GPU {gpu.uuid}: {hidden / 2**30:.1f} GiB are held by processes that cannot be seen from here; "
            'share the pid namespace (--pid=host), or use scope="system" or prefer_gpu=False'
        )
    others = {pid: used for pid, used in seen.items() if pid not in own}
    shares = {"gpu_memory": min(1.0, sum(others.values()) / gpu.memory_total_bytes)}
    if gpu.process_utilization is not None:
        busy = sum(share for pid, share in gpu.process_utilization.items() if pid in others)
        shares["gpu"] = min(1.0, busy)
    elif gpu.utilization is not None:
        shares["gpu"] = gpu.utilization * sum(others.values()) / max(1, sum(seen.values()))
    return shares


def taken(gpu: Gpu) -> dict[str, float]:
    """Return the fractions of a GPU's memory and time in use."""
    shares = {"gpu_memory": gpu.memory_used_bytes / gpu.memory_total_bytes}
    if gpu.utilization is not None:
        shares["gpu"] = gpu.utilization
    return shares


def scarcest(gpus_shares: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the largest fraction of each kind: training on several GPUs waits for the most loaded GPU."""
    worst: dict[str, float] = {}
    for shares in gpus_shares:
        worst |= {name: max(share, worst.get(name, 0.0)) for name, share in shares.items()}
    return worst


@functools.cache
def _open_nvml(pid: int) -> Any:
    """Return the NVML module, initialized once per process: a forked child cannot use its parent's."""
    try:
        import pynvml
    except ImportError as error:
        raise InfrastructureError(
            f"reading the GPU needs nvidia-ml-py; install it with {install_command('gpu')}, "
            "or set prefer_gpu=False to ignore GPUs"
        ) from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise InfrastructureError(
            f"NVML does not start: {error}; check the driver with nvidia-smi"
        ) from error
    return pynvml


def _offered(nvml: Any, read: Callable[[Any], Any], handle: Any) -> Any:
    """Return the result of a query, or None if the device or driver does not support it."""
    try:
        return read(handle)
    except nvml.NVMLError as error:
        if error.value in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_NO_PERMISSION):
            return None
        raise


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
