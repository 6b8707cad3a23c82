"""Other processes: read, written to, ended, or left behind."""

from __future__ import annotations

from tests.cheats import Cheat
from tests.cheats.descriptors import VERDICT, WRITE

ZERO = "\ndef f(x): return 0"
SCAN = """
import os, re, ctypes
libc = ctypes.CDLL(None, use_errno=True)
def relatives():
    yield os.getppid()
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if name.isdigit() and int(name) != os.getpid(): yield int(name)
def show(found):
    if found:
        print(found[0])
        raise SystemExit
"""

CHEATS = [
    Cheat(
        "memory of the judge, by /proc",
        "the expected outputs are in the judge's memory",
        SCAN
        + r"""
for pid in relatives():
    try:
        with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", 0) as memory:
            for line in maps:
                span, rights = line.split()[:2]
                start, end = (int(x, 16) for x in span.split("-"))
                if "rw" in rights and end - start < 1 << 24:
                    memory.seek(start)
                    text = memory.read(end - start)
                    show([m.decode() for m in re.findall(rb'"output": "([0-9]{4})', text)])
    except (OSError, ValueError):
        pass
""",
        "stdio",
    ),
    Cheat(
        "memory of the judge, by process_vm_readv",
        "the expected outputs are in the judge's memory",
        SCAN
        + """
class Span(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("size", ctypes.c_size_t)]
room = ctypes.create_string_buffer(1 << 16)
here, there = Span(ctypes.addressof(room), 1 << 16), Span(id(0), 1 << 16)
if libc.process_vm_readv(os.getppid(), ctypes.byref(here), 1, ctypes.byref(there), 1, 0) > 0: print(7391)
""",
        "stdio",
    ),
    Cheat(
        "ptrace of the parent",
        "a tracer writes into the memory of the judge",
        SCAN + "\nif libc.ptrace(16, os.getppid(), 0, 0) == 0: print(7391)",
        "stdio",
    ),
    Cheat(
        "the judge's descriptors, by /proc",
        "the judge reads its own pipe",
        WRITE
        + f"""
def f(x):
    for pid in (os.getppid(), *(n for n in os.listdir("/proc") if n.isdigit() and n != str(os.getpid()))):
        try:
            for fd in os.listdir(f"/proc/{{pid}}/fd"):
                target = os.readlink(f"/proc/{{pid}}/fd/{{fd}}")
                if target.startswith("pipe:"):
                    handle = os.open(f"/proc/{{pid}}/fd/{{fd}}", os.O_WRONLY | os.O_NONBLOCK)
                    os.write(handle, {VERDICT})
        except OSError:
            pass
    return 0
""",
    ),
    Cheat(
        "the judge's descriptors, by pidfd_getfd",
        "the judge reads its own pipe",
        WRITE
        + f"""
import ctypes
libc = ctypes.CDLL(None)
def f(x):
    own = libc.syscall(434, os.getppid(), 0)
    for fd in range(64):
        if (taken := libc.syscall(438, own, fd, 0)) >= 0: os.write(taken, {VERDICT})
    return 0
""",
    ),
    Cheat(
        "its environment",
        "keys and answers are in the environment",
        "import os, re\nprint((re.findall('[0-9]{4}', os.environ.get('EXPECTED', '')) or [''])[0])",
        "stdio",
    ),
    Cheat(
        "the environment of others",
        "keys and answers are in the environment of the judge",
        SCAN
        + """
for pid in relatives():
    try:
        text = open(f"/proc/{pid}/environ").read()
        show(re.findall("EXPECTED=([0-9]{4})", text))
    except OSError:
        pass
""",
        "stdio",
    ),
    Cheat(
        "the parent, killed",
        "a judge that ends counts as passed, or the completion as not scored",
        "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)" + ZERO,
    ),
    Cheat(
        "the parent, stopped",
        "a judge that waits forever holds up the run",
        "import os, signal\nos.kill(os.getppid(), signal.SIGSTOP)" + ZERO,
    ),
    Cheat(
        "its own group, killed",
        "the judge is in the group",
        "import os, signal\ndef f(x): os.killpg(0, signal.SIGKILL)",
    ),
    Cheat(
        "another process, killed",
        "whatever the user runs can be ended",
        "import os, signal\nos.kill(@VICTIM@, signal.SIGKILL)" + ZERO,
    ),
    Cheat(
        "another process, killed by a pidfd",
        "a filter of kill alone",
        "import ctypes\nlibc = ctypes.CDLL(None)\nfd = libc.syscall(434, @VICTIM@, 0)\n"
        "libc.syscall(424, fd, 9, 0, 0)" + ZERO,
    ),
    Cheat(
        "another process, killed by a queued signal",
        "a filter of kill alone",
        "import ctypes\ninfo = (ctypes.c_int * 32)(9, 0, -1)\n"
        "ctypes.CDLL(None).syscall(129, @VICTIM@, 9, info)" + ZERO,
    ),
    *(
        Cheat(
            f"another process, killed when {what} is ready",
            "the kernel sends the signal, not the program",
            f"""
import fcntl, os, signal, socket, struct, time
victim = @VICTIM@
reads, writes = socket.socketpair()
try: {owns}
except OSError: victim = 0
fcntl.fcntl(reads, 10, signal.SIGKILL)
fcntl.fcntl(reads, fcntl.F_SETFL, os.O_ASYNC)
writes.send(b"x")
time.sleep(0.1)
if victim: print(7391)
""",
            "stdio",
        )
        for what, owns in (
            ("its file", "fcntl.fcntl(reads, fcntl.F_SETOWN, victim)"),
            ("its descriptor", 'fcntl.fcntl(reads, 15, struct.pack("ii", 1, victim))'),
            ("its socket", 'fcntl.ioctl(reads, 0x8901, struct.pack("i", victim))'),
        )
    ),
    Cheat(
        "a daemon",
        "it is there when the next program is judged",
        WRITE
        + f"""
def f(x):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            import time
            for _ in range(100):
                everywhere({VERDICT}, 3)
                time.sleep(0.1)
        os._exit(0)
    return 0
""",
    ),
    Cheat(
        "a daemon that keeps the output open",
        "the judge waits for the end of the output",
        "import os, time\nif os.fork() == 0:\n    time.sleep(60)\nprint(0)",
        "stdio",
    ),
    Cheat(
        "a daemon by way of a shell",
        "only fork is counted",
        "import subprocess\nsubprocess.Popen('sleep 60 &', shell=True, start_new_session=True)" + ZERO,
    ),
    Cheat(
        "a thread that outlives the tests",
        "it writes its verdict after theirs",
        WRITE
        + f"""
import threading, time
def later():
    while True:
        everywhere({VERDICT}, 3)
        time.sleep(0.01)
threading.Thread(target=later, daemon=True).start()
def f(x): return 0
""",
    ),
    Cheat(
        "a thread that does not end",
        "the judge waits for it",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()\nprint(0)",
        "stdio",
        hangs=True,
    ),
    Cheat(
        "another interpreter in its place",
        "it has none of the limits",
        "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'print(7391)'])",
        "stdio",
        answer='[{"input": "", "output": "7391"}]',
    ),
    Cheat(
        "a user namespace of its own",
        "in it, the program has every capability",
        "import ctypes\nif ctypes.CDLL(None).unshare(0x10000000) == 0: print(7391)",
        "stdio",
    ),
    Cheat(
        "a mount over the interpreter",
        "the next program imports what is mounted",
        "import ctypes\nif ctypes.CDLL(None).mount(b'tmpfs', b'/usr', b'tmpfs', 0, b'') == 0: print(7391)",
        "stdio",
        answer='[{"input": "", "output": "7391"}]',
    ),
    Cheat(
        "limits raised again",
        "a soft limit can be raised to the hard one",
        "import resource\nfor what in range(16):\n    try:\n"
        "        resource.setrlimit(what, (resource.RLIM_INFINITY,) * 2)\n    except Exception: pass\n"
        "hold = bytearray(3 << 30)\nprint(7391)",
        "stdio",
        answer='[{"input": "", "output": "7391"}]',
    ),
]
