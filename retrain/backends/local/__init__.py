"""Any causal language model, sampled and trained on this machine with PyTorch, transformers and peft.

Heavy imports are deferred until a run connects: planning reads only this file, `options` and `names`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from retrain.backends import BackendSpec
from retrain.backends.local.names import model_problem, prompts_problem, template_problem
from retrain.backends.local.options import (
    DEFAULTS,
    NO_REFERENCE,
    check_options,
    parse_options,
    takes_permits,
)
from retrain.distribution import install_command
from retrain.errors import ConfigError
from retrain.system import gpu_nodes

if TYPE_CHECKING:
    from retrain.backends.local.policy import LocalBackend
    from retrain.config.schema import Config
    from retrain.rollouts import Prompt

__all__ = [
    "EXTRA",
    "PACKAGES",
    "advise_run",
    "check_options",
    "check_prompts",
    "check_run",
    "connect",
    "missing_packages",
    "servers",
    "takes_permits",
    "wants_gpu",
]

EXTRA = "local"
PACKAGES = ("torch", "transformers", "peft", "safetensors")
ROUNDED_RATIO = 0.005  # change of the mean ratio of sixty tokens by bfloat16 rounding


def missing_packages() -> list[str]:
    """Return the required packages that are not installed, without importing any."""
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]


def check_run(config: Config) -> list[str]:
    """Return the problems that would stop this run, each with its key; torch is not imported."""
    problems = []
    options = config.backend.options
    offline = bool(options.get("local_files_only"))
    if wrong := model_problem(config.model.model, local_files_only=offline):
        problems.append(f"[model].model: {wrong}")
    elif options.get("chat_template") and (wrong := template_problem(config.model.model)):
        problems.append(f"[backend.options].chat_template: {wrong}")
    if config.algorithm.kl_coef and not options.get("lora", DEFAULTS.lora):
        problems.append(f"[algorithm].kl_coef: {NO_REFERENCE}")
    device, launcher = options.get("device", DEFAULTS.device), config.campaign and config.campaign.launcher
    if device.startswith("cuda") and launcher in ("local", "inline") and not gpu_nodes():
        problems.append(
            f'[backend.options].device: got {device!r}; this machine has no GPU; use "cpu" or "auto"'
        )
    return problems


def advise_run(config: Config) -> list[str]:
    """Return advice about this configuration."""
    bounds = config.algorithm.loss_params
    tightest = min(bounds.get("clip_low", 0.0), bounds.get("clip_high", 0.0))  # unset: the published
    if config.algorithm.loss_mode != "gspo" or tightest >= ROUNDED_RATIO or not _is_rounded(config):
        return []
    return [
        'in bfloat16, rounding alone moves a rollout\'s ratio further than "gspo" allows, which then cuts at '
        "random; set algorithm.loss_params = { clip_low = 0.01, clip_high = 0.01 }, or "
        'backend.options.dtype = "float32"'
    ]


def _is_rounded(config: Config) -> bool:
    options = config.backend.options
    dtype, device = options.get("dtype", DEFAULTS.dtype), options.get("device", DEFAULTS.device)
    return dtype == "bfloat16" or (dtype == "auto" and device != "cpu" and bool(gpu_nodes()))


def check_prompts(config: Config, prompts: Sequence[Prompt]) -> list[str]:
    """Return problems of the prompts, judged by the model's files; torch is not imported."""
    wrong = prompts_problem(config.model.model, prompts)
    return [f"[data]: {wrong}"] if wrong else []


def servers(config: Config) -> dict[str, str]:
    """Return the server that a run needs, as address -> key."""
    options = config.backend.options
    return (
        {str(options.get("engine_url", "")): "[backend.options].engine_url"} if takes_permits(options) else {}
    )


def wants_gpu(options: Mapping[str, Any]) -> bool:
    """Whether a run uses the GPU that it is assigned; false if it names a GPU, or uses the CPU."""
    return options.get("device", DEFAULTS.device) in ("auto", "cuda")


def connect(spec: BackendSpec) -> LocalBackend:
    """Load a model and add fresh adapters to it.

    Raises:
        ConfigError: an option is wrong, packages are missing, or the model cannot be used.
        InfrastructureError: the hub or the sampling server cannot be reached.
    """
    options = parse_options(spec.options)
    missing = missing_packages()
    if missing:
        raise ConfigError(f"[backend].backend: 'local' needs {', '.join(missing)}; {install_command(EXTRA)}")
    from retrain.backends.local.policy import LocalBackend

    return LocalBackend(spec, options)
