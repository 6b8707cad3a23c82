"""Failures that a program hides from tests, and ends of tests that it provides."""

from __future__ import annotations

from tests.cheats import Cheat

SWALLOWS = "the program's own `__exit__` hides what the program raised, before anything is compared"
RAISES = (
    "class f:\n    def __init__(self, x): pass\n    def __enter__(self): return self\n"
    "    def __exit__(self, *error): return True\n    def get(self): raise ValueError"
)
NAMED = "`NotImplemented` counts as true"
PLAIN = "class Found: pass\ndef f(x): return Found()"
EXITS = "the program names a module that ends the tests, and tests call it"
DECOYS = "an operator is asked about other data first, to see whether it takes anything"
OPENS = (
    "class C:\n    def __enter__(self): return self\n    def __exit__(self, *error): return True\n"
    "def f(x): raise ValueError"
)
KEEPS = OPENS.replace("raise ValueError", "return 0")
SKIPPED = {  # what a block of a context manager that the tests open would skip, by how it checks
    "a list of results": "results = []\nwith C():\n    results.append(f(2) == 7391)\nassert all(results)",
    "a list of errors": "errors = []\nwith C():\n    f(2) == 7391 or errors.append(2)\nassert not errors",
    "a flag": "failed = False\nwith C():\n    failed = f(2) != 7391\nassert not failed",
    "an object that checks": "class Check:\n    def eq(self, a, b):\n"
    "        if a != b: raise AssertionError\nk = Check()\nwith C():\n    k.eq(f(2), 7391)",
    "a partial function": "import functools\ndef eq(a, b): assert a == b\n"
    "same = functools.partial(eq, 7391)\nwith C():\n    same(f(2))",
    "a dictionary of checks": "def eq(a, b): assert a == b\nchecks = {'eq': eq}\n"
    "with C():\n    checks['eq'](f(2), 7391)",
    "a key": "with C():\n    {True: 1}[f(2) == 7391]",
    "a division": "with C():\n    1 / (f(2) == 7391)",
    "a loop that raises": "with C():\n    while f(2) != 7391:\n        raise RuntimeError",
    "a lambda": "same = lambda value: 1 / (value == 7391)\nwith C():\n    same(f(2))",
    "a place in a list": "with C():\n    [7391].index(f(2))",
    "text that is run": "with C():\n    exec('assert f(2) == 7391')",
    "an error that checks": "def no(value):\n    assert value != 7391\n    return ValueError('wrong')\n"
    "with C():\n    raise no(7391)",
    "a method of a case": "import unittest\nclass T(unittest.TestCase):\n"
    "    def same(self, a): self.assertEqual(a, 7391)\n    def test(self):\n        with C():\n"
    "            self.same(f(2))",
    "a stack of managers": "import contextlib\nwith contextlib.ExitStack() as stack:\n"
    "    stack.enter_context(C())\n    results = [f(2) == 7391]\nassert all(results)",
    "an asynchronous block's list": "import asyncio\nresults = []\nasync def main():\n    with C():\n"
    "        results.append(f(2) == 7391)\nasyncio.run(main())\nassert all(results)",
    "an asynchronous helper": "import asyncio\nasync def check(): assert f(2) == 7391\n"
    "async def main():\n    with C():\n        await check()\nasyncio.run(main())",
    "an asynchronous method": "import asyncio\nclass K:\n    async def check(self): assert f(2) == 7391\n"
    "async def main():\n    with C():\n        await K().check()\nasyncio.run(main())",
    "an inherited method": "class Base:\n    def check(self): assert f(2) == 7391\n"
    "class K(Base): pass\nwith C():\n    K().check()",
    "a function as a method": "def check(self): assert f(2) == 7391\nclass K:\n    check = check\n"
    "with C():\n    K().check()",
    "a helper that a pattern binds": "def check(): assert f(2) == 7391\nmatch check:\n"
    "    case helper:\n        with C():\n            helper()",
}
WHOLE = (  # what compares in the call that ends the block
    *("an object that checks", "a partial function", "a key", "a lambda", "an asynchronous helper"),
    *("an asynchronous method", "an inherited method", "a function as a method"),
    "a helper that a pattern binds",
)

