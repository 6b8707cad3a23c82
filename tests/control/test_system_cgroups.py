"""Directory trees as kernels and container engines write them, laid out in a temporary folder."""

import pytest

from retrain.control.machine import (
    RANK_SHARE,
    Pool,
    cpu_capacity,
    cpu_pools,
    machine_cpu,
    machine_memory,
    memory_available_bytes,
    memory_limit_bytes,
    memory_pools,
    programs_at_once,
    stalled_fraction,
)

GIB = 2**30
MEMINFO = "MemTotal: 16777216 kB\nMemFree: 1048576 kB\nMemAvailable: 12582912 kB\nHugePages_Total: 0\n"
V1_UNLIMITED = "9223372036854771712\n"
PSI = "some avg10=2.50 avg60=1.95 avg300=0.58 total=6064759\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=0\n"


@pytest.fixture
def kernel(tmp_path):
    """Writes files below proc/ and cgroup/, and gives both folders."""

    def write(files):
        for name, text in {"proc/meminfo": MEMINFO, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path / "proc", tmp_path / "cgroup"

    return write


def v2_group(
    path, cpu_max="max 100000", memory_max="max", memory_high="max", used=GIB, cache=0, usage_usec=0
):
    group = f"cgroup/{path}"
    return {
        f"{group}/cpu.max": f"{cpu_max}\n",
        f"{group}/cpu.stat": f"usage_usec {usage_usec}\nuser_usec 0\nsystem_usec 0\n",
        f"{group}/memory.max": f"{memory_max}\n",
        f"{group}/memory.high": f"{memory_high}\n",
        f"{group}/memory.current": f"{used}\n",
        f"{group}/memory.stat": f"anon {used - cache}\ninactive_file {cache}\nactive_file 0\n",
    }


V2 = {"proc/self/cgroup": "0::/user.slice/job\n", "cgroup/cgroup.controllers": "cpu memory\n"}
V1 = {
    "proc/self/cgroup": "4:memory:/docker/ab12\n3:cpu,cpuacct:/docker/ab12\n1:name=systemd:/docker/ab12\n",
    "cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
    "cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    "cgroup/memory/memory.limit_in_bytes": V1_UNLIMITED,
    "cgroup/cpu,cpuacct/docker/ab12/cpu.cfs_quota_us": "150000\n",
    "cgroup/cpu,cpuacct/docker/ab12/cpu.cfs_period_us": "100000\n",
    "cgroup/cpu,cpuacct/docker/ab12/cpuacct.usage": "2500000000\n",
    "cgroup/memory/docker/ab12/memory.limit_in_bytes": f"{4 * GIB}\n",
    "cgroup/memory/docker/ab12/memory.usage_in_bytes": f"{3 * GIB}\n",
    "cgroup/memory/docker/ab12/memory.stat": f"cache 1\ntotal_inactive_file {GIB}\n",
}


def test_v2_quota_and_limit_bind(kernel):
    paths = kernel(V2 | v2_group("user.slice/job", "50000 100000", f"{2 * GIB}", usage_usec=7_000_000))
    assert cpu_pools(*paths) == [Pool(0.5, 7.0)]
    assert memory_pools(*paths) == [Pool(2 * GIB, GIB)]


def test_v2_max_is_no_limit(kernel):
    paths = kernel(V2 | v2_group("user.slice/job"))
    assert cpu_pools(*paths) == memory_pools(*paths) == []


def test_v2_memory_high_is_a_limit_too(kernel):
    paths = kernel(V2 | v2_group("user.slice/job", memory_max=f"{4 * GIB}", memory_high=f"{3 * GIB}"))
    assert memory_limit_bytes(*paths) == 3 * GIB


def test_v2_the_tightest_of_nested_groups_binds(kernel):
    inner = v2_group("user.slice/job", "400000 100000", f"{8 * GIB}")
    outer = v2_group("user.slice", "150000 100000", f"{6 * GIB}")
    paths = kernel(V2 | inner | outer)
    assert cpu_capacity(*paths, cpus=range(8)) == 1.5
    assert memory_limit_bytes(*paths) == 6 * GIB


def test_v2_inside_a_container_the_mount_point_is_our_group(kernel):
    own = v2_group(".", "200000 100000", f"{GIB}")
    paths = kernel({"proc/self/cgroup": "0::/\n", "cgroup/cgroup.controllers": "cpu memory\n"} | own)
    assert cpu_capacity(*paths, cpus=range(8)) == 2.0
    assert memory_limit_bytes(*paths) == GIB


def test_v2_a_group_outside_of_our_namespace_falls_back_to_the_mount_point(kernel):
    own = v2_group(".", "200000 100000")
    paths = kernel({"proc/self/cgroup": "0::/../../x\n", "cgroup/cgroup.controllers": "cpu\n"} | own)
    assert cpu_capacity(*paths, cpus=range(8)) == 2.0


def test_v1_quota_and_limit_bind(kernel):
    paths = kernel(V1)
    assert cpu_pools(*paths) == [Pool(1.5, 2.5)]
    assert memory_pools(*paths) == [Pool(4 * GIB, 2 * GIB)]


def test_v1_inside_a_container_the_host_path_does_not_exist(kernel):
    paths = kernel(
        {
            "proc/self/cgroup": "3:cpu,cpuacct:/docker/ab12\n2:memory:/docker/ab12\n",
            "cgroup/cpu/cpu.cfs_quota_us": "300000\n",
            "cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "cgroup/cpuacct/cpuacct.usage": "1000000000\n",
            "cgroup/memory/memory.limit_in_bytes": f"{GIB}\n",
            "cgroup/memory/memory.usage_in_bytes": "0\n",
            "cgroup/memory/memory.stat": "total_inactive_file 0\n",
        }
    )
    assert cpu_pools(*paths) == [Pool(3.0, 1.0)]
    assert memory_limit_bytes(*paths) == GIB


def test_hybrid_reads_limits_from_v1_and_pressure_from_v2(kernel):
    hybrid = V1["proc/self/cgroup"] + "0::/docker/ab12\n"
    pressure = {"cgroup/unified/docker/ab12/cpu.pressure": PSI.replace("2.50", "40.00")}
    paths = kernel(V1 | {"proc/self/cgroup": hybrid, "proc/pressure/cpu": PSI} | pressure)
    assert cpu_pools(*paths) == [Pool(1.5, 2.5)]
    assert stalled_fraction("cpu", *paths) == 0.4


def test_a_system_without_control_groups_has_no_limits(kernel):
    paths = kernel({})
    assert cpu_pools(*paths) == memory_pools(*paths) == []
    assert cpu_capacity(*paths, cpus=range(6)) == 6.0


def test_pressure_is_the_machines_without_a_group_of_our_own(kernel):
    assert stalled_fraction("memory", *kernel({"proc/pressure/memory": PSI})) == 0.025


def test_pressure_is_none_where_the_kernel_does_not_keep_it(kernel):
    assert stalled_fraction("cpu", *kernel({})) is None


def test_available_memory_is_the_least_of_machine_and_group(kernel):
    paths = kernel(V2 | v2_group("user.slice/job", memory_max=f"{4 * GIB}", used=3 * GIB, cache=GIB))
    assert memory_available_bytes(*paths) == 2 * GIB
    assert memory_limit_bytes(*paths) == 4 * GIB
    assert machine_memory(paths[0]) == Pool(16 * GIB, 4 * GIB)


def test_busy_time_counts_our_processors_and_not_their_waits(kernel):
    stat = "cpu 9 9 9 9 9 9 9 9 0 0\ncpu0 100 10 50 999 999 5 15 20 0 0\ncpu1 7 7 7 7 7 7 7 7 0 0\nctxt 1\n"
    proc, _ = kernel({"proc/stat": stat})
    assert machine_cpu(proc, cpus={0}) == Pool(1, 2.0)


def test_without_a_proc_folder_psutil_answers(tmp_path):
    assert machine_memory(tmp_path).limit == machine_memory().limit
    assert machine_cpu(tmp_path).used > 0


@pytest.mark.parametrize(("wanted", "share", "count"), [(0, "1 4", 1), (6, "1 4", 2), (6, "", 6)])
def test_a_rank_on_another_node_runs_its_share_of_programs(monkeypatch, wanted, share, count):
    monkeypatch.setenv(RANK_SHARE, share)
    assert programs_at_once(wanted) == count
