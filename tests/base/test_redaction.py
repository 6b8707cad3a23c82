"""No secret is recorded or shown, whatever form an error quotes it in."""

from __future__ import annotations

import ast
import io
import json
import math
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest

import retrain
from retrain.base.redaction import LONGEST_ERROR_BYTES, cover_output, recorded_error, redacted
from retrain.campaign import Observer
from retrain.campaign.endings import log_tail
from retrain.campaign.rollup import RecordingObserver
from retrain.plugins.rewards import Outcome, Score
from retrain.records.campaign_state import NoticeBook
from retrain.records.layout import RunFiles
from retrain.records.metrics import MetricsWriter
from retrain.records.run_row import last_output
from retrain.records.run_state import end_attempt
from retrain.results.status.one_run import follow
from retrain.trainer.batch import ScoredBatch
from retrain.trainer.signs import UnscoredCount

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
        f"https://host/?my_api_key={SECRET}",
        f"https://host/?subscription-key={SECRET}",
        f"https://host/?next=https%3A%2F%2Fother%3Fapi_key%3D{SECRET}%26page%3D1",
        '{"error": "{\\"api_key\\": \\"' + SECRET + '\\"}"}',
        f"X-Api-Key: {SECRET}",
        f"Ocp-Apim-Subscription-Key: {SECRET}",
        f"[(b'x-api-key', b'{SECRET}')]",
        f"[('Authorization', 'Basic {SECRET}')]",
        f"Authorization: ApiKey {SECRET}",
        f"Set-Cookie: session={SECRET}; Path=/",
        f"{{'OTHER_API_KEY': '{SECRET}', 'OTHER_TOKEN': '{SECRET}'}}",
        f"OTHER_TOKEN={SECRET}",
        f"Command '['curl', '--api-key', '{SECRET}', '--token={SECRET}']' failed",
        f"curl --access-token {SECRET} failed",
        f"Incorrect API key provided: sk-{SECRET}",
        f"client_secret='{SECRET}'",
        f"api_key: '{SECRET}'",
        f"PRIVATE-TOKEN: {SECRET}",
        f"https://host/?api%5Fkey={SECRET}",
        f"refused Bearer: {SECRET}",
        f"wrong github_pat_{SECRET}",
        f"wrong glpat-{SECRET}",
        f"wrong AIza{SECRET}",
        f"wrong eyJhbGciOiJI.{SECRET}.{SECRET}",
    ],
)
def test_a_secret_is_removed(text: str) -> None:
    assert SECRET not in redacted(text)
    assert redacted(redacted(text)) == redacted(text)


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "MY_API_KEY",
        "apikey",
        "AWS_SECRET_ACCESS_KEY",
        "DB_PASSWORD",
        "PGPASSWORD",
        "DB_PASS",
        "GITHUB_PAT",
        "MYSQL_PWD",
        "OPENAI_API_KEYS",
    ],
)
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
        "Tokenizer(eos_token='<|im_end|>', pad_token='<|endoftext|>')",
        "logs/secret: no such file; signature: wrong; api_key: must be a string",
        '{"url":"http://a","mail":"x@y"}',
        "unknown columns 'key', 'value_column'",
        "the author of monkey-patched author_key",
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


def test_a_key_is_removed_that_was_replaced_or_taken_out_of_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MY_API_KEY", SECRET)
    assert redacted(SECRET) == "***"
    monkeypatch.setenv("MY_API_KEY", SECRET[::-1])
    assert redacted(SECRET[::-1]) == "***"
    monkeypatch.delenv("MY_API_KEY")
    assert redacted(f"{SECRET} {SECRET[::-1]}") == "*** ***"


@pytest.mark.parametrize(
    "value", ["/ab+cd/efgh12==", "first-key-1234,second-key-1234", "line-one-1\nline-two-2"]
)
def test_a_key_is_removed_in_all_forms_that_errors_quote(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEYS", value)
    for part in (value, quote(value, safe=""), *re.split("[,\n]", value)):
        assert redacted(f"it said {part}!") == "it said ***!"


def test_a_path_to_a_file_of_keys_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = tmp_path / "keys.json"
    keys.write_text("{}")
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(keys))
    monkeypatch.setenv("SSL_KEY_FILE", "/missing/key.pem")
    assert (
        redacted(f"{keys}: no such file, nor /missing/key.pem")
        == f"{keys}: no such file, nor /missing/key.pem"
    )


def test_a_recorded_error_is_bounded_in_bytes_and_says_where_the_rest_is() -> None:
    error = recorded_error("é" * 10_000)
    assert len(error.encode()) <= LONGEST_ERROR_BYTES
    assert error.endswith("output.log]")
    assert recorded_error("x" * LONGEST_ERROR_BYTES) == "x" * LONGEST_ERROR_BYTES


def test_a_secret_across_the_bound_is_not_cut_but_removed() -> None:
    text = "x" * (LONGEST_ERROR_BYTES - 20) + f" Bearer {SECRET}"
    assert SECRET[:6] not in recorded_error(text)


def pem(kind: str = "", lines: int = 20) -> str:
    """Return a private key in PEM, of so many lines; each has the same letters, so that any rest is found."""
    body = "".join("MIIEvQ" + "s3cr3t+/" * 7 + f"{line:02}\n" for line in range(lines))
    return f"-----BEGIN {kind}PRIVATE KEY-----\n{body}s3cr3tQ=\n-----END {kind}PRIVATE KEY-----\n"


