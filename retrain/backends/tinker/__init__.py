"""The Tinker API: a policy that is sampled and trained remotely, through the SDK.

Planning reads only this file and `wire`; the SDK is imported when a run connects. Only the SDK reads the
key, from the environment.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrain.backends import BackendSpec, ServerFinding, always
from retrain.backends.options import chat_template, number, parsed, problems_of, table, template_problems
from retrain.backends.tinker import server_facts
from retrain.base import extras
from retrain.base.errors import ConfigError, Problem
from retrain.config.prices import Price
from retrain.config.resolve import teachers_of

if TYPE_CHECKING:
    from retrain.backends import Exported
    from retrain.backends.tinker.policy import TinkerBackend
    from retrain.config.schema import Config
    from retrain.plugins.tasks import Task

EXTRA = "tinker"
PACKAGES = ("tinker",)
# where the SDK finds a key; `tinker auth login` writes the file
KEYS = ("TINKER_API_KEY", "TINKER_CREDENTIAL_CMD", "~/.tinker/credentials.json")
DAY_S = 86400.0
ASK = "the first run asks it, or: retrain doctor FILE --probe"
# Prices of models in dollars per million tokens, as the API's maker published them; only those of which
# all four are known. Some were told to be reduced for a limited time. The API reads a prompt once for all
# rollouts of a group, and bills the others' reading as cached.
SOURCE = "https://tinker-docs.thinkingmachines.ai/tinker/models"
SEPTEMBER, OCTOBER = "2026-09-10", "2026-10-07"
PRICES = {
    "Qwen/Qwen3-8B": Price(0.195, 0.039, 0.60, 0.44, SOURCE, SEPTEMBER),
    "Qwen/Qwen3.5-4B": Price(0.33, 0.066, 1.005, 0.737, SOURCE, SEPTEMBER),
    "openai/gpt-oss-20b": Price(0.18, 0.036, 0.45, 0.396, SOURCE, SEPTEMBER),
    "thinkingmachines/Inkling": Price(1.87, 0.374, 4.68, 5.61, SOURCE, OCTOBER),
}


@dataclass(frozen=True, slots=True)
class TinkerOptions:
    """Tokenizer, optimizer, timeouts and retries of the API."""

    tokenizer: str = ""  # local directory or hub id; empty: as the API names it for the model
    chat_template: bool | str = chat_template()  # true: prompts in the tokenizer's, or in that of a file
    system_prompt: str = ""  # with chat_template
    chat_template_kwargs: Mapping[str, Any] = table()  # variables of the template, such as enable_thinking
    beta1: float = number(0.9, 0, 0.9999)  # of Adam; the API's defaults
    beta2: float = number(0.95, 0, 0.99999)
    eps: float = number(1e-12, 0, 1)
    weight_decay: float = number(0.0, 0, 1)
    probe: bool = True  # ask a server that is not the API's own, once, how it behaves
    requests_at_once: int = number(8, 1, 256)  # sampling calls of one run that hold or wait for a permit
    replay_steps: int = number(32, 1, 10_000)  # updates kept for replay; beyond that, a state is saved
    state_days: int = number(7, 0, 3650)  # days until the API deletes a saved state; 0: never
    connect_timeout_s: float = number(60.0, 0.1, DAY_S)  # to open a session
    call_timeout_s: float = number(1800.0, 0.1, DAY_S)  # one call, from permit to result
    permit_timeout_s: float = number(21600.0, 0.1, 30 * DAY_S)  # after that, its holders are considered stuck
    first_retry_s: float = number(1.0, 0.001, 60)  # backoff; doubles each time, with 50 to 100 % jitter
    retry_budget_s: float = number(1800.0, 0, DAY_S)  # from a first failure to the run's end, without pauses

    @property
    def state_ttl_s(self) -> int | None:
        """Seconds until a saved state is deleted; None: never."""
        return int(self.state_days * DAY_S) or None


def connect(spec: BackendSpec) -> TinkerBackend:
    """Open a session with the API, free of charge."""
    options = parsed(TinkerOptions, spec.options, check_options(spec.options))
    _require(spec.model)
    from retrain.backends.tinker.policy import TinkerBackend

    backend = TinkerBackend(spec, options)
    try:
        backend.open()
    except BaseException:
        backend.close()
        raise
    return backend


def check_options(options: Mapping[str, object]) -> list[str]:
    """Return the problems of a `[backend.options]` table, one line each, starting with the key."""
    return [*problems_of(TinkerOptions, options), *template_problems(options)]


def check(config: Config, task: Task) -> list[Problem]:
    """Return what is missing, or why a run cannot have what it asks for; free of charge."""
    if problems := _missing(config.model.model):
        return problems
    if config.backend.options.get("probe", True) and (facts := server_facts.known(config)):
        problems += server_facts.refusals(facts, config)
    if problems or not (config.model.adapter or teachers_of(config)):
        return problems
    from retrain.backends.tinker.saved_states import start_problems, teacher_problems

    if config.model.adapter:
        problems = [Problem(("model", "adapter"), what) for what in start_problems(config)]
    return [*problems, *teacher_problems(config)]


def teacher_modes(options: Mapping[str, object]) -> tuple[str, ...]:
    """Return the modes of `[teacher]`: the API scores sampled tokens alone."""
    return ("reverse_kl",)


bills = reports_calls = takes_adapters = always


def servers(config: Config) -> dict[str, str]:
    """Return the server that a run needs, as address -> key, unless it is the API's default."""
    if config.model.base_url:
        return {config.model.base_url: "[model].base_url"}
    named = os.environ.get("TINKER_BASE_URL")
    return {named: "[model].base_url (TINKER_BASE_URL)"} if named else {}


