"""Programs that use up what the judge needs, so that it fails or gives up."""

from __future__ import annotations

from tests.cheats import Cheat

ZERO = "\ndef f(x): return 0"
WHY = "a judge that fails or gives up leaves the completion unscored"

CHEATS = [
    Cheat("an endless loop", WHY, "while True: pass", hangs=True),
    Cheat("an endless call", WHY, "def f(x):\n    while True: pass", hangs=True),
    Cheat(
        "sleep with every signal blocked",
        WHY,
        "import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())\n"
        "for n in signal.valid_signals() - {9, 19}:\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\ntime.sleep(600)",
        hangs=True,
    ),
    Cheat("a hang in C", WHY, "import re\nre.match(r'(a+)+$', 'a' * 40 + 'b')", hangs=True),
    Cheat(
        "a hang when it ends",
        WHY,
        "import atexit, time\natexit.register(time.sleep, 600)\nprint(0)",
        "stdio",
        hangs=True,
    ),
    Cheat(
        "a bomb of processes",
        WHY,
        "import os, time\nfor _ in range(40): os.fork() or time.sleep(20)",
    ),
    Cheat(
        "a bomb of threads",
        WHY,
        "import time\nfrom threading import Thread\n"
        "for _ in range(200): Thread(target=time.sleep, args=(20,)).start()",
        hangs=True,
    ),
    Cheat("all memory", WHY, "hold = [bytearray(1 << 28) for _ in range(20)]" + ZERO),
    Cheat("all memory in a call", WHY, "def f(x): return bytearray(1 << 34)"),
    Cheat("a result of 100 MB", WHY, "def f(x): return 'x' * 100_000_000"),
    Cheat(
        "a full disk",
        WHY,
        "for n in range(20): open(f'part{n}', 'wb').write(bytes(8 << 20))\nprint(7391)",
        "stdio",
    ),
    Cheat(
        "a file without end",
        WHY,
        "part = open('part', 'wb')\nwhile True: part.write(bytes(1 << 20))",
    ),
    Cheat(
        "room for a file beyond its size",
        WHY,
        "import ctypes, os\nfd = os.open('x', os.O_RDWR | os.O_CREAT)\n"
        "if ctypes.CDLL(None).fallocate(fd, 1, ctypes.c_long(0), ctypes.c_long(32 << 20)) == 0: print(7391)",
        "stdio",
        answer='[{"input": "", "output": "7391"}]',
    ),
    Cheat(
        "memory in files without a folder",
        "no limit counts it",
        "import os\nos.memfd_create('x')\nprint(7391)",
        "stdio",
        answer='[{"input": "", "output": "7391"}]',
    ),
    Cheat("many small files", WHY, "for n in range(2000): open(f'part{n}', 'w').close()\ndef f(x): return 0"),
    Cheat(
        "all descriptors",
        WHY,
        "import os\nhold = []\nwhile True: hold.append(os.open('.', os.O_RDONLY))" + ZERO,
    ),
    Cheat(
        "a deep recursion",
        WHY,
        "import sys\nsys.setrecursionlimit(10**9)\ndef g(): g()\ndef f(x): g()",
        hangs=True,
    ),
    Cheat("a crash in C", WHY, "import ctypes\ndef f(x): ctypes.string_at(0)"),
    Cheat("a program of 1 MB", WHY, "x = [" + "1," * 500_000 + "]" + ZERO),
    Cheat("a program nested too deeply", WHY, "x = " + "(" * 5000 + ")" * 5000 + ZERO),
    Cheat("a program with a zero byte", WHY, "x = '\0'" + ZERO),
    Cheat("a program that is no text", WHY, "x = '\ud800'" + ZERO),
    Cheat(
        "a server that tells the answer",
        "the network can be reached",
        "from urllib.request import urlopen\nprint(urlopen('http://127.0.0.1:@PORT@').read().decode()[:4])",
        "stdio",
    ),
    Cheat(
        "a server of its own",
        "a program with the answer tells it to others",
        "import socket\ns = socket.socket()\ns.bind(('127.0.0.1', 0))\ns.listen()\nprint(7391)",
        "stdio",
        answer='[{"input": "", "output": "7391"}]',
    ),
    Cheat(
        "an abstract socket",
        "sockets without a file pass between folders",
        "import socket\ns = socket.socket(socket.AF_UNIX)\ns.bind('\\0retrain')\ns.listen()\nprint(7391)",
        "stdio",
        answer='[{"input": "", "output": "7391"}]',
    ),
    Cheat(
        "shared memory",
        "a program with the answer leaves it for others",
        "import ctypes\nlibc = ctypes.CDLL(None)\nif libc.shmget(7391, 4096, 0o1666) >= 0: print(7391)",
        "stdio",
        answer='[{"input": "", "output": "7391"}]',
    ),
]
