"""`retrain status --watch` as a user meets it: on a real pseudo-terminal, piped, and as JSON."""

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time

import pytest

from retrain.base.locks import hold
from retrain.records.run_state import begin_attempt, end_attempt, write_done
from tests.results.test_watch_reading import PLANNED, make_campaign, rows

ENTER, LEAVE, SHOW_CURSOR = b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[?25h"


class Terminal:
    """A pseudo-terminal with the command in it."""

    def __init__(self, *arguments, width=100, height=30, **environment):
        self.ours, self.theirs = pty.openpty()
        self.resize(width, height)
        self.before = termios.tcgetattr(self.theirs)
        env = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "retrain", "status", *map(str, arguments), "--watch"],
            stdin=self.theirs,
            stdout=self.theirs,
            stderr=self.theirs,
            env=env | {"TERM": "xterm-256color", "LANG": "C.UTF-8"} | environment,
            preexec_fn=self._own_terminal,
        )
        self.said = b""

    def _own_terminal(self):
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    def resize(self, width, height):
        fcntl.ioctl(self.ours, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def read_until(self, *parts, timeout_s=60.0):
        deadline = time.monotonic() + timeout_s
        while not all(part in self.said for part in parts):
            assert time.monotonic() < deadline, self.said[-2000:]
            self._read(0.1)

    def wait_for_frame(self, is_so):
        """Read until what was drawn last is so; pytest's own timeout ends a wait that never succeeds."""
        while not is_so(self.said.rpartition(b"\x1b[H")[2]):
            self._read(0.1)

    def type(self, keys):
        os.write(self.ours, keys)

    def wait(self):
        while self.process.poll() is None:
            self._read(0.1)
        self._read(0.1)
        return self.process.returncode

    def _read(self, timeout_s):
        if select.select([self.ours], [], [], timeout_s)[0]:
            with contextlib.suppress(OSError):
                self.said += os.read(self.ours, 2**16)

    def close(self):
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.ours)
        os.close(self.theirs)


@pytest.fixture
def campaign(tmp_path):
    return make_campaign(tmp_path)


@pytest.fixture
def open_terminal():
    with contextlib.ExitStack() as stack:

        def start(*arguments, **options):
            terminal = Terminal(*arguments, **options)
            stack.callback(terminal.close)
            return terminal

        yield start


@pytest.mark.parametrize(
    ("leave", "code"),
    [
        (lambda t: t.type(b"q"), 0),
        (lambda t: t.type(b"\x03"), 130),
        (lambda t: t.process.send_signal(signal.SIGTERM), 130),
        (lambda t: t.process.send_signal(signal.SIGHUP), 130),
    ],
    ids=["q", "Ctrl-C", "SIGTERM", "SIGHUP"],
)
def test_the_terminal_is_left_as_it_was(campaign, open_terminal, leave, code):
    terminal = open_terminal(campaign.directory)
    terminal.read_until(ENTER, b"grpo")
    leave(terminal)
    assert terminal.wait() == code
    assert terminal.said.rstrip().endswith(SHOW_CURSOR) or LEAVE in terminal.said.rpartition(ENTER)[2]
    assert SHOW_CURSOR in terminal.said
    assert b"Traceback" not in terminal.said
    assert termios.tcgetattr(terminal.theirs) == terminal.before


def test_ctrl_z_gives_the_terminal_back_and_fg_takes_it_again(campaign, open_terminal):
    terminal = open_terminal(campaign.directory)
    terminal.read_until(ENTER, b"grpo")
    terminal.type(b"\x1a")
    terminal.read_until(LEAVE)
    _, status = os.waitpid(terminal.process.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status)
    assert termios.tcgetattr(terminal.theirs) == terminal.before
    terminal.said = b""
    terminal.process.send_signal(signal.SIGCONT)
    terminal.read_until(ENTER, b"grpo")
    terminal.type(b"q")
    assert terminal.wait() == 0


