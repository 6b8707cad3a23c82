"""Teachers at the Tinker API: base models, saved states and finished runs, through the SDK and a server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from retrain.backends import SELF, BackendSpec, Sampling, TeacherSpec
from retrain.backends.tinker import connect
from retrain.base.errors import ConfigError
from retrain.base.rollouts import Prompt
from retrain.campaign.run import start
from retrain.config.load import parse
from retrain.control.semaphore import FileSemaphore
from retrain.plan.preflight import backend_problems
from retrain.plugins.tasks import Task
from retrain.records.layout import CampaignFiles
from retrain.records.metrics import read_metrics
from retrain.records.spending import read_spending
from tests.extras.test_tinker_backend import STEP, loss_of, samples_of
from tests.tinker_api.running import KEY, MODEL, RunningServer, write_tokenizer
from tests.tinker_api.sdk import CALLS_SDK

pytestmark = CALLS_SDK
ALPHABET = "01234="
PROMPTS = [Prompt(n, f"{n}=", str((n + 1) % 5)) for n in range(4)]
HOW = Sampling(group_size=4, max_tokens=3, temperature=1.0)

CAMPAIGN = """
[model]
model = "{model}"
base_url = "{url}"

[training]
max_steps = {steps}
batch_size = 5
group_size = 4
max_tokens = 3
temperature = 1.0
lr = 4e-2

[algorithm]
loss_mode = "importance_sampling"

[data]
task = "successor"
options = {{ digits = 1, base = 5, held_out = 0.0 }}

[reward]
reward = "{reward}"

[backend]
backend = "tinker"
options = {{ tokenizer = "{tokenizer}", first_retry_s = 0.1 }}

[budget.prices."{model}"]
prefill = 1.0
sample = 1.0
train = 1.0
cached = 0.0

[campaign]
seeds = [0]
launcher = "inline"
{more}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    running = RunningServer(tmp_path_factory.mktemp("server"), ALPHABET)
    yield running
    running.end()


@pytest.fixture
def spec(server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> BackendSpec:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    semaphore = FileSemaphore(tmp_path / "permits", 2)
    options = {"tokenizer": str(write_tokenizer(tmp_path / "tokenizer", ALPHABET)), "first_retry_s": 0.01}
    return BackendSpec(1, model=MODEL, base_url=server.url, options=options, permit=lambda: semaphore)


def teacher(name: str) -> TeacherSpec:
    return TeacherSpec(name, 1.0, is_whole=False)


def test_a_base_model_and_a_saved_state_score_what_was_sampled(spec: BackendSpec, tmp_path: Path) -> None:
    backend = connect(spec)
    try:
        groups = backend.sample(PROMPTS, HOW)
        backend.update(samples_of(groups, 100.0), loss_of("importance_sampling"), replace(STEP, lr=0.1))
        backend.save(tmp_path)
        after = [r for group in backend.sample(PROMPTS, HOW) for r in group.rollouts]
        state = json.loads((tmp_path / "tinker.json").read_text())["path"]
        scores, base, start = (
            backend.open_teacher(teacher(name)).score(after) for name in (state, MODEL, SELF)
        )
        for rollout, its, theirs, own in zip(after, scores, base, start, strict=True):
            np.testing.assert_allclose(its.logprobs, rollout.logprobs, atol=1e-5)
            np.testing.assert_array_equal(theirs.logprobs, own.logprobs)
            assert abs(theirs.logprobs - its.logprobs).max() > 0.01
            assert its.read == 2 + len(rollout.tokens)
        (apart,) = backend.open_teacher(teacher(SELF)).score([replace(after[0], prompt=PROMPTS[1])])
        assert len(apart.logprobs) == len(after[0].tokens)  # the same tokens after another prompt
    finally:
        backend.close()


def test_a_model_that_the_api_does_not_serve_is_refused_before_the_first_step(spec: BackendSpec) -> None:
    backend = connect(spec)
    try:
        with pytest.raises(ConfigError, match=r"\[teacher\].teacher: the API refuses 'other'"):
            backend.open_teacher(teacher("other"))
    finally:
        backend.close()


def test_a_run_learns_from_a_finished_one_without_a_reward_and_pays_for_it(
    server: RunningServer, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    facts = {"model": MODEL, "url": server.url, "tokenizer": write_tokenizer(tmp_path / "t", ALPHABET)}
    rows = [json.dumps({"prompt": f"{n}=", "completion": str((n + 1) % 5)}) + "\n" for n in range(5)]
    (here / "rows.jsonl").write_text("".join(rows))
    written = '[warmup]\npath = "rows.jsonl"\nsteps = 30\nbatch_size = 5\nlr = 4e-2\n'
    (here / "first.toml").write_text(CAMPAIGN.format(**facts, steps=1, reward="match", more=written))
    (first,) = CampaignFiles(start(here / "first.toml").execute().directory).runs.iterdir()
    taught = f'[teacher]\nteacher = "{first}"\n'
    (here / "second.toml").write_text(CAMPAIGN.format(**facts, steps=15, reward="none", more=taught))
    campaign = CampaignFiles(start(here / "second.toml").execute().directory)
    (student,) = campaign.runs.iterdir()
    learned = read_metrics(student)
    assert len(learned) == 15
    assert learned[-1]["teacher_kl"] < 0.5 * learned[0]["teacher_kl"]
    assert learned[0]["teacher_tokens"] > 5 * 4 * 2  # prompts included
    assert all(row["teacher_agreement"] is None for row in learned)  # the API tells no likeliest token
    for row in learned:  # each prompt is read once, and each rollout by the teacher, which samples a token
        assert row["prefill_tokens"] == 5 * 2 + row["teacher_tokens"]
        assert row["sampled_tokens"] == row["tokens_per_step"] + 5 * 4
    spent = read_spending(campaign.run(student.name))
    assert spent is not None
    assert spent.tokens.prefill == sum(row["prefill_tokens"] for row in learned)


@pytest.mark.parametrize(
    ("tables", "what"),
    [
        ({"training": {"temperature": 0.7}}, r"temperature: got 0.7; .* needs 1"),
        ({"teacher": {"teacher": SELF, "refresh": True}}, r"refresh: got true"),
        ({"teacher": {"teacher": SELF, "mode": "jsd"}}, r'mode: got "jsd"; .* reverse_kl'),
        (
            {"teacher": {"teacher": "tinker://none/weights/x"}},
            r"teacher: the Tinker API refuses tinker://none",
        ),
        ({"teacher": {"teacher": "."}}, r"teacher: .* is no finished run of backend 'tinker'"),
        ({"teacher": {"teacher": "engine"}}, r'teacher: got "engine", which backend .local. has'),
    ],
)
def test_what_the_api_cannot_do_is_refused_by_the_plan(
    tables: dict[str, dict[str, object]],
    what: str,
    server: RunningServer,
    here: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    raw: dict[str, dict[str, object]] = {
        "model": {"model": MODEL, "base_url": server.url},
        "training": {"temperature": 1.0},
        "teacher": {"teacher": MODEL},
        "data": {"task": "successor"},
        "backend": {"backend": "tinker"},
    }
    config = parse({name: table | tables.get(name, {}) for name, table in raw.items()}, "c.toml")
    (problem,) = backend_problems(config, Task((), (), "", 0))
    assert re.search(what, f"{problem.where[-1]}: {problem.what}")
