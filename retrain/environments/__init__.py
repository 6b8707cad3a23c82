"""Environments: programs that answer a policy, turn by turn, and reward it.

A plugin is one file or folder with `open_episode(*, <options>)`, called once per episode, or a class of the
user's own, named by its dotted path. What it returns has `start(prompt)`, which returns what the policy reads
first, and `step(completion)`, which returns (observation, reward, done); optionally `close()`. Each may be a
coroutine function. A text is a user's message; a conversation is a list of {"role": ..., "content": ...}.
A reward of None at the end leaves scoring to `[reward]`, which gets the last completion.

An exception, a call that takes longer than `[environment].time_limit_s`, or a wrong result costs its episode.
"""

from __future__ import annotations

from retrain.registry import Hook, PluginSpec

SPEC = PluginSpec(
    "environment",
    "open_episode",
    members=("start", "step"),
    methods=(
        Hook("start", ("prompt",), "what the policy reads first"),
        Hook("step", ("completion",), "(observation, reward, done)"),
    ),
    hooks=(
        Hook("check_options", ("options",), "problems of [environment.options], as `key: what is wrong`"),
    ),
    judge="check_options",
)
SINGLE_TURN = "single_turn"
