"""Supervised steps on the backends that people run: the loss is what it says, and it is learned."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from retrain.backends import BackendSpec, Optimization, Sampling
from retrain.backends.text import Text
from retrain.base.errors import ConfigError
from retrain.base.json_lines import Demonstration
from retrain.base.rollouts import Prompt, TrainingSample
from retrain.campaign.run import start
from retrain.control.semaphore import FileSemaphore
from retrain.records.layout import CampaignFiles, RunFiles
from retrain.records.metrics import read_metrics
from retrain.trainer import worker
from retrain.trainer.warm_up import WARM_UP_LOSS
from tests.clocks import without_times
from tests.extras.local_policies import chosen, open_backend, plain_logprobs
from tests.extras.test_tinker_backend import during
from tests.extras.tiny_models import character_tokenizer, save_tiny_model
from tests.tinker_api.running import KEY, MODEL, RunningServer, write_tokenizer
from tests.tinker_api.sdk import CALLS_SDK
from tests.trainer.test_trainer import make_run

pytestmark = [
    *CALLS_SDK,
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),  # peft's own
]
PAIRS = [Demonstration(Prompt(n, f"{n}=", str(n + 1)), str(n + 1)) for n in range(4)]
TEMPLATE = "{% for m in messages %}{{ m.role[0] }} {{ m.content }} {% endfor %}a "


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), hidden=64)


def learned(backend, demonstrations, steps: int, lr: float) -> list[float]:
    rollouts = backend.written(demonstrations)
    tokens = sum(len(r.tokens) for r in rollouts)
    samples = [TrainingSample(r, np.ones(len(r.tokens)), 1 / tokens, i) for i, r in enumerate(rollouts)]
    return [backend.update(samples, WARM_UP_LOSS, Optimization(lr=lr)).loss for _ in range(steps)]


def test_the_local_loss_is_the_mean_surprisal_of_completions(model: str) -> None:
    backend = open_backend(model)
    rollouts = backend.written(PAIRS)
    samples = [TrainingSample(r, np.ones(len(r.tokens)), 1.0) for r in rollouts]
    scored = zip(plain_logprobs(backend, samples, 1.0), samples, strict=True)
    plain = [chosen(logprobs, sample) for logprobs, sample in scored]
    assert [len(r.tokens) for r in rollouts] == [2, 2, 2, 2]  # a digit and the end
    assert learned(backend, PAIRS, 1, 1e-9)[0] == pytest.approx(
        -float(torch.cat(plain).detach().mean()), rel=1e-4
    )


def test_a_local_policy_learns_what_was_written(model: str) -> None:
    backend = open_backend(model, rank=16)
    losses = learned(backend, PAIRS, 150, 1e-2)
    said = backend.sample([one.prompt for one in PAIRS], Sampling(1, 4, temperature=0.0))
    assert losses[-1] < 0.2 < losses[0]
    assert [group.rollouts[0].text for group in said] == [one.completion for one in PAIRS]


def test_a_conversation_is_shown_through_the_chat_template(tmp_path: Path) -> None:
    model = save_tiny_model(tmp_path / "model", hidden=64)
    config = Path(model) / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": TEMPLATE}))
    talk = Demonstration(Prompt(1, "", "", (("user", "x"), ("assistant", "y"), ("user", "z"))), "7")
    backend = open_backend(model, chat_template=True)
    (rollout,) = backend.written([talk])
    encoded = backend.text.encode(rollout.prompt)
    assert backend.text.completions([encoded]) == ["u x a y u z a "]
    framed = open_backend(model, chat_template=True, system_prompt="q")
    assert framed.text.completions([framed.text.encode(rollout.prompt)]) == ["s q u x a y u z a "]
    with pytest.raises(ConfigError, match="is a conversation"):
        open_backend(model).written([talk])


def test_a_written_completion_ends_as_the_chat_template_ends_a_turn(tmp_path: Path) -> None:
    made = character_tokenizer()
    made.add_special_tokens({"additional_special_tokens": ["<turn>"]})
    made.chat_template = "{% for m in messages %}{{ m.role[0] }} {{ m.content }}<turn>{% endfor %}"
    turn = made.convert_tokens_to_ids("<turn>")
    for ends, last in (([turn], turn), ([], made.eos_token_id)):  # it counts only if sampling stops there
        text = Text(made, "model", chat=True, system="", ends=ends)
        assert text.written(PAIRS[0]).tokens[-1] == last


def test_a_row_longer_than_the_context_is_named(model: str) -> None:
    long = Demonstration(Prompt(7, "1=", ""), "5" * 200)
    with pytest.raises(ConfigError, match=r"row 7 has 203 tokens, more than the model's context of 128"):
        open_backend(model).written([long])


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    running = RunningServer(tmp_path_factory.mktemp("server"), "0123456789=")
    yield running
    running.end()


def test_a_remote_policy_learns_what_was_written_and_forgets_the_moments(
    server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    tokenizer = write_tokenizer(tmp_path / "tokenizer", "0123456789=")
    semaphore = FileSemaphore(tmp_path / "permits", 2)
    options = {"tokenizer": str(tokenizer), "first_retry_s": 0.01}
    spec = BackendSpec(seed=1, model=MODEL, base_url=server.url, options=options, permit=lambda: semaphore)

    async def story(backend) -> tuple[list[float], list[str], list[float]]:
        rollouts = await backend.written(PAIRS)
        samples = [TrainingSample(r, np.ones(len(r.tokens)), 1 / 8, i) for i, r in enumerate(rollouts)]
        losses = [(await backend.update(samples, WARM_UP_LOSS, Optimization(2e-2))).loss for _ in range(60)]
        await backend.reset_optimizer()
        await backend.save(tmp_path)
        said = await backend.sample([one.prompt for one in PAIRS], Sampling(1, 4, temperature=0.0))
        kept = [(await backend.update(samples, WARM_UP_LOSS, Optimization(1e-9))).loss]
        return losses, [group.rollouts[0].text for group in said], kept

    losses, said, kept = during(spec, story)
    assert losses[-1] < 0.2 < losses[0]
    assert said == [one.completion for one in PAIRS]
    assert kept[0] <= losses[-1]  # the weights are those of after the last update
    assert json.loads((tmp_path / "tinker.json").read_text())["version"] == 0
    assert not [r for r in caplog.records if "nats per token away from" in r.message]


def test_a_local_run_warms_up_from_a_file(model: str, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": f"{n}=", "completion": str(n + 1)}) + "\n" for n in range(9))
    )
    raw = {
        "model": {"model": model, "lora_rank": 16},
        "training": {
            "seed": 0,
            "max_steps": 1,
            "batch_size": 2,
            "group_size": 2,
            "max_tokens": 4,
            "lr": 1e-3,
        },
        "backend": {"backend": "local", "options": {"local_files_only": True, "device": "cpu"}},
        "data": {"task": "successor"},
        "warmup": {"path": str(rows), "steps": 30, "batch_size": 9, "lr": 1e-2},
    }
    files = make_run(tmp_path / "run", raw)
    assert worker.run(files.directory, threading.Event()) == 0
    losses = [json.loads(line)["loss"] for line in files.warmup.read_text().splitlines()]
    assert len(read_metrics(files.directory)) == 1
    assert losses[-1] < losses[0] / 2


SHARED = """
[model]
{model}

