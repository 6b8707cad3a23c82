"""Token transforms distribute a rollout's advantage over its tokens.

A plugin is one file or folder with `reweigh(rollout, advantage, progress, *, <params>) -> advantages`, one
value per completion token; `progress` in [0, 1] is the share of the run's steps that are complete.
A log-probability that is not finite is a ValueError.
"""

from __future__ import annotations

from retrain.base.registry import PluginSpec

SPEC = PluginSpec("token transform", "reweigh", ("rollout", "advantage", "progress"), has_defaults=True)
