"""`engine = "vllm"`: a server that the first backend starts, all share, and none outlives."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from retrain.backends import ENGINE, BackendSpec, Optimization, TeacherSpec
from retrain.backends.engines.shared_server import ServerFiles
from retrain.backends.engines.vllm import vllm_problem, vllm_server
from retrain.backends.local import LocalOptions, check, check_options
from retrain.backends.local.policy import LocalBackend
from retrain.base.errors import ConfigError
from retrain.base.locks import holder
from retrain.config.load import parse
from retrain.plugins.tasks import Task
from tests.conftest import temporary_files_in
from tests.extras.completions_server import CompletionsServer, serve
from tests.extras.local_policies import (
    as_samples,
    chosen,
    draw,
    loss_named,
    open_backend,
    plain_logprobs,
    stir,
)
from tests.extras.tiny_models import save_tiny_model
from tests.long.test_shared_server import is_alive
from tests.semaphore_processes import wait_until
from tests.stopping import is_running

COMMAND = (sys.executable, "-m", "tests.extras.vllm_command")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, context=64)


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of all servers of this file; at the end, none of them is left."""
    path = tmp_path_factory.mktemp("engines")
    with temporary_files_in(path), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        yield path
    left = [ServerFiles(one) for one in path.glob("retrain-engines-*/*")]
    wait_until(lambda: not any(map(is_alive, left)))


@pytest.fixture
def behind(model: str) -> Iterator[CompletionsServer]:
    """The server that answers behind a managed one."""
    with serve(model) as running:
        yield running


def options_for(behind: CompletionsServer) -> dict[str, object]:
    arguments = ("--tests-port", str(behind.server_address[1]))
    return {"engine": "vllm", "engine_command": COMMAND, "engine_arguments": arguments}


@pytest.fixture
def managed(model: str, behind: CompletionsServer) -> Iterator[Callable[..., LocalBackend]]:
    """Open backends on one managed server."""
    with ExitStack() as stack:

        def open_one(seed: int, name: str = model) -> LocalBackend:
            backend = open_backend(name, seed=seed, **options_for(behind))
            stack.callback(backend.close)
            stir(backend, seed)
            return backend

        yield open_one


def files_in(folder: Path) -> ServerFiles:
    (directory,) = folder.glob("retrain-engines-*/*")
    return ServerFiles(directory)


def assert_own(backend) -> None:
    """Samples have the log-probabilities of this backend's own adapters."""
    samples = as_samples(draw(backend))
    for sample, logps in zip(samples, plain_logprobs(backend, samples, 0.8), strict=True):
        assert np.allclose(chosen(logps, sample).detach(), sample.rollout.logprobs, atol=1e-4)


def test_runs_share_a_server_and_survive_its_crash_and_the_loss_of_its_daemon(
    managed, model, folder, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(Path(model).parent))
    first, second = managed(0), managed(1, f"~/{Path(model).name}")
    for backend in (first, second):
        assert_own(backend)
    files = files_in(folder)
    assert files.log.read_text().count("serving") == 1

    trained = open_backend(model)
    stir(trained, seed=5)
    trained.save(tmp_path)
    second.start_from(str(tmp_path / "adapter"), is_reference=True)
    samples = as_samples(draw(second))
    for sample, logps in zip(samples, plain_logprobs(trained, samples, 0.8), strict=True):
        assert np.allclose(chosen(logps, sample).detach(), sample.rollout.logprobs, atol=1e-4)

    os.kill(files.read_state().pid, signal.SIGKILL)
    first.update(as_samples(draw(first)), loss_named("gspo"), Optimization(lr=1e-2, temperature=0.8))
    for backend in (first, second):
        assert_own(backend)
    assert files.read_state().restarts == 1
    assert files.log.read_text().count("serving") == 2
    daemon = holder(files.daemon_lock)
    os.kill(daemon.pid, signal.SIGKILL)
    wait_until(lambda: not is_running(daemon.pid, daemon.started))
    assert_own(first)


