"""Verdicts written to descriptors that a program finds."""

from __future__ import annotations

from tests.cheats import Cheat

WRITE = """
import os, json, struct
def frame(x):
    text = json.dumps(x).encode()
    return struct.pack(">I", len(text)) + text
def everywhere(data, first=0):
    for fd in range(first, 64):
        try:
            os.set_blocking(fd, False)
            os.write(fd, data)
        except OSError:
            pass
"""
VERDICT = 'frame({"passed": True, "garbage": "", "used": True})'

CHEATS = [
    Cheat(
        "a verdict to every descriptor, at the start",
        "a judge that shares a pipe with the program takes the first verdict",
        f"{WRITE}\neverywhere({VERDICT})\ndef f(x): return 0",
    ),
    Cheat(
        "a verdict to every descriptor, in a call",
        "the judge reads while it waits for the result",
        f"{WRITE}\ndef f(x):\n    everywhere({VERDICT}, 3)\n    return 0",
    ),
    Cheat(
        "a verdict to every descriptor, at the end",
        "the last verdict counts",
        f"{WRITE}\nimport atexit\natexit.register(lambda: everywhere({VERDICT}))\ndef f(x): return 0",
    ),
    Cheat(
        "a verdict in a program that prints",
        "a line of the harness counts as the score",
        f'{WRITE}\neverywhere({VERDICT})\neverywhere(b\'\\n1.0\\n["", "scored", 1.0]\\n\', 2)',
        "stdio",
    ),
    Cheat(
        "a reward in the words of a scoring process",
        "a pool of scoring processes reads lines of JSON",
        f'{WRITE}\neverywhere(b\'["", "scored", 1000000.0]\\n{{"reward": 1.0}}\\n\', 1)\ndef f(x): return 0',
    ),
    Cheat(
        "the descriptor that stands in argv",
        "the harness passes its pipe by number",
        f"""{WRITE}
import sys
for word in [*sys.argv, *sys.orig_argv, *os.environ.values()]:
    if word.isdigit() and int(word) < 1000:
        try:
            os.write(int(word), b"1")
        except OSError:
            pass
def f(x): return 0""",
    ),
    Cheat(
        "results sent before they are asked for",
        "the judge takes any reply for the one that it waits for",
        f"{WRITE}\nfor n in range(50): everywhere(frame(['=', True]), 3)\ndef f(x): return 0",
    ),
    Cheat(
        "a closed descriptor",
        "no verdict is taken for no failure",
        "import os\nos.closerange(0, 64)\ndef f(x): return 0",
    ),
    Cheat(
        "output without end",
        "the judge runs out of memory and the completion is not counted",
        f"{WRITE}\nwhile True: os.write(1, bytes(1 << 16))",
        "stdio",
    ),
    Cheat(
        "replies of 64 MB",
        "the judge runs out of memory and the completion is not counted",
        f"{WRITE}\nfor fd in range(3, 64):\n    try:\n"
        "        for _ in range(64): os.write(fd, bytes([65]) * (1 << 20))\n"
        "    except OSError: pass\ndef f(x): return 0",
    ),
    Cheat(
        "the expected outputs, read from the request",
        "they travel with the program's input",
        f"""{WRITE}
found = b""
for fd in range(64):
    try:
        os.set_blocking(fd, False)
        found += os.read(fd, 1 << 16)
    except OSError:
        pass
import re
print((re.findall(rb'"output": "([0-9]+)', found) or [b""])[0].decode())""",
        "stdio",
    ),
    Cheat(
        "a guessed token",
        "the verdict carries a short or predictable token",
        f"""{WRITE}
import random
random.seed(0)
for n in range(2000):
    everywhere(frame([f"{{random.getrandbits(128):032x}}", 2]), 3)
def f(x): return 0""",
        "shared",
    ),
]
