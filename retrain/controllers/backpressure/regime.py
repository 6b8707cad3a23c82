"""Names the regime a step ran in, and the action that follows.

| regime | when | action |
|---|---|---|
| warmup | doubling the batch, at the start and after a changed curve | hold |
| retrograde | past throttle_margin x p* or a measured fall; out of memory | throttle |
| compute_bound | short of what the curve offers: a larger batch pays | increase |
| compute_bound | under 80 % of the fit: slow, but no batch would mend it | hold |
| memory_bound | over 110 % of the fit: headroom that the curve does not explain | hold |
| optimal | within 80 to 110 % of the fit, or no fit yet | hold |

A probe is exploring, not an opinion: it holds, in the regime of the step that ran.
"""

from __future__ import annotations

from typing import Literal

from retrain.controllers.backpressure.explore import Purpose

Action = Literal["hold", "throttle", "increase"]
Regime = Literal["warmup", "retrograde", "memory_bound", "compute_bound", "optimal"]

HEADROOM, SHORTFALL = 1.1, 0.8  # measured over fitted throughput


def classify(size: float, following: int, purpose: Purpose, over_fit: float) -> tuple[Action, Regime]:
    """Action and regime of a completed step.

    Args:
        size: the batch that ran.
        following: the batch to run next.
        purpose: what the next batch is for.
        over_fit: measured over fitted throughput at `size`; 1 without a fit.
    """
    if purpose == "warmup":
        return "hold", "warmup"
    if purpose == "operate" and following < size:
        return "throttle", "retrograde"
    if purpose == "operate" and following > size:
        return "increase", "compute_bound"
    if over_fit > HEADROOM:
        return "hold", "memory_bound"
    return "hold", "compute_bound" if over_fit < SHORTFALL else "optimal"
