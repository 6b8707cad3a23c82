"""What the PyTorch backend says of a plan without importing torch."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from retrain.backends import Devices, MemoryEstimate, Trainers, local
from retrain.backends.local import MOST_DEVICES, advise, memory, model_files, wants_gpu
from retrain.backends.local.model_files import Sizes, micro_batch
from retrain.base.errors import EXIT_INFRASTRUCTURE, ConfigError, exit_code_of
from retrain.base.rollouts import Prompt
from retrain.campaign import admission
from retrain.campaign.admission import check_fits
from retrain.config.schema import (
    AlgorithmSection,
    BackendSection,
    CampaignSection,
    Config,
    EnvironmentSection,
    ModelSection,
    RateLimiterSection,
    TeacherSection,
    TrainingSection,
)
from retrain.plugins.tasks import Task

Call = Callable[..., subprocess.CompletedProcess[str]]


class Hub(BaseHTTPRequestHandler):
    """Has every model but those of `gone`."""

    def do_GET(self) -> None:
        self.send_response(404 if self.path.startswith("/gone/") else 200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@pytest.fixture(autouse=True)
def gpu_nodes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Devices of GPUs that this machine seems to have, none at first."""
    nodes: list[str] = []
    monkeypatch.setattr(local, "gpu_nodes", lambda: nodes)
    return nodes


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        serving = Thread(target=server.serve_forever, args=(0.01,))
        serving.start()
        address = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
        monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
        yield address
        server.shutdown()
        serving.join()


def run_of(
    model: str = "some/model", kl_coef: float = 0.0, launcher: str = "local", **options: object
) -> Config:
    return Config(
        model=ModelSection(model=model),
        algorithm=AlgorithmSection(kl_coef=kl_coef),
        backend=BackendSection(backend="local", options=options),
        campaign=CampaignSection(launcher=launcher),
    )


def check_run(config: Config, *prompts: Prompt) -> list[str]:
    return [str(problem) for problem in local.check(config, Task(prompts, (), "", 0))]


VLLM = {"engine": "vllm", "engine_command": [sys.executable]}


@pytest.mark.parametrize("model", ["~nobody-here/model", "a" * 300, "a/" + "b" * 300, "\0", "/etc/passwd"])
def test_a_name_that_can_be_no_model_s_is_refused_and_stops_no_other_check(model):
    config = run_of(model=model)
    (problem,) = check_run(config, Prompt(0, "1", "1"))
    assert "is no directory here, and no name on the hub" in problem
    assert memory(config, []) is None


def test_a_model_s_directory_that_a_lost_server_holds_is_not_taken_for_a_wrong_name(monkeypatch):
    def refuse(_: Path) -> bool:
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(Path, "is_dir", refuse)
    with pytest.raises(OSError, match="Stale file handle") as raised:
        check_run(run_of(model="/shared/model"))
    assert exit_code_of(raised.value) == EXIT_INFRASTRUCTURE


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (run_of(model=""), "[model].model: empty"),
        (run_of(model="./nowhere"), "[model].model: './nowhere' is no directory here"),
        (run_of(kl_coef=0.1, lora=False), "[algorithm].kl_coef: needs [backend.options].lora = true"),
        (run_of(device="cuda:1"), "[backend.options].device: got 'cuda:1'; this machine has no GPU"),
        (run_of(device="cuda", devices=2), "[backend.options].device: got 'cuda'; this machine has no GPU"),
        (run_of(engine_sleep=True), '[backend.options].engine_sleep: needs engine = "vllm"'),
        (
            replace(run_of(**VLLM, engine_sleep=True), rate_limiter=RateLimiterSection(max_staleness=1)),
            "[backend.options].engine_sleep: needs [rate_limiter].max_staleness = 0",
        ),
        (run_of(**VLLM, engine_sleep=True), "[backend.options].engine_sleep: vLLM can sleep on a GPU only"),
        (
            run_of(nodes=2, launcher="ray"),
            '[backend.options].nodes: several need launcher = "slurm", got "ray"; use 1',
        ),
        (
            run_of(devices="all", launcher="ray"),
            '[backend.options].devices: got "all", and Ray does not limit a task to the cores that it asks',
        ),
    ],
)
def test_what_would_stop_a_run_is_said_with_its_key(config, words):
    (problem,) = check_run(config)
    assert problem.startswith(words)


