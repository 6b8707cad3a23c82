"""Tests in one sandbox against a program in another: what honest programs return, and what cheats would."""

from __future__ import annotations

import socket
import sys
import zoneinfo
from collections.abc import Iterator

import pytest

from retrain.base.rollouts import Prompt
from retrain.plugins.rewards import Answer, Outcome, Score, python
from retrain.plugins.rewards.python.scorer import NO_VERDICT, ProgramScorer, read_verdict
from retrain.plugins.sandbox import SandboxEndedError
from retrain.plugins.sandbox.inside import values
from tests.namespaces import BUBBLEWRAP

NAMED_ZONE = {
    "times with a named zone": (
        "from datetime import datetime\nfrom zoneinfo import ZoneInfo\n"
        "def noon(zone): return datetime(2024, 7, 1, 12, tzinfo=zone)\ndef name(one): return one.tzinfo.key",
        "from zoneinfo import ZoneInfo\nzone = ZoneInfo('UTC')\n"
        "assert noon(zone).tzinfo == zone and name(noon(zone)) == 'UTC'",
    ),
}
HONEST = {
    "changes of what is in an argument": (
        "def add(d, k, v):\n    d.setdefault(k, []).append(v)\n    return len(d[k])",
        "d = {}\nassert add(d, 'a', 1) == 1\nassert add(d, 'a', 2) == 2\nd['a'].append(3)\n"
        "assert add(d, 'a', 4) == 4\nassert d['a'] == [1, 2, 3, 4]",
    ),
    "an argument that is changed twice where tests must not see it": (
        "def push(xs, x):\n    xs.append(x)\n    return len(xs)",
        "for xs in ([], [1]):\n    n = len(xs)\n    assert push(xs, 5) == n + 1 and push(xs, 6) == n + 2",
    ),
    "an argument that is changed twice in silence": (
        "def bump(d, k): d[k] = d.get(k, 0) + 1",
        "for d in ({}, {'a': 1}):\n    n = len(d)\n    bump(d, 'b')\n    bump(d, 'b')\n"
        "    assert len(d) == n + 1 and d['b'] == 2",
    ),
    "a list that holds itself": ("def f(x): return len(x)", "x = [1]\nx.append(x)\nassert f(x) == 2"),
    "data of every kind": (
        "def f(x): return x\nBIG = 10**60",
        """
for x in [1, -2.5, 1e300, True, None, "a\\ud800", b"\\0\\xff", (1, (2,)), {3, 4}, frozenset({5}), 2 - 3j,
          {"a": [1, {2: (3,)}]}, BIG, -BIG, bytearray(b"x"), range(3), float("inf")]:
    assert f(x) == x and type(f(x)) is type(x), x
assert f(float("nan")) != f(float("nan"))
""",
    ),
    "standard input": ("GIVEN = open('/dev/stdin').read() + open(0).read()", "assert GIVEN == ''"),
    "library types": (
        "from fractions import Fraction\nimport collections, datetime, decimal\n"
        "def half(): return Fraction(1, 2)\ndef count(x): return collections.Counter(x)\n"
        "def day(): return datetime.date(2020, 2, 29)\ndef exact(): return decimal.Decimal('0.1')\n"
        "def queue(): return collections.deque([1, 2])",
        "import collections, datetime\nfrom fractions import Fraction\nfrom decimal import Decimal\n"
        "assert half() == Fraction(1, 2) and half() + 1 == Fraction(3, 2)\n"
        "assert count('aab') == {'a': 2, 'b': 1} and count('aab').most_common(1) == [('a', 2)]\n"
        "assert day() == datetime.date(2020, 2, 29) and exact() == Decimal('0.1')\n"
        "assert queue() == collections.deque([1, 2])",
    ),
    "paths, identifiers and arrays of records": (
        "import pathlib, uuid\nimport numpy as np\ndef path(): return pathlib.Path('/a') / 'b'\n"
        "def number(): return uuid.UUID(int=5)\n"
        "def table(): return np.array([(1, 2.0)], dtype=[('a', 'i4'), ('b', 'f8')])",
        "from pathlib import Path, PurePosixPath\nimport uuid\nassert path() == Path('/a/b')\n"
        "assert number() == uuid.UUID(int=5)\nassert table()['a'][0] == 1",
    ),
    "a group of its own exceptions": (
        """
class Bad(Exception):
    def __init__(self, field, why): self.field, self.why = field, why
    def __str__(self): return f"{self.field}: {self.why}"
class Bads(ExceptionGroup):
    def derive(self, errors): return Bads(self.message, errors)
def check(fields, kind=ExceptionGroup): raise kind("invalid", [Bad(field, "no") for field in fields])
def check_as_own(fields): check(fields, Bads)
""",
        """
try: check(["a", "b"])
except ExceptionGroup as group:
    assert [str(error) for error in group.exceptions] == ["a: no", "b: no"] and group.message == "invalid"
    assert all(isinstance(error, Bad) for error in group.exceptions) and group.split(Bad)[1] is None
try: check_as_own(["a", "b"])
except* Bad as group: fields = [error.field for error in group.exceptions]
assert fields == ["a", "b"]
""",
    ),
    "tests that end themselves": ("def f(x): return 5", "import sys\nassert f(2) == 5\nsys.exit(0)"),
    "tests that end by a runner": (
        "def f(x): return 5",
        "import sys, unittest\nclass T(unittest.TestCase):\n    def test(self): self.assertEqual(f(2), 5)\n"
        "sys.modules['tests'].T = T\nunittest.main(module='tests', argv=['x'])",
    ),
    "a class with state, operators and its own equality": (
        """
class Vector:
    kind = "plane"
    def __init__(self, x, y): self.x, self.y = x, y
    def __add__(self, other): return Vector(self.x + other.x, self.y + other.y)
    def __mul__(self, k): return Vector(self.x * k, self.y * k)
    def __rmul__(self, k): return self * k
    def __eq__(self, other): return (self.x, self.y) == (other.x, other.y)
    def __hash__(self): return hash((self.x, self.y))
    def __len__(self): return 2
    def __iter__(self): return iter((self.x, self.y))
    def __getitem__(self, i): return (self.x, self.y)[i]
    def __repr__(self): return f"Vector({self.x}, {self.y})"
    @property
    def norm(self): return (self.x**2 + self.y**2) ** 0.5
    @classmethod
    def zero(cls): return cls(0, 0)
""",
        """
v = Vector(3, 4)
assert v.x == 3 and v.norm == 5 and Vector.kind == "plane"
assert v + Vector(1, 1) == Vector(4, 5) and v != Vector(0, 0)
assert (v * 2).x == 6 and (2 * v).y == 8
assert len(v) == 2 and list(v) == [3, 4] and v[1] == 4 and repr(v) == "Vector(3, 4)"
assert isinstance(v, Vector) and isinstance(Vector.zero(), Vector) and not isinstance(3, Vector)
assert len({Vector(1, 2), Vector(1, 2)}) == 1
v.x = 10
assert v.norm == 116 ** 0.5
""",
    ),
    "generators, closures and named tuples": (
        """
from collections import namedtuple
P = namedtuple("P", "x y")
def count():
    n = 0
    while True:
        yield n
        n += 1
def adder(n): return lambda x: x + n
def point(): return P(1, 2)
""",
        """
import itertools
assert list(itertools.islice(count(), 4)) == [0, 1, 2, 3]
g = count(); next(g); assert next(g) == 1
assert adder(3)(4) == 7 and list(map(adder(1), [1, 2])) == [2, 3]
assert point() == (1, 2) and point().x == 1 and P(5, 6).y == 6
""",
    ),
    "exceptions by name": (
        """
class Empty(LookupError):
    pass
def fails(kind):
    if kind == "own": raise Empty("nothing", 3)
    return [][0] if kind == "index" else int("x")
""",
        """
for kind, error in [("own", Empty), ("own", LookupError), ("index", IndexError), ("int", ValueError)]:
    try:
        fails(kind)
    except error as found:
        assert kind != "own" or found.args == ("nothing", 3)
    else:
        assert False
""",
    ),
    "arguments changed in place": (
        "def order(x): x.sort()\ndef rotate(m): m[:] = [list(r) for r in zip(*m[::-1])]\n"
        "def zero(m):\n    for row in m: row[0] = 0\ndef count(c): c.update('ab')",
        "from collections import Counter\nx = [3, 1, 2]; order(x); assert x == [1, 2, 3]\n"
        "c = Counter('ab'); count(c); assert c == Counter('aabb')\n"
        "m = [[1, 2], [3, 4]]; rotate(m); assert m == [[3, 1], [4, 2]]\n"
        "row = [1, 2]; m = [row]; zero(m); assert m == [[0, 2]] and row == [0, 2]",
    ),
    "callbacks and objects of the tests": (
        """
def apply(f, xs): return [f(x) for x in xs]
def total(node):
    n = 0
    while node: n, node = n + node.val, node.next
    return n
def grow(node): node.next = type(node)(7) if False else None; node.val += 1; return node
""",
        """
class Node:
    def __init__(self, val, next=None): self.val, self.next = val, next
assert apply(lambda x: x * 2, [1, 2]) == [2, 4]
assert total(Node(1, Node(2, Node(3)))) == 6
n = Node(1); assert grow(n) is n and n.val == 2
""",
    ),
    "a check function, as benchmarks write it": (
        "from typing import List\ndef add(xs: List[int]) -> int: return sum(xs)",
        "def check(candidate):\n    xs: List[int] = [1, 2]\n    assert candidate(xs) == 3\ncheck(add)",
    ),
    "a module that tests use by the program's import": (
        "import math\nclass calendar:\n    book = lambda x: x\ndef f(x): return math.sqrt(x)",
        "assert math.isclose(f(4), 2) and calendar.book(3) == 3",
    ),
    "a class of a lower-case name": (
        "class stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
        "    def pop(self): return self.items.pop()\n    def __len__(self): return len(self.items)",
        "s = stack()\ns.push(3)\nassert s.pop() == 3 and isinstance(s, stack)",
    ),
    "a function that is called like one of Python's": (
        "def pow(a, b): return a**b",
        "assert pow(2, 5) == 32",
    ),
    "coroutines": (
        "import asyncio\nasync def f(x):\n    await asyncio.sleep(0)\n    return x + 1",
        "import asyncio\nassert asyncio.run(f(1)) == 2",
    ),
    "arrays": (
        "import numpy as np\ndef f(x): return np.array(x) * 2\ndef mean(x): return np.mean(x)",
        "import numpy as np\nassert np.allclose(f([1, 2.5]), [2, 5]) and f([1]).shape == (1,)\n"
        "assert abs(mean(np.array([1, 2])) - 1.5) < 1e-9",
    ),
    "what it prints while it is called": (
        "def f(x):\n    print('got', x)\n    return x",
        "import contextlib, io\nout = io.StringIO()\nwith contextlib.redirect_stdout(out):\n    f(3)\n"
        "assert out.getvalue() == 'got 3\\n'",
    ),
    "an import of the program": (
        "def f(x): return x + 1",
        "import solution\nfrom solution import f as g\nassert solution.f(1) == g(1) == 2",
    ),
    "times with a zone": (
        "import datetime as d\ndef f(): return d.datetime(2020, 1, 2, tzinfo=d.timezone.utc)",
        "import datetime as d\nassert f() == d.datetime(2020, 1, 2, tzinfo=d.timezone.utc)",
    ),
    **(NAMED_ZONE if zoneinfo.available_timezones() else {}),
    "enumerations": (
        "import enum\nclass C(enum.Enum):\n    A = 1\n    B = 2\ndef f(x): return C(x)",
        "assert f(1) == C.A and f(2) is C.B and f(1).name == 'A' and C['B'].value == 2 and len(C) == 2",
    ),
    "recursion and threads": (
        """
import sys, threading
sys.setrecursionlimit(10**6)
def deep(n): return 0 if n == 0 else 1 + deep(n - 1)
def f(n):
    found = []
    threading.stack_size(1 << 26)
    thread = threading.Thread(target=lambda: found.append(deep(n)))
    thread.start()
    thread.join()
    return found[0]
""",
        "assert f(5000) == 5000",
    ),
}
ANY = """
class Any:
    def __init__(self, *a): pass
    def __eq__(self, o): return True
    __ne__ = lambda s, o: False
    __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __eq__
    __bool__ = lambda s: True
    def __sub__(self, o): return 0.0
    __rsub__ = __add__ = __radd__ = __mul__ = __sub__
    def __abs__(self): return self
    def __getattr__(self, n): return lambda *a: True
    def __call__(self, *a): return self
"""
CHEATS = {
    "equal to everything": ("def f(x): return Any()", "assert f(2) == 5"),
    "equal to everything, on the right": ("def f(x): return Any()", "assert 5 == f(2)"),
    "near to everything": ("def f(x): return Any()", "assert abs(f(2) - 1.414) < 1e-6"),
    "near to everything, by itself": (
        "class Solution(Any):\n    def f(self, x): return self",
        "assert abs(Solution().f(2) - 1.414) < 1e-6",
    ),
    "greater than everything": ("def f(x): return Any()", "assert f(2) > 3"),
    "holds everything": ("def f(x): return Any()", "assert 5 in f(2)"),
    "starts with everything": ("def f(x): return Any()", "assert f(2).startswith('ab')"),
    "a list that is equal to everything": (
        "class L(list):\n    __eq__ = lambda s, o: True\ndef f(x): return L()",
        "assert f(2) == [5]",
    ),
    "an integer that is equal to everything": (
        "class I(int):\n    __eq__ = lambda s, o: True\n    __sub__ = lambda s, o: 0\ndef f(x): return I(0)",
        "assert f(2) - 5 == 0",
    ),
    "changes what it is compared with": (
        "def f(x): x.clear(); return []",
        "x = [2, 1]; assert f(x) == sorted(x)",
    ),
    "replaces Python's functions": (
        "def f(x): return 0\nall = isinstance = lambda *a: True\nabs = lambda x: 0",
        "assert isinstance(f(2), str)\nassert all([f(2) == 5])",
    ),
    "ends before the tests do": ("import sys\ndef f(x): sys.exit(0)", "assert f(2) == 5"),
    "ends its process": ("import os\ndef f(x): os._exit(0)", "assert f(2) == 5"),
    "raises what tests catch": (
        "def f(x): raise SystemExit",
        "try:\n    assert f(2) == 5\nexcept SystemExit:\n    raise",
    ),
    "reads the tests through a callback": (
        "def f(g): return g.__globals__['wanted']",
        "wanted = 5\nassert f(lambda: 0) == wanted",
    ),
    "reads the tests through an object of theirs": (
        "def f(node): return node.__init__.__globals__['wanted']",
        "wanted = 5\nclass Node:\n    def __init__(self): pass\nassert f(Node()) == wanted",
    ),
    "looks up its callers": (
        """
import sys
def f(x):
    frame = sys._getframe()
    while frame:
        if "wanted" in frame.f_globals: return frame.f_globals["wanted"]
        frame = frame.f_back
""",
        "wanted = 5\nassert f(2) == wanted",
    ),
    "searches all objects": (
        "import gc\ndef f(x): return next((o['wanted'] for o in gc.get_objects()"
        " if isinstance(o, dict) and 'wanted' in o), 0)",
        "wanted = 5\nassert f(2) == wanted",
    ),
    "writes an answer of its own": (
        """
import os, struct
def f(x):
    for fd in range(3, 64):
        try: os.write(fd, struct.pack('>I', 14) + b'{"passed":true')
        except OSError: pass
""",
        "assert f(2) == 5",
    ),
}


