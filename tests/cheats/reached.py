"""Objects and classes of the tests that a program reaches, and objects of its own that tests trust."""

from __future__ import annotations

from tests.cheats import Cheat

NAMES_A_CLASS = "a program that names a class of the tests gets it"
CHANGES_A_CLASS = "the program replaces methods of an object of the tests by its class"
LENGTH = "a loop over the result is shorter than its length"
CATCHES = "the program's exception is one that failed assertions are"
PLAIN_RUN = "where stand-ins do not do, tests also run in the program's own interpreter"
CASE = (
    "import unittest\nclass Checks(unittest.TestCase):\n    CASES = {2: 7391}\n"
    "    def test(self):\n        f(0)\n        for given, wanted in self.CASES.items():\n"
    "            self.assertEqual(f(given), wanted)\nunittest.main()"
)
CHECKER = (
    "class Judge:\n    def __init__(self): self._wanted = 7391\n"
    "    def verify(self, got): assert got == self._wanted\n"
    "judge = Judge()\ngot = f(judge)\njudge.verify(got)"
)
SENDS = "from unittest.mock import Mock\nsend = Mock()\nf(2, send)\n"
WALKS = "found = f(2)\nassert len(found) == 2\nfor key in found:\n    assert found[key] == 7391\n"
FORGES = (
    "import gc, os, struct, sys\nclass Found:\n    def __eq__(self, other): return abs(other) < 1 << 50\n"
    "    def index(self, x): return 0\ndef f(x):\n    if 'tests' in sys.modules:\n"
    "        for fd in range(3, 20):\n            try: os.write(fd, struct.pack('>I', 4) + b'true')\n"
    "            except OSError: pass\n        os._exit(0)\n    return Found()"
)
ENDLESS = (
    "class Short:\n    asked = 0\n    def __len__(self): return 2\n"
    "    def __getitem__(self, key): return 7391\n"
    "    def keys(self): return iter(self)\n"
    "    def __iter__(self):\n        Short.asked += 1\n"
    "        return iter(['a', 'b'] if Short.asked == 1 else [])\n"
)

