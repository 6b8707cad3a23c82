"""What a server of the protocol does wrong in silence is found out, and adapted to or refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from retrain.backends.tinker.server_facts import COST
from retrain.campaign.run import run_campaign
from retrain.records.metrics import read_metrics
from retrain.records.spending import Tokens
from tests.cli.test_doctor import Call, checks
from tests.extras.test_tinker_campaign import ALPHABET, CAMPAIGN
from tests.tinker_api.running import KEY, MODEL, WORKERS_PATH, RunningServer, write_tokenizer
from tests.tinker_api.sdk import CALLS_SDK

pytestmark = CALLS_SDK
ONE = [
    'campaign.conditions=[{name="one"}]',
    "campaign.parallel=false",
    "campaign.launcher=inline",
    "campaign.retries=0",
    "backend.options.probe=true",
    "backend.options.requests_at_once=1",  # a sampler draws for one request after another
]


@contextmanager
def serving(directory: Path, *wrong: str) -> Iterator[RunningServer]:
    options = [word for name in wrong for word in ("--wrong", name)]
    directory.mkdir()
    server = RunningServer(directory, ALPHABET, *options)
    try:
        yield server
    finally:
        server.end()


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.setenv("PYTHONPATH", WORKERS_PATH)


@pytest.fixture
def rows_of(here: Path) -> Callable[..., list[dict[str, Any]]]:
    """Return the rows of a short campaign at a server that is wrong in some ways."""

    def rows(*wrong: str, changes: tuple[str, ...] = ()) -> list[dict[str, Any]]:
        name = "-".join(wrong or ["right"]).replace(" ", "-")
        with serving(here / name, *wrong) as server:
            tokenizer = write_tokenizer(here / "tokenizer", ALPHABET)
            file = here / f"{name}.toml"
            file.write_text(CAMPAIGN.format(model=MODEL, url=server.url, tokenizer=tokenizer, steps=4))
            outcome = run_campaign(file, [*ONE, *changes])
        assert outcome.exit_code == 0, (outcome.directory / "runs/one_s0/output.log").read_text()
        (run,) = (outcome.directory / "runs").iterdir()
        return read_metrics(run)

    return rows


LEARNED = ("mean_reward", "loss", "grad_norm", "entropy", "approx_kl", "clip_fraction", "sampled_tokens")
AVERAGES = [("averages weights", loss) for loss in ("ppo", "importance_sampling", "cispo", "gspo")]
AVERAGES += [("averages tokens", "ppo"), ("averages datums", "ppo")]


@pytest.mark.parametrize(("wrong", "loss"), AVERAGES)
def test_a_server_that_averages_trains_as_one_that_sums(
    rows_of: Callable[..., list[dict[str, Any]]], wrong: str, loss: str
) -> None:
    changes = (f"algorithm.loss_mode={loss}", "training.updates_per_batch=2")
    right, adapted = rows_of(changes=changes), rows_of(wrong, changes=changes)
    for one, other in zip(right, adapted, strict=True):
        assert [other[name] for name in LEARNED] == pytest.approx([one[name] for name in LEARNED], abs=1e-4)


def told(retrain: Call, file: Path, *words: str) -> dict[str, tuple[str, str]]:
    """Return what doctor finds, by what was checked."""
    answer = retrain("doctor", str(file), "--json", *words)
    return {name: (check["verdict"], check["found"]) for name, check in checks(answer).items()}


RIGHT = {
    "loss importance_sampling": ("ok", "is a sum"),
    "loss cross_entropy": ("ok", "is a sum"),
    "an older sampler": ("ok", "leaves the weights in training alone"),
    "a request sent again": ("ok", "is not done again"),
    "grad_clip_norm": ("ok", "is applied"),
    "compute_logprobs": ("ok", "returns one value per token"),
    "a model from a state": ("ok", "can be made"),
}
SUM_OF_WEIGHTS = "does not come back as sent: a weight of -0.01 has 1e+06 times the gradient of 1"


@pytest.mark.parametrize(
    ("wrong", "found"),
    [
        ("", {}),
        (
            "averages weights",
            {
                "loss importance_sampling": ("warning", "is divided by its tokens of each datum"),
                "loss cross_entropy": ("warning", SUM_OF_WEIGHTS),
            },
        ),
        ("undoes updates", {"an older sampler": ("warning", "replaces the weights in training")}),
        ("repeats requests", {"a request sent again": ("warning", "is done again")}),
        ("unclipped", {"grad_clip_norm": ("warning", "is not applied")}),
        (
            "short scores",
            {"compute_logprobs": ("warning", "does not return one value per token, as in training")},
        ),
        ("no states", {"a model from a state": ("warning", "cannot be made")}),
    ],
)
def test_doctor_shows_what_a_server_does_wrong(
    retrain: Call, here: Path, wrong: str, found: dict[str, tuple[str, str]]
) -> None:
    with serving(here / "server", *[wrong] if wrong else []) as server:
        tokenizer = write_tokenizer(here / "tokenizer", ALPHABET)
        file = here / "c.toml"
        text = CAMPAIGN.format(model=MODEL, url=server.url, tokenizer=tokenizer, steps=4)
        file.write_text(text.replace("probe = false", "probe = true"))
        assert told(retrain, file)["the server"][1].startswith("not asked yet")
        probed = told(retrain, file, "--probe")
        shown = told(retrain, file)  # without asking again
        stats = server.stats()
    for answers in (probed, shown):
        assert {name: answers[name] for name in RIGHT} == RIGHT | found
    assert stats["requests"]["create_model"] == 1
    billed = Tokens(**{"cached": 0, **stats["billed"]})
    assert all(0 < getattr(billed, kind) <= getattr(COST, kind) for kind in ("prefill", "sample", "train"))
    assert (stats["models"], stats["sessions"]) == (0, 0)