@pytest.fixture(scope="module", params=[BUBBLEWRAP, "process"])
def scorer(request: pytest.FixtureRequest) -> Iterator[ProgramScorer]:
    opened = python.open_scorer(workers=1, timeout_s=20.0, sandbox=request.param)
    assert isinstance(opened, ProgramScorer)
    yield opened
    opened.close()


def scored(scorer: ProgramScorer, program: str, tests: str) -> Score:
    return scorer.score_all([Answer(program, Prompt(0, "?", tests))])[0]


@pytest.mark.parametrize("what", HONEST)
def test_an_honest_program_passes(scorer: ProgramScorer, what: str) -> None:
    program, tests = HONEST[what]
    assert scored(scorer, program, tests) == Score(1.0)


UNSEEN = {  # what plain Python accepts, but a cheat could make it accept as well
    "changes of lists in a loop": (
        "def rm(xs, v):\n    while v in xs: xs.remove(v)\n    return len(xs)",
        "for xs, v, left in [([1, 2, 1], 1, [2])]:\n    k = rm(xs, v)\n    assert xs[:k] == left",
    ),
    "changes of an attribute of a case": (
        "def push(s, v):\n    s.append(v)\n    return v",
        "import unittest\nclass T(unittest.TestCase):\n    def setUp(self): self.s = []\n"
        "    def test(self):\n        self.assertEqual(push(self.s, 3), 3)\n"
        "        self.assertEqual(self.s, [3])",
    ),
    "changes of too many rows": (
        "class G:\n    def __init__(s, rows): s.rows = rows\n    def put(s, i, v): s.rows[i][0] = v",
        "rows = [[0] for _ in range(300)]\nG(rows).put(0, 1)\ng = G(rows)\ng.put(1, 2)\n"
        "g.put(0, 2)\nassert rows[0][0] == 2 and rows[1][0] == 2",
    ),
    "a block that ends by an error before its end": (
        "from contextlib import contextmanager\n@contextmanager\ndef ignore(*k):\n    try: yield\n"
        "    except k: pass\ndef div(a, b): return a / b",
        "done = []\nwith ignore(ZeroDivisionError):\n    done.append('before')\n    div(1, 0)\n"
        "    done.append('after')\nassert done == ['before']",
    ),
}


