"""The embedded backend: a small recurrent policy over characters, trained on one core with numpy.

numpy and the policy are imported when a run connects: planning reads the options only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from retrain.backends import BackendSpec
from retrain.backends.numpy.checks import check_alphabet
from retrain.backends.numpy.options import check_options, parse_options, takes_permits

if TYPE_CHECKING:
    from retrain.backends.numpy.policy import NumpyBackend

__all__ = ["check_alphabet", "check_options", "connect", "takes_permits"]


def connect(spec: BackendSpec) -> NumpyBackend:
    """Return a policy with fresh weights.

    Raises:
        ConfigError: an option is wrong, or the task has no alphabet.
    """
    from retrain.backends.numpy.policy import NumpyBackend

    return NumpyBackend(spec, parse_options(spec.options))
