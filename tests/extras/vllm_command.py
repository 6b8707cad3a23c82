"""Stands in for vLLM's command line: the same arguments, over a real tiny policy, in a process of its own."""

from __future__ import annotations

import argparse
import os

from tests.extras.completions_server import CompletionsServer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-lora-rank", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)  # what the tests' adapters have: ours
    parser.add_argument("--calls", default="")  # file that gets the path of each call
    known, _ = parser.parse_known_args()
    assert known.host == "127.0.0.1"
    server = CompletionsServer(known.model, known.rank, port=known.port)
    server.key = os.environ["VLLM_API_KEY"]
    server.calls_log = known.calls
    print("serving", f"{os.environ['VLLM_CPU_KVCACHE_SPACE']} GiB", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
