"""What runs start from: whether they can, and the lineage that the manifest records."""

from __future__ import annotations

from retrain import registry
from retrain.config.adapters import KEY, adapter_problem, state_of
from retrain.config.schema import Config
from retrain.plan.matrix import Plan


def adapter_problems(config: Config, alphabet: str) -> list[str]:
    """Return why a run cannot start from the adapter that it names; `alphabet` is its task's."""
    adapter, name = config.model.adapter, config.backend.backend
    if not adapter:
        return []
    check = registry.hook("backends", name, "check_adapter")
    if check is None:
        known = registry.built_in_names("backends")
        able = ", ".join(one for one in known if registry.hook("backends", one, "check_adapter"))
        what = f"backend {name!r} cannot start from an adapter"
        wrong = [f"{what}; remove it, or use a backend that can: {able}"]
    else:
        missing = adapter_problem(adapter)
        wrong = [missing] if missing else list(check(config, alphabet))
    return [f"[model].adapter: {what}" for what in wrong]


def lineage(plan: Plan) -> dict[str, dict[str, str]]:
    """Return what each condition starts from, by name and by content; none for those that start anew.

    Content is a digest of a file, and the path of what an API has.
    """
    configs = {
        condition: run.config for condition, run in plan.first_runs().items() if run.config.model.adapter
    }
    return {name: _start_of(config) for name, config in configs.items()}


def _start_of(config: Config) -> dict[str, str]:
    known = {
        "adapter": config.model.adapter,
        "digest": config.run.files.get(KEY, "") if config.run else "",
        "state": state_of(config.model.adapter),
    }
    return {key: value for key, value in known.items() if value}
