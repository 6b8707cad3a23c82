"""A client of an OpenAI-compatible address, as the programs of episodes have one."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any


def post(url: str, key: str, body: Any, path: str = "/chat/completions") -> tuple[int, Any]:
    """Return status and answer; the events of a stream as a list."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, content, headers)) as answer:
            said, kind = answer.read().decode(), answer.headers["Content-Type"]
            return answer.status, _events(said) if "event-stream" in kind else json.loads(said)
    except urllib.error.HTTPError as refusal:
        with refusal:
            return refusal.code, json.load(refusal)


def complete(url: str, key: str, said: list[dict[str, str]], **more: Any) -> Any:
    """Return an answer to messages, with token ids and log-probabilities."""
    status, answer = post(url, key, {"messages": said, "return_token_ids": True, "logprobs": True, **more})
    assert status == 200, answer
    return answer


def spoken(answer: Any) -> dict[str, str]:
    return answer["choices"][0]["message"]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _events(said: str) -> list[Any]:
    events = [event.removeprefix("data: ") for event in said.split("\n\n") if event]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]