def server_findings(config: Config, *, asks: bool) -> Iterator[ServerFinding]:
    """Iterate over how the run's server behaves, as far as is known; with `asks`, by a new probe."""
    if _missing(config.model.model):
        return
    if not server_facts.address_of(config.model.base_url):
        found = f"as its maker documents it, for version {version('tinker')} of the SDK; not asked"
        yield ServerFinding("the Tinker API", True, found)
        return
    options = parsed(TinkerOptions, config.backend.options, check_options(config.backend.options))
    if not (options.probe or asks):
        yield ServerFinding("the server", None, "not asked how it behaves: [backend.options].probe = false")
        return
    facts = server_facts.known(config)
    if asks:
        from retrain.backends.tinker.probe import ask_server

        facts = ask_server(config, options)
    if facts:
        yield from server_facts.findings(facts)
    else:
        yield ServerFinding(
            "the server", None, f"not asked yet how it behaves; {server_facts.COST_TOLD}", ASK
        )


def price(config: Config) -> Price | None:
    """Return what the tokens of a run's model cost at the API itself; None if that is not known."""
    return None if servers(config) else PRICES.get(config.model.model)


def export(config: Config, checkpoint: Path, directory: Path) -> Exported:
    """Download the adapters of a checkpoint's state into a directory, in peft's format."""
    from retrain.backends.tinker.saved_states import exported

    _require(config.model.model)
    options = config.backend.options
    return exported(config, parsed(TinkerOptions, options, check_options(options)), checkpoint, directory)


def delete_states(config: Config, paths: Sequence[str]) -> Mapping[str, str]:
    """Delete saved states at the API; return each one's problem, "" if there was none."""
    _require(config.model.model)
    from retrain.backends.tinker.saved_states import deleted

    return deleted(config, paths)


def advise(config: Config) -> list[str]:
    """Return advice about this configuration."""
    lines = [
        f"{one.what}: {one.found} ({one.then})" for one in server_findings(config, asks=False) if one.then
    ]
    temperature = config.training.temperature
    advice = (
        f"the Tinker API scores at temperature 1, and training.temperature = {temperature:g}: importance "
        "ratios would compare different distributions; training.temperature = 1.0 keeps them exact"
    )
    return lines if temperature == 1.0 else [*lines, advice]


def _require(model: str) -> None:
    if problems := _missing(model):
        raise ConfigError([*map(str, problems)])


def _missing(model: str) -> list[Problem]:
    problems = []
    if missing := extras.missing_problem("backends", "tinker"):
        problems.append(Problem(("backend", "backend"), missing))
    if not extras.needs("backends", "tinker").has_key():
        what = (
            "'tinker' needs a key; set the environment variable TINKER_API_KEY "
            "(never in a file of a campaign, which is copied and shared), or type `tinker auth login`"
        )
        problems.append(Problem(("backend", "backend"), what))
    if not model:
        problems.append(Problem(("model", "model"), "needs the name of a model that the API serves"))
    return problems
