"""Stands in for vLLM's command line: a process with its arguments, which passes all on to the tests' server.

That server has imported PyTorch and opened a policy already, which would take this process seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import threading
import urllib.request

HERE = "127.0.0.1"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--host", required=True, choices=[HERE])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--max-lora-rank", type=int, required=True)
    parser.add_argument("--tests-port", type=int, required=True)  # of their `CompletionsServer`
    known, _ = parser.parse_known_args()
    begin(known.tests_port, os.environ["VLLM_API_KEY"])
    with socket.create_server((HERE, known.port)) as listening:
        print("serving", f"{os.environ['VLLM_CPU_KVCACHE_SPACE']} GiB", flush=True)
        while True:
            client, _ = listening.accept()
            server = socket.create_connection((HERE, known.tests_port))
            for ends in ((client, server), (server, client)):
                threading.Thread(target=pass_on, args=ends, daemon=True).start()


def begin(port: int, key: str) -> None:
    """Have the tests' server forget what it was told before, as a process that starts."""
    told = urllib.request.Request(f"http://{HERE}:{port}/begin", b"{}", {"Authorization": f"Bearer {key}"})
    urllib.request.urlopen(told, timeout=60).close()


def pass_on(source: socket.socket, sink: socket.socket) -> None:
    """Send one end's data to the other, then its end."""
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    with contextlib.suppress(OSError):
        sink.shutdown(socket.SHUT_WR)


if __name__ == "__main__":
    main()
