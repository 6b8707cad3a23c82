"""The benchmark for a machine with a GPU, at its small size on the CPU."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from benchmarks.gpu import PARTS, measured
from benchmarks.gpu_model import SIZES, Setup, save_model
from benchmarks.gpu_parts import peaks, phases

ROOT = Path(__file__).parents[2]


def test_phases_are_measured_against_the_peaks(tmp_path: Path) -> None:
    assert all(line.ours > 0 for line in peaks(Setup("cpu", SIZES["small"], tmp_path)))
    setup = Setup("cpu", SIZES["small"], tmp_path, peaks=(50.0, 5.0))
    lines = {line.what: line for line in phases(setup)}
    for phase in ("prefill", "decode, 64 rows", "train"):
        assert lines[phase].ours > 0
    assert 0 < lines["train: arithmetic, of the peak"].ours < 100
    assert 0 < lines["decode: bandwidth, of the peak"].ours < 100
    assert not any(line.limit for line in lines.values())  # goals are for a GPU


def test_a_part_measures_in_a_process_of_its_own_or_says_why_it_cannot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_model(Setup("cpu", SIZES["small"], tmp_path))
    arguments = ["--device", "cpu", "--size", "small", "--directory", str(tmp_path)]
    options = argparse.Namespace(device="cpu", json="-")
    parts = {part.name: part for part in PARTS}
    monkeypatch.chdir(ROOT)
    for name, gpus in (("NVML", 1), ("Ranks of one run", 2)):
        problem = measured(parts[name], arguments, options).problem
        assert problem == f"not measured: needs NVIDIA GPUs: {gpus}"
    out_of_memory = measured(parts["Out of memory"], arguments, options)
    assert out_of_memory.problem == ""
    lines = {line.what: line for line in out_of_memory.lines}
    assert lines["tokens at a time that fit"].verdict == "met"
    assert lines["its loss, apart from the other's"].verdict == "met"
