"""No secret is recorded or shown, whatever form an error quotes it in."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from retrain.records.metrics import MetricsWriter
from retrain.records.run_state import end_attempt
from retrain.redaction import LONGEST_ERROR_BYTES, cover_output, recorded_error, redacted

SECRET = "s3cr3t-9f8a7b6c5d"


@pytest.mark.parametrize(
    "text",
    [
        f"GET https://me:{SECRET}@host/v1 failed",
        f"GET https://{SECRET}@host/v1 failed",
        f"401 for https://host/v1?api_key={SECRET}&model=x",
        f"401 for https://host/v1?model=x&key={SECRET}",
        f"https://host/?access_token={SECRET}#top",
        f"https://bucket/x?X-Amz-Signature={SECRET}&X-Amz-Credential={SECRET}",
        f"refused: Bearer {SECRET}",
        f"headers: {{'Authorization': 'Bearer {SECRET}', 'accept': '*/*'}}",
        f"Authorization: Basic {SECRET}==",
        f"authorization={SECRET}",
        f"{{'x-api-key': '{SECRET}'}}",
        f'{{"api_key": "{SECRET}"}}',
        f"Client(api_key='{SECRET}', timeout=3)",
        f"login(token={SECRET})",
        f"password={SECRET}",
    ],
)
def test_a_secret_is_removed(text: str) -> None:
    assert SECRET not in redacted(text)
    assert redacted(redacted(text)) == redacted(text)


@pytest.mark.parametrize("name", ["HF_TOKEN", "MY_API_KEY", "apikey", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD"])
def test_the_value_of_a_variable_named_like_a_key_is_removed(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, SECRET)
    assert redacted(f"it said {SECRET}!") == "it said ***!"


@pytest.mark.parametrize(
    "text",
    [
        "campaign.toml [backend.options].api_key: unknown key; did you mean 'key_env'?",
        "[reward.params].key_env: the variable JUDGE_KEY is not set",
        "max_tokens=1024 temperature=0.7 token=5",
        "https://host/v1?model=a&page=3",
        "KeyError: 'answer'; the bearer is unknown",
        "a@b.c // see docs",
    ],
)
def test_a_text_without_a_secret_stays(text: str) -> None:
    assert redacted(text) == text


@pytest.mark.parametrize(("name", "value"), [("TOKENIZERS_PARALLELISM", "disabled"), ("MY_KEY", "short")])
def test_ordinary_words_in_the_environment_stay(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert redacted(f"{value} words stay") == f"{value} words stay"


def test_a_recorded_error_is_bounded_in_bytes_and_says_where_the_rest_is() -> None:
    error = recorded_error("é" * 10_000)
    assert len(error.encode()) <= LONGEST_ERROR_BYTES
    assert error.endswith("output.log]")
    assert recorded_error("x" * LONGEST_ERROR_BYTES) == "x" * LONGEST_ERROR_BYTES


def test_a_secret_across_the_bound_is_not_cut_but_removed() -> None:
    text = "x" * (LONGEST_ERROR_BYTES - 20) + f" Bearer {SECRET}"
    assert SECRET[:6] not in recorded_error(text)


def test_records_hold_no_secret(tmp_path: Path) -> None:
    leak = f"HTTP 401 from https://host/?api_key={SECRET}"
    with MetricsWriter(tmp_path / "metrics.jsonl", 1) as rows:
        rows.append({"step": 0, "run": "a_s0", "unscored_reason": leak, "loss": 0.5})
    end_attempt(tmp_path / "attempts.jsonl", 1, "failed", message=leak)
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert row["unscored_reason"] == "HTTP 401 from https://host/?api_key=***"
    assert SECRET not in (tmp_path / "attempts.jsonl").read_text()


def test_what_a_covered_process_prints_is_redacted(monkeypatch: pytest.MonkeyPatch) -> None:
    out, errors = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", errors)
    cover_output()
    print(f"Bearer {SECRET}")
    print(f"Bearer {SECRET}", file=sys.stderr)
    assert (out.getvalue(), errors.getvalue()) == ("Bearer ***\n", "Bearer ***\n")
