"""The identity of a run's configuration: everything set that decides its result, and nothing else.

Defaults are left out, so that keys added by later versions change no digest. Files count by their content,
so a moved project is the same experiment, and changed prompts are another one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from retrain.base.errors import ConfigError
from retrain.config.files import contents_of, mapped
from retrain.config.keys import Table, Tables, keys_of, table_at
from retrain.config.resolve import SECTIONS, as_tables, build, deciding_keys, values_of
from retrain.config.schema import Config

VERSION = "v2:"
# tables and keys on which the policy before the first step, and an evaluation of it, depend
AT_START = (
    *("model", "backend", "data", "reward", "environment"),
    *("training.seed", "training.max_steps", "training.max_tokens", "training.temperature"),
)
UNLIKE_AT_START = ("data.curriculum", "data.curriculum_params", "data.refill", "data.refill_most")
# the same of the policy after `[warmup]`
WARMED_UP = ("model", "backend", "data", "environment", "warmup", "training.seed", "training.max_grad_norm")
UNLIKE_WARMED_UP = (*UNLIKE_AT_START, "data.eval_prompts", "data.eval_samples")
BESIDE_RESULTS = tuple(name for name, kind in SECTIONS.items() if kind.__affects__ != "result")


def digest(config: Config, contents: Mapping[str, str] | None = None) -> str:
    """Identify everything that decides a run's result: "v2:" and 16 hex digits.

    Args:
        config: of a run.
        contents: fingerprints of the files that it names, by dotted key; None reads the files.
    """
    return VERSION + _hash(_deciding(config, contents_of(config) if contents is None else contents))


def start_digest(config: Config, name: str) -> str:
    """Identify what an evaluation, "" for the run's own, finds before the first step.

    Runs for which it is equal have the same policy then, and ask and score it alike.
    """
    deciding = _deciding(config, config.run.files if config.run else contents_of(config))
    evals: list[Table] = deciding.get("eval.tables", [])
    evaluation = next((table for table in evals if table["name"] == name), {})
    unlike = set(UNLIKE_AT_START)
    if "reward" in evaluation:  # scored by that alone
        unlike |= {"reward.reward", "reward.params"}
    warm_up = warm_up_digest(config) if config.warmup.steps else ""
    return _hash({**_among(deciding, AT_START, unlike), "evaluation": evaluation, "warmup": warm_up})


def warm_up_digest(config: Config) -> str:
    """Identify the policy after the warm-up: runs of a campaign for which it is equal share it."""
    keys = {*WARMED_UP}
    if config.warmup.lr is None:
        keys.add("training.lr")
    if config.model.adapter and config.algorithm.kl_coef:  # its weights may be kept as the reference
        keys |= {"algorithm.kl_coef", "algorithm.kl_reference"}
    if config.teacher.teacher == "self":  # whose weights may be kept as well
        keys.add("teacher")
    deciding = _deciding(config, config.run.files if config.run else contents_of(config))
    return _hash(_among(deciding, keys, UNLIKE_WARMED_UP))


def _among(deciding: Tables, keys: Collection[str], unlike: Collection[str]) -> Tables:
    """Return what decides of these keys, and of these tables except for some keys."""
    return {
        key: value
        for key, value in deciding.items()
        if key in keys or (key.partition(".")[0] in keys and key not in unlike)
    }


def _deciding(config: Config, known: Mapping[str, str]) -> Tables:
    def normal(value: Any, key: str, _: str) -> Any:
        """Return a value's canonical form: 1 for 1.0, and a file's content for its path."""
        if key in known:
            return {"file": known[key]}
        return int(value) if isinstance(value, float) and value.is_integer() else value

    return {
        f"{section}.{key.name}": mapped(value, f"{section}.{key.name}", key.path, normal)
        for section, key, value in values_of(config, deciding_keys)
        if value != key.first_default
    }


def decides(section: str, key: str) -> bool:
    """Whether a key of a run's configuration can change its result."""
    kind = SECTIONS.get(section)
    declared = keys_of(kind).get(key) if kind else None
    return declared.affects == "result" if declared else kind is None


def is_as_written(tables: Tables) -> bool:
    """Whether a run.toml has the configuration of its digest; a ConfigError if a later retrain wrote it."""
    run = table_at(tables, "run")
    recorded = run.get("config_hash")
    if not isinstance(recorded, str) or "version" not in run:
        return False
    if ":" in recorded and not recorded.startswith(VERSION):
        raise ConfigError(f"config_hash = {recorded!r}: a later retrain wrote this; upgrade retrain")
    try:
        return digest(build(Config, tables), run.get("files", {})) == recorded
    except (TypeError, AttributeError):
        return False


def is_edited(tables: Tables) -> bool:
    """Whether a run.toml has a digest that differs from its configuration's."""
    try:
        return bool(table_at(tables, "run").get("config_hash")) and not is_as_written(tables)
    except ConfigError:  # a later version's, which cannot be judged
        return False


def laid_over(recorded: Tables, planned: Config, contents: Mapping[str, str]) -> Config:
    """Return a configuration with what decides the result from a recorded run.toml, and the rest from a plan.

    Files of the same name are the plan's: they may have moved.
    """
    tables = as_tables(planned)
    for section, key, now in values_of(planned, deciding_keys):
        old = recorded.get(section, {})
        if key.name in old:
            tables[section][key.name] = _moved(old[key.name], now, f"{section}.{key.name}", contents)
        else:  # absent, or not a key then
            tables[section].pop(key.name, None)
    return build(Config, tables)


def _moved(old: Any, new: Any, key: str, contents: Mapping[str, str]) -> Any:
    if isinstance(old, dict) and isinstance(new, dict):
        return {name: _moved(inner, new.get(name), f"{key}.{name}", contents) for name, inner in old.items()}
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return [_moved(a, b, f"{key}.{n}", contents) for n, (a, b) in enumerate(zip(old, new, strict=True))]
    is_file = key in contents and isinstance(old, str) and isinstance(new, str)
    return new if is_file and Path(old).name == Path(new).name else old


def _hash(tables: Tables) -> str:
    canonical = json.dumps(tables, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]
