"""The benchmark for a machine with a GPU, at its small size on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu_model import SIZES, Setup, save_model
from benchmarks.gpu_parts import phases

ROOT = Path(__file__).parents[2]


def test_every_part_measures_something_or_says_why_it_cannot() -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--small", "--json"]
    command += ["--parts", "out_of_memory", "nvml"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    areas = {area["area"]: area for area in json.loads(done.stdout)}
    measured = ["Model, and peaks of the device", "Out of memory"]
    assert [area for area in areas if areas[area]["lines"]] == measured
    assert areas["NVML"]["problem"] == "not measured: needs an NVIDIA GPU"
    lines = {line["what"]: line for line in areas["Out of memory"]["lines"]}
    assert lines["tokens at a time that fit"]["verdict"] == "met"
    assert lines["its loss, apart from the other's"]["verdict"] == "met"


def test_phases_are_measured_against_the_peaks(tmp_path: Path) -> None:
    setup = Setup("cpu", SIZES["small"], tmp_path, peaks=(50.0, 5.0))
    save_model(setup)
    lines = {line.what: line for line in phases(setup)}
    for phase in ("prefill", "decode, 64 rows", "train"):
        assert lines[phase].ours > 0
    assert 0 < lines["train: arithmetic, of the peak"].ours < 100
    assert 0 < lines["decode: bandwidth, of the peak"].ours < 100
    assert not any(line.limit for line in lines.values())  # goals are for a GPU