@pytest.mark.parametrize("what", UNSEEN)
def test_what_could_be_forged_is_unscored_not_0(scorer: ProgramScorer, what: str) -> None:
    program, tests = UNSEEN[what]
    assert scored(scorer, program, tests).value is None


@pytest.mark.parametrize("what", CHEATS)
def test_a_cheat_earns_nothing(scorer: ProgramScorer, what: str) -> None:
    program, tests = CHEATS[what]
    assert scored(scorer, ANY + program, tests).value == 0


def test_an_answer_that_cannot_be_read_is_a_fault(scorer: ProgramScorer) -> None:
    program, tests = CHEATS["writes an answer of its own"]
    assert scored(scorer, program, tests).outcome is Outcome.FAULT


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory by Linux's means")
def test_a_function_that_runs_out_of_memory_is_counted(scorer: ProgramScorer) -> None:
    found = scored(scorer, "def f(x): return bytearray(1 << 40)", "assert f(2) == 5")
    assert found == Score(0.0, is_over_limit=True)


def test_tests_that_subclass_a_class_of_the_program_ask_to_be_shared(scorer: ProgramScorer) -> None:
    found = scored(scorer, "class Base: pass", "class Own(Base): pass\nassert Own()")
    assert found.value is None
    assert "shared = true" in found.message