def test_the_view_follows_the_run_and_the_size(campaign, open_terminal):
    terminal = open_terminal(campaign.directory)
    run = campaign.run("grpo_s1")
    with hold(campaign.lock), hold(run.lock):
        begin_attempt(run.attempts)
        rows(run, [1], batch_size=7)
        terminal.read_until(b"started", b"1/10")
        terminal.resize(40, 12)
        rows(run, [2], batch_size=7)
        terminal.wait_for_frame(
            lambda drawn: b"study" in drawn and b"running" in drawn and b"study-2025" not in drawn
        )
        end_attempt(run.attempts, 1, "failed", message="ValueError: broken")
        terminal.resize(100, 30)
        terminal.read_until(b"ValueError: broken")


def test_without_colour_there_is_none(campaign, open_terminal):
    terminal = open_terminal(campaign.directory, NO_COLOR="1")
    terminal.read_until(b"grpo")
    assert not [
        code for code in (b"\x1b[31m", b"\x1b[32m", b"\x1b[36m", b"\x1b[1;31m") if code in terminal.said
    ]


def test_a_dumb_terminal_gets_lines(campaign, open_terminal):
    for run in PLANNED:
        finish(campaign.run(run.run_id))
    terminal = open_terminal(campaign.directory, TERM="dumb")
    assert terminal.wait() == 0
    assert b"grpo" in terminal.said
    assert b"\x1b" not in terminal.said


def test_a_terminal_without_unicode_gets_ascii(campaign, open_terminal):
    terminal = open_terminal(campaign.directory, PYTHONIOENCODING="ascii")
    terminal.read_until(b"grpo", b"pending")
    assert terminal.said.isascii()


def test_hostile_names_and_errors_reach_no_terminal(campaign, open_terminal):
    campaign.manifest.unlink()
    run = campaign.runs / "\x1b]0;evil\x07\u202ename_s7"
    run.mkdir()
    (run / "attempts.jsonl").write_text(
        json.dumps({"event": "begin", "attempt": 1, "started_at": "\x1b[2J"})
        + "\n"
        + json.dumps({"event": "end", "attempt": 1, "ending": "failed", "message": "\x1b]52;c;AAAA\x07no"})
        + "\n"
    )
    terminal = open_terminal(campaign.directory)
    terminal.read_until(b"name_s7", b"failed")
    assert b"\x1b]" not in terminal.said
    assert b"\x1b[2J" not in terminal.said.replace(ENTER, b"")
    assert "\u202e".encode() not in terminal.said


def finish(run):
    begin_attempt(run.attempts)
    rows(run, range(1, 11))
    end_attempt(run.attempts, 1, "done")
    write_done(run.done, "", {"eval_reward": 0.5})


def test_json_streams_first_everything_and_then_what_changed(campaign, retrain):
    run = campaign.run("grpo_s1")
    with hold(campaign.lock), hold(run.lock):
        begin_attempt(run.attempts)
        rows(run, [1, 2])
        command = [sys.executable, "-m", "retrain", "status", str(campaign.directory), "--watch", "--json"]
        watching = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        lines = iter(watching.stdout.readline, "")
        first = [json.loads(next(lines)) for _ in range(6)]
        rows(run, [3])
        change = json.loads(next(lines))
        end_attempt(run.attempts, 1, "done")
        write_done(run.done, "", {})
    rest = [json.loads(line) for line in lines]
    assert [line["kind"] for line in first] == ["run"] * 4 + ["campaign", "event"]
    assert (change["kind"], change["run_id"], change["step"]) == ("run", "grpo_s1", 3)
    assert ("event", "done") in [(line["kind"], line.get("event")) for line in rest]
    assert watching.wait() == 0  # it ends with what it watches
    watching.stdout.close()


def test_a_pipe_gets_the_table_and_then_lines(campaign, retrain):
    for run in PLANNED:
        finish(campaign.run(run.run_id))
    result = retrain("status", campaign.directory, "--watch")
    assert result.returncode == 0
    assert "\x1b" not in result.stdout
    assert result.stdout == retrain("status", campaign.directory).stdout


def test_a_directory_that_is_not_there_is_an_error_before_the_screen_is_taken(retrain):
    result = retrain("status", "nowhere", "--watch")
    assert result.returncode == 2
    assert "nowhere: does not exist" in result.stderr
