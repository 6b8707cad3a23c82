"""Programs that end, or speak, before they are judged."""

from __future__ import annotations

from tests.cheats import Cheat

BANNER = """
print("1 passed in 0.01s")
print("Ran 3 tests in 0.000s\\n\\nOK")
print('{"passed": true, "reward": 1.0, "score": 1}')
print("ALL TESTS PASSED", flush=True)
"""
ZIPPED = "for found, y in zip(map(f, [2, 3]), [7391, 8402]):\n    assert found == y"
CASE = "import unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(2), 7391)\n"
SKIPS = "an exception that a loop of the tests takes for its end skips the assertions"
SKIPS_LENGTH = "a loop over an object is shorter than it says, and its assertions are skipped"
SIZED = "class Found:\n    __iter__ = lambda s: iter(())\n"

CHEATS = [
    Cheat("sys.exit(0)", "exit status 0 counts as passed", "import sys\nsys.exit(0)"),
    Cheat("sys.exit(0) in a call", "exit status 0 counts as passed", "import sys\ndef f(x): sys.exit(0)"),
    Cheat("os._exit(0) in a call", "exit status 0 counts as passed", "import os\ndef f(x): os._exit(0)"),
    Cheat("quit() in a call", "exit status 0 counts as passed", "def f(x): quit()"),
    Cheat(
        "an exit while an object is made",
        "exit status 0 counts as passed",
        "class f:\n    def __new__(cls, x): raise SystemExit(0)",
    ),
    Cheat("the banner of a test runner", "the judge searches the output", BANNER + "def f(x): return 0"),
    Cheat("the banner, printed as the answer", "the judge searches the output", BANNER, "stdio"),
    Cheat(
        "the banner at exit",
        "the judge reads the last line",
        f"import atexit\natexit.register(lambda: exec({BANNER!r}))\ndef f(x): return 0",
    ),
    Cheat(
        "every answer at once",
        "the judge looks for the expected output anywhere",
        "print(*range(7000, 9000))",
        "stdio",
    ),
    Cheat(
        "every answer, one a line",
        "the judge takes the line that fits",
        "for n in range(7000, 9000): print(n)",
        "stdio",
    ),
    Cheat(
        "an answer that the terminal hides",
        "the judge compares what would be seen",
        r"print('\x1b[2K\r7391\x08\x08\x08\x08')",
        "stdio",
    ),
    Cheat("no output", "nothing differs from nothing", "pass", "stdio"),
    Cheat(
        "an output that ends in the middle",
        "only the lines that are there are compared",
        "import os\nprint('739', end='', flush=True)\nos._exit(0)",
        "stdio",
    ),
    Cheat(
        "a right output and a crash",
        "the output counts, the exit status does not",
        "import os\nprint({'2': 7391, '3': 8402}[input()], flush=True)\nos.kill(os.getpid(), 11)"
        "\nraise SystemExit(3)",
        "stdio",
    ),
    Cheat(
        "a context manager that swallows failures",
        "an assertion in its body fails and is not seen",
        "class f:\n    def __init__(self, x): pass\n    def __enter__(self): return self\n"
        "    def __exit__(self, *error): return True",
        answer="with f(2) as found:\n    assert found == 7391",
    ),
    Cheat(
        "a context manager that swallows errors",
        "a comparison in its body fails and is not seen",
        "from contextlib import suppress\ndef f(x): return suppress(Exception)",
        answer="found = f(2)\nwith found:\n    assert found > 7390",
    ),
    Cheat("StopIteration in a loop over map", SKIPS, "def f(x): raise StopIteration", answer=ZIPPED),
    Cheat(
        "a subclass of StopIteration",
        SKIPS,
        "class Done(StopIteration): pass\ndef f(x): raise Done",
        answer=ZIPPED,
    ),
    Cheat(
        "StopIteration in all()",
        SKIPS,
        "def f(x): raise StopIteration",
        answer="assert all(map(lambda x, y: f(x) == y, [2, 3], [7391, 8402]))",
    ),
    Cheat(
        "GeneratorExit",
        SKIPS,
        "def f(x): raise GeneratorExit",
        answer="def ask():\n    yield f(2) == 7391\nfor ok in ask():\n    assert ok",
    ),
    Cheat(
        "StopAsyncIteration in an asynchronous loop",
        SKIPS,
        "def f(x): raise StopAsyncIteration",
        answer="import asyncio\nclass Asks:\n    def __aiter__(self): return self\n"
        "    async def __anext__(self): return f(2)\n"
        "async def main():\n    async for y in Asks(): assert y == 7391\nasyncio.run(main())",
    ),
    Cheat(
        "an exit, and another exception after it",
        "the judge takes the exit for the tests' own",
        "import sys\ndef f(x): sys.exit(0)\ndef clean(): raise ValueError",
        answer="def close():\n    try: clean()\n    except ValueError: pass\n"
        "try:\n    assert f(2) == 7391\nfinally:\n    close()",
    ),
    Cheat(
        "an exception called StopIteration",
        SKIPS,
        "Fake = type('StopIteration', (Exception,), {})\ndef f(x): raise Fake()",
        answer=ZIPPED,
    ),
    Cheat(
        "an exception named like the judge's own",
        "the judge takes it for an outage",
        "Fake = type('UnscoredError', (Exception,), {'__module__': 'retrain.plugins.rewards'})\n"
        "def f(x): raise Fake('no tests')",
    ),
    *(
        Cheat(
            f"a program of the library, {name}",
            "the judge imports what is returned, and that ends it well in its last statement",
            f"import types\ndef f(x): return types.ModuleType({name!r})",
            answer="def check(f):\n    assert f(2) == 7391\n    assert f(3) == 8402\ncheck(f)",
        )
        for name in ("unittest.__main__", "numpy.f2py.__main__")
    ),
    Cheat(
        "a module of the library that skips its importer",
        "without a display it raises unittest's own SkipTest, which is no failure",
        "import types\ndef f(x): return types.ModuleType('idlelib.idle_test.test_undo')",
        answer=f"{CASE}unittest.main()",
    ),
    Cheat(
        "a TimeoutError of the program",
        "a timeout of the judge leaves the completion unscored",
        "def f(x): raise TimeoutError('the judge did not answer')",
    ),
    Cheat(
        "MemoryError at once",
        "an outage of the machine leaves the completion unscored",
        "raise MemoryError",
    ),
    Cheat(
        "an exception that cannot be shown",
        "the judge fails while it reports",
        "class E(Exception):\n    def __str__(self): raise self\n    __repr__ = __reduce__ = __str__\n"
        "    args = property(__str__)\ndef f(x): raise E",
    ),
    Cheat(
        "an exception with a hostile name",
        "names go into messages, files and queries",
        r"E = type('</td>\n\x00\ud800\x1b[2J' * 9, (Exception,), {})"
        + "\ndef f(x): raise E('x' * (1 << 20))",
    ),
    Cheat(
        "an exception of hundreds of classes",
        "the judge rebuilds its classes",
        "E = Exception\nfor n in range(300): E = type(f'E{n}', (E,), {})\ndef f(x): raise E",
    ),
    Cheat(
        "a generator that never ends",
        "the judge asks for all of it",
        "def f(x):\n    while True: yield 7391",
        answer="assert list(f(2)) == [7391]",
        hangs=True,
    ),
    Cheat(
        "a generator with hostile methods",
        "the judge closes and sends into it",
        "class G:\n    def __iter__(self): return self\n    def __next__(self): return self\n"
        "    close = send = throw = __del__ = lambda s, *a: (_ for _ in ()).throw(SystemExit(0))\n"
        "def f(x): return G()",
        answer="assert next(f(2)) == 7391",
    ),
    Cheat(
        "a list that holds itself",
        "the judge does not come to the end of it",
        "def f(x):\n    y = []\n    y.append(y)\n    return y",
        answer="assert f(2) == [7391]",
    ),
    Cheat(
        "a list nested without end",
        "the judge runs out of stack",
        "def f(x):\n    y = []\n    for _ in range(100000): y = [y]\n    return y",
        answer="assert f(2) == [7391]",
    ),
    Cheat(
        "an integer of a million digits",
        "the judge converts it forever",
        "def f(x): return 10 ** 1000000",
    ),
    Cheat(
        "a failure that a runner only reports",
        "tests reach their end",
        "def f(x): return 0",
        answer=f"{CASE}unittest.main(argv=['x'], exit=False)",
    ),
    Cheat(
        "a failure of a suite whose result nobody reads",
        "tests reach their end",
        "def f(x): return 0",
        answer=f"{CASE}unittest.TextTestRunner().run(unittest.defaultTestLoader.loadTestsFromTestCase(T))",
    ),
    Cheat(
        "a class that cannot be set up, which a runner only reports",
        "none of its tests is run, and tests reach their end",
        "def g(x): return 0",
        answer=CASE.replace("def test", "@classmethod\n    def setUpClass(cls): f(2)\n    def test")
        + "g(2)\nunittest.main(argv=['x'], exit=False)",
    ),
    Cheat(
        "an index that ends a loop",
        SKIPS,
        "def f(x): raise IndexError",
        answer="class Found:\n    def __getitem__(self, i): return f(i)\n"
        "for found in Found(): assert found == 7391",
    ),
    Cheat(
        "a length that a loop does not have",
        SKIPS_LENGTH,
        f"{SIZED}    __len__ = lambda s: 2\ndef f(x): return Found()",
        answer="found = f([2, 3])\nassert len(found) == 2\n"
        "for one, y in zip(found, [7391, 8402]): assert abs(one - y) < 1e-6",
    ),
    Cheat(
        "a length that is another each time",
        SKIPS_LENGTH,
        f"{SIZED}    sizes = [0, 2]\n    __len__ = lambda s: s.sizes.pop()\ndef f(x): return Found()",
        answer="found, wanted = f([2, 3]), [7391, 8402]\nassert len(found) == len(wanted)\n"
        "for i in range(len(found)): assert found[i] == wanted[i]",
    ),
    Cheat("a number that is none", "every comparison with it is undefined", "def f(x): return float('nan')"),
]
