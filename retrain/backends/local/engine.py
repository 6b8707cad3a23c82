"""Updates a sampling server's adapters after each optimizer step, and checks its log-probabilities."""

from __future__ import annotations

import itertools
import re
import secrets
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from retrain.backends import BackendSpec, Sampling
from retrain.backends.engines import Drawn, Ids, LostAdaptersError
from retrain.backends.engines.metrics import EngineWatch
from retrain.backends.engines.openai import CompletionRequest, Engine
from retrain.backends.engines.shared_server import RESTARTING, STARTING, ServerState, SharedServer, gpu_shared
from retrain.backends.engines.vllm import START_S, vllm_server
from retrain.backends.local import LocalOptions
from retrain.backends.local.loading import (
    ADAPTER,
    Cut,
    DeviceMemory,
    Policy,
    count_devices,
    save_weights,
)
from retrain.backends.local.logprob_check import reject_other_policy, reject_unknown
from retrain.backends.local.model_files import directory_at
from retrain.backends.progress import StartProgress
from retrain.backends.rows import CallsProgress, Tell
from retrain.base.errors import ConfigError, InfrastructureError, InterruptedRunError, is_passing
from retrain.control.machine import memory_available_bytes
from retrain.control.machine.nvidia import gpu_count

T = TypeVar("T")

MOST_CALLS = 32  # at the same time, for one batch
CRASHES = 3  # of a server of ours, that one call survives


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """The trained weights between two updates; updates do not change it."""

    version: int  # of the policy
    weights: Sequence[torch.Tensor]  # in main memory


@dataclass(slots=True, eq=False)
class Served:
    """Adapters that the server has loaded."""

    name: str
    snapshot: Snapshot
    users: int = 0  # calls that are sampling with them
    is_checked: bool = False  # whether their log-probabilities were compared with ours


