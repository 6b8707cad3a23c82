"""How a server of the Tinker protocol behaves where servers differ in silence, and what follows for a run.

`probe` asks, once per server, model and version. What it found is kept among this user's temporary files,
for all runs of a machine; those that come meanwhile wait. Planning reads it without the SDK. The API itself
is not asked: it is known by its documentation.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

import numpy as np

from retrain.backends import ServerFinding
from retrain.base.errors import DamagedRecordError, Location, Problem
from retrain.base.rollouts import Floats
from retrain.config.resolve import teachers_of
from retrain.config.schema import Config
from retrain.records.files import read_json, record_of, write_json
from retrain.records.layout import own_temporary_folder
from retrain.records.spending import Tokens

PROBE = 1  # increment when it asks something else
COST = Tokens(prefill=250, sample=2, train=150)  # of a probe, at most
COST_TOLD = (
    f"a probe is billed at most {COST.prefill} tokens read, {COST.train} trained and {COST.sample} sampled"
)
ANSWER_S = 5.0  # to the question for a version, which is not asked again sooner
SUM, OTHER, UNKNOWN = "sum", "other", ""

Weights = Sequence[Floats]  # of each datum of a request: those of all its positions


def _lengths(weights: Weights) -> Floats:
    return np.array([len(each) for each in weights], dtype=np.float64)


def _used(weights: Weights) -> Floats:
    return np.array([np.count_nonzero(each) for each in weights], dtype=np.float64)


# By what a server divides the loss of each datum of a request: numbers that are known before it is sent.
DIVISORS: Mapping[str, Callable[[Weights], Floats]] = {
    SUM: lambda weights: np.ones(len(weights)),
    "datums": lambda weights: np.full(len(weights), float(len(weights))),
    "tokens": lambda weights: np.full(len(weights), _lengths(weights).sum()),
    "tokens of each datum": _lengths,
    "tokens of each datum, then datums": lambda weights: _lengths(weights) * len(weights),
    "weighted tokens": lambda weights: np.full(len(weights), _used(weights).sum()),
    "weighted tokens of each datum": _used,
    "weighted tokens of each datum, then datums": lambda weights: _used(weights) * len(weights),
}


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What a probe found out; None and "" are not known."""

    url: str = ""
    model: str = ""
    version: str = ""  # as the server tells
    sdk: str = ""
    probe: int = PROBE
    # by loss: what the server divides it by, a key of DIVISORS, or OTHER; and the relative gradient of a
    # weight of -0.01, which is 0.01 unless weights are averaged
    divisors: Mapping[str, str] = field(default_factory=dict)
    hundredth: Mapping[str, float] = field(default_factory=dict)
    keeps_weights: bool | None = None  # in training, while an older sampler samples
    repeats: bool | None = None  # the answer to a request that is sent again, without doing it again
    clips: bool | None = None  # by grad_clip_norm
    scores: bool | None = None  # each token once, as it is scored in training
    loads_states: bool | None = None
    tokens: Tokens = field(default_factory=Tokens)  # that the probe was billed

    def divisor(self, loss: str) -> str:
        """Return what a loss is divided by; a loss that was not asked about is treated as a policy's."""
        name = loss if loss in self.divisors else "importance_sampling"
        return self.divisors.get(name, UNKNOWN) or SUM

    @property
    def sums(self) -> bool:
        """Whether the losses that the server computes itself are sums, as far as is known."""
        return self.divisor("importance_sampling") == SUM

    @property
    def linear_form(self) -> str:
        """The loss in which a sum of slope x log-probability comes back as sent; "" if there is none."""
        forms = ("cross_entropy", "importance_sampling")
        return next((form for form in forms if self.divisor(form) in DIVISORS), "")


OFFICIAL = ServerFacts(
    divisors={"cross_entropy": SUM, "importance_sampling": SUM},
    keeps_weights=True,
    repeats=True,
    clips=True,
    scores=True,
    loads_states=True,
)


def address_of(url: str) -> str:
    """Return the address of a server of another maker; "" for the API's own."""
    return (url or os.environ.get("TINKER_BASE_URL") or "").rstrip("/")


@lru_cache(maxsize=32)
def told_version(address: str, _moment: int) -> str:
    """Return what a server tells of its version; "" if nothing. Contacts it, once a moment."""
    import httpx  # slow, and the API itself is not asked

    try:
        answer = httpx.get(f"{address}/api/v1/healthz", timeout=ANSWER_S)
        content = answer.json() if "json" in answer.headers.get("content-type", "") else None
        told = content.get("version") if isinstance(content, dict) else None
        return str(told or answer.headers.get("server", ""))[:200]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError):
        return ""


def identity(address: str, model: str) -> ServerFacts:
    """Return what tells one server, model and version from others. Contacts the server."""
    told = told_version(address, int(time.monotonic() / ANSWER_S))
    return ServerFacts(address, model, told, version("tinker"))


def file_of(address: str, model: str) -> Path:
    """Return where the answers of a server about a model are kept."""
    name = hashlib.sha256(f"{address}\n{model}".encode()).hexdigest()[:16]
    return own_temporary_folder("tinker") / f"{name}.json"


