"""Functions of Python and of the judge, replaced by the program."""

from __future__ import annotations

from tests.cheats import Cheat

IS_CLOSE = "import math\nassert math.isclose(f(2), 7391.5)\nassert isinstance(f(3), float)"
ZERO = "def f(x): return 0\n"

CHEATS = [
    Cheat(
        "builtins beside an import of the program",
        "tests that name nothing else seem to test a function like Python's",
        "def f(x): return 0\nall = lambda results: True",
        answer="from solution import f\nassert all([f(2) == 7391])",
    ),
    Cheat(
        "builtins in an import of everything",
        "what the program exports replaces Python's own",
        "__all__ = ['f', 'abs']\ndef f(x): return 0\ndef abs(x): return 0",
        answer="from solution import *\nassert abs(f(2) - 7391) < 1e-6",
    ),
    Cheat(
        "a method of the tests' object",
        "the object asks the program instead of itself",
        "def f(box): box.is_right = lambda: True",
        answer="class Box:\n    value = 0\n    def is_right(self): return self.value == 7391\n"
        "box = Box()\nf(box)\nassert box.is_right()",
    ),
    Cheat(
        "tests of its own",
        "a runner of tests asks the module of the tests, and that the program",
        "def f(x): return 0\nload_tests = lambda loader, tests, pattern: []",
        answer="import unittest\nclass T(unittest.TestCase):\n"
        "    def test(self): self.assertEqual(f(2), 7391)\nunittest.main()",
    ),
    Cheat(
        "a module that tests do not import",
        "a name that tests do not define is the program's",
        "class math:\n    isclose = lambda *a: True\ndef f(x): return 0",
        answer="assert math.isclose(f(2), 7391)",
    ),
    Cheat(
        "exec does nothing",
        "tests run by the program's exec",
        ZERO + "import builtins\nbuiltins.exec = print",
    ),
    Cheat(
        "compile returns an empty program",
        "tests are compiled after the program has run",
        ZERO + "import builtins\nreal = compile\nbuiltins.compile = lambda *a, **k: real('', 'x', 'exec')",
    ),
    Cheat(
        "ast.parse returns no statements",
        "tests are parsed after the program has run",
        ZERO + "import ast\nast.parse = lambda *a, **k: ast.Module([], [])",
    ),
    Cheat(
        "AssertionError is another exception",
        "the judge catches the program's AssertionError",
        ZERO + "import builtins\nbuiltins.AssertionError = KeyboardInterrupt",
    ),
    Cheat(
        "isinstance, abs and all agree",
        "tests call the program's names first",
        ZERO + "isinstance = all = any = callable = lambda *a: True\nabs = len = lambda x: 0",
        answer="assert all([f(2) == 7391])\nassert abs(f(3) - 8402) < 1",
    ),
    Cheat(
        "builtins agree",
        "tests use builtins that the program has replaced",
        ZERO + "import builtins\nbuiltins.all = builtins.any = lambda *a: True\nbuiltins.abs = lambda x: 0",
        answer="assert all([f(2) == 7391])\nassert abs(f(3) - 8402) < 1",
    ),
    Cheat(
        "a module that agrees",
        "tests import what the program put into sys.modules",
        "import math, sys, types\ndef f(x): return 0\nmath.isclose = lambda *a, **k: True\n"
        "sys.modules['math'] = types.SimpleNamespace(isclose=math.isclose)",
        answer=IS_CLOSE,
    ),
    Cheat(
        "an import hook",
        "tests import through the program's finder",
        """
import sys, types
class Finder:
    def find_spec(self, name, *rest):
        import importlib.machinery
        return importlib.machinery.ModuleSpec(name, self)
    def create_module(self, spec):
        return types.SimpleNamespace(__name__=spec.name, isclose=lambda *a, **k: True)
    def exec_module(self, module): pass
sys.modules.pop("math", None)
sys.meta_path.insert(0, Finder())
def f(x): return 0
""",
        answer=IS_CLOSE,
    ),
    Cheat(
        "json says passed",
        "the verdict is written with the program's json",
        ZERO
        + """
import json
real = json.dumps
json.dumps = lambda x, **k: real({**x, "passed": True, "used": True} if isinstance(x, dict) else x, **k)
""",
    ),
    Cheat(
        "os.write says passed",
        "the verdict is written with the program's os",
        ZERO + "import os\nreal = os.write\n"
        "os.write = lambda fd, data: real(fd, bytes(data).replace(b'false', b'true'))",
    ),
    Cheat(
        "the judge's own functions",
        "the judge's modules are in the program's interpreter",
        ZERO
        + """
import gc, types
for one in gc.get_objects():
    if isinstance(one, types.FunctionType) and "retrain" in str(one.__globals__.get("__name__", "")):
        if one.__name__ in ("run", "read_frame", "parse"):
            one.__code__ = (lambda *a, **k: {"passed": True, "used": True}).__code__
""",
    ),
    Cheat(
        "expected values of its own",
        "tests look up their names in the program",
        "wanted = {2: 0, 3: 0}\ndef f(x): return 0",
    ),
    Cheat(
        "a small integer, rewritten in memory",
        "the tests' integers are the program's",
        "import ctypes\nctypes.memmove(id(2) + 24, id(3) + 24, 4)\ndef f(x): return 0",
    ),
    Cheat(
        "classes that print as expected",
        "the printed form is compared",
        "import builtins, sys\nclass S(str):\n    __eq__ = lambda s, o: True\n    __hash__ = str.__hash__\n"
        "builtins.str = S\nprint(S('0'))",
        "stdio",
    ),
    Cheat(
        "a stand-in's own methods",
        "the tests' objects let the program replace their methods",
        "def f(box):\n    try:\n        type(box).__eq__ = box.__class__.__eq__ = lambda s, o: True\n"
        "    except Exception: pass\n    return box",
        answer="class Box: pass\nassert f(Box()) == 7391",
    ),
    Cheat(
        "a trace function that skips the assertion",
        "tests run in a thread that the program traces",
        ZERO
        + """
import sys, threading
def trace(frame, event, arg):
    if event == "line" and frame.f_code.co_filename == "tests.py":
        frame.f_globals["f"] = type("A", (), {"__call__": lambda s, x: frame.f_globals["wanted"][x]})()
    return trace
sys.settrace(trace)
threading.settrace(trace)
""",
    ),
]
