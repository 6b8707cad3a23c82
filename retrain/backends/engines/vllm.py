"""vLLM on this machine, started by the first run that needs it and shared by all runs of the user.

One server per model, precision and GPU, or one on the CPU; `shared_server` says how it lives and ends. It
listens on 127.0.0.1 only, and answers only to a key that the user's own processes can read.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from retrain.base.distribution import install_command
from retrain.base.errors import ConfigError
from retrain.control.machine import memory_limit_bytes
from retrain.control.machine.nvidia import gpus

if TYPE_CHECKING:
    from retrain.backends import BackendSpec
    from retrain.backends.engines.shared_server import SharedServer
    from retrain.backends.local import LocalOptions

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM can be started for
SHARED_RANK = 32  # adapters up to this rank share one server
ADAPTERS = 8  # of different runs in one batch; others wait in main memory
CPU_SHARE = 1 / 16  # of the memory, for the key-value cache, at most: a CPU decodes few tokens at a time
LEFT_SHARE = 0.5  # of what trainers leave of it; the server's weights and buffers need some, too
GPU_SHARE = 0.45  # of a GPU's, for the whole server, if the trainers' need is not known
LEAST_OF_A_GPU, MOST_OF_A_GPU = 0.05, 0.95
GIB = 1 << 30
START_S = 900.0  # the first start on a GPU compiles for minutes
ENVIRONMENT = {
    "VLLM_API_KEY": "{key}",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
DEVELOPER = {"VLLM_SERVER_DEV_MODE": "1"}  # has /sleep and /wake_up, for which vLLM asks for no key


def vllm_problem(command: Sequence[str]) -> str:
    """Return why vLLM cannot be started here; empty if it can."""
    if sys.platform != "linux":
        return 'vLLM runs on Linux only; use engine = "torch", or "openai" for a server elsewhere'
    if not _executable(command[0]):
        return (
            f"{command[0]!r} is not installed; run: {install_command('vllm')}, or name that of another "
            'environment: engine_command = ["/path/to/vllm"]'
        )
    return ""


def vllm_server(
    spec: BackendSpec,
    options: LocalOptions,
    *,
    model: str,
    dtype: str,
    gpu: int | None,
    left_bytes: float | None,
    devices: int = 1,
) -> SharedServer:
    """Return this process's share in the server for a model; it is not started yet.

    Args:
        model: directory, or name on the hub.
        dtype: of weights and cache, as vLLM names it.
        gpu: number of the GPU among those that this process sees; None: the CPU.
        left_bytes: of the device's memory, beside the trainers; None if that is not known.
        devices: so many GPUs, from that one on, hold a part of every layer each.

    Raises:
        ConfigError: vLLM cannot serve this here.
    """
    from retrain.backends.engines.shared_server import SharedServer  # planning reads only this file

    command, sleeps = options.engine_command, options.engine_sleep
    if problem := vllm_problem(command):
        raise ConfigError(f"[backend.options].engine_command: {problem}")
    if spec.lora_rank > RANKS[-1]:
        raise ConfigError(f"[model].lora_rank: got {spec.lora_rank}; vLLM serves at most {RANKS[-1]}")
    rank = next(r for r in RANKS if r >= max(spec.lora_rank, SHARED_RANK))
    memory_bytes = None if isinstance(options.engine_memory, str) else options.engine_memory * 1e9
    is_chosen = memory_bytes is not None
    if gpu is None:
        if memory_bytes is None:  # half of what is left, beside the server's own weights
            most = CPU_SHARE * memory_limit_bytes()
            memory_bytes = most if left_bytes is None else min(most, LEFT_SHARE * left_bytes)
        memory = str(max(1, round(memory_bytes / GIB)))  # for the key-value cache
        environment = {
            "VLLM_CPU_KVCACHE_SPACE": memory if is_chosen else "{memory}",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "TORCHDYNAMO_DISABLE": "1",  # minutes of g++ at the first request, for small kernels
        }
        device = ["--enforce-eager"]
    else:
        whole = min((each.memory_total_bytes for each in gpus()), default=0)
        if memory_bytes is None:
            memory_bytes = GPU_SHARE * whole if left_bytes is None else left_bytes
        fraction = min(MOST_OF_A_GPU, max(LEAST_OF_A_GPU, memory_bytes / whole)) if whole else GPU_SHARE
        memory = f"{fraction:.3f}"  # of the GPU, for the whole server
        listed = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpu + devices)))
        used = [name.strip() for name in listed.split(",")[gpu : gpu + devices]]
        environment = {"CUDA_VISIBLE_DEVICES": ",".join(used)}  # each, or each set, has its own server
        # a share that is not chosen decides nothing about which runs have one server
        device = ["--gpu-memory-utilization", memory if is_chosen else "{memory}"]
        if devices > 1:
            device += ["--tensor-parallel-size", str(devices)]
    line = [
        _executable(command[0]) or command[0], *command[1:], "serve", model,
        "--host", "127.0.0.1", "--port", "{port}",
        *(("--revision", options.revision) if options.revision else ()),
        "--dtype", dtype,
        "--enable-lora", "--max-lora-rank", str(rank), "--max-loras", str(ADAPTERS),
        "--max-cpu-loras", str(4 * ADAPTERS),
        "--logprobs-mode", "processed_logprobs",  # of the distribution that is sampled from
        "--generation-config", "vllm",  # the model's own would add top_k and penalties
        "--disable-uvicorn-access-log",  # so that its last lines say why it crashed
        *device,
        *(("--enable-sleep-mode",) if sleeps else ()),
        *options.engine_arguments,
    ]  # fmt: skip
    developer = DEVELOPER if sleeps else {}
    return SharedServer(line, {**ENVIRONMENT, **environment, **developer}, "vLLM", memory=memory)


def _executable(name: str) -> str | None:
    """Return the path of a command in PATH, or in the environment that this Python belongs to."""
    return shutil.which(name) or shutil.which(Path(sys.executable).parent / name)