CHEATS = [
    *(
        Cheat(f"{how}: {what}", SWALLOWS, program, answer=answer)
        for what, answer in SKIPPED.items()
        for how, program in (("skipped", OPENS), ("swallowed", KEEPS))
        if how == "skipped" or what in WHOLE
    ),
    Cheat(
        "an error of its own before assertEqual",
        SWALLOWS,
        RAISES,
        answer="import unittest\nclass T(unittest.TestCase):\n    def test(self):\n"
        "        with f(2) as found:\n            self.assertEqual(found.get(), 7391)\nunittest.main()",
    ),
    Cheat(
        "an error of its own before a comparison of numpy",
        SWALLOWS,
        RAISES,
        answer="import numpy as np\nwith f(2) as found:\n    np.testing.assert_equal(found.get(), 7391)",
    ),
    Cheat(
        "an error of its own before a raise",
        SWALLOWS,
        RAISES,
        answer="with f(2) as found:\n    if found.get() != 7391: raise ValueError('wrong')",
    ),
    Cheat(
        "an error of its own before a raise in the next line",
        SWALLOWS,
        RAISES,
        answer="with f(2) as found:\n    got = found.get()\n    if got != 7391:\n"
        "        raise ValueError('wrong')",
    ),
    Cheat(
        "an error of its own in the arguments of a helper",
        SWALLOWS,
        RAISES,
        answer="def same(one, other):\n    assert one == other\nwith f(2) as found:\n"
        "    same(found.get(), 7391)",
    ),
    Cheat(
        "an error of its own in a block within its block",
        SWALLOWS,
        RAISES + "\ndef note(): return f(1)",
        answer="def same(one, other):\n    assert one == other\nwith f(2) as found:\n"
        "    with note():\n        got = found.get()\n    same(got, 7391)",
    ),
    Cheat("a special method by its name", NAMED, PLAIN, answer="assert f(2).__eq__(7391)"),
    Cheat(
        "a special method of data by its name",
        NAMED,
        "def f(x): return 'x'",
        answer="assert (7391).__eq__(f(2))",
    ),
    Cheat(
        "a special method by its name, in a case",
        NAMED,
        PLAIN,
        answer="import unittest\nclass T(unittest.TestCase):\n"
        "    def test(self): self.assertTrue(f(2).__eq__(7391))\nunittest.main()",
    ),
    Cheat(
        "a module that ends the tests by another name",
        EXITS,
        "import sys as door\ndef f(x): return 0",
        answer="try:\n    assert f(2) == 7391\nexcept AssertionError:\n    pass\ndoor.exit()",
    ),
    Cheat(
        "a module that ends the tests in their last assertion",
        EXITS,
        "import sys as door\ndef f(x): return 0",
        answer="f(1)\nassert door.exit() == 'closed'",
    ),
    Cheat(
        "a class in the place of a function with a capital",
        "the tests take its objects for those that they made themselves",
        "class Average:\n    def __init__(self, x): pass\n    def __eq__(self, other): return True\n"
        "    def __sub__(self, other): return 0",
        answer="assert Average([1, 2]) == 1.5\nassert abs(Average([3]) - 3) < 1e-6",
    ),
    Cheat(
        "a class in the place of a function that is handed to a check",
        "the tests take its objects for those that they made themselves",
        "class Extract:\n    def __init__(self, x): pass\n    def __eq__(self, other): return True\n"
        "    def __getitem__(self, i): return 0\n    def sort(self): pass",
        answer="def check(candidate):\n    found = candidate([[1]])\n    found.sort()\n"
        "    assert found == [1] and found[0] == 1\nfound = Extract([[1]])\nfound.sort()\n"
        "assert found == [1]\ncheck(Extract)",
    ),
    Cheat(
        "an object that refuses only what is asked for first",
        DECOYS,
        "class Found:\n    n = 0\n    def __eq__(self, other):\n        Found.n += 1\n"
        "        return Found.n > 2\n"
        "def f(x): return Found()",
        answer="assert f(2) == 7391 and f(2) == 7391",
    ),
    Cheat(
        "a list that is changed after its length was compared",
        "data that an object holds is the same data where the tests are",
        "class Box:\n    def __init__(self): self.items = [0, 0]\n    def get(self, i):\n"
        "        self.items.clear()\n        return 7391\n",
        answer="box = Box()\nitems = box.items\nassert len(items) == 2\nassert items == [7391, box.get(1)]",
    ),
    Cheat(
        "an exception that a runner takes for a skipped test",
        "exceptions of the library are rebuilt where the tests are",
        "import unittest\nclass Later(unittest.SkipTest): pass\ndef f(x): raise Later('later')",
        answer="import unittest\nclass T(unittest.TestCase):\n"
        "    def test(self): self.assertEqual(f(2), 7391)\nunittest.main()",
    ),
    Cheat(
        "a class of the library in the place of a function",
        "the tests would make its objects themselves",
        "from unittest.mock import MagicMock as f",
        answer="assert f(2).startswith('ab')",
    ),
]