class EngineSampler:
    """Samples on a server with the adapters published last, from any thread, also while they are trained.

    Only `publish` reads the policy that is trained. Everything else reads snapshots: their adapters are
    saved from, and the server is checked by, a policy that shares the frozen weights; not if other ranks have
    pieces of these, because those would have to join in.
    """

    def __init__(
        self, spec: BackendSpec, options: LocalOptions, policy: Policy, own: Policy, end_ids: Ids
    ) -> None:
        """Start or find the server of a policy, of which `own` is a copy with other adapters."""
        self._spec, self._options = spec, options
        self._server = _vllm(spec, options, policy) if options.engine == "vllm" else None
        self._turns = self._server.files.turns if self._server and options.engine_sleep else None
        self._engine = self._connected()
        self._trained = policy
        self._policy = own
        self._end_ids = end_ids
        self._stop, self._cut = options.stop, Cut.by(options)
        self._progress = CallsProgress(spec.observe)
        parent = options.engine_adapters or None  # of a directory for adapters, a temporary one without it
        try:
            if parent:
                Path(parent).mkdir(parents=True, exist_ok=True)
            self._directory = Path(tempfile.mkdtemp(prefix="retrain-adapters-", dir=parent))
        except (OSError, ValueError) as error:
            kind = InfrastructureError if is_passing(error) else ConfigError
            raise kind(f"[backend.options].engine_adapters: cannot be made ({error})") from error
        # a server refuses a name that is already loaded, for example by an earlier attempt
        name = f"{re.sub(r'[^A-Za-z0-9._-]', '-', spec.run_name) or 'run'}-{secrets.token_hex(4)}"
        self._names = map(f"{name}-{{}}".format, itertools.count(1))
        self._lock = threading.Lock()  # guards `_policy` and `_served`
        self._served: list[Served] = []  # the newest last; earlier ones until no call uses them
        self.publish(0)
        server = self._server.files if self._server else options.engine_url
        self._watch = EngineWatch(self._engine, server, self._progress, spec)
        self.take_use = self._watch.take_use

    def publish(self, version: int) -> None:
        """Sample with the trained policy's weights as they are now; not to be called during an update."""
        weights = [p.detach().to("cpu", copy=True) for p in self._trained.trainable().values()]
        self._published = Snapshot(version, weights)

    def complete(self, prompts: Sequence[Ids], sampling: Sampling) -> tuple[dict[int, list[Drawn]], int]:
        """Return groups by the number of their prompt, and the policy's version, the oldest of several calls.

        Prompts near the end of the context are in calls of their own, because a call has one limit of tokens.
        """
        numbers: dict[int, list[int]] = {}  # of the prompts, by the tokens that each may be completed by
        for number, ids in enumerate(prompts):
            limit = min(sampling.max_tokens, self._policy.context - len(ids))
            numbers.setdefault(limit, []).append(number)
        if len(numbers) > 1 and sampling.enough:  # calls do not know what others have: take the first
            kept, how = prompts[: sampling.enough], replace(sampling, enough=0, due=0)
            return self.complete(kept, how)
        prompts_of_calls = ([prompts[n] for n in of] for of in numbers.values())
        call = partial(self._call, sampling)
        with gpu_shared(self._turns, trains=False), ThreadPoolExecutor(MOST_CALLS) as threads:
            answers = list((map if len(numbers) == 1 else threads.map)(call, prompts_of_calls, numbers))
        groups_by_number: dict[int, list[Drawn]] = {}
        for of, (served, groups) in zip(numbers.values(), answers, strict=True):
            self._check(served, [prompts[n] for n in of], groups, sampling.temperature)
            groups_by_number |= {of[place]: group for place, group in groups.items()}
        return dict(sorted(groups_by_number.items())), min(served.snapshot.version for served, _ in answers)

    def _call(
        self, sampling: Sampling, prompts: Sequence[Ids], limit: int
    ) -> tuple[Served, dict[int, list[Drawn]]]:
        request = CompletionRequest(
            prompts=prompts,
            count=sampling.group_size,
            max_tokens=limit,
            temperature=sampling.temperature,
            end_ids=self._end_ids,
            stop=self._stop,
            cut={} if self._cut is None else {k: v for k, v in asdict(self._cut).items() if v},
            can_be_ended=not sampling.evaluates,  # evaluation goes on to the end of its step
            enough=sampling.enough,
            due=sampling.due,
        )
        with self._progress.call() as tell:
            return self._ask(partial(self._sample, request, tell))

    def _sample(
        self, request: CompletionRequest, tell: Tell, engine: Engine
    ) -> tuple[Served, dict[int, list[Drawn]]]:
        """Make a call with the adapters published last, which stay loaded until it is answered."""
        with self._lending() as served:
            return served, engine.complete(served.name, request, tell)

    def ask(self, call: Callable[[Engine], T]) -> T:
        """Make a call that is about none of the adapters, while the server is awake."""
        with gpu_shared(self._turns, trains=False):
            return self._ask(call)

    @contextmanager
    def making_room(self) -> Iterator[None]:
        """Let the server sleep while the body updates the policy, if it is to: the GPU is free then."""
        if not self._options.engine_sleep:
            yield
            return
        with gpu_shared(self._turns, trains=True):
            with suppress(InfrastructureError):  # one that has crashed takes no memory
                self._engine.sleep()
            try:
                yield
            finally:
                DeviceMemory(self._trained.device).free()

    def close(self) -> None:
        """Unload the adapters from the server and delete their files."""
        self._watch.close()
        served, self._served = self._served, []
        self._engine.close([adapters.name for adapters in served])
        if self._server is not None:
            self._server.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _connected(self) -> Engine:
        """Return a client of the server, which is started first if it is ours to start."""
        options, spec = self._options, self._spec
        client = partial(
            Engine,
            reload=options.engine_reload,
            silence_s=options.engine_timeout_s,
            permit=spec.permit,
            observe_call=spec.observe_call,
        )
        if self._server is None:
            return client(options.engine_url)
        state = self._server.ready(START_S, self._show_wait)
        return client(state.url, key=state.key, advice=f"vLLM's log is {self._server.files.log}")

    def _show_wait(self, state: ServerState, waited_s: float) -> None:
        if self._spec.is_leaving():
            raise InterruptedRunError("stopped while vLLM was starting")
        verb = state.state if state.state in (STARTING, RESTARTING) else "waiting for"
        self._spec.observe(StartProgress(f"{verb} vLLM", waited_s))

    def _ask(self, call: Callable[[Engine], T]) -> T:
        """Make a call; a server that was restarted has lost the adapters, one of ours is waited for."""
        for failures in itertools.count(1):
            engine = self._engine
            try:
                if self._options.engine_sleep:
                    engine.wake_up()
                return call(engine)
            except LostAdaptersError:
                if failures > 1:
                    raise
            except InfrastructureError:
                if self._server is None or failures >= CRASHES:
                    raise
                with self._lock:
                    if self._engine is engine:  # no other thread has waited for the server
                        self._engine = self._connected()
                        self._watch.replace(self._engine)
            with self._lock:
                self._served.clear()
        raise AssertionError("unreachable")

    @contextmanager
    def _lending(self) -> Iterator[Served]:
        """Lend the adapters published last; earlier ones are unloaded once nobody uses them."""
        with self._lock:
            snapshot = self._published
            if not self._served or self._served[-1].snapshot is not snapshot:
                earlier, served = self._served, Served(next(self._names), snapshot)
                directory = self._directory / served.name
                directory.mkdir()
                self._act_as(snapshot)
                save_weights(directory, self._policy)
                self._engine.load_adapter(served.name, str((directory / ADAPTER).absolute()))
                self._served = [adapters for adapters in earlier if adapters.users] + [served]
                for adapters in earlier:
                    if not adapters.users:
                        self._engine.unload_adapter(adapters.name)
                        shutil.rmtree(self._directory / adapters.name, ignore_errors=True)
            served = self._served[-1]
            served.users += 1
        try:
            yield served
        finally:
            with self._lock:
                served.users -= 1

    def _act_as(self, snapshot: Snapshot) -> None:
        with torch.no_grad():
            for parameter, weights in zip(self._policy.trainable().values(), snapshot.weights, strict=True):
                parameter.copy_(weights)

    def _check(
        self,
        served: Served,
        prompts: Sequence[Ids],
        groups: Mapping[int, Sequence[Drawn]],
        temperature: float,
    ) -> None:
        """Raise if the server samples another policy: its log-probabilities, compared once, are not ours."""
        drawn = [completion for group in groups.values() for completion in group]
        reject_unknown(drawn, len(self._policy.causal.get_input_embeddings().weight))
        if served.is_checked or temperature == 0 or self._options.shard:
            return
        of = [prompts[number] for number, group in groups.items() for _ in group]
        with self._lock:
            self._act_as(served.snapshot)
            reject_other_policy(self._policy, of, drawn, temperature, self._cut)
        served.is_checked = True


def _vllm(spec: BackendSpec, options: LocalOptions, policy: Policy) -> SharedServer:
    device, directory = policy.device, directory_at(spec.model)
    trainers, left_bytes = spec.memory(), None
    if trainers is not None:  # what they leave to the server
        if device.type == "cuda":
            free, count = torch.cuda.mem_get_info(device)[0], -(-trainers.count // max(1, gpu_count()))
        else:
            free, count = memory_available_bytes(), trainers.count
        left_bytes = float(free - trainers.to_come(count, in_turn=options.engine_sleep))
    return vllm_server(
        spec,
        options,
        model=str(directory.absolute() if directory else spec.model),
        dtype=str(policy.causal.dtype).removeprefix("torch."),
        gpu=device.index or 0 if device.type == "cuda" else None,
        left_bytes=left_bytes,
        devices=count_devices(options),
    )