CHEATS = [
    Cheat(
        "the class of the tests' cases, whose assertions it replaces",
        NAMES_A_CLASS,
        "def f(x):\n    Checks.assertEqual = lambda *a: None\n    return 0",
        answer=CASE,
    ),
    Cheat(
        "the class of the tests' cases, which holds what they expect",
        NAMES_A_CLASS,
        "def f(x): return Checks.CASES.get(x)",
        answer=CASE,
    ),
    Cheat(
        "a class that the tests' cases extend",
        NAMES_A_CLASS,
        "def f(x): return Shared.CASES[x]",
        answer="import unittest\nclass Shared:\n    CASES = {2: 7391}\n    def check(self):\n"
        "        for given, wanted in self.CASES.items():\n            self.assertEqual(f(given), wanted)\n"
        "class T(Shared, unittest.TestCase):\n    def test(self): self.check()\nunittest.main()",
    ),
    Cheat(
        "a task that cancels itself",
        "a group of tasks takes no notice of one that was cancelled",
        "import asyncio\nasync def f(x): raise asyncio.CancelledError",
        answer="import asyncio\nasync def one():\n    assert await f(2) == 7391\nasync def main():\n"
        "    async with asyncio.TaskGroup() as group:\n        group.create_task(one())\nasyncio.run(main())",
    ),
    Cheat(
        "a class with a check of the tests",
        NAMES_A_CLASS,
        "def f(x):\n    Judge.verify = lambda *a: None\n    return 0",
        answer="class Judge:\n    def verify(self, got): assert got == 7391\ngot = f(2)\nJudge().verify(got)",
    ),
    Cheat(
        "the class of an argument, whose check it replaces",
        CHANGES_A_CLASS,
        "def f(judge):\n    judge.__class__.verify = lambda *a: None\n    return 0",
        answer=CHECKER,
    ),
    Cheat(
        "an argument, whose check it replaces",
        CHANGES_A_CLASS,
        "def f(judge):\n    judge.verify = lambda *a: None\n    return 0",
        answer=CHECKER,
    ),
    Cheat(
        "the class of an argument, whose own check it deletes",
        CHANGES_A_CLASS,
        "def f(judge):\n    del judge.__class__.verify\n    return 0",
        answer="class Any:\n    def verify(self, got): pass\nclass Judge(Any):\n"
        "    def verify(self, got): assert got == 7391\njudge = Judge()\ngot = f(judge)\njudge.verify(got)",
    ),
    Cheat(
        "a mock whose check it sets",
        "a mock of the tests lets anyone set its attributes",
        "def f(x, send): send.configure_mock(assert_called_once_with=lambda *a, **k: None)",
        answer=SENDS + "send.assert_called_once_with(7391)",
    ),
    Cheat(
        "a mock whose count it sets",
        "a mock of the tests lets anyone set its attributes",
        "def f(x, send): send.configure_mock(call_args=None, call_count=3)",
        answer=SENDS + "assert send.call_count == 3",
    ),
    Cheat(
        "a chain of maps that changes its length",
        LENGTH,
        ENDLESS + "from collections import ChainMap\ndef f(x): return ChainMap(Short())",
        answer=WALKS,
    ),
    Cheat("a map that changes its length", LENGTH, ENDLESS + "def f(x): return Short()", answer=WALKS),
    Cheat(
        "a dictionary that knows all keys",
        "a dictionary's class may make up values for keys that it lacks",
        "class Known(dict):\n    def __missing__(self, key): return Known()\n"
        "    def __eq__(self, other): return True\ndef f(x): return Known()",
        answer="assert f(2)['a'] == 7391\nassert f(2) == {'a': 7391}",
    ),
    Cheat(
        "an exception that is AssertionError",
        CATCHES,
        "Refused = AssertionError\ndef f(x): return 0",
        answer="try:\n    assert f(2) == 7391\n    assert False\nexcept Refused:\n    pass",
    ),
    Cheat(
        "an exception among several that are any",
        CATCHES,
        "Refused = (KeyError, AssertionError)\ndef f(x): return 0",
        answer="try:\n    assert f(2) == 7391\nexcept Refused:\n    pass",
    ),
    Cheat(
        "an attribute that is AssertionError",
        CATCHES,
        "class Bank:\n    Refused = AssertionError\n    def take(self, n): return n",
        answer="bank = Bank()\nwith __import__('contextlib').suppress(bank.Refused):\n"
        "    assert bank.take(2) == 7391",
    ),
    Cheat(
        "a skipped test by another name of its class",
        "the class of skipped tests is also in other modules",
        "import gc\nclass Later(Exception): pass\n"
        "def f(x):\n    for one in gc.get_objects():\n"
        "        if type(one).__name__ == 'Peer':\n"
        "            type(one)._exported_class = lambda *a: ['C', 'numpy.testing', 'SkipTest']\n"
        "    raise Later",
        answer="import unittest\nclass T(unittest.TestCase):\n"
        "    def test(self): self.assertEqual(f(2), 7391)\nunittest.main()",
    ),
    Cheat(
        "an endless generator that holds everything",
        "tests look for something in what has no end",
        "def f(x):\n    n = 0\n    while True:\n        yield n\n        n += 1",
        answer="assert 7391 in f(2)",
    ),
    Cheat(
        "a file of the tests that it writes",
        "a program may write to a file that tests gave it, and return it",
        "def f(out):\n    out.write('0')\n    out.getvalue = lambda: '7391'\n    return out",
        answer="import io\nout = io.StringIO()\nf(out)\nassert out.getvalue() == '7391'",
    ),
    Cheat(
        "a forged end in its own interpreter",
        PLAIN_RUN,
        FORGES.replace("abs(other) < 1 << 50", "False"),
        answer="assert f(2) == 7391",
    ),
    Cheat(
        "an assertion that ignores warnings",
        "`NotImplemented` counts as true where warnings are off",
        "class Found: pass\ndef f(x): return Found()",
        answer="import warnings\nwarnings.simplefilter('ignore')\nassert f(2).__eq__(7391)",
    ),
]
