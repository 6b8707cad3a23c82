"""Any causal language model, sampled and trained on this machine with PyTorch, transformers and peft.

The heavy imports wait until a run connects: planning reads this file and `_torch_options` only.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from retrain.backends import BackendSpec
from retrain.backends._torch_options import (
    DEFAULTS,
    check_options,
    parse_options,
    takes_permits,
)
from retrain.errors import ConfigError

if TYPE_CHECKING:
    from retrain.backends._torch_backend import LocalBackend

__all__ = [
    "EXTRA",
    "PACKAGES",
    "check_options",
    "connect",
    "missing_packages",
    "takes_permits",
    "wants_gpu",
]

EXTRA = "local"
PACKAGES = ("torch", "transformers", "peft", "safetensors")


def missing_packages() -> list[str]:
    """List the packages that this backend needs and that are not installed, without importing any."""
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]


def wants_gpu(options: Mapping[str, Any]) -> bool:
    """Tell whether a run takes any GPU that it is given; not if it names one, or none."""
    return options.get("device", DEFAULTS.device) in ("auto", "cuda")


def connect(spec: BackendSpec) -> LocalBackend:
    """Load a model and put fresh adapters on it.

    Raises:
        ConfigError: an option is wrong, packages are missing, or the model cannot be used.
        InfrastructureError: the hub or the generation engine cannot be reached.
    """
    options = parse_options(spec.options)
    missing = missing_packages()
    if missing:
        raise ConfigError(
            f"[backend].backend: 'local' needs {', '.join(missing)}; pip install 'retrain[{EXTRA}]'"
        )
    from retrain.backends._torch_backend import LocalBackend

    return LocalBackend(spec, options)