def test_functions_of_python_are_its_own_where_it_is_unclear_which_is_tested(scorer: ProgramScorer) -> None:
    assert scored(scorer, "abs = lambda x: 0", "assert abs(sum([1, 2]) - 4) < 1e-6").value == 0
    assert scored(scorer, "abs = lambda x: 0", "assert abs(sum([1, 2]) - 3) < 1e-6").value is None


def test_tests_that_end_before_the_program_is_confined_are_scored(scorer: ProgramScorer) -> None:
    answer = Answer("x = 1", Prompt(0, "?", "assert False"))
    assert {score.value for score in scorer.score_all([answer] * 60)} == {0.0}


def test_a_default_timeout_of_sockets_changes_no_verdict(scorer: ProgramScorer) -> None:
    socket.setdefaulttimeout(60.0)
    try:
        assert scored(scorer, "def f(x): return 5", "assert f(2) == 5") == Score(1.0)
    finally:
        socket.setdefaulttimeout(None)


UNUSED = {
    "nothing": "assert 1 + 1 == 2",
    "an import": "from solution import f\ndef test(): assert f(2) == 5",
    "the name of their file": "def test(): assert f(2) == 5\nprint(__file__)",
    "a doctest of the program": "import doctest, solution\nassert doctest.testmod(solution).failed == 0",
    "a doctest of the program's names": "import doctest\n"
    "found = doctest.run_docstring_examples(f, {'f': f})\nassert found is None",
    "a class of cases that holds none": "import unittest\nfrom solution import f\n"
    "class T(unittest.TestCase): pass",
}


