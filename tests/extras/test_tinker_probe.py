"""What a server of the protocol does wrong in silence is found out, and adapted to or refused."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from retrain.backends import BackendSpec, UpdateStats
from retrain.backends.tinker import TinkerOptions, server_findings
from retrain.backends.tinker.probe import ask_server
from retrain.backends.tinker.server_facts import COST, ServerFacts, file_of, refusals, store, stored
from retrain.base.errors import ConfigError
from retrain.campaign.run import run_campaign
from retrain.config.load import load_config
from retrain.config.schema import Config, ModelSection
from retrain.records.layout import RunFiles
from retrain.records.metrics import read_metrics
from retrain.records.run_state import read_attempts
from retrain.records.spending import Tokens, read_spending
from tests.cli.test_doctor import Call, checks
from tests.extras.test_tinker_backend import Awaited, during, fixed_steps, train
from tests.extras.test_tinker_campaign import ALPHABET, CAMPAIGN
from tests.tinker_api.running import KEY, MODEL, WORKERS_PATH, RunningServer, write_tokenizer
from tests.tinker_api.sdk import CALLS_SDK

pytestmark = CALLS_SDK
STEPS = 3
Rows = Callable[..., list[dict[str, Any]]]
ONE = [
    'campaign.conditions=[{name="one"}]',
    "campaign.parallel=false",
    "campaign.launcher=inline",
    "campaign.retries=0",
    "backend.options.requests_at_once=1",  # a sampler draws for one request after another
]


@contextmanager
def serving(directory: Path, *wrong: str, dialect: str = "") -> Iterator[RunningServer]:
    options = [*(word for name in wrong for word in ("--wrong", name)), f"--dialect={dialect}"]
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


def campaign_at(server: RunningServer, file: Path) -> Path:
    """Write a campaign of a few steps that asks its server how it behaves."""
    tokenizer = write_tokenizer(file.parent / "tokenizer", ALPHABET)
    text = CAMPAIGN.format(model=MODEL, url=server.url, tokenizer=tokenizer, steps=STEPS)
    file.write_text(text.replace("probe = false", "probe = true"))
    return file


@pytest.fixture(scope="module")
def right_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with serving(tmp_path_factory.mktemp("right") / "server") as server:
        yield server


@pytest.fixture
def right_rows(here: Path, right_server: RunningServer) -> Rows:
    """Return the rows of a short campaign at a server that does nothing wrong; each campaign runs once."""

    def rows(*changes: str) -> list[dict[str, Any]]:
        if changes not in AT_RIGHT_SERVER:
            AT_RIGHT_SERVER[changes] = rows_at(right_server, here / "right.toml", *changes)
        return AT_RIGHT_SERVER[changes]

    return rows


@pytest.fixture
def wrong_rows(here: Path) -> Rows:
    """Return the rows of a short campaign at a server that is wrong in some ways."""

    def rows(
        *wrong: str, changes: tuple[str, ...] = (), disturb: Callable[[RunningServer], None] | None = None
    ) -> list[dict[str, Any]]:
        with serving(here / "wrong", *wrong) as server:
            file = campaign_at(server, here / "wrong.toml")
            if disturb is not None:
                ask_server(load_config(file), TinkerOptions())
                disturb(server)
            return rows_at(server, file, *changes)

    return rows


def rows_at(server: RunningServer, file: Path, *changes: str) -> list[dict[str, Any]]:
    outcome = run_campaign(campaign_at(server, file), [*ONE, *changes])
    assert outcome.exit_code == 0, (outcome.directory / "runs/one_s0/output.log").read_text()
    (run,) = (outcome.directory / "runs").iterdir()
    return read_metrics(run)


LEARNED = ("mean_reward", "loss", "grad_norm", "entropy", "approx_kl", "clip_fraction")
AVERAGES = [("averages weights", loss) for loss in ("ppo", "importance_sampling", "cispo", "gspo")]
AVERAGES += [("averages tokens", "ppo"), ("averages datums", "ppo")]
AT_RIGHT_SERVER: dict[tuple[str, ...], list[dict[str, Any]]] = {}  # rows, by what was changed


@pytest.mark.parametrize(("wrong", "loss"), AVERAGES)
def test_a_server_that_averages_trains_as_one_that_sums(
    right_rows: Rows, wrong_rows: Rows, wrong: str, loss: str
) -> None:
    changes = (f"algorithm.loss_mode={loss}", "training.updates_per_batch=2")
    assert_equal(right_rows(*changes), wrong_rows(wrong, changes=changes))


def test_a_server_that_averages_trains_with_a_kl_term_and_a_bonus(right_rows: Rows, wrong_rows: Rows) -> None:
    changes = ("algorithm.kl_coef=0.1", "training.entropy_bonus=0.01", "training.minibatches=2")
    changes += ("training.group_size=4",)  # each rollout is scored by a request of its own
    right, adapted = right_rows(*changes), wrong_rows("averages weights", changes=changes)
    assert_equal(right, adapted)
    kl = [[row["reference_kl"] for row in rows] for rows in (right, adapted)]
    assert kl[0] == pytest.approx(kl[1], abs=1e-4)
    assert kl[0][-1] > 1e-3


def assert_equal(right: list[dict[str, Any]], found: list[dict[str, Any]]) -> None:
    """Check that what was sampled and learned is equal but for rounding."""
    for one, other in zip(right, found, strict=True):
        assert [other[name] for name in LEARNED] == pytest.approx([one[name] for name in LEARNED], abs=1e-4)


def lose_answers(server: RunningServer) -> None:
    """Lose the answers to the last update, which the SDK then sends again."""
    for path in ("forward_backward", "optim_step"):
        server.fail(path, times=1, status=502, is_done=True, after=STEPS - 1)


def test_a_campaign_whose_server_repeats_requests_is_right(
    right_rows: Rows, wrong_rows: Rows, here: Path
) -> None:
    assert_equal(right_rows(), wrong_rows("repeats requests", disturb=lose_answers))
    (run,) = (here / "logs").glob("wrong-*/runs/*")
    spending = read_spending(RunFiles(run))
    assert spending is not None
    assert spending.unsure.train > 0
    assert spending.open == Tokens()


def test_a_campaign_that_needs_nothing_of_what_is_wrong_is_right(
    right_rows: Rows, wrong_rows: Rows, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = ("undoes updates", "no states", "short scores", "keeps names", "unclipped")
    assert_equal(right_rows(), wrong_rows(*wrong))  # no gradient is longer than max_grad_norm
    said = "at this server, grad_clip_norm is not applied: [training].max_grad_norm has no effect"
    assert said in caplog.messages


def test_what_would_be_wrong_in_silence_is_refused(here: Path) -> None:
    wrong = ("undoes updates", "short scores", "no states", "repeats requests")
    asked = (
        "rate_limiter.max_staleness=1",
        "algorithm.kl_coef=0.1",
        "warmup.path=rows.jsonl",
        "warmup.steps=1",
    )
    refused = (
        "[rate_limiter].max_staleness: got 1",
        "[algorithm].kl_coef: at the server",
        "[algorithm].kl_coef: the server does not score",
        "[warmup].steps: the server cannot load",
        "[model].base_url: the server takes a request that is sent again for a new one, and cannot load",
    )
    (here / "rows.jsonl").write_text('{"prompt": "0=", "completion": "1"}\n')
    with serving(here / "server", *wrong) as server:
        file = campaign_at(server, here / "c.toml")
        outcome = run_campaign(file, [*ONE, *asked])  # the worker asks
        (run,) = (outcome.directory / "runs").iterdir()
        (attempt,) = read_attempts(RunFiles(run).attempts)
        with pytest.raises(ConfigError) as known:  # before it starts
            run_campaign(file, [*ONE, *asked])
        stats = server.stats()
    for where in refused:
        assert where in attempt.message
        assert where in str(known.value)
    assert not read_metrics(run)
    assert stats["requests"]["create_model"] == 1  # of the probe


def test_one_worker_asks_and_the_others_wait(here: Path) -> None:
    with serving(here / "server") as server:
        outcome = run_campaign(campaign_at(server, here / "c.toml"))
        stats = server.stats()
    assert outcome.exit_code == 0
    assert stats["requests"]["create_model"] == 1 + len(outcome.states)
    spent = [read_spending(RunFiles(run)) for run in (outcome.directory / "runs").iterdir()]
    billed = sum((each.tokens for each in spent if each), Tokens())
    assert billed == Tokens(**stats["billed"])  # the probe included, in the spending of the run that asked


def test_the_api_itself_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TINKER_BASE_URL", raising=False)
    config = Config(model=ModelSection(model="Qwen/Qwen3-8B"))
    (finding,) = server_findings(config, asks=True)
    assert (finding.what, finding.is_right) == ("the Tinker API", True)
    assert version("tinker") in finding.found


def test_a_loss_that_comes_back_in_no_form_is_refused() -> None:
    facts = ServerFacts(divisors={"cross_entropy": "other", "importance_sampling": "other"})
    (problem,) = refusals(facts, Config())
    assert str(problem).startswith("[model].base_url: the server divides every loss by what depends on")


def test_answers_that_are_damaged_or_of_another_version_are_asked_again(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(here))
    wanted = ServerFacts("http://127.0.0.1:1", "m", "1", "0.38")
    facts = replace(wanted, clips=False, divisors={"cross_entropy": "datums"}, tokens=Tokens(train=3))
    store(facts)
    assert stored(wanted) == facts
    assert stored(replace(wanted, version="2")) is None
    file_of(wanted.url, wanted.model).write_text("{")
    assert stored(wanted) is None


def told(retrain: Call, file: Path, *words: str) -> dict[str, tuple[str, str]]:
    """Return what doctor finds, by what was checked."""
    answer = retrain("doctor", str(file), "--json", *words)
    return {name: (check["state"], check["found"]) for name, check in checks(answer).items()}


RIGHT = {
    "loss importance_sampling": ("ok", "is a sum"),
    "loss cross_entropy": ("ok", "is a sum"),
    "an older sampler": ("ok", "leaves the weights in training alone"),
    "a request sent again": ("ok", "is not done again"),
    "grad_clip_norm": ("ok", "is applied"),
    "compute_logprobs": ("ok", "returns one value per token"),
    "a model from a state": ("ok", "can be made"),
}
UNTOLD = ("warning", "not known: the server reports no gradient norm")
SUM_OF_WEIGHTS = "does not come back as sent: a weight of -0.01 has 1e+06 times the gradient of 1"


@pytest.mark.parametrize(
    ("wrong", "dialect", "found"),
    [
        ((), "", {}),
        (
            ("averages weights", "repeats requests", "short scores"),
            "",
            {
                "loss importance_sampling": ("warning", "is divided by its tokens of each datum"),
                "loss cross_entropy": ("warning", SUM_OF_WEIGHTS),
                "a request sent again": ("warning", "is done again"),
                "compute_logprobs": ("warning", "does not return one value per token, as in training"),
            },
        ),
        (
            ("undoes updates", "unclipped", "no states"),
            "",
            {
                "an older sampler": ("warning", "replaces the weights in training"),
                "grad_clip_norm": ("warning", "is not applied"),
                "a model from a state": ("warning", "cannot be made"),
            },
        ),
        ((), "silent", {"loss importance_sampling": UNTOLD, "loss cross_entropy": UNTOLD}),
    ],
)
def test_doctor_shows_what_a_server_does_wrong(
    retrain: Call, here: Path, wrong: tuple[str, ...], dialect: str, found: dict[str, tuple[str, str]]
) -> None:
    with serving(here / "server", *wrong, dialect=dialect) as server:
        file = campaign_at(server, here / "c.toml")
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


@pytest.fixture
def spec_of(here: Path) -> Callable[[RunningServer], BackendSpec]:
    def spec(server: RunningServer) -> BackendSpec:
        options = {"tokenizer": str(write_tokenizer(here / "tokenizer", ALPHABET)), "first_retry_s": 0.01}
        options["requests_at_once"] = 1
        return BackendSpec(seed=1, model=MODEL, base_url=server.url, options=options, run_name="run")

    return spec


@pytest.mark.parametrize("path", ["forward_backward", "optim_step"])
@pytest.mark.parametrize("wrong", ["", "repeats requests"])
def test_an_update_that_was_sent_twice_is_taken_once(
    here: Path,
    right_server: RunningServer,
    spec_of: Callable[[RunningServer], BackendSpec],
    wrong: str,
    path: str,
) -> None:
    sessions: list[int] = []
    unsure: list[int] = []  # tokens trained on

    async def story(backend: Awaited) -> tuple[Any, list[UpdateStats]]:
        steps = await fixed_steps(backend)
        return steps, await train(backend, steps)

    steps, expected = during(spec_of(right_server), story)
    with serving(here / "server", *[wrong] if wrong else []) as server:
        spec = spec_of(server)

        async def disturbed(backend: Awaited) -> list[UpdateStats]:
            found = await train(backend, steps[:2])
            server.fail(path, times=1, status=502, is_done=True)  # the answer is lost
            sessions.append(backend.session.generation)
            unsure.append(spec.meter.unsure.train)
            found += await train(backend, steps[2:])
            sessions.append(backend.session.generation)
            unsure.append(spec.meter.unsure.train)
            return found

        assert during(spec, disturbed) == expected
    assert sessions == [0, 1 if wrong else 0]
    if wrong and path == "forward_backward":  # once more than it was billed, at most
        assert unsure[1] - unsure[0] >= sum(sample.rollout.length for sample in steps[2])
    else:
        assert unsure[1] == unsure[0]


def test_a_lost_answer_to_a_save_costs_one_new_name(
    here: Path, spec_of: Callable[[RunningServer], BackendSpec]
) -> None:
    async def story(backend: Awaited) -> tuple[float, int]:
        await train(backend, (await fixed_steps(backend))[:1])
        server.fail("save_weights", times=1, is_done=True)
        began_s = time.monotonic()
        (here / "step").mkdir()
        await backend.save(here / "step")
        return time.monotonic() - began_s, backend.session.generation

    with serving(here / "server", "keeps names") as server:
        took_s, generation = during(spec_of(server), story)
        names = [path.name for path in (here / "server" / "states").glob("*run-000001*")]
    assert took_s < 60  # the SDK would have asked again for 300 s
    assert generation == 0
    assert len(names) == 2
    kept = json.loads((here / "step" / "tinker.json").read_text())["path"]
    assert [name for name in names if kept.rpartition("/")[2] in name]
