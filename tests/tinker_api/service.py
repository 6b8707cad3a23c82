"""Sessions, models, samplers and futures: what the API remembers between requests."""

from __future__ import annotations

import itertools
import json
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.tinker_api.exports import write_adapter
from tests.tinker_api.policies import Policy, Sampler
from tests.tinker_api.states import EXTERNAL, RefusalError, States
from tests.tinker_api.wire import ForwardBackward

Json = dict[str, Any]


@dataclass
class Future:
    """A result that may not be there yet; bytes are protobuf."""

    done: threading.Event = field(default_factory=threading.Event)
    result: Json | bytes = b""


class Bill:
    """Tokens as the API bills them, each request once; survives the server."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self.tokens = Counter(json.loads(path.read_text()) if path.exists() else {})
        self._charged: set[str] = set()

    def charge(self, request: str, **tokens: int) -> None:
        with self._lock:
            if request not in self._charged:
                self._charged.add(request)
                self.tokens.update(tokens)
                new = self._path.with_suffix(".new")
                new.write_text(json.dumps(self.tokens))
                new.replace(self._path)  # a server may be killed at any moment, and starts again


@dataclass
class Model:
    """A policy, and the requests to it, which are done in the order of their numbers."""

    id: str
    session: str
    policy: Policy
    rank: int
    turn: int = 1
    pending: dict[int, Callable[[], None]] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def submit(self, seq: int, work: Callable[[], None]) -> None:
        with self.lock:
            self.pending.setdefault(seq, work)
            while self.turn in self.pending:
                self.pending.pop(self.turn)()
                self.turn += 1


class Service:
    """Everything that dies with the process, and the directory that does not."""

    def __init__(
        self,
        state: Path,
        alphabet: str,
        model: str,
        chunk: int,
        most_models: int = 10**6,
        dialect: str = "",
        wrong: Collection[str] = (),
    ) -> None:
        self.wrong = wrong
        self.version = f"{time.time_ns()}"  # another server may once have had the same port
        self.states = States(state, keeps_names="keeps names" in wrong)
        self._alphabet = "".join(sorted(alphabet))
        self._model = model
        self._chunk = chunk
        self._most_models = most_models
        self.dialect = (
            dialect  # "json" predates proto, "unnumbered" sequence ids; "silent" has no figures and no limits
        )
        self._loss = 404, "no model {}"  # what is said of a model that is gone
        self._lock = threading.Lock()
        self._names = itertools.count()
        self._boot = f"{len(list(state.glob('boot-*')))}"  # ids of a restarted server are others
        (state / f"boot-{self._boot}").touch()
        self.updates = 0
        self.context = 0  # tokens that the model reads; 0: not told
        self.bill = Bill(state / "bill.json")
        self.stops: set[str] = set()
        self.forget()

    def forget(self, status: int = 404, said: str = "no model {}") -> None:
        """Lose all that is in memory."""
        with self._lock:
            self._loss = status, said
            self.sessions: set[str] = set()
            self.models: dict[str, Model] = {}
            self.samplers: dict[str, Sampler] = {}
            self.futures: dict[str, Future] = {}

    def config(self, request: Json) -> Json:
        return {"fwdbwd_max_chunk_len": self._chunk}

    def health(self) -> Json:
        return {"status": "ready", "version": self.version}

    def capabilities(self) -> Json:
        if not self.context or self.dialect == "silent":
            raise RefusalError(404, "no such route")
        return {"supported_models": [{"model_name": self._model, "max_context_length": self.context}]}

    def create_session(self, request: Json) -> Json:
        session = f"session-{self._boot}-{next(self._names)}"
        self.sessions.add(session)
        return {"session_id": session, "type": "create_session"}

    def finish_session(self, session: str) -> Json:
        self.sessions.discard(session)
        self.models = {name: model for name, model in self.models.items() if model.session != session}
        return {}

    def heartbeat(self, request: Json) -> Json:
        self._check_session(request["session_id"])
        return {"type": "session_heartbeat"}

    def create_model(self, request: Json) -> Json:
        if request["base_model"] != self._model:
            raise RefusalError(400, f"unknown model {request['base_model']!r}; there is {self._model!r}")
        seed = request["lora_config"].get("seed") or 0
        policy = Policy(self._alphabet, seed, self.wrong)
        model = self._new_model(request, policy, request["lora_config"]["rank"])
        return self._promise(f"{model.id}:create", {"model_id": model.id, "type": "create_model"})

    def get_info(self, request: Json) -> Json:
        model = self._find(request["model_id"])
        data = {"arch": "gru", "model_name": self._model, "tokenizer_id": None}
        return {"model_id": model.id, "model_data": data, "is_lora": True, "lora_rank": model.rank}

    def forward_backward(self, request: ForwardBackward) -> Json:
        model = self._find(request.model_id)
        tokens = sum(len(datum.tokens) for datum in request.data)
        kind = "prefill" if request.forward_only else "train"
        self.bill.charge(f"{model.id}:{request.seq}", **{kind: tokens})
        return self._in_turn(model, request.seq, lambda: model.policy.forward_backward(request))

    def optim_step(self, request: Json) -> Json:
        model = self._find(request["model_id"])

        def step() -> Json:
            self.updates += 1
            told = model.policy.optim_step(request["adam_params"])
            return {"metrics": {}} if self.dialect == "silent" else told

        return self._in_turn(model, request["seq_id"], step)

    def save_weights(self, request: Json) -> Json:
        model = self._find(request["model_id"])

        def save() -> Json:
            path = self.states.save(model.id, "weights", request, model.policy, model.rank)
            return {"path": path, "type": "save_weights"}

        self.states.check_name(request["path"])
        self.states.check_free(model.id, "weights", request["path"])
        return self._in_turn(model, request["seq_id"], save)

    def load_weights(self, request: Json) -> Json:
        if "no states" in self.wrong:
            raise RefusalError(404, "{'detail': 'Not Found'}")
        facts = self.states.facts(request["path"], "weights")
        policy = Policy(self._alphabet, 0, self.wrong)
        policy.load(self.states.directory(request["path"]), optimizer=bool(request.get("optimizer")))
        model = self._new_model(request, policy, facts["lora_rank"])
        return self._promise(f"{model.id}:create", {"model_id": model.id, "type": "load_weights"})

    def weights_info(self, request: Json) -> Json:
        facts = self.states.facts(request["tinker_path"], "weights", "sampler_weights")
        return {"base_model": self._model, "is_lora": True, "lora_rank": facts["lora_rank"]}

    def save_weights_for_sampler(self, request: Json) -> Json:
        model = self._find(request["model_id"])
        if request.get("path") is not None:
            self.states.check_name(request["path"])

            def save() -> Json:
                path = self.states.save(model.id, "sampler_weights", request, model.policy, model.rank)
                return {"path": path, "type": "save_weights_for_sampler"}

            return self._in_turn(model, request["seq_id"], save)

        def snapshot() -> Json:
            name = f"{model.id}:sampler:{request['sampling_session_seq_id']}"
            self.samplers[name] = model.policy.sampler()
            return {"sampling_session_id": name, "type": "save_weights_for_sampler"}

        return self._in_turn(model, request["seq_id"], snapshot)

    def save_weights_external(self, request: Json) -> Json:
        model = self._find(request["model_id"])
        self.states.check_name(request["path"])

        def save() -> Json:
            path = self.states.save(model.id, EXTERNAL, request, model.policy, model.rank)
            write_adapter(self.states.directory(path), model.policy)
            return {"path": path, "type": "save_weights_external"}

        return self._in_turn(model, request["seq_id"], save)

    def create_sampling_session(self, request: Json) -> Json:
        """Make a sampler of saved weights, or of the base model: a model of seed 0 before it is trained."""
        self._check_session(request["session_id"])
        policy, path = Policy(self._alphabet, 0, self.wrong), request.get("model_path")
        if path is not None:
            self.states.facts(path, "sampler_weights")
            policy.load(self.states.directory(path), optimizer=False)
        elif request["base_model"] != self._model:
            raise RefusalError(400, f"unknown model {request['base_model']!r}; there is {self._model!r}")
        name = f"{request['session_id']}:base:{request['sampling_session_seq_id']}"
        self.samplers[name] = policy.sampler()
        return {"sampling_session_id": name, "type": "create_sampling_session"}

    def sampler_info(self, name: str) -> Json:
        if name not in self.samplers:
            raise RefusalError(404, f"no sampler {name}")
        return {"sampler_id": name, "base_model": self._model, "model_path": None}

    def sample(self, request: Json) -> Json:
        sampler = self.samplers.get(request["sampling_session_id"])
        if sampler is None:
            raise RefusalError(404, f"no sampler {request['sampling_session_id']}")
        params, count = request["sampling_params"], request["num_samples"]
        self.stops.add(str(params.get("stop")))
        prompt = [token for chunk in request["prompt"]["chunks"] for token in chunk["tokens"]]
        if self.context and len(prompt) + int(params["max_tokens"]) > self.context:
            raise RefusalError(
                400, f"prompt and max_tokens exceed the model's context window of {self.context}"
            )
        name = f"{request['sampling_session_id']}:{request['seq_id']}"
        if "undoes updates" in self.wrong:
            for model in self.models.values():
                if name.startswith(f"{model.session}:"):
                    model.policy.weights.flat[:] = sampler.weights.flat
        with self._lock:  # a sampler has one random generator
            response, sampled = sampler.sample(prompt, count, params, score=bool(request["prompt_logprobs"]))
            self.bill.charge(name, prefill=len(prompt), cached=(count - 1) * len(prompt), sample=sampled)
            answer = self._promise(name, response)
        if self.dialect == "unnumbered":
            return answer
        return {**answer, "sample_sequence_ids": [f"{name}:{number}" for number in range(count)]}

    def future(self, request_id: str) -> Future:
        found = self.futures.get(request_id)
        if found is None:
            raise RefusalError(410, f"no request {request_id}")
        return found

    def _new_model(self, request: Json, policy: Policy, rank: int) -> Model:
        session = request["session_id"]
        self._check_session(session)
        if len(self.models) >= self._most_models:
            raise RefusalError(400, f"Maximum number of LoRA adapters ({self._most_models}) reached")
        model = Model(f"{session}:train:{request['model_seq_id']}", session, policy, rank)
        return self.models.setdefault(model.id, model)

    def _check_session(self, session: str) -> None:
        if session not in self.sessions:
            raise RefusalError(410, f"session {session} has expired")

    def _find(self, model_id: str) -> Model:
        if model_id not in self.models:
            status, said = self._loss
            raise RefusalError(status, said.format(model_id))
        return self.models[model_id]

    def _in_turn(self, model: Model, seq: int, work: Callable[[], Json | bytes]) -> Json:
        """Promise a result; a repeated number gets the promise that it got before."""
        name = f"{model.id}:{seq}"
        if is_repeated := "repeats requests" in self.wrong:
            name += f":{next(self._names)}"
        with self._lock:
            known = name in self.futures
            future = self.futures.setdefault(name, Future())

        def run() -> None:
            try:
                future.result = work()
            except Exception as error:  # noqa: BLE001 - a server answers, whatever happens
                traceback.print_exc()  # clients try again for long: a fault of this server's is to be seen
                future.result = {"error": repr(error), "category": "server"}
            future.done.set()

        if is_repeated:
            with model.lock:
                run()
        elif not known:
            model.submit(seq, run)
        return {"request_id": name, "model_id": model.id}

    def _promise(self, name: str, result: Json | bytes) -> Json:
        future = self.futures.setdefault(name, Future(result=result))
        future.done.set()
        return {"request_id": name}


def routes(service: Service) -> Mapping[str, Callable[[Json], Json]]:
    """Return what answers a JSON request, by path."""
    return {
        "client/config": service.config,
        "client/dynamic_config": lambda _: {},
        "telemetry": lambda _: {"status": "accepted"},
        "create_session": service.create_session,
        "session_heartbeat": service.heartbeat,
        "create_model": service.create_model,
        "get_info": service.get_info,
        "optim_step": service.optim_step,
        "save_weights": service.save_weights,
        "load_weights": service.load_weights,
        "save_weights_external": service.save_weights_external,
        "weights_info": service.weights_info,
        "save_weights_for_sampler": service.save_weights_for_sampler,
        "create_sampling_session": service.create_sampling_session,
        "asample": service.sample,
    }