def test_ranks_with_layers_in_pieces_train_what_the_server_samples(model, behind):
    cut = open_backend(model, devices=2, shard=True, **options_for(behind))
    alone = open_backend(model)
    try:
        for backend in (cut, alone):
            stir(backend)
        samples = as_samples(draw(cut), drift=0.3)
        for backend in (cut, alone):
            backend.update(samples, loss_named("ppo"), Optimization(lr=1e-2, temperature=0.8))
        samples = as_samples(draw(cut))
    finally:
        cut.close()
    for sample, logps in zip(samples, plain_logprobs(alone, samples, 0.8), strict=True):
        assert np.allclose(chosen(logps, sample).detach(), sample.rollout.logprobs, atol=1e-3)


def test_a_server_on_the_gpus_of_a_run_has_a_part_of_every_layer_on_each(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4, 5,6")
    spec, options = BackendSpec(0, "m", lora_rank=8), LocalOptions(engine="vllm", engine_command=COMMAND)
    plans = [
        vllm_server(spec, options, model="m", dtype="bfloat16", gpu=0, left_bytes=None, devices=devices).plan
        for devices in (1, 3)
    ]
    assert [plan["environment"]["CUDA_VISIBLE_DEVICES"] for plan in plans] == ["4", "4,5,6"]
    alone, together = (plan["command"] for plan in plans)
    place = together.index("--tensor-parallel-size")
    assert together[place + 1] == "3"
    assert alone == together[:place] + together[place + 2 :]


def test_the_model_of_a_managed_server_teaches_and_outlives_its_crash(managed, model, behind):
    backend = managed(0)
    teacher = backend.open_teacher(TeacherSpec(ENGINE, 1.0, is_whole=False))
    rollouts = [sample.rollout for sample in as_samples(draw(backend))]
    here = backend.open_teacher(TeacherSpec(model, 1.0, is_whole=False)).score(rollouts)
    for is_killed in (False, True):
        if is_killed:
            os.kill(backend._engine._server.files.read_state().pid, signal.SIGKILL)
        for score, own in zip(teacher.score(rollouts), here, strict=True):
            np.testing.assert_allclose(score.logprobs, own.logprobs, atol=2e-5)
    assert_own(backend)  # adapters are loaded again
    assert behind.scored == 1 + 2 * len(rollouts)


def test_a_teacher_wakes_a_server_that_sleeps(model, behind, temporary):
    backend = open_backend(model, **options_for(behind), engine_sleep=True)
    teacher = backend.open_teacher(TeacherSpec(ENGINE, 1.0, is_whole=False))
    samples = as_samples(draw(backend))
    backend.update(samples, loss_named("ppo"), Optimization(lr=1e-2, temperature=0.8))
    assert behind.is_asleep
    assert len(teacher.score([sample.rollout for sample in samples])) == len(samples)
    backend.close()


def test_a_server_sleeps_while_a_run_trains_and_gets_adapters_when_awake(model, behind, temporary):
    backend = open_backend(model, **options_for(behind), engine_sleep=True)
    for _ in range(2):
        samples = as_samples(draw(backend))
        backend.update(samples, loss_named("ppo"), Optimization(lr=1e-2, temperature=0.8))
    assert [path for path, _, _ in behind.requests] == [
        "/wake_up",
        "/v1/load_lora_adapter",
        "/v1/completions",
        "/sleep?level=1",
        "/wake_up",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/v1/completions",
        "/sleep?level=1",
    ]
    backend.close()


def test_what_the_server_says_when_it_cannot_start_is_the_error(model, temporary):
    fails = (sys.executable, "-c", "import sys; sys.exit('out of memory, alas')")
    with pytest.raises(ConfigError, match=r"(?s)vLLM: .* exit code 1; .*\n  out of memory, alas"):
        open_backend(model, engine="vllm", engine_command=fails)


def test_a_missing_command_is_found_before_anything_starts(model):
    options = {"engine": "vllm", "engine_command": ["/no/such/vllm"], "local_files_only": True}
    raw = {"backend": {"backend": "local", "options": options}, "model": {"model": model}}
    assert any(
        "'/no/such/vllm' is not installed" in line.what
        for line in check(parse(raw, "c.toml"), Task((), (), "", 0))
    )
    assert check_options({"engine": "vllm", "lora": False})
    assert vllm_problem([sys.executable]) == ""