def of_loss(mode: str, bounds: dict[str, float], **options: object) -> Config:
    return replace(run_of(**options), algorithm=AlgorithmSection(loss_mode=mode, loss_params=bounds))


def test_clipping_that_rounding_sets_off_is_warned_of(gpu_nodes: list[str]) -> None:
    wide = {"clip_low": 0.01, "clip_high": 0.01}
    (advice,) = advise(of_loss("gspo", {}, dtype="bfloat16"))
    assert "in bfloat16, rounding alone moves" in advice
    assert advise(of_loss("gspo", {})) == advise(of_loss("gspo", wide, dtype="bfloat16")) == []
    assert advise(of_loss("ppo", {}, dtype="bfloat16")) == []
    gpu_nodes.append("/dev/nvidia0")
    assert advise(of_loss("gspo", {}))


def saved_model(directory: Path, **tokenizer: object) -> str:
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    return str(directory)


def test_a_saved_model_whose_completions_could_not_end_is_told(tmp_path: Path) -> None:
    model = saved_model(tmp_path / "m", tokenizer_class="TokenizersBackend")
    (problem,) = check_run(run_of(model=model))
    assert "has no end-of-sequence token" in problem
    assert check_run(run_of(model=saved_model(tmp_path / "own", tokenizer_class="GPT2Tokenizer"))) == []
    (Path(model) / "generation_config.json").write_text('{"eos_token_id": [0, 1]}')
    assert check_run(run_of(model=model)) == []


def test_a_saved_model_without_a_chat_template_is_told_where_one_is_asked_for(tmp_path: Path) -> None:
    model = saved_model(tmp_path / "m", eos_token="<eos>")
    (problem,) = check_run(run_of(model=model, chat_template=True))
    assert problem.startswith("[backend.options].chat_template: the tokenizer of")
    assert check_run(run_of(model=model)) == []
    (Path(model) / "chat_template.jinja").write_text("{{ messages }}")
    assert check_run(run_of(model=model, chat_template=True)) == []
    inside = saved_model(tmp_path / "inside", eos_token="<eos>", chat_template="{{ messages }}")
    assert check_run(run_of(model=inside, chat_template=True)) == []


def test_a_file_with_a_chat_template_stands_in_for_a_missing_one(tmp_path: Path) -> None:
    model = saved_model(tmp_path / "m", eos_token="<eos>")
    place = str(tmp_path / "own.jinja")
    (problem,) = local.check_options({"chat_template": place})
    needed = "needs true (the tokenizer's), false, or a file with a template"
    assert problem == f"chat_template: got {place!r}; {needed}"
    Path(place).write_text("{{ messages }}")
    config = run_of(model=model, chat_template=place)
    with_functions = replace(config, environment=EnvironmentSection(environment="tools"))
    assert check_run(config) == []
    assert len(check_run(with_functions)) == 1
    Path(place).write_text("{{ messages }}{{ tools }}")
    assert check_run(with_functions) == []


def test_a_model_of_the_hub_must_be_in_the_cache_if_the_hub_is_not_asked(
    tmp_path: Path,
) -> None:
    assert check_run(run_of(model="some/model")) == []
    (problem,) = check_run(run_of(model="some/model", local_files_only=True))
    assert f"neither a directory nor in {tmp_path}" in problem
    (tmp_path / "models--some--model").mkdir()
    assert check_run(run_of(model="some/model", local_files_only=True)) == []


