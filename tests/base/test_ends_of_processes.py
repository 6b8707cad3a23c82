"""How processes of ours end, and what is told of it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from retrain.backends.engines.shared_server import ServerFiles
from retrain.base.line_process import how_ended


@pytest.mark.parametrize(
    ("code", "how"),
    [(-signal.SIGKILL, "by SIGKILL"), (-63, "by signal 63"), (3, "with exit code 3")],  # 63 has no name
)
def test_an_ending_names_its_signal_if_that_has_a_name(code, how):
    assert how_ended(code) == how


def test_the_last_lines_of_a_huge_log_are_read_without_the_rest(tmp_path):
    files = ServerFiles(tmp_path)
    with files.log.open("wb") as log:
        log.truncate(1 << 40)  # sparse: no disk has it
        log.seek(0, os.SEEK_END)
        log.write(b"\nloading\n\nout of memory\r\n")
    assert files.last_lines().splitlines()[-2:] == ["loading", "out of memory"]


def test_the_server_that_tests_start_closes_its_socket(tmp_path):
    life, ours = os.pipe()
    os.close(ours)  # whoever started it has ended
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        passed = (listener.fileno(), life)
        command = [sys.executable, "-X", "dev", "-m", "tests.warm", *map(str, passed)]
        root = Path(__file__).parents[2]
        ended = subprocess.run(command, cwd=root, pass_fds=passed, capture_output=True, text=True)
    os.close(life)
    assert (ended.returncode, ended.stderr) == (0, "")