def stored(wanted: ServerFacts) -> ServerFacts | None:
    """Return what an earlier probe found; None if there was none of this server, model and version."""
    try:
        record = read_json(file_of(wanted.url, wanted.model))
        if record is None:
            return None
        facts = record_of(ServerFacts, record)
    except (DamagedRecordError, ValueError):  # damaged, or of another version: ask again
        return None
    same = ("url", "model", "version", "sdk", "probe")
    return facts if all(getattr(facts, key) == getattr(wanted, key) for key in same) else None


def store(facts: ServerFacts) -> None:
    """Keep the answers of a server."""
    write_json(file_of(facts.url, facts.model), asdict(facts))


def known(config: Config) -> ServerFacts | None:
    """Return what is known of a run's server without asking it; None before its first probe."""
    if not (address := address_of(config.model.base_url)):
        return replace(OFFICIAL, model=config.model.model, sdk=version("tinker"))
    return stored(identity(address, config.model.model))


def refusals(facts: ServerFacts, config: Config) -> Iterator[Problem]:
    """Iterate over what a run asks for that would be wrong in silence at its server."""
    if not facts.linear_form:
        yield Problem(
            ("model", "base_url"),
            "the server divides every loss by what depends on its weights, so gradients cannot be corrected; "
            "use another server",
        )
    if facts.repeats is False and facts.loads_states is False:
        yield Problem(
            ("model", "base_url"),
            "the server takes a request that is sent again for a new one, and cannot load a saved state: an "
            "update that was applied twice could not be undone; use another server",
        )
    others: dict[Location, str] = {}
    if config.algorithm.kl_coef:
        others["algorithm", "kl_coef"] = f"kl_reference = {config.algorithm.kl_reference!r}"
    others |= {where: f"teacher {name!r}" for name, where in teachers_of(config).items()}
    if facts.keeps_weights is False:
        loads = "at the server, sampling with older weights replaces those in training"
        if (stale := config.rate_limiter.max_staleness) > 0:
            yield Problem(("rate_limiter", "max_staleness"), f"got {stale}; {loads}, so needs 0")
        for where, what in others.items():
            yield Problem(where, f"{loads}, as does scoring with {what}; leave it out")
    if facts.scores is False:
        for where, what in others.items():
            yield Problem(
                where, f"the server does not score each token once, which {what} needs; leave it out"
            )
    if facts.loads_states is False:
        lacks = "the server cannot load a saved state"
        if config.model.adapter:
            yield Problem(("model", "adapter"), f"{lacks}; leave it out")
        if config.warmup.steps:
            yield Problem(("warmup", "steps"), f"{lacks}, as the end of a warm-up must; needs 0")


def findings(facts: ServerFacts) -> Iterator[ServerFinding]:
    """Iterate over what a probe found out, one property after another."""
    for loss in ("importance_sampling", "cross_entropy"):
        yield _of_loss(facts, loss)
    properties = (
        (
            "an older sampler",
            facts.keeps_weights,
            ("leaves the weights in training alone", "replaces the weights in training"),
            "max_staleness, kl_coef and teachers are refused",
        ),
        (
            "a request sent again",
            facts.repeats,
            ("is not done again", "is done again"),
            "an update that was sent twice is taken back and replayed",
        ),
        (
            "grad_clip_norm",
            facts.clips,
            ("is applied", "is not applied"),
            "[training].max_grad_norm has no effect",
        ),
        (
            "compute_logprobs",
            facts.scores,
            ("returns one value per token", "does not return one value per token, as in training"),
            "kl_coef and teachers are refused",
        ),
        (
            "a model from a state",
            facts.loads_states,
            ("can be made", "cannot be made"),
            "no run goes on once its worker or its session is lost; adapters and a warm-up are refused",
        ),
    )
    for what, is_right, found, then in properties:
        if is_right is None:
            yield ServerFinding(what, None, "not known: the server did not tell")
        else:
            yield ServerFinding(what, is_right, found[0 if is_right else 1], "" if is_right else then)


def _of_loss(facts: ServerFacts, loss: str) -> ServerFinding:
    """Return what is known of how a loss is put together."""
    what, divisor = f"loss {loss}", facts.divisors.get(loss, UNKNOWN)
    if divisor == SUM:
        return ServerFinding(what, True, "is a sum")
    if divisor == UNKNOWN:
        then = "taken for a sum"
        return ServerFinding(what, None, "not known: the server reports no gradient norm", then)
    form = facts.linear_form
    found, then = f"is divided by its {divisor}", "sent multiplied by that"
    if divisor == OTHER:
        found = (
            f"does not come back as sent: a weight of -0.01 has {facts.hundredth.get(loss, 0):.3g} times the"
        )
        found, then = f"{found} gradient of 1", f"sent as {form}" if form else "refused"
    elif form != loss and loss == "cross_entropy":
        then = f"sent as {form}"
    return ServerFinding(what, False, found, then)