def test_a_model_that_cannot_be_downloaded_is_told_unless_it_is_here_or_runs_elsewhere(
    hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (problem,) = check_run(run_of(model="gone/model"))
    assert problem == f"[model].model: {hub} has no model 'gone/model'; check its name and the revision"
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    (problem,) = check_run(run_of())
    assert "is not on this machine, and http://127.0.0.1:9 does not answer (Connection refused)" in problem
    assert check_run(run_of(launcher="slurm")) == []
    snapshot = tmp_path / "models--some--model" / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert check_run(run_of())  # its weights were never downloaded
    (snapshot / "model.safetensors").touch()
    assert check_run(run_of()) == []


TWO_LAYERS = {
    "hidden_size": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "vocab_size": 100,
}


def sized_model(directory: Path, name: str = "m", layers: int = 2) -> str:
    model = saved_model(directory / name, eos_token="<eos>")
    (Path(model) / "config.json").write_text(json.dumps(TWO_LAYERS))
    names = {"embed_tokens.weight": [100, 8], "norm.weight": [8]}
    for layer in range(layers):
        names |= {f"layers.{layer}.q_proj.weight": [16, 8], f"layers.{layer}.down_proj.weight": [8, 32]}
    header = json.dumps({name: {"dtype": "F32", "shape": shape} for name, shape in names.items()}).encode()
    (Path(model) / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return model


def test_the_memory_of_a_run_is_estimated_from_the_sizes_of_its_model(tmp_path: Path) -> None:
    model = sized_model(tmp_path)
    config = replace(
        run_of(model=model, device="cpu"),
        training=TrainingSection(batch_size=3, group_size=2, max_tokens=10),
    )
    found = local.memory(config, [Prompt(0, "x" * 30, "1")])
    assert found is not None
    assert local.memory(config, [Prompt(0, "x" * 30, "1")]) == found
    assert found.held["weights"] == 4 * (800 + 8 + 2 * (128 + 256))
    adapters = 4 * 2 * 32 * (16 + 8 + 8 + 32)  # bytes, layers, rank; outputs and inputs
    assert (found.held["adapters"], found.held["optimizer"]) == (adapters, 3 * adapters)
    assert found.sampling >= 6 * 20 * 2 * 2 * 8 * 4  # rows, tokens, layers, keys and values, width, bytes
    assert found.peak > found.smallest > sum(found.held.values())
    talk = replace(config, environment=EnvironmentSection("guess"))
    talked = local.memory(talk, [Prompt(0, "x" * 30, "1")])
    assert talked is not None
    assert talked.sampling >= 6 * 30 * 2 * 2 * 8 * 4  # ten more, which an environment says
    assert talked.training > found.training
    large, larger = (
        local.memory(replace(config, training=replace(config.training, batch_size=size)), [])
        for size in (30_000, 60_000)
    )
    assert large is not None
    assert larger is not None
    assert found.training < large.training == larger.training  # both in micro-batches of one size
    full = local.memory(
        replace(config, backend=BackendSection("local", options={"lora": False, "device": "cpu"})), []
    )
    assert full is not None
    assert (full.held["adapters"], full.held["optimizer"]) == (0, 3 * full.held["weights"])


def test_more_gpus_than_there_are_are_refused_and_crowded_cores_are_told(
    monkeypatch: pytest.MonkeyPatch, gpu_nodes: list[str]
) -> None:
    monkeypatch.setattr(local, "gpu_count", lambda: 3)
    monkeypatch.setattr(local, "cpu_capacity", lambda: 2.0)
    gpu_nodes.append("nvidia0")
    assert check_run(run_of(devices=3)) == check_run(run_of(devices="all")) == []
    wanted = "[backend.options].devices: got 4, and this machine has 3 GPUs"
    assert [problem[: len(wanted)] for problem in check_run(run_of(devices=4))] == [wanted]
    assert check_run(run_of(devices=4, device="cpu")) == []
    (advice,) = advise(run_of(devices=4, device="cpu"))
    assert "devices = 4 on 2 cores" in advice
    assert advise(run_of(devices="all", device="cpu")) == []


def test_layers_in_pieces_need_several_layers(tmp_path: Path) -> None:
    model = sized_model(tmp_path)
    run = run_of(model=model, devices=2, shard=True)
    assert check_run(run) == []
    (Path(model) / "config.json").write_text(json.dumps({**TWO_LAYERS, "num_hidden_layers": 1}))
    (problem,) = check_run(run)
    assert problem.startswith(f"[backend.options].shard: {model!r} has one layer")


def test_several_devices_share_the_memory_of_a_cpu_and_split_a_batch_on_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, prompts = sized_model(tmp_path), [Prompt(0, "x" * 30, "1")]

    def estimate(**options: object) -> MemoryEstimate:
        training = TrainingSection(batch_size=4, group_size=2, max_tokens=10)
        found = local.memory(replace(run_of(model=model, **options), training=training), prompts)
        assert found is not None
        return found

    one, two = (estimate(device="cpu", devices=devices) for devices in (1, 2))
    assert two.held["runtime"] == 2 * one.held["runtime"]
    assert two.held["weights"] == 2 * one.held["weights"]
    assert two.held["optimizer"] == one.held["optimizer"] + one.held["adapters"]  # a gradient
    assert (two.sampling, two.smallest > one.smallest) == (one.sampling, True)
    monkeypatch.setattr(model_files, "TINY_PARAMETERS", 1)
    assert estimate(device="cpu", devices=2).held["weights"] == one.held["weights"]  # a file that both map
    one, two = (estimate(device="cuda", devices=devices) for devices in (1, 2))
    assert two.held == one.held
    assert two.sampling == one.sampling // 2
    assert estimate(device="cuda", devices=2, nodes=2).sampling == one.sampling // 4
    cut, finer = (estimate(device="cuda", devices=devices, shard=True) for devices in (2, 4))
    linear = sum(n * m for _, n, m in model_files.read_sizes(Path(model)).linear)
    assert cut.held["weights"] - finer.held["weights"] == 2 * (linear // 2 - linear // 4)
    assert {**cut.held, "weights": 0} == {**one.held, "weights": 0}
    parameters = model_files.read_sizes(Path(model)).parameters
    cut, finer = (estimate(device="cuda", devices=devices, shard=True, lora=False).held for devices in (2, 4))
    assert cut["weights"] - finer["weights"] == 4 * (linear // 2 - linear // 4)  # in float32
    kept = 3 * parameters + (parameters - linear)  # moments, gradients, and float32 copies of what is outside
    assert cut["optimizer"] - finer["optimizer"] == 4 * (kept // 2 - kept // 4)
    pair = estimate(device="cpu", devices=2, shard=True, lora=False).held
    assert pair["optimizer"] > 4 * kept - 4 * (parameters - linear)  # ranks have one each


def teaching(model: str, teacher: str, **options: object) -> Config:
    training = TrainingSection(batch_size=4, group_size=2, max_tokens=10)
    return replace(run_of(model=model, **options), training=training, teacher=TeacherSection(teacher))


def test_a_teacher_that_does_not_fit_is_refused_unless_its_layers_are_offloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpu_nodes: list[str]
) -> None:
    model, teacher = sized_model(tmp_path), sized_model(tmp_path, name="other", layers=3)
    layer = 2 * (128 + 256)  # in bfloat16
    total, moved = 2 * (800 + 8) + 3 * layer, 2 * layer
    whole, offloaded = (
        local.memory(teaching(model, teacher, device="cuda", teacher_offload=offload), [])
        for offload in (False, True)
    )
    assert whole is not None
    assert offloaded is not None
    assert (whole.held["teacher"], offloaded.held["teacher"]) == (total, total - moved)
    assert whole.peak - offloaded.peak == whole.movable == offloaded.movable == moved
    assert "of the teacher in this machine's memory" in offloaded.parts()
    free = {"cuda": offloaded.smallest, "cpu": moved}
    monkeypatch.setattr(admission, "free_memory", free.get)
    with pytest.raises(ConfigError, match=r"use a smaller model or teacher.*, or teacher_offload = true"):
        check_fits([whole], "c.toml")
    check_fits([offloaded], "c.toml")
    free["cpu"] -= 1
    with pytest.raises(ConfigError, match=r"\[backend.options\].teacher_offload: .*this machine's memory"):
        check_fits([offloaded], "c.toml")
    assert advise(teaching(model, teacher, device="cuda", teacher_offload=True)) == []


@pytest.mark.parametrize(
    ("teacher", "options", "moved"),
    [
        ("self", {"device": "cuda"}, "the teacher's frozen weights are the policy's"),
        ("MODEL", {"device": "cuda"}, "the teacher's frozen weights are the policy's"),
        ("self", {"device": "cuda", "lora": False}, ""),
        ("self", {"device": "cpu", "lora": False}, "on the CPU all weights are in it anyway"),
    ],
)
def test_where_there_is_nothing_to_offload_explain_says_so(
    tmp_path: Path, gpu_nodes: list[str], teacher: str, options: dict, moved: str
) -> None:
    model = sized_model(tmp_path)
    config = teaching(model, teacher.replace("MODEL", model), teacher_offload=True, **options)
    advice = advise(config)
    assert [moved in one for one in advice] == ([True] if moved else [])
    found = local.memory(config, [])
    assert found is not None
    assert found.is_moved is not bool(moved)


def test_an_offload_without_a_teacher_here_is_refused() -> None:
    problem, *_ = check_run(run_of(teacher_offload=True, launcher="slurm"))
    assert problem.startswith("[backend.options].teacher_offload: has no effect")
    (problem,) = local.check_options({"teacher_offload": True, "quantization": "4bit"})[:1]
    assert problem.startswith("teacher_offload: needs quantization")


def test_an_engine_gets_what_trainers_leave_and_more_if_they_take_turns() -> None:
    held = {"runtime": 5, "weights": 100, "adapters": 1, "optimizer": 3}
    trainers = Trainers(MemoryEstimate("cuda", held, sampling=0, training=50, least=10), count=3)
    assert trainers.to_come(1, in_turn=False) == 3 + 50  # its model is loaded
    assert trainers.to_come(3, in_turn=False) == 3 * 159 - 106
    assert trainers.to_come(3, in_turn=True) == 3 * 109 - 106


@pytest.mark.parametrize(("value", "fits"), [("auto", True), (12.5, True), (0, False), ("all", False)])
def test_the_memory_of_an_engine_is_a_number_or_chosen(value: object, fits: bool) -> None:
    assert (local.check_options({"engine": "vllm", "engine_memory": value}) == []) is fits


@pytest.mark.parametrize(
    ("layers", "tokens"),
    [
        (1, 2048),  # more is no faster
        (30, 1118),  # 128 MiB / (30 layers x 1000 numbers x 4 bytes)
        (3000, 256),  # less is slower
    ],
)
def test_a_micro_batch_on_the_cpu_is_as_large_as_its_activations_may_be(layers: int, tokens: int) -> None:
    sizes = Sizes(0, (), layers, hidden=10, heads=10, kv_heads=10, feed_forward=202, vocabulary=1, movable=0)
    assert sizes.activations(16) == 1000
    assert micro_batch(local.DEFAULTS, sizes, "cpu", rank=16, width=4) == tokens
    assert micro_batch(local.DEFAULTS, sizes, "cuda", rank=16, width=2) == 16384
    given = replace(local.DEFAULTS, tokens_per_micro_batch=7)
    assert micro_batch(given, sizes, "cpu", rank=16, width=4) == 7


@pytest.mark.parametrize(
    "config",
    [
        run_of(),
        run_of(kl_coef=0.1),
        run_of(device="auto"),
        run_of(device="cuda", launcher="slurm"),
    ],
)
def test_what_may_go_well_is_let_through(config):
    assert check_run(config) == []


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ({}, 1),
        ({"device": "cuda"}, 1),
        ({"device": "cuda:1"}, 0),
        ({"device": "cpu", "devices": 2}, 0),
        ({"devices": 2}, 2),
        ({"devices": "all"}, MOST_DEVICES),
    ],
)
def test_a_run_that_names_its_device_wants_no_gpu_given(options, wanted):
    assert wants_gpu(options) == wanted


def test_a_cluster_is_asked_for_the_most_that_a_run_needs_of_it():
    of_runs = [local.devices(options) for options in ({"devices": "all", "nodes": 3}, {}, {"devices": 4})]
    assert Devices.most(of_runs) == Devices(cores=4, gpus=0, nodes=3)
    assert local.devices({"devices": 2, "device": "cuda"}) == Devices(cores=2, gpus=2)
    assert check_run(run_of(devices=64, device="cuda", launcher="slurm")) == []  # not this machine's


def test_memory_is_estimated_without_numpy():
    code = "import sys, retrain.backends.local.model_files; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
