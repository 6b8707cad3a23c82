"""Attribution works on plain readings; the reader replays NVML's answers as its bindings give them."""

from types import SimpleNamespace

import pytest

from retrain.base.errors import InfrastructureError
from retrain.control.machine.nvidia import (
    Gpu,
    gpu_uuids,
    gpus,
    read_gpus,
    scarcest,
    taken,
    taken_by_others,
    visible,
)

GIB = 2**30
UUIDS = ["GPU-8932f937-d72c", "GPU-8fab0911-11aa", "GPU-15e5b3c2-0b1c"]


@pytest.mark.parametrize(
    ("setting", "left"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("2,0", [2, 0]),
        ("0, 1", [0, 1]),
        ("0,7,1", [0]),
        ("1,1", [1]),
        ("GPU-8f", [1]),
        ("GPU-8", []),
        ("GPU-15e5b3c2-0b1c,GPU-8932f937-d72c", [2, 0]),
        ("MIG-4c1e", ["MIG-4c1e"]),
    ],
)
def test_visible_devices_are_those_that_cuda_would_use(setting, left):
    assert visible(UUIDS, setting) == left


def gpu(memory, utilization=None, total_utilization=None, used=None):
    used = sum(memory.values()) if used is None else used
    return Gpu(0, UUIDS[0], "H200", 100 * GIB, used, total_utilization, memory, utilization)


def others(reading, own):
    return taken_by_others(reading, own, is_alive=lambda pid: True)


def test_our_own_processes_on_a_gpu_are_not_foreign():
    reading = gpu({1: 60 * GIB, 2: 20 * GIB}, utilization={1: 0.9, 2: 0.25})
    assert others(reading, own={1}) == {"gpu_memory": 0.2, "gpu": 0.25}
    assert others(reading, own={1, 2}) == {"gpu_memory": 0.0, "gpu": 0.0}


def test_counting_everything_nobody_is_left_out():
    assert taken(gpu({1: 60 * GIB}, total_utilization=0.9)) == {"gpu_memory": 0.6, "gpu": 0.9}


def test_time_that_the_driver_does_not_split_is_split_as_memory_is():
    reading = gpu({1: 30 * GIB, 2: 10 * GIB}, total_utilization=0.8)
    assert others(reading, own={1})["gpu"] == pytest.approx(0.2)


def test_a_sample_of_a_process_that_has_left_the_gpu_does_not_count():
    assert others(gpu({1: GIB}, utilization={1: 0.5, 9: 0.5}), own={1})["gpu"] == 0.0


def test_memory_held_by_processes_out_of_sight_is_not_guessed():
    with pytest.raises(InfrastructureError, match="cannot be seen from here"):
        others(gpu({1: 10 * GIB}, used=40 * GIB), own={1})


def test_processes_of_another_pid_namespace_are_out_of_sight():
    with pytest.raises(InfrastructureError, match="pid namespace"):
        taken_by_others(gpu({4242: 40 * GIB}), {1}, is_alive=lambda pid: False)


def test_the_drivers_own_share_is_nobodys():
    assert others(gpu({1: 10 * GIB}, used=12 * GIB), own={1})["gpu_memory"] == 0.0


def test_the_most_loaded_of_several_gpus_counts():
    shares = [{"gpu_memory": 0.1, "gpu": 0.9}, {"gpu_memory": 0.4}, {"gpu_memory": 0.2, "gpu": 0.3}]
    assert scarcest(shares) == {"gpu_memory": 0.4, "gpu": 0.9}


class NvmlError(Exception):
    def __init__(self, value):
        super().__init__(f"NVML error {value}")
        self.value = value


def nvml(utilization, old_driver=False):
    """The bindings' answers for two GPUs; `utilization` answers the question about processes."""

    def memory(handle, version=None):
        if version and old_driver:
            raise NvmlError(3)
        return SimpleNamespace(total=100 * GIB, used=30 * GIB)

    def refuse(handle):
        raise NvmlError(3)

    return SimpleNamespace(
        NVMLError=NvmlError,
        NVML_SUCCESS=0,
        NVML_ERROR_NOT_SUPPORTED=3,
        NVML_ERROR_NO_PERMISSION=4,
        NVML_ERROR_NOT_FOUND=6,
        nvmlMemory_v2=2,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetUUID=lambda handle: UUIDS[handle] if isinstance(handle, int) else handle,
        nvmlDeviceGetName=lambda handle: b"NVIDIA H200",
        nvmlDeviceGetMemoryInfo=memory,
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=70, memory=20),
        nvmlDeviceGetComputeRunningProcesses=lambda handle: [
            SimpleNamespace(pid=11, usedGpuMemory=20 * GIB),
            SimpleNamespace(pid=12, usedGpuMemory=None),
        ],
        nvmlDeviceGetGraphicsRunningProcesses=refuse,
        nvmlDeviceGetProcessUtilization=utilization,
    )


def samples(handle, since_us):
    return [
        SimpleNamespace(pid=11, timeStamp=2, smUtil=40),
        SimpleNamespace(pid=11, timeStamp=1, smUtil=90),
        SimpleNamespace(pid=0, timeStamp=0, smUtil=0),
    ]


def failing(value):
    def ask(handle, since_us):
        raise NvmlError(value)

    return ask


def test_a_gpu_is_read_with_its_processes_latest_samples():
    (read,) = read_gpus(nvml(samples), "1")
    assert read == Gpu(1, UUIDS[1], "NVIDIA H200", 100 * GIB, 30 * GIB, 0.7, {11: 20 * GIB, 12: 0}, {11: 0.4})


@pytest.mark.parametrize("answer", [6, 0])  # not found; the bindings raise an empty success as well
def test_no_samples_means_that_nobody_ran(answer):
    assert read_gpus(nvml(failing(answer)), "0")[0].process_utilization == {}


def test_a_driver_without_samples_or_new_answers_is_read_without():
    (read,) = read_gpus(nvml(failing(3), old_driver=True), "0")
    assert (read.process_utilization, read.memory_used_bytes) == (None, 30 * GIB)


def test_a_mig_slice_is_read_by_its_uuid():
    (read,) = read_gpus(nvml(samples), "MIG-4c1e")
    assert (read.index, read.uuid) == (-1, "MIG-4c1e")


def test_a_machine_without_device_nodes_has_no_gpus(tmp_path):
    assert gpus(tmp_path) == []


def test_a_gpu_that_cannot_be_read_says_what_to_do(tmp_path):
    (tmp_path / "nvidia0").touch()
    with pytest.raises(InfrastructureError, match=r"\[gpu\]|NVML does not start"):
        gpus(tmp_path)


INFORMATION = """\
Model: \t\t NVIDIA H200
GPU UUID: \t {uuid}
Bus Location: \t {bus}
Device Minor: \t 0
"""


@pytest.mark.parametrize(
    ("second", "found"),
    [("GPU-bb-2", ["GPU-aa-1", "GPU-bb-2"]), ("GPU-????????-????", [])],  # not known before its first use
)
def test_the_driver_names_gpus_by_pci_bus_or_none_of_them(tmp_path, second, found):
    for bus, uuid in (("0000:c1:00.0", second), ("0000:01:00.0", "GPU-aa-1")):
        (tmp_path / bus).mkdir()
        (tmp_path / bus / "information").write_text(INFORMATION.format(uuid=uuid, bus=bus))
    assert gpu_uuids(tmp_path) == found
    assert gpu_uuids(tmp_path / "no driver") == []
