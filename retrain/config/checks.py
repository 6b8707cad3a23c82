"""Checks of one run beyond types: keys that must be consistent, plugins and their parameters.

Each check takes typed sections (`Draft`) and skips keys that are wrong by themselves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from retrain import extras, registry
from retrain.config.drafts import Draft, Problem
from retrain.config.flow import flow_problems
from retrain.config.resolve import PLUGINS, PluginKey
from retrain.errors import ConfigError

NAMED = re.compile(r"(?P<key>[a-z_]+): (?P<what>.+)", re.DOTALL)  # `length: got 0; needs at least 1`


def check_run(draft: Draft, try_plugins: bool) -> Iterator[Problem]:
    """Check what one run would use, section by section.

    Args:
        draft: the run's sections.
        try_plugins: also build tasks, read files, and ask plugins about their parameters.
    """
    for plugin in PLUGINS:
        yield from _check_plugin(plugin, draft, try_plugins)
    for check in SECTION_CHECKS.values():
        yield from check(draft, try_plugins)


def check_plugin_names(draft: Draft) -> Iterator[Problem]:
    """Check the plugins that a file names, even if its conditions replace them."""
    for plugin in PLUGINS:
        name = getattr(getattr(draft.config, plugin.section), plugin.key)
        if draft.is_sound(f"{plugin.section}.{plugin.key}"):
            what = registry.problem_with_name(plugin.kind, name)
            yield from [((plugin.section, plugin.key), what)] if what else ()


def _check_plugin(plugin: PluginKey, draft: Draft, try_plugins: bool) -> Iterator[Problem]:
    section, key, kind, params_key, _ = plugin
    table = getattr(draft.config, section)
    name, params = getattr(table, key), getattr(table, params_key)
    if not draft.is_sound(f"{section}.{key}"):
        return
    if what := registry.problem_with_name(kind, name):
        yield (section, key), what
        return
    if not draft.is_sound(f"{section}.{params_key}"):
        return
    wrong = registry.problems_with_params(kind, name, params)
    if not wrong and try_plugins:
        wrong = list(trial_problems(kind, name, params, draft.config.data.seed))
    for param, what in wrong:
        yield ((section, params_key, param) if param else (section, key)), what


def trial_problems(kind: str, name: str, params: Mapping[str, Any], seed: int) -> Iterator[tuple[str, str]]:
    """Check what only a plugin can, before anything is created: its values, data and packages.

    Built-in tasks are built, and plugins are asked to check their tables. A task of the user's own, which may
    take long, is built once for all runs that share it, by the preflight of the plan.

    Returns:
        Pairs of a parameter, "" for the plugin itself, and the problem.
    """
    if missing := extras.missing_problem(kind, name):
        yield "", missing
        return
    judge = registry.spec_of(kind).judge
    check = registry.hook(kind, name, judge) if judge else None
    for problem in [*_try_task(kind, name, params, seed), *(check(params) if check else ())]:
        named = NAMED.fullmatch(problem)
        yield (named["key"], named["what"]) if named else ("", problem)


def _try_task(kind: str, name: str, options: Mapping[str, Any], seed: int) -> tuple[str, ...]:
    if kind != "tasks" or not registry.is_built_in(kind, name):
        return ()
    try:
        registry.find("tasks", name)(seed=seed, **options)
    except ConfigError as error:
        return tuple(error.problems)
    return ()


def _check_back_pressure(draft: Draft, try_plugins: bool) -> Iterator[Problem]:
    del try_plugins
    table, batch = draft.config.backpressure, draft.config.training.batch_size
    smallest, largest = table.min_batch_size, table.max_batch_size
    if not draft.is_sound("backpressure.min_batch_size", "backpressure.max_batch_size"):
        return
    what = ""
    if largest < smallest:
        what = f"got {largest}, below min_batch_size = {smallest}; raise one or lower the other"
    elif table.enabled and not smallest <= batch <= largest and draft.is_sound("training.batch_size"):
        bounds = f"min_batch_size = {smallest} to max_batch_size = {largest}"
        what = f"training.batch_size = {batch} is outside {bounds}; widen them"
    yield from [(("backpressure", "max_batch_size"), what)] if what else ()


def _check_rate_limiter(draft: Draft, try_plugins: bool) -> Iterator[Problem]:
    del try_plugins
    if draft.is_sound("training", "rate_limiter", "backpressure"):
        yield from flow_problems(draft.config)


def _check_throttle(draft: Draft, try_plugins: bool) -> Iterator[Problem]:
    del try_plugins
    path = draft.config.throttle.load_fn
    if path:
        try:
            registry.find_function("throttle.load_fn", path)
        except ConfigError as error:
            yield ("throttle", "load_fn"), str(error)


def _check_warm_up(draft: Draft, try_plugins: bool) -> Iterator[Problem]:
    """Check that steps and path come together.

    `steps = 0` written down is a decision (a condition may leave the warm-up out); forgotten is a mistake.
    """
    table = draft.config.warmup
    if not draft.is_sound("warmup.steps", "warmup.path") or not (table.steps or table.path):
        return
    if not table.path:
        yield ("warmup", "path"), f"steps = {table.steps} needs a JSONL file of completions"
    elif not draft.gives("warmup", "steps"):
        yield ("warmup", "steps"), "is not given, so path would not be read; set it, 0 for no updates"
    elif table.steps and try_plugins and draft.is_sound("backend"):
        yield from ((("warmup", "path"), what) for what in _file_problems(draft))


def _file_problems(draft: Draft) -> Iterator[str]:
    from retrain.demonstrations import read_demonstrations  # not at the top: few files have a warm-up

    path, backend = draft.config.warmup.path, draft.config.backend
    try:
        rows = read_demonstrations(path)
    except ConfigError as error:
        yield from (problem.removeprefix("path: ") for problem in error.problems)
        return
    built_in = registry.is_built_in("backends", backend.backend)
    has_template = backend.options.get("chat_template") is True
    talks = next((row.prompt.id for row in rows if row.prompt.messages), None)
    if talks is not None and built_in and not has_template:
        yield (
            f"{path}:{talks}: a conversation needs a chat template: [backend.options] chat_template = true "
            "(backends local and tinker); a row with a single user message does not"
        )


SECTION_CHECKS: Mapping[str, Callable[[Draft, bool], Iterator[Problem]]] = {
    "backpressure": _check_back_pressure,
    "warmup": _check_warm_up,
    "throttle": _check_throttle,
    "rate_limiter": _check_rate_limiter,
}