@pytest.mark.parametrize(
    ("key", "rest"),
    [
        (f"a {pem()} b", "-----END PRIVATE KEY-----\n b"),
        (f"a {pem('RSA ')} b", "-----END RSA PRIVATE KEY-----\n b"),
        (f"a {pem('ENCRYPTED ') + pem('EC ')} b", "-----END EC PRIVATE KEY-----\n b"),
        (repr(f"a {pem('OPENSSH ')} b"), "b'"),
        (json.dumps({"key": json.dumps(pem())}), '"}'),
        (repr(pem().splitlines()), "]"),
        (pem().replace("\n", "\n  > ") + " b", " b"),
        (pem().replace("KEY-----\nM", "KEY-----\nProc-Type: 4,ENCRYPTED\nDEK-Info: AES,0F\n\nM", 1), ""),
        (pem()[:700] + " [truncated]", " [truncated]"),
        (pem()[:70], ""),
        (pem()[100:] + " b", " b"),
    ],
)
def test_a_private_key_is_removed_also_where_it_is_quoted_or_cut(key: str, rest: str) -> None:
    shown = redacted(key)
    assert "s3cr3t" not in shown
    assert shown.endswith(rest)
    assert redacted(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "no line '-----BEGIN PRIVATE KEY-----' in key.pem: is it a certificate? Convert it by openssl",
        "expected -----BEGIN PRIVATE KEY----- or -----BEGIN RSA PRIVATE KEY-----, got other bytes",
        "missing -----END PRIVATE KEY----- at the end",
    ],
)
def test_words_about_a_private_key_stay(text: str) -> None:
    assert redacted(text) == text


def test_a_private_key_across_the_bound_of_an_error_is_removed() -> None:
    for before in range(LONGEST_ERROR_BYTES - 1500, LONGEST_ERROR_BYTES, 100):
        assert "s3cr3t" not in recorded_error("x " * (before // 2) + pem())
    assert "s3cr3t" not in recorded_error(pem(lines=100))


def test_a_private_key_printed_line_by_line_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    cover_output()
    for line in ("before", *pem().splitlines(), "after"):
        print(line)
    begin, end = "-----BEGIN PRIVATE KEY-----", "-----END PRIVATE KEY-----"
    assert out.getvalue() == f"before\n{begin}***\n{end}\nafter\n"
    print(begin, "is missing")
    assert out.getvalue().endswith(f"after\n{begin} is missing\n")


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
    print("Bearer", SECRET)  # in three parts
    sys.stderr.write("Bearer ")
    sys.stderr.write(SECRET)
    sys.stderr.flush()
    assert (out.getvalue(), errors.getvalue()) == ("Bearer ***\n" * 2, "Bearer ***\nBearer ***")


def test_the_reason_that_a_checkpoint_keeps_holds_no_secret() -> None:
    count = UnscoredCount()
    score = Score(None, Outcome.ERROR, "x" * 190 + f" Bearer {SECRET}")  # cut to 200 characters afterwards
    count.add(ScoredBatch((), np.array([[math.nan]]), errors=1, marked={0: score}))
    assert SECRET[:4] not in count.counts.reason
    assert SECRET[:4] not in count.counts.last_outage


def test_lines_that_no_python_wrote_are_redacted_when_they_are_shown(tmp_path: Path) -> None:
    files = RunFiles(tmp_path)
    files.output_log.write_text(f"curl: Bearer {SECRET}\n")
    assert last_output(files, 1) == ["curl: Bearer ***"]
    assert list(follow(files.output_log, 10, lambda: True)) == ["curl: Bearer ***"]
    assert log_tail(files) == ["curl: Bearer ***"]


def test_no_notice_holds_a_secret(tmp_path: Path) -> None:
    texts: list[str] = []

    class Heard(Observer):
        def notice(self, text: str) -> None:
            texts.append(text)

    observer = RecordingObserver(Heard(), None, NoticeBook(tmp_path / "notices.jsonl"), None)  # type: ignore[arg-type]
    observer.notice(f"sbatch: https://host/?api_key={SECRET}")
    assert texts == ["sbatch: https://host/?api_key=***"]
    assert SECRET not in (tmp_path / "notices.jsonl").read_text()


def test_no_message_of_ours_is_taken_for_a_secret() -> None:
    changed = {
        text
        for path in Path(retrain.__file__).parent.rglob("*.py")
        if path.name != "redaction.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant | ast.JoinedStr)
        for text in [literal_of(node)]
        if "//" not in text and redacted(text) != text
    }
    assert changed == set()


def literal_of(node: ast.Constant | ast.JoinedStr) -> str:
    """Return a text in the source, with a word for each of its values."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "x1" for part in node.values)


FORKING = """
import os, sys, threading
from retrain.base.redaction import cover_output
cover_output()
printing = threading.Thread(target=sys.stdout._lock.acquire)
printing.start()
printing.join()  # it holds the lock for good
if not os.fork():
    print("from the child", flush=True)
    os._exit(0)
os.wait()
os._exit(0)
"""


def test_a_forked_child_prints_while_another_thread_did() -> None:
    forked = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, timeout=60)
    assert forked.stdout == "from the child\n"
