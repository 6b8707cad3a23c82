"""A server as the local backend's engine sees it: `/v1/completions` and adapters, over a real tiny policy."""

from __future__ import annotations

import json
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from peft import set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoTokenizer

from retrain.backends import Sampling
from retrain.backends.engines import Drawn
from tests.extras.local_policies import open_backend

TOKENS_PER_EVENT = 3
SLEEPING = {"/sleep?level=1": True, "/wake_up": False}


class CompletionsServer(ThreadingHTTPServer):
    """Samples with the adapters that a call names; what goes wrong is set from outside."""

    def __init__(self, model: str, rank: int, prefix: str = "/v1", **options: Any) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.key = ""  # that calls must name, if any
        self.model = model  # its name, of the weights without adapters
        self.policy = open_backend(model, rank=rank, **options)
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.prefix = prefix
        self.adapters: dict[str, dict[str, torch.Tensor]] = {}
        self.first: dict[str, torch.Tensor] = {}  # adapters that were loaded first
        self.requests: list[tuple[str, dict[str, Any], str | None]] = []
        self.failures = 0  # so many calls are answered with 503
        self.forgets_token_ids = False
        self.reports_raw_logprobs = False  # those before the temperature is applied
        self.rubbish: bytes | None = None  # instead of completions
        # changes the scores of a prompt's tokens before they are told
        self.misread: Callable[[list[Any]], list[Any] | None] = lambda scores: scores
        self.scored = 0  # prompts
        self.refusal = b""  # answered with 401 and this
        self.ignores_adapters = False  # samples with those that were loaded first
        self.moved_to = ""  # answered with a redirection there
        # whether the stream for a request waits after its first event
        self.is_held: Callable[[dict[str, Any]], bool] = lambda body: False
        # whether a request's completion of this number is never told of, until the client is gone
        self.is_slow: Callable[[dict[str, Any], int], bool] = lambda body, index: False
        self.running = 0  # streams that are not over, and whose client is still there
        self.is_asleep = False
        self.tokens = 0  # as its metrics say: a hundred more each time
        self.looks = 0  # at its metrics, while streams were running
        self.broken_streams = 0  # so many streams end without their last event
        self.lock = threading.Lock()
        self.generator = torch.Generator().manual_seed(0)  # of calls without a seed

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, bytes]:
        if self.refusal:
            return 401, self.refusal
        if self.failures:
            self.failures -= 1
            return 503, b"warming up"
        if path in SLEEPING or self.is_asleep:
            self.is_asleep = SLEEPING.get(path, True)
            return (200, b"{}") if path in SLEEPING else (400, b"asleep, and asked to sample")
        if path == f"{self.prefix}/load_lora_adapter".replace("//", "/"):
            if body["lora_name"] in self.adapters or not Path(body["lora_path"]).is_dir():
                return 400, b"this adapter cannot be loaded"
            tensors = load_file(Path(body["lora_path"]) / "adapter_model.safetensors")
            self.adapters[body["lora_name"]] = tensors
            self.first = self.first or tensors
            return 200, b"Success"
        if path == f"{self.prefix}/unload_lora_adapter".replace("//", "/"):
            return (200, b"Success") if self.adapters.pop(body["lora_name"], None) else (404, b"unknown")
        if path == "/v1/completions":
            return self.complete(body)
        return 404, b"no such path"

    def models(self) -> dict[str, Any]:
        """As vLLM lists them: the model first, then adapters with its name."""
        own = {"id": self.model, "parent": None, "max_model_len": self.policy.policy.context}
        return {"data": [own, *({"id": name, "parent": self.model} for name in self.adapters)]}

    def score(self, body: dict[str, Any]) -> tuple[int, bytes]:
        """Tell the log-probabilities of prompts' tokens, as vLLM does with `prompt_logprobs`."""
        if body["model"] not in (self.model, *self.adapters):
            return 404, b"The model does not exist"
        if wrong := next(filter(None, map(self.refused, body["prompt"])), ""):
            return 400, wrong.encode()
        policy = self.policy.policy
        if body["model"] in self.adapters:
            set_peft_model_state_dict(policy.adapters, self.adapters[body["model"]])
            off: AbstractContextManager[object] = nullcontext()
        else:
            off = policy.adapters.disable_adapter()
        choices = []
        with off, torch.no_grad():
            for index, ids in enumerate(body["prompt"]):
                logps = policy.causal(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
                after = zip(ids[1:], logps, strict=False)
                scores = self.misread(
                    [None, *(self.facts(token, one, body["prompt_logprobs"]) for token, one in after)]
                )
                choices.append({"index": index, "finish_reason": "length", "prompt_logprobs": scores})
        self.scored += len(choices)
        return 200, json.dumps({"choices": choices}).encode()

    def refused(self, ids: list[int]) -> str:
        """Return why a prompt cannot be scored; "" if it can."""
        if max(ids) >= len(self.policy.policy.causal.get_output_embeddings().weight):
            return f"Token id {max(ids)} is out of vocabulary"
        most = self.policy.policy.context
        return f"maximum context length is {most} tokens" if len(ids) + 1 > most else ""

    def facts(self, token: int, logps: torch.Tensor, most: int) -> dict[str, dict[str, Any]]:
        return {
            str(each): {
                "logprob": float(logps[each]),
                "rank": 1 + int((logps > logps[each]).sum()),
                "decoded_token": self.tokenizer.decode([each]),
            }
            for each in (token, *logps.topk(min(most, len(logps))).indices.tolist())
        }

    def complete(self, body: dict[str, Any]) -> tuple[int, bytes]:
        if "prompt_logprobs" in body:
            return self.score(body)
        named = self.adapters.get(body["model" if self.prefix else "lora_path"])
        if named is None:
            return 404, b"The model does not exist"
        set_peft_model_state_dict(self.policy.policy.adapters, self.first if self.ignores_adapters else named)
        if self.rubbish is not None:
            return 200, self.rubbish
        choices = self.choices(body)
        return 200, b"".join(events(choices)) if body.get("stream") else json.dumps(
            {"choices": choices}
        ).encode()

    def choices(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        rows = [tuple(ids) for ids in body["prompt"] for _ in range(body["n"])]
        how = Sampling(body["n"], body["max_tokens"], body["temperature"])
        sample, drawn = self.policy.sampler.complete, []
        for ids in body["prompt"]:  # as vLLM, which gives every prompt of a call its seed
            generator = torch.Generator().manual_seed(body["seed"]) if "seed" in body else self.generator
            drawn += sample([tuple(ids)], [how.max_tokens], how, generator)
        pairs = enumerate(zip(rows, drawn, strict=True))
        return [self.choice(i, row, one) for i, (row, one) in pairs][::-1]  # an order is not promised

    def choice(self, index: int, row: tuple[int, ...], one: Drawn) -> dict[str, Any]:
        logprobs = self.raw(row, one) if self.reports_raw_logprobs else one.logprobs.tolist()
        names = [f"token_id:{token}" for token in one.tokens]
        has_words = self.forgets_token_ids or not self.prefix  # as SGLang, which gives ids beside them
        shown = {"tokens": ["?"] * len(names) if has_words else names, "token_logprobs": logprobs}
        ids = {} if self.prefix else {"token_ids": list(one.tokens)}
        end = "stop" if one.ended else "length"
        return {"index": index, "finish_reason": end, "logprobs": shown, **ids}

    def raw(self, row: tuple[int, ...], one: Drawn) -> list[float]:
        with torch.no_grad():
            logits = self.policy.policy.causal(input_ids=torch.tensor([[*row, *one.tokens]])).logits
        logps = logits[0, len(row) - 1 : -1].log_softmax(-1)
        return logps[torch.arange(len(one.tokens)), torch.tensor(one.tokens)].tolist()


def events(choices: list[dict[str, Any]]) -> Iterator[bytes]:
    """Cut completions into the events of a stream, at most three tokens of one completion in each."""
    for begin in range(0, max(len(choice["logprobs"]["tokens"]) for choice in choices), TOKENS_PER_EVENT):
        span = slice(begin, begin + TOKENS_PER_EVENT)
        for choice in choices:
            shown = {name: values[span] for name, values in choice["logprobs"].items()}
            if not shown["tokens"]:
                continue
            is_last = begin + TOKENS_PER_EVENT >= len(choice["logprobs"]["tokens"])
            ids = {"token_ids": choice["token_ids"][span]} if "token_ids" in choice else {}
            end = choice["finish_reason"] if is_last else None
            part = {"index": choice["index"], "finish_reason": end, "logprobs": shown, **ids}
            yield f"data: {json.dumps({'choices': [part]})}\n\n".encode()
    yield b"data: [DONE]\n\n"


class Handler(BaseHTTPRequestHandler):
    server: CompletionsServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:  # /health, /metrics or /v1/models
        if self.path == "/v1/models":
            with self.server.lock:
                is_known = not self.server.key or self.headers["Authorization"] == f"Bearer {self.server.key}"
                content = json.dumps(self.server.models()).encode()
            self.tell(200 if is_known else 401, content if is_known else b"no key")
            return
        with self.server.lock:
            running, self.server.tokens = self.server.running, self.server.tokens + 100
            self.server.looks += running > 0
        labels = '{engine="0",model_name="tiny, {of tests}"}'
        load = {"num_requests_running": running, "num_requests_waiting": 2, "kv_cache_usage_perc": 0.25}
        counts = {**load, "generation_tokens_total": self.server.tokens}
        lines = [
            f"# TYPE vllm:{name} gauge\nvllm:{name}{labels} {float(value)}\n"
            for name, value in counts.items()
        ]
        self.tell(200, "".join(lines).encode() if self.path == "/metrics" else b"")

    def tell(self, code: int, content: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def do_POST(self) -> None:
        if self.path == "/begin":  # of a process that serves through this one
            self.server.key = self.headers["Authorization"].removeprefix("Bearer ")
            self.server.adapters, self.server.is_asleep = {}, False
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append((self.path, body, self.headers["Authorization"]))
            named = self.headers["Authorization"]
            is_known = not self.server.key or named == f"Bearer {self.server.key}"
            code, content = self.server.answer(self.path, body) if is_known else (401, b"no key")
        if self.server.moved_to:
            code = 302
        if code == 200 and body.get("stream"):
            self.stream(body, content)
            return
        self.send_response(code)
        self.send_header("Location", self.server.moved_to)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def stream(self, body: dict[str, Any], content: bytes) -> None:
        """Send events as chunks, until the client is gone."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.close_connection = True
        with self.server.lock:
            self.server.running += 1
            is_broken, self.server.broken_streams = (
                self.server.broken_streams > 0,
                self.server.broken_streams - 1,
            )
        try:
            all_of_them = content.split(b"\n\n")
            told = [event for event in all_of_them if not self.is_slow(body, event)]
            for event in told[: 1 if is_broken else -1]:
                self.wfile.write(b"%x\r\n%s\n\n\r\n" % (len(event) + 2, event))
                while self.server.is_held(body) and not self.is_left(0.01):
                    pass
                if self.is_left():
                    return
            while len(told) < len(all_of_them) and not self.is_left(0.01):
                pass
            if not is_broken:
                self.wfile.write(b"0\r\n\r\n")
        finally:
            with self.server.lock:
                self.server.running -= 1

    def is_slow(self, body: dict[str, Any], event: bytes) -> bool:
        if not event.startswith(b"data: {"):
            return event.startswith(b"data: [DONE]") and self.server.is_slow(body, 0)
        return self.server.is_slow(body, json.loads(event[6:])["choices"][0]["index"])

    def is_left(self, wait_s: float = 0.0) -> bool:
        """Whether the client has closed the connection."""
        readable, _, _ = select.select([self.connection], [], [], wait_s)
        return bool(readable) and not self.connection.recv(1, socket.MSG_PEEK)

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def serve(model: str, *, rank: int = 4, prefix: str = "/v1", **options: Any) -> Iterator[CompletionsServer]:
    """Serve a model; `options` are those of the backend that samples."""
    server = CompletionsServer(model, rank, prefix, **options)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