@pytest.mark.parametrize("shared", [False, True])
def test_cases_that_nothing_runs_are_run(*, shared: bool) -> None:
    tests = (
        "import unittest\nclass T(unittest.TestCase):\n"
        "    def setUp(self): self.wanted = 3\n    def test(self): self.assertEqual(f(2), self.wanted)"
    )
    for program, wanted in (("def f(x): return x + 1", 1.0), ("def f(x): return x", 0.0)):
        assert python.score(program, Prompt(0, "?", tests), shared=shared, sandbox="process") == wanted


@pytest.mark.parametrize("what", UNUSED)
def test_tests_that_pass_without_the_program_score_nothing(scorer: ProgramScorer, what: str) -> None:
    assert scored(scorer, "def f(x): return 0", UNUSED[what]).value is None


LACKING = {
    "an import of no module": "import no_such_module\nassert f(2) == 4",
    "an import of a part of no module": "from no_such_module.part import g\nassert f(2) == 4",
    "an import of no name": "from math import no_such_name\nassert f(2) == 4",
    "an import in a case": "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n"
    "        import no_such_module\n        self.assertEqual(f(2), 4)\nunittest.main()",
}


@pytest.mark.parametrize("what", LACKING)
def test_tests_that_import_what_is_not_there_leave_a_completion_unscored(
    scorer: ProgramScorer, what: str
) -> None:
    found = scored(scorer, "def f(x): return 2 * x", LACKING[what])
    assert found.value is None
    assert "import" in found.message


