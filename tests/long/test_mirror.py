"""A copy in a real S3 server, also one in trouble, and a campaign that goes on from it elsewhere."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from retrain.base.errors import EXIT_CONFIG, EXIT_LAUNCH
from retrain.campaign import Observer, mirror
from retrain.campaign.run import reopen, run_campaign, start
from retrain.records.layout import CampaignFiles
from retrain.records.metrics import read_metrics
from retrain.records.mirror import Place, download, read_state
from retrain.records.run_state import read_attempts
from retrain.results.status import survey
from tests.clocks import without_times
from tests.conftest import ONE_RUN
from tests.semaphore_processes import wait_until
from tests.stopping import kill_when

ROOT = Path(__file__).parents[2]
RUNS = ("grpo_s0", "maxrl_s0")
BUCKET = "bucket"
HOP = ("content-length", "transfer-encoding", "connection", "date", "server")  # headers of one connection


class Store:
    """A real S3 server in a process of its own, behind a proxy that may refuse, hold up or cut off."""

    def __init__(self) -> None:
        self.status, self.is_slow = 0, False
        store = self
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self.begin()

        class Proxy(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def forward(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                while store.is_slow:
                    time.sleep(0.05)
                if store.status == 403 or (store.status and self.command == "PUT"):
                    code = {403: "AccessDenied", 507: "InsufficientStorage"}[store.status]
                    content = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
                    self.answer(store.status, {"Content-Type": "application/xml"}, content)
                    return
                try:
                    there = http.client.HTTPConnection("127.0.0.1", store._port)
                    there.request(self.command, self.path, body, dict(self.headers))
                    answer = there.getresponse()
                    self.answer(answer.status, dict(answer.getheaders()), answer.read())
                except OSError:
                    self.close_connection = True  # the server is down

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = forward  # noqa: N815

            def answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    if name.lower() not in (
                        "content-length",
                        "transfer-encoding",
                        "connection",
                        "date",
                        "server",
                    ):
                        self.send_header(name, value)
                size = headers.get("Content-Length") if self.command == "HEAD" else None
                self.send_header("Content-Length", size or str(len(content)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            def log_message(self, *_: object) -> None:
                pass

        self._proxy = ThreadingHTTPServer(("127.0.0.1", 0), Proxy)
        self._proxy.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that was killed
        self.address = f"http://127.0.0.1:{self._proxy.server_port}"
        threading.Thread(target=self._proxy.serve_forever, daemon=True).start()

    def begin(self) -> None:
        """Start the server, with an empty bucket."""
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self._port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(self._answers)
        there = http.client.HTTPConnection("127.0.0.1", self._port)
        there.request("PUT", f"/{BUCKET}")
        assert there.getresponse().status == 200
        there.close()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _answers(self) -> bool:
        assert self._process.poll() is None
        with suppress(OSError), socket.create_connection(("127.0.0.1", self._port)):
            return True
        return False

    def close(self) -> None:
        self.is_slow = False
        self._proxy.shutdown()
        self._proxy.server_close()
        self.kill()


@pytest.fixture(scope="module")
def running() -> Iterator[Store]:
    store = Store()
    yield store
    store.close()


@pytest.fixture
def store(running: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    for name, value in {
        "AWS_ENDPOINT_URL": running.address,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "user",
        "AWS_SECRET_ACCESS_KEY": "secret-of-user",
        "PYTHONPATH": str(ROOT),
    }.items():
        monkeypatch.setenv(name, value)
    yield running
    running.status, running.is_slow = 0, False


@pytest.fixture
def url(store: Store, request: pytest.FixtureRequest) -> str:
    return f"s3://{BUCKET}/{request.node.name}"


class Heard(Observer):
    def __init__(self) -> None:
        self.notices: list[str] = []

    def notice(self, text: str) -> None:
        self.notices.append(text)


def everything(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.suffix != ".lock" and path.name != "mirror.json"
    }


@pytest.mark.timeout(240)
def test_a_campaign_outlives_its_machine(
    campaign_file: Path, here: Path, url: str, retrain: Callable[..., subprocess.CompletedProcess[str]]
) -> None:
    (gate := here / "gate").touch()  # without it, steps take a second
    params = f'reward.params={{gate="{gate}", wait_s=0.1}}'
    settings = [
        "campaign.seeds=[0]",
        "campaign.max_steps=20",
        "reward.reward=tests.plugins.slow_until",
        params,
    ]
    twin = run_campaign(campaign_file, [*settings, "campaign.launcher=inline"]).directory
    gate.unlink()
    for name in ("spot", "desk", "next"):
        (here / name).mkdir()
    flags = [part for each in (*settings, f"logging.mirror={url}") for part in ("--set", each)]
    command = [sys.executable, "-m", "retrain", "run", str(campaign_file), *flags]
    seen: list[dict[str, Any]] = []

    def is_time() -> bool:
        if not any(map(is_copied, (here / "spot").glob("logs/*"))):
            return False
        seen.extend(json.loads(retrain("status", url, "--json", cwd=here / "desk").stdout)["campaigns"])
        refused = retrain("resume", url, cwd=here / "desk")
        assert f"{url}: its campaign runs elsewhere, with process" in refused.stderr
        assert refused.returncode == EXIT_LAUNCH
        return True

    kill_when(is_time, command, here / "spot")
    (lost,) = (here / "spot").glob("logs/*")
    assert (seen[0]["state"], seen[0]["resume_with"]) == ("running", "")
    assert 0 < sum(run["step"] for run in seen[0]["runs"]) < 40
    assert seen[0]["mirror"]["behind_s"] > 0
    assert min(len(read_metrics(lost / "runs" / run)) for run in RUNS) < 20
    shutil.rmtree(here / "spot")
    assert f"continue with: retrain resume {url}" in retrain("status", url, cwd=here / "desk").stdout
    gate.touch()
    resumed = retrain("resume", url, cwd=here / "next")
    assert resumed.returncode == 0, resumed.stderr
    there = here / "next" / "logs" / lost.name
    for run in RUNS:
        rows = [without_times(read_metrics(each / "runs" / run)) for each in (there, twin)]
        assert len(rows[0]) == 20
        assert rows[0] == rows[1]
        assert read_attempts(there / "runs" / run / "attempts.jsonl")[-1].resumed_from_step > 0
    (status,) = survey(there)
    assert status.mirror is not None
    assert (status.mirror.behind_s, status.mirror.url) == (0.0, url)
    assert everything(download(Place(url), here / "desk")[1]) == everything(there)


def is_copied(directory: Path) -> bool:
    state = read_state(CampaignFiles(directory))
    return state is not None and len(state.steps) == 2 and min(state.steps.values()) > 0


@pytest.mark.parametrize(
    ("trouble", "cause"),
    [
        ("full", "InsufficientStorage"),
        ("forbidding", "access is denied"),
        ("slow", "nothing was sent for"),
        ("killed", ""),
    ],
)
def test_a_bucket_in_trouble_holds_no_run_up_and_gets_the_rest_later(
    campaign_file: Path,
    here: Path,
    store: Store,
    url: str,
    trouble: str,
    cause: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url, gate = f"s3://{BUCKET}/{trouble}", here / "gate"
    settings = [*ONE_RUN, "campaign.launcher=inline", f"logging.mirror={url}"]
    settings += ["reward.reward=tests.plugins.held", f'reward.params={{gate="{gate}"}}']
    observer = Heard()
    campaign = start(campaign_file, settings, observer)
    if trouble == "killed":
        store.kill()
    store.status = {"full": 507, "forbidding": 403}.get(trouble, 0)
    store.is_slow = trouble == "slow"

    def is_noticed() -> bool:
        state = read_state(CampaignFiles(campaign.directory))
        return state is not None and bool(state.behind_bytes if trouble == "slow" else state.problem)

    def let_it_run() -> None:
        wait_until(is_noticed)
        gate.touch()

    threading.Thread(target=let_it_run).start()
    with monkeypatch.context() as impatient:
        impatient.setattr(mirror, "REFUSED_S", 1.0)
        impatient.setattr(mirror, "SILENT_S", 1.0)
        assert campaign.execute().exit_code == 0
    (lacks,) = (text for text in observer.notices if "lacks what is newest" in text)
    assert f"`retrain resume logs/{campaign.directory.name}` tries again" in lacks
    assert cause in lacks
    (shown,) = survey(campaign.directory)
    assert shown.mirror is not None
    assert shown.mirror.behind_bytes > 1000
    assert bool(shown.mirror.problem) == (trouble != "slow")
    assert not shown.mirror.problem or cause in shown.mirror.problem
    store.status, store.is_slow = 0, False
    if trouble == "killed":
        store.begin()
    again = Heard()
    assert reopen(campaign.directory, again).execute().exit_code == 0
    assert not [text for text in again.notices if "lacks" in text]
    (healed,) = survey(campaign.directory)
    assert healed.mirror is not None
    assert everything(download(Place(url), here / "there")[1]) == everything(campaign.directory)
    assert (healed.mirror.behind_s, healed.mirror.behind_steps, healed.mirror.problem) == (0.0, 0, "")


@pytest.mark.parametrize(
    ("bucket", "environment", "problem"),
    [
        ("nowhere", {}, "the bucket is not there"),
        (BUCKET, {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": ""}, "no credentials"),
    ],
)
def test_what_does_not_pass_is_told_before_anything_starts(
    campaign_file: Path,
    here: Path,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    bucket: str,
    environment: dict[str, str],
    problem: str,
    retrain: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    address = f"s3://{bucket}/prefix"
    refused = retrain("run", campaign_file, "--set", f"logging.mirror={address}")
    assert f'tiny.toml [logging].mirror: got "{address}": {problem}' in refused.stderr
    assert refused.returncode == EXIT_CONFIG
    assert not (here / "logs").exists()
    for command in ("resume", "status"):
        refused = retrain(command, address)
        assert f"{address}: {problem}" in refused.stderr
        assert refused.returncode == EXIT_CONFIG


def test_the_recipe_for_spot_machines_runs_and_then_resumes(
    campaign_file: Path, here: Path, store: Store, url: str
) -> None:
    page = (ROOT / "docs" / "reliability.md").read_text()
    job = yaml.safe_load(page.partition("```yaml\n")[2].partition("```")[0])
    assert job["envs"].keys() == {"COPY"}
    environment = {**os.environ, "COPY": url, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", "-c", job["run"]]
    text = (
        campaign_file.read_text()
        .replace("[0, 1]", "[0]")
        .replace('[[campaign.conditions]]\nname = "maxrl"', "")
    )
    shown = []
    for machine in ("first", "second"):
        (here / machine).mkdir()
        (here / machine / "campaign.toml").write_text(text)
        done = subprocess.run(
            command, cwd=here / machine, env=environment, capture_output=True, text=True, check=True
        )
        shown.append(done.stderr)
        (directory,) = (here / machine).glob("logs/*")
        shutil.rmtree(here / machine)
    assert f"{url}: holds no copy of a campaign" in shown[0]
    assert f"downloading {url} into logs/{directory.name}" in shown[1]
    store.status = 403
    refused = subprocess.run(command, cwd=here, env=environment, check=False)
    assert refused.returncode == EXIT_CONFIG
    assert not (here / "logs").exists()