[training]
max_steps = 2
batch_size = 3
group_size = 4
max_tokens = 4
temperature = 1.0
lr = 1e-3

[data]
task = "successor"
options = {{ digits = 1, held_out = 0.0 }}

[reward]
reward = "partial"

[backend]
{backend}

[warmup]
path = "{rows}"
steps = {steps}
batch_size = 9
lr = 2e-2

[campaign]
seeds = [0]
launcher = "inline"

[[campaign.conditions]]
name = "grpo"
advantage_mode = "grpo"

[[campaign.conditions]]
name = "maxrl"
"""


def shared_file(directory: Path, model: str, backend: str, steps: int) -> Path:
    rows = directory / "rows.jsonl"
    rows.write_text(
        "".join(json.dumps({"prompt": f"{n}=", "completion": str(n + 1)}) + "\n" for n in range(9))
    )
    path = directory / "c.toml"
    path.write_text(SHARED.format(model=model, backend=backend, rows=rows, steps=steps))
    return path


def warm_up_rows(files: RunFiles) -> list[dict[str, Any]]:
    return [json.loads(line) for line in files.warmup.read_text().splitlines()]


def test_a_local_run_goes_on_from_another_one_s_warm_up_as_from_its_own(
    model: str, here: Path, tmp_path: Path
) -> None:
    local = 'backend = "local"\noptions = { local_files_only = true, device = "cpu" }'
    file = shared_file(here, f'model = "{model}"\nlora_rank = 16', local, 4)
    campaign = CampaignFiles(start(file).execute().directory)
    taker = campaign.run("maxrl_s0")
    assert [row.get("made_by") for row in warm_up_rows(taker)] == ["grpo_s0"] * 4
    own = tmp_path / "own"
    own.mkdir()
    shutil.copyfile(taker.run_toml, own / "run.toml")
    assert worker.run(own, threading.Event()) == 0
    assert without_times(read_metrics(taker.directory)) == without_times(read_metrics(own))


def test_a_remote_run_goes_on_from_the_state_that_another_one_saved(
    server: RunningServer, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    tokenizer = write_tokenizer(tmp_path / "tokenizer", "0123456789=")
    remote = f'backend = "tinker"\noptions = {{ tokenizer = "{tokenizer}", first_retry_s = 0.1 }}'
    before = server.stats()["updates"]
    file = shared_file(here, f'model = "{MODEL}"\nbase_url = "{server.url}"', remote, 40)
    campaign = CampaignFiles(start(file).execute().directory)
    taker = campaign.run("maxrl_s0")
    assert 40 <= server.stats()["updates"] - before <= 40 + 2 * 2  # a step whose rewards tie takes none
    assert [row.get("made_by") for row in warm_up_rows(taker)] == ["grpo_s0"] * 40
    for run in (campaign.run("grpo_s0"), taker):
        assert read_metrics(run.directory)[0]["mean_reward"] > 0.6  # it begins with what was written