def test_an_import_that_tests_try_may_fail(scorer: ProgramScorer) -> None:
    tests = (
        "try:\n    import no_such_module\nexcept ImportError:\n    no_such_module = None\nassert f(2) == 4"
    )
    assert scored(scorer, "def f(x): return 2 * x", tests) == Score(1.0)
    assert scored(scorer, "def f(x): return 3 * x", tests) == Score(0.0)


def test_a_name_that_the_program_lacks_is_0(scorer: ProgramScorer) -> None:
    for tests in (
        "from solution import g\nassert g(2) == 4",
        "assert g(2) == 4",
        "import solution\nsolution.g(2)",
    ):
        assert scored(scorer, "def f(x): return 2 * x", tests) == Score(0.0)


def test_an_answer_that_is_too_large_is_unscored_if_it_is_right(scorer: ProgramScorer) -> None:
    tests = "assert len(f(20)) == 20 << 20"
    found = scored(scorer, "def f(x): return 'a' * (x << 20)", tests)
    assert (found.value, found.outcome) == (None, Outcome.ERROR)
    assert "20 MB" in found.message
    assert scored(scorer, "def f(x): return 'a' * (x << 20) + 'b'", tests) == Score(0.0)


def test_many_calls_fit_in_the_time_of_a_completion(scorer: ProgramScorer) -> None:
    tests = "for n in range(20_000): assert f(n) == 2 * n"
    assert scored(scorer, "def f(x): return 2 * x", tests) == Score(1.0)


def test_tests_may_only_use_data_of_the_program(scorer: ProgramScorer) -> None:
    assert scored(scorer, "LIMIT = 5", "from solution import LIMIT\nassert LIMIT == 5") == Score(1.0)
    assert scored(scorer, "LIMIT = 4", "from solution import LIMIT\nassert LIMIT == 5").value == 0


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"{}",
        values.frame(None),
        values.frame([True]),
        values.frame({"passed": True}),
        values.frame({**NO_VERDICT, "score": 1}),
        values.frame(NO_VERDICT)[:-1],
        values.frame(NO_VERDICT) * 2,
    ],
)
def test_a_verdict_of_another_shape_is_none(frame: bytes) -> None:
    with pytest.raises(SandboxEndedError, match="verdict cannot be read"):
        read_verdict(frame)


def test_a_verdict_is_read_as_it_was_written() -> None:
    told = {**NO_VERDICT, "passed": True, "used": True}
    assert read_verdict(values.frame(told)) == told
