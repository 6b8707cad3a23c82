"""What limits each phase of a step on this hardware: hints in the row, for backends that know their work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from retrain.backends import BackendInfo
from retrain.config.schema import BackPressure
from retrain.controllers.roofline import PhaseWork, classify
from retrain.rollouts import Rollout, TrainingSample

TRAINING_PASSES = 3  # over the weights: forward, backward, and the optimizer's update


def roofline_row(
    info: BackendInfo,
    table: BackPressure,
    rollouts: Sequence[Rollout],
    samples: Sequence[TrainingSample],
    times_s: dict[str, float],
) -> dict[str, Any]:
    """Give `roofline_<phase>`, `mfu_<phase>` and `mbu_<phase>`; nothing where no peak is configured.

    Sampling counts as the decode phase: a backend that shares prompts within a group spends little on
    prefill, and does not time it apart.
    """
    if not (table.peak_gflops or table.peak_bw_gb_s):
        return {}
    row: dict[str, Any] = {"roofline_prefill": "unknown"}  # not timed apart from decoding
    if info.remote:  # its hardware is not this machine's, and its times are mostly waiting
        return {**row, "roofline_decode": "unknown", "roofline_train": "unknown"}
    for work in _works(info, rollouts, samples, times_s):
        hint = classify(work, table.peak_gflops, table.peak_bw_gb_s)
        row[f"roofline_{hint.phase}"] = hint.bound
        row[f"mfu_{hint.phase}"] = hint.mfu
        row[f"mbu_{hint.phase}"] = hint.mbu
    return row


def _works(
    info: BackendInfo,
    rollouts: Sequence[Rollout],
    samples: Sequence[TrainingSample],
    times_s: dict[str, float],
) -> Iterator[PhaseWork]:
    sampled = sum(len(rollout.tokens) for rollout in rollouts)
    trained = sum(len(sample.rollout.tokens) for sample in samples)
    yield PhaseWork(
        "decode",
        flops=_times(info.flops_per_sampled_token, sampled),
        bytes_moved=_decode_bytes(info, rollouts),
        time_s=times_s["sample_time_s"],
    )
    if samples:
        yield PhaseWork(
            "train",
            flops=_times(info.flops_per_trained_token, trained),
            bytes_moved=_times(info.bytes_per_decode_step, TRAINING_PASSES),
            time_s=times_s["train_time_s"],
        )


def _decode_bytes(info: BackendInfo, rollouts: Sequence[Rollout]) -> float | None:
    """Weights once per position that any sequence still decodes, and each token's cache at each later one."""
    if info.bytes_per_decode_step is None or info.kv_bytes_per_token is None:
        return None
    lengths = [len(rollout.tokens) for rollout in rollouts]
    cached = sum(length * (length - 1) / 2 for length in lengths)
    return info.bytes_per_decode_step * max(lengths, default=0) + info.kv_bytes_per_token * cached


def _times(per_token: float | None, tokens: int) -> float | None:
    return None if per_token is None else per_token * tokens
