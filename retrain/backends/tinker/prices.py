"""Prices of the Tinker API's models, in dollars per million tokens, as its maker published them.

Only models of which all four prices are known are in the table. Some were told to be reduced for a limited
time. The API reads a prompt once for all rollouts of a group, and bills the others' reading as cached.
"""

from __future__ import annotations

from retrain.config.prices import Price

SOURCE = "https://tinker-docs.thinkingmachines.ai/tinker/models"
SEPTEMBER, OCTOBER = "2026-09-10", "2026-10-07"
PRICES = {
    "Qwen/Qwen3-8B": Price(0.195, 0.039, 0.60, 0.44, SOURCE, SEPTEMBER),
    "Qwen/Qwen3.5-4B": Price(0.33, 0.066, 1.005, 0.737, SOURCE, SEPTEMBER),
    "openai/gpt-oss-20b": Price(0.18, 0.036, 0.45, 0.396, SOURCE, SEPTEMBER),
    "thinkingmachines/Inkling": Price(1.87, 0.374, 4.68, 5.61, SOURCE, OCTOBER),
}
