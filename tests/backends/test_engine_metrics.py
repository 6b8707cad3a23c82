"""What is read from a server's metrics."""

from __future__ import annotations

import pytest

from retrain.backends.engines.metrics import EngineMeter
from retrain.records.row_parts import EngineUse

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="/models/{a} b"} 3.0
vllm:num_requests_running{engine="1",model_name="/models/{a} b"} 2.0
vllm:num_requests_waiting{engine="0",model_name="/models/{a} b"} 1.0
vllm:num_requests_waiting_by_reason{engine="0",model_name="a",reason="capacity"} 7.0
vllm:kv_cache_usage_perc{engine="0",model_name="/models/{a} b"} 0.125
vllm:generation_tokens_total{engine="0",model_name="/models/{a} b"} TOKENS
"""
SGLANG = """\
sglang:num_running_reqs{model_name="m"} 4.0
sglang:num_queue_reqs{model_name="m"} 0.0
sglang:token_usage{model_name="m"} 0.5
"""


def vllm(tokens: float) -> str:
    return VLLM.replace("TOKENS", str(tokens))


def test_the_servers_own_names_are_known() -> None:
    assert EngineMeter("a.log").observe(vllm(1e3), 0.0) == EngineUse(
        running=5, waiting=1, kv_fraction=0.125, tokens_per_s=None, server="a.log"
    )
    meter = EngineMeter("")
    for now_s in (0.0, 1.0):
        assert str(meter.observe(SGLANG, now_s)) == "4 running, 0 waiting, KV cache 50%"
    assert meter.take().tokens_per_s is None


def test_speed_is_that_between_two_looks_and_of_a_step_that_since_the_last_one() -> None:
    meter = EngineMeter("a.log")
    meter.observe(vllm(1000), 10.0)
    said = str(meter.observe(vllm(1500.0), 12.0))
    assert said == "5 running, 1 waiting, KV cache 12%, 250 tokens/s"
    assert meter.take().tokens_per_s == pytest.approx(250.0)
    assert meter.take() is None
    meter.observe(vllm(1600), 14.0)
    assert meter.take().tokens_per_s == pytest.approx(50.0)


def test_a_crash_is_told_once_by_the_runs_that_saw_it() -> None:
    meter = EngineMeter("a.log", restarts=1)
    meter.observe(vllm(0), 10.0, 1, "of an earlier run")
    assert meter.take().crash is None
    said = str(meter.observe(vllm(0), 12.0, 2, "out of memory"))
    assert said == "5 running, 1 waiting, KV cache 12%, 0 tokens/s, restarted 2 times"
    used = meter.take()
    assert (used.restarts, used.crash) == (2, "out of memory")
    meter.observe(vllm(0), 14.0, 2, "out of memory")
    assert meter.take().crash is None


def test_a_server_that_was_restarted_or_says_something_else_has_no_speed() -> None:
    meter = EngineMeter("")
    meter.observe(vllm(1000), 10.0)
    assert meter.observe(vllm(0), 12.0).tokens_per_s is None
    assert meter.observe("process_cpu_seconds_total 3.0", 14.0) is None


@pytest.mark.parametrize("number", ["NaN", "+Inf", "1e999", "1.2.3", "-", "-1", "e"])
def test_what_is_no_count_is_as_good_as_not_told(number) -> None:
    assert EngineMeter("").observe(f"vllm:num_requests_running {number}\n", 0.0) is None
