"""Read processors, memory, pressure and GPUs.

Other modules use this package; they never read /proc, psutil or NVML themselves.
"""

from retrain.system.machine import (
    allowed_cpus,
    cpu_capacity,
    memory_available_bytes,
    memory_limit_bytes,
)
from retrain.system.nvidia import Gpu, gpu_nodes, gpus
from retrain.system.processes import process_tree

__all__ = [
    "Gpu",
    "allowed_cpus",
    "cpu_capacity",
    "gpu_nodes",
    "gpus",
    "memory_available_bytes",
    "memory_limit_bytes",
    "process_tree",
]
