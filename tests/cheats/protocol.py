"""Programs that speak to the tests themselves, in frames that no honest program sends."""

from __future__ import annotations

from tests.cheats import Cheat

SPEAKS = """
import json, os, socket, struct
def send(message):
    text = json.dumps(message).encode()
    left = struct.pack(">I", len(text)) + text
    while left: left = left[os.write(ends[-1], left):]
def exactly(count):
    found = b""
    while len(found) < count: found += os.read(ends[0], count - len(found)) or os._exit(0)
    return found
ends = []
for fd in range(3, 64):
    try:
        socket.socket(fileno=os.dup(fd)).getsockname()
        ends.append(fd)
    except OSError: pass
while True:
    kind, _, *rest = json.loads(exactly(*struct.unpack(">I", exactly(4))))
    if kind == "name":
        send(["=", "", [["h", 1, "object"]] if rest[0] == "f" else []])
    else:
"""
ARRAY = "['k', 'numpy.array', ['t', [{data}, {kind}]]]"
RECORDS = ARRAY.format(data="['t', [33344]]", kind="['l', [['t', ['total', 'f2']]]]")


def answers(value: str) -> str:
    """Return a program whose function `f` returns what a message stands for."""
    return f"{SPEAKS}        send(['=', '', *([{value}, None] if kind == 'call' else [None])])"


CHEATS = [
    Cheat(
        "a record of few bits",
        "its field is an array that is equal to several numbers",
        answers(RECORDS),
        answer="assert f(2)['total'] == 33333",
        hangs=True,  # where a message that speaks for the judge is waited for
    ),
    Cheat(
        "a number of 64 bits that is an array",
        "an array rounds what it is compared with",
        "import numpy as np\ndef f(x): return np.array(1e18)",
        answer="assert f(2) == 10**18 + 1",
    ),
    Cheat(
        "a number of 8 bits that is an array",
        "differences wrap around, and so does their absolute value",
        "import numpy as np\ndef f(x): return np.array(-100, 'int8')",
        answer="assert abs(f(2) - 28) < 1e-6",
    ),
]
