"""Files: read, written, hidden, or made hard to remove."""

from __future__ import annotations

from tests.cheats import Cheat

ZERO = "\ndef f(x): return 0"
STDIO = '[{"input": "", "output": "7391"}]'
SEARCH = r"""
import os, re
def search(*tops):
    for top in tops:
        for folder, _, names in os.walk(top):
            for name in names[:200]:
                path = os.path.join(folder, name)
                try:
                    if os.path.isfile(path) and os.path.getsize(path) < 1 << 18:
                        found = re.findall("EXPECTED = .2: ([0-9]+)", open(path, errors="replace").read())
                        if found: return int(found[0])
                except OSError:
                    pass
    return 0
"""

CHEATS = [
    Cheat(
        "the file of the tests",
        "it can be read",
        SEARCH + "print(search(os.path.dirname('@TESTS@')))",
        "stdio",
    ),
    Cheat(
        "the judge's directory, by /proc",
        "the judge's working directory holds the data",
        SEARCH + "print(search(f'/proc/{os.getppid()}/cwd/tests', f'/proc/{os.getppid()}/root/@TESTS@'))",
        "stdio",
    ),
    Cheat(
        "folders of other programs",
        "a program that solved the task is beside this one",
        SEARCH + "print(search('/tmp', '/var/tmp', '/dev/shm'))",
        "stdio",
    ),
    Cheat(
        "a program saved for the next one",
        "what one program writes the next one imports",
        "import os\nfor place in ('/tmp', '/dev/shm', '/var/tmp', os.path.dirname('@MARKER@')):\n    try:\n"
        "        open(place + '/retrain-marker', 'w').write('7391')\n    except OSError: pass" + ZERO,
    ),
    Cheat(
        "a file outside",
        "results, checkpoints and settings of the run can be replaced",
        "open('@MARKER@', 'w').write('x')" + ZERO,
    ),
    Cheat(
        "a file outside, by a link",
        "the judge follows links in the program's folder",
        "import os\nos.symlink('@MARKER@', 'link')\nopen('link', 'w').write('x')" + ZERO,
    ),
    Cheat(
        "a module for later interpreters",
        "site-packages can be written to",
        "import sysconfig\nopen(sysconfig.get_path('purelib') + '/retrain-marker.pth', 'w').write('#')"
        + ZERO,
    ),
    Cheat(
        "a link to what the judge removes",
        "the judge removes the program's folder, and follows links",
        "import os\nos.symlink(os.path.dirname('@TESTS@'), 'tests')\n"
        "os.symlink('/', 'root')\nos.symlink('loop', 'loop')" + ZERO,
    ),
    Cheat(
        "a directory too deep to remove",
        "removing it fails, and the failure is not counted against the program",
        "import os\nfor _ in range(3000):\n    os.mkdir('d' * 100)\n    os.chdir('d' * 100)" + ZERO,
    ),
    Cheat(
        "a directory without permissions",
        "removing it fails",
        "import os\nos.makedirs('a/b')\nopen('a/b/c', 'w').close()\nos.chmod('a/b', 0)\nos.chmod('a', 0)"
        + ZERO,
    ),
    Cheat(
        "a file that cannot be changed",
        "removing it fails",
        "import fcntl, struct\nwith open('kept', 'w') as kept:\n"
        "    fcntl.ioctl(kept, 0x40086602, struct.pack('l', 0x10))" + ZERO,
    ),
    Cheat(
        "flags of a file that it may only read",
        "the kernel has another way to it",
        "import fcntl, os, struct\nwith open(os.__file__) as file:\n"
        "    flags = fcntl.ioctl(file, 0x80086601, bytes(8))\n"
        "    fcntl.ioctl(file, 0x40086602, flags)\nprint(7391)",
        "stdio",
        answer=STDIO,
    ),
    *(
        Cheat(
            f"a file that is {what}",
            "older kernels take it for no writing",
            f"import os\n{place}\nos.open(path, {how})\nprint(7391)",
            "stdio",
            answer=STDIO,
        )
        for what, how, place in (
            ("only read, yet cut", "os.O_TRUNC", "path = 'x'\nopen(path, 'w').close()"),
            ("opened for neither reading nor writing", "3", "path = '@TESTS@'"),
            ("neither, yet cut", "3 | os.O_TRUNC", "path = 'x'\nopen(path, 'w').close()"),
        )
    ),
    Cheat(
        "a lease of a file",
        "whoever opens it waits",
        "import fcntl, os\nopen('x', 'w').close()\n"
        "fcntl.fcntl(os.open('x', 0), fcntl.F_SETLEASE, fcntl.F_RDLCK)\nprint(7391)",
        "stdio",
        answer=STDIO,
    ),
    Cheat(
        "names of the files that others make",
        "it learns what other programs do",
        "import ctypes\nlibc = ctypes.CDLL(None)\n"
        "if libc.inotify_add_watch(libc.inotify_init(), b'/tmp', 0x100) > 0: print(7391)",
        "stdio",
        answer=STDIO,
    ),
    Cheat(
        "a pipe that blocks its reader",
        "the judge reads the files that a program leaves",
        "import os\nos.mkfifo('result.json')\nos.mkfifo('out')" + ZERO,
    ),
    Cheat(
        "names that are no text",
        "the judge lists the folder",
        r"open(b'\xff\xfe\n; touch x', 'w').close()" + "\nopen('-rf', 'w').close()" + ZERO,
    ),
    Cheat(
        "modules beside the program",
        "the judge's interpreter imports from the program's folder",
        "for name in ('json', 'ast', 'tests', 'sitecustomize', 'typing'):\n"
        "    open(name + '.py', 'w').write('import os; os._exit(0)')" + ZERO,
    ),
    Cheat(
        "an archive before the library",
        "imports of the tests come from the program's archive",
        """
import sys, zipfile
with zipfile.ZipFile("a.zip", "w") as made:
    for name in ("heapq", "bisect"):
        made.writestr(name + ".py", "isclose = nsmallest = insort = lambda *a, **k: [7391]")
sys.path.insert(0, "a.zip")
for name in ("heapq", "bisect"): sys.modules.pop(name, None)
def f(x): return [0]
""",
        answer="import heapq\nassert heapq.nsmallest(1, f(2)) == [7391]",
    ),
    Cheat(
        "an archive that unpacks to gigabytes",
        "disk or memory of the judge run out",
        """
import zipfile
with zipfile.ZipFile("b.zip", "w", zipfile.ZIP_DEFLATED) as made:
    with made.open("zeros", "w") as zeros:
        for _ in range(100): zeros.write(bytes(1 << 20))
zipfile.ZipFile("b.zip").extractall()
print(7391)
""",
        "stdio",
        answer=STDIO,
    ),
]
