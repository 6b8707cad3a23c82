"""What controllers say about the next step, and what they are told about the last one.

One order: base batch -> back pressure -> load throttle -> learning rate scaled to the batch used.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from retrain.config.schema import Config

if TYPE_CHECKING:
    from retrain.controllers.backpressure import BackPressure, Decision


@dataclass(frozen=True, slots=True)
class StepSize:
    """How the next step is run."""

    batch_size: int
    micro_batches: int = 1
    lr_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What controllers may know of a finished step."""

    batch_size: int
    tokens: int
    step_time_s: float


class Steering:
    """The controllers of one run, in their order."""

    def __init__(self, config: Config) -> None:
        self._batch_size = config.training.batch_size
        self._group_size = config.training.group_size
        self._back_pressure = _back_pressure(config)

    def next_size(self) -> StepSize:
        """Say how to run the next step."""
        if self._back_pressure is None:
            return StepSize(self._batch_size)
        return StepSize(self._back_pressure.batch_size)

    def observe(self, facts: StepFacts) -> dict[str, Any]:
        """Tell the controllers of a finished step.

        Returns:
            Their part of the step's row.
        """
        if self._back_pressure is None:
            return {}
        from retrain.controllers.backpressure import StepObservation

        decision = self._back_pressure.observe(
            StepObservation(facts.batch_size, self._group_size, facts.tokens, facts.step_time_s)
        )
        return _row(decision)

    def out_of_memory(self, size: StepSize) -> bool:
        """Tell the controllers that a step did not fit; True if the next size is smaller."""
        if self._back_pressure is None:
            return False
        from retrain.controllers.backpressure import StepObservation

        self._back_pressure.observe(
            StepObservation(size.batch_size, self._group_size, 0, 0.0, out_of_memory=True)
        )
        return self._back_pressure.batch_size < size.batch_size

    def state_dict(self) -> dict[str, Any]:
        """Give what a resumed run needs."""
        return {"back_pressure": self._back_pressure.state_dict() if self._back_pressure else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        if self._back_pressure is not None and state.get("back_pressure") is not None:
            self._back_pressure.load_state_dict(state["back_pressure"])


def _back_pressure(config: Config) -> BackPressure | None:
    keys = dataclasses.asdict(config.backpressure)
    if not keys.pop("enabled"):
        return None
    from retrain.controllers.backpressure import BackPressure

    return BackPressure(config.training.batch_size, config.training.group_size, **keys)


def _row(decision: Decision) -> dict[str, Any]:
    return {
        "bp_action": decision.action,
        "bp_regime": decision.regime,
        "bp_p_star": decision.p_star,
        "bp_sigma": decision.sigma,
        "bp_kappa": decision.kappa,
        "bp_utilization": decision.utilization,
        "bp_throughput": decision.throughput,
        "bp_reason": decision.reason,
    }
