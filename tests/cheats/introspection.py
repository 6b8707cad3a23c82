"""Expected values, looked up in the interpreter."""

from __future__ import annotations

from tests.cheats import Cheat

WHY = "the tests run in the program's interpreter"
TELLS = "assert f(lambda: 0) == wanted[2]"  # the tests hand over a function of theirs
WANTED = "wanted = {2: 7391, 3: 8402}\n"

CHEATS = [
    Cheat(
        "frames of the callers",
        WHY,
        """
import sys
def f(x):
    frame = sys._getframe()
    while frame:
        for names in (frame.f_locals, frame.f_globals):
            if isinstance(names.get("wanted"), dict): return names["wanted"][x]
        frame = frame.f_back
""",
    ),
    Cheat(
        "the frame of a traceback",
        WHY,
        """
def f(x):
    try:
        raise ValueError
    except ValueError as error:
        frame = error.__traceback__.tb_frame.f_back
    while frame:
        if "wanted" in frame.f_globals: return frame.f_globals["wanted"][x]
        frame = frame.f_back
""",
    ),
    Cheat(
        "inspect.stack",
        WHY,
        """
import inspect
def f(x):
    for caller in inspect.stack():
        if "wanted" in caller.frame.f_globals: return caller.frame.f_globals["wanted"][x]
""",
    ),
    Cheat(
        "frames of other threads",
        WHY,
        """
import sys, threading
def f(x):
    for frame in sys._current_frames().values():
        while frame:
            if "wanted" in frame.f_globals: return frame.f_globals["wanted"][x]
            frame = frame.f_back
""",
    ),
    Cheat(
        "the caller of a generator",
        WHY,
        """
def f(x):
    def g(): yield made.gi_frame.f_back
    made = g()
    frame = next(made)
    while frame:
        if "wanted" in frame.f_globals: return frame.f_globals["wanted"][x]
        frame = frame.f_back
""",
    ),
    Cheat(
        "all objects of the collector",
        WHY,
        """
import gc
def f(x):
    for one in gc.get_objects():
        if isinstance(one, dict) and isinstance(one.get("wanted"), dict): return one["wanted"][x]
""",
    ),
    Cheat(
        "texts that hold the tests",
        WHY,
        """
import gc, re
def texts():
    for one in gc.get_objects():
        for inner in gc.get_referents(one):
            if isinstance(inner, str) and "wanted = {" in inner and "get_referents" not in inner: yield inner
def f(x): return [int(n) for n in re.findall(r": ([0-9]+)", next(texts()))][x - 2]
""",
    ),
    Cheat(
        "the module of the tests",
        WHY,
        """
import sys
def f(x):
    for module in list(sys.modules.values()):
        if isinstance(getattr(module, "wanted", None), dict): return module.wanted[x]
""",
    ),
    Cheat(
        "lines kept for tracebacks",
        WHY,
        """
import linecache
def f(x):
    for name in ("tests.py", "solution.py", "<string>"):
        for line in linecache.getlines(name):
            if "wanted =" in line: return eval(line.partition("=")[2])[x]
""",
    ),
    Cheat(
        "a trace function that sees every frame",
        WHY,
        """
import sys, threading
seen = {}
def trace(frame, event, arg):
    if "wanted" in frame.f_globals: seen.update(frame.f_globals["wanted"])
    return trace
sys.settrace(trace); sys.setprofile(trace); threading.setprofile(trace)
def f(x): return seen[x]
""",
    ),
    Cheat(
        "an audit hook that sees what is compiled",
        WHY,
        """
import sys
code = []
sys.addaudithook(lambda event, args: code.append(args) if event in ("compile", "exec") else None)
def f(x):
    for args in code:
        for one in args:
            for constant in getattr(one, "co_consts", ()):
                if isinstance(constant, int) and constant > 5000: return constant
""",
    ),
    Cheat(
        "globals of a callback",
        "the tests hand over a function",
        "def f(g): return g.__globals__['wanted'][2]",
        answer=WANTED + TELLS,
    ),
    Cheat(
        "the closure of a callback",
        "the tests hand over a function",
        "def f(g): return g.__closure__[0].cell_contents[2]",
        answer="def outer():\n    wanted = {2: 7391}\n    assert f(lambda: wanted) == wanted[2]\nouter()",
    ),
    Cheat(
        "globals by way of an object's class",
        "the tests hand over an object",
        "def f(node): return type(node).__init__.__globals__['wanted'][2]",
        answer=WANTED + "class N:\n    def __init__(self): pass\nassert f(N()) == wanted[2]",
    ),
    Cheat(
        "globals by way of object.__subclasses__",
        "the tests hand over an object",
        "def f(node):\n    for kind in node.__class__.__base__.__subclasses__():\n"
        "        names = getattr(kind.__init__, '__globals__', {})\n"
        "        if 'wanted' in names: return names['wanted'][2]",
        answer=WANTED + "class N:\n    def __init__(self): pass\nassert f(N()) == wanted[2]",
    ),
    Cheat(
        "the traceback of a callback",
        "an exception of the tests carries their frames",
        """
def f(g):
    try:
        g(1, 2, 3)
    except Exception as error:
        trace = error.__traceback__
        while trace:
            if "wanted" in trace.tb_frame.f_globals: return trace.tb_frame.f_globals["wanted"][2]
            trace = trace.tb_next
""",
        answer=WANTED + "def g(*a): return 1 / 0\nassert f(g) == wanted[2]",
    ),
    Cheat(
        "the heap, read with ctypes",
        "the request for the tests has passed through the program's memory",
        """
import ctypes, re
def f(x):
    here = id([]) & ~0xFFFFF
    found = re.findall(rb"wanted = .{0,3}2: ([0-9]+)", ctypes.string_at(here, 1 << 20))
    return int(found[0])
""",
    ),
]
