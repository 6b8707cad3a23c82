import json
import os
import resource
import signal
import stat
import subprocess
import sys

import pytest

from retrain.base.errors import RecordsError
from retrain.records.files import read_json, remove_leftovers, write_atomic, write_json


def test_written_json_is_read_back(tmp_path):
    write_json(tmp_path / "a.json", {"x": [1, 2.5, "three"]})
    assert read_json(tmp_path / "a.json") == {"x": [1, 2.5, "three"]}


def test_a_missing_file_reads_as_none(tmp_path):
    assert read_json(tmp_path / "a.json") is None


def test_files_are_for_their_owner_only(tmp_path):
    write_atomic(tmp_path / "a", "text")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600


@pytest.mark.parametrize("content", [b"", b'{"torn": ', b"[1, 2]", b"\0" * 50, b"\xff\xfe", b"[" * 100_000])
def test_a_corrupt_file_is_named_with_a_fix(tmp_path, content):
    path = tmp_path / "a.json"
    path.write_bytes(content)
    with pytest.raises(RecordsError, match=r"a\.json: .*; (restore|move)"):
        read_json(path)


def test_a_planted_symlink_is_refused_and_its_target_untouched(tmp_path):
    target = tmp_path / "precious"
    target.write_text("mine")
    (tmp_path / "a.json").symlink_to(target)
    with pytest.raises(RecordsError, match="symbolic link"):
        write_json(tmp_path / "a.json", {})
    assert target.read_text() == "mine"


def test_a_planted_fifo_does_not_block_a_reader(tmp_path):
    os.mkfifo(tmp_path / "a.json")
    with pytest.raises(RecordsError, match="not a regular file"):
        read_json(tmp_path / "a.json")


def test_infinity_is_refused_and_the_old_content_stays(tmp_path):
    write_json(tmp_path / "a.json", {"x": 1})
    with pytest.raises(ValueError, match="JSON"):
        write_json(tmp_path / "a.json", {"x": float("inf")})
    assert read_json(tmp_path / "a.json") == {"x": 1}


def test_a_disk_that_refuses_keeps_the_old_content_and_leaves_no_litter(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"x": 1})
    program = "import sys, pathlib; from retrain.records.files import write_atomic\n"
    program += "write_atomic(pathlib.Path(sys.argv[1]), 'y' * 100_000)"
    ended = subprocess.run(
        [sys.executable, "-B", "-c", program, str(path)],  # byte code would be cut off too
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
        capture_output=True,
        text=True,
    )
    assert "cannot write (File too large)" in ended.stderr
    assert list(tmp_path.iterdir()) == [path]
    assert read_json(path) == {"x": 1}


def test_readers_beside_a_killed_writer_never_see_half_a_file(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"n": 0, "filler": "x" * 50_000})
    program = """
import sys, pathlib
from retrain.records.files import write_json
n = 0
while True:
    n += 1
    write_json(pathlib.Path(sys.argv[1]), {"n": n, "filler": "x" * 50_000}, durable=False)
    print(n, flush=True)
"""
    for _ in range(3):
        with subprocess.Popen([sys.executable, "-c", program, str(path)], stdout=subprocess.PIPE) as writer:
            writer.stdout.readline()
            for _ in range(200):
                assert len(json.loads(path.read_bytes())["filler"]) == 50_000
            writer.send_signal(signal.SIGKILL)
        assert len(read_json(path)["filler"]) == 50_000
    remove_leftovers(tmp_path)
    assert list(tmp_path.iterdir()) == [path]
