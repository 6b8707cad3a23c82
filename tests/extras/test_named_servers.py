"""The servers that a file names for its rewards are known, and asked before anything starts."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from retrain.config.load import parse
from retrain.plan.preflight import runs_programs, servers_of
from tests.cli.test_doctor import JUDGE, NO_KEYS, Call, checks
from tests.trainer.test_evals import with_evals


def test_doctor_asks_the_servers_that_a_file_names(retrain: Call, here: Path) -> None:
    (here / "judged.toml").write_text(JUDGE)
    silent = retrain("doctor", "judged.toml", "--json", env={**NO_KEYS, "JUDGE_KEY": "key"})
    found = checks(silent)["server http://127.0.0.1:9/v1"]
    assert (silent.returncode, found["state"]) == (2, "missing")
    assert "[reward.params.parts.judge.params].base_url" in found["fix"]
    with ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:  # answers 501
        Thread(target=server.serve_forever, daemon=True).start()
        port = server.server_address[1]
        (here / "judged.toml").write_text(JUDGE.replace(":9/", f":{port}/"))
        answering = retrain("doctor", "judged.toml", "--json", env={**NO_KEYS, "JUDGE_KEY": "key"})
        server.shutdown()
    assert checks(answering)[f"server http://127.0.0.1:{port}/v1"]["state"] == "ok"
    assert answering.returncode == 0


def test_runs_whose_server_is_silent_are_not_launched(retrain: Call, here: Path) -> None:
    (here / "judged.toml").write_text(JUDGE)
    answer = retrain("run", "judged.toml", env={**NO_KEYS, "JUDGE_KEY": "key"})
    assert answer.returncode == 3
    assert "judged.toml [reward.params.parts.judge.params].base_url: no answer from" in answer.stderr
    assert not (here / "logs").exists()


def test_servers_and_sandboxes_of_evaluations_are_known() -> None:
    where = {"base_url": "http://127.0.0.1:9", "model": "m", "key_env": ""}
    judged = {"name": "j", "reward": "judge", "params": where}
    config = parse(with_evals(judged, {"name": "p", "reward": "python"}), "c.toml")
    assert [server.key for server in servers_of([config])] == ['[[eval]] "j" [params].base_url']
    assert runs_programs(config)
