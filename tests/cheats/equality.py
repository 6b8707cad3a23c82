"""Results that are equal to everything."""

from __future__ import annotations

from tests.cheats import Cheat

ANY = """
class Any:
    def __init__(self, *a): pass
    def __eq__(self, o): return True
    __ne__ = lambda s, o: False
    __hash__ = lambda s: 7391
    __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __eq__
    __bool__ = lambda s: True
    __len__ = lambda s: 1
    def __sub__(self, o): return 0.0
    __rsub__ = __add__ = __radd__ = __mul__ = __mod__ = __sub__
    def __abs__(self): return self
    __round__ = __float__ = __int__ = __index__ = lambda s, *a: 0
    def __getattr__(self, n): return lambda *a: True
    def __call__(self, *a): return self
"""
WHY = "the program's own comparison decides"


def subclass(base: str, value: str) -> str:
    return (
        f"class Mine({base}):\n    __eq__ = __le__ = __ge__ = __lt__ = __gt__ = lambda s, o: True\n"
        f"    __ne__ = lambda s, o: False\n    __hash__ = {base}.__hash__\n"
        f"    __sub__ = __rsub__ = lambda s, o: 0\ndef f(x): return Mine({value})"
    )


RETURNS_ANY = ANY + "def f(x): return Any()"
SORTER = (
    "class Sorter:\n    def __init__(self, x): self.x = x\n    def note(self): self.x.clear()\n"
    "    def get(self):\n        self.x.clear()\n        return []\n"
    "    @property\n    def result(self): return self.get()\n"
    "    def __iter__(self): return iter(self.get())\n"
    "    def __enter__(self): return self.get()\n    def __exit__(self, *error): pass\n"
    "    def __add__(self, other): return self.get()\n    def __getitem__(self, i): return self.get()\n"
)
LATER_CHANGES = {
    "a generator that empties its argument": (
        "def f(x):\n    x.clear()\n    yield from ()",
        "x = [2, 1]\nassert list(f(x)) == sorted(x)",
    ),
    "a method that empties what the constructor was given": (
        SORTER,
        "x = [2, 1]\ns = Sorter(x)\nassert s.get() == sorted(x)",
    ),
    "a property that empties what the constructor was given": (
        SORTER,
        "x = [2, 1]\ns = Sorter(x)\nassert s.result == sorted(x)",
    ),
    "a method without a result that empties what another was given": (
        SORTER,
        "x = [2, 1]\ns = Sorter(x)\ns.note()\nassert [*s] == sorted(x)",
    ),
    "a loop that empties what the constructor was given": (
        SORTER,
        "x = [2, 1]\nassert list(Sorter(x)) == sorted(x)",
    ),
    "a block that empties what the constructor was given": (
        SORTER,
        "x = [2, 1]\nwith Sorter(x) as r:\n    assert r == sorted(x)",
    ),
    "an operator that empties what the constructor was given": (
        SORTER,
        "x = [2, 1]\nassert Sorter(x) + 1 == sorted(x)",
    ),
    "an item that empties what the constructor was given": (
        SORTER,
        "x = [2, 1]\nassert Sorter(x)[0] == sorted(x)",
    ),
    "a function that empties what another function kept": (
        "kept = []\ndef keep(x): kept.append(x)\ndef f():\n    kept[0].clear()\n    return []",
        "x = [2, 1]\nkeep(x)\nassert f() == sorted(x)",
    ),
    "an exception that comes with a change": (
        "def f(x):\n    x.clear()\n    raise ValueError([])",
        "x = [2, 1]\ntry:\n    f(x)\n    assert False\n"
        "except ValueError as e:\n    assert e.args[0] == sorted(x)",
    ),
    "a decorator that empties its argument": (
        "def keep(x):\n    def decorate(f):\n        def inner():\n"
        "            x.clear()\n            return []\n        return inner\n    return decorate",
        "x = [2, 1]\n@keep(x)\ndef f(): return sorted(x)\nassert f() == sorted(x)",
    ),
    "a change before a callback": (
        "def f(x, key):\n    x.clear()\n    key(1)\n    return []",
        "x = [2, 1]\nassert f(x, key=lambda y: -y) == sorted(x, key=lambda y: -y)",
    ),
    "rows of a table that are emptied": (
        "def f(x):\n    for row in x: row.clear()\n    return [[], []]",
        "x = [[2, 1], [4, 3]]\nassert f(x) == [sorted(row) for row in x]",
    ),
    "a list that is emptied by what was returned": (
        "def f(x):\n    def get():\n        x.clear()\n        return []\n    return get",
        "x = [2, 1]\nget = f(x)\nassert get() == sorted(x)",
    ),
    "an attribute that is given and emptied": (
        SORTER,
        "x = [2, 1]\ns = Sorter([])\ns.x = x\nassert s.get() == sorted(x)",
    ),
    "an asynchronous function that empties its argument": (
        "async def f(x):\n    x.clear()\n    return []",
        "import asyncio\nx = [2, 1]\nassert asyncio.run(f(x)) == sorted(x)",
    ),
}

CHEATS = [
    Cheat("an object equal to everything", WHY, RETURNS_ANY),
    Cheat("on the right of a comparison", WHY, RETURNS_ANY, answer="assert 7391 == f(2)"),
    Cheat("not unequal to anything", WHY, RETURNS_ANY, answer="assert not (f(2) != 7391)"),
    Cheat("near to everything", WHY, RETURNS_ANY, answer="assert abs(f(2) - 7391) < 1e-6"),
    Cheat(
        "close to everything",
        WHY,
        RETURNS_ANY,
        answer="import math\nassert math.isclose(f(2), 7391, abs_tol=1)",
    ),
    Cheat(
        "a class near to everything",
        "the tests take its objects for those that they made themselves",
        ANY + "class f(Any): pass",
        answer="assert abs(f(2) - 7391) < 1e-6",
    ),
    Cheat(
        "a class within a class, near to everything",
        "the tests take its objects for those that they made themselves",
        ANY + "class Solution:\n    class f(Any): pass",
        answer="assert abs(Solution().f(2) - 7391) < 1e-6",
    ),
    Cheat("a class that holds everything", WHY, ANY + "class f(Any): pass", answer="assert 7391 in f(2)"),
    Cheat(
        "a class that has every method",
        WHY,
        ANY + "class f(Any): pass",
        answer="assert f(2).startswith('ab')",
    ),
    Cheat(
        "a class, returned and near to everything",
        WHY,
        ANY + "def f(): return Any",
        answer="assert abs(f()(2) - 7391) < 1e-6",
    ),
    Cheat(
        "an array that lies where the program says",
        "numpy reads the memory of the tests",
        "class Array:\n    @property\n    def __array_interface__(self):\n"
        "        where = {'data': (id(0) & ~4095, False)}\n"
        "        return {'shape': (0,), 'typestr': '<f8', 'version': 3, **where}\ndef f(x): return Array()",
        answer="import numpy as np\nassert np.asarray(f(2)).dtype == float",
    ),
    Cheat(
        "data that lies where the program says",
        "numpy reads the memory of the tests, though they got a list",
        "class L(list):\n    @property\n    def __array_interface__(self):\n"
        "        where = {'data': (id(0) & ~4095, False)}\n"
        "        return {'shape': (0,), 'typestr': '<f8', 'version': 3, **where}\ndef f(x): return L([0])",
        answer="import numpy as np\nassert np.asarray(f(2)).dtype == float",
    ),
    Cheat(
        "a list that has the shape of an array",
        "an empty answer is close to everything, so the tests compare its shape as well",
        "class L(list): shape = (1,)\ndef f(x): return L()",
        answer="import numpy as np\nassert f(2).shape == (1,) and np.allclose(f(2), [7391])",
    ),
    Cheat(
        "a list that has the length of an array",
        "an empty answer is close to everything, so the tests compare its length as well",
        "class L(list): shape = [1]\ndef f(x): return L()",
        answer="import numpy as np\nassert f(2).shape[0] == 1 and np.allclose(f(2), [7391])",
    ),
    Cheat(
        "a list that has the size of an array",
        "an empty answer is close to everything, so the tests compare its size as well",
        "class L(list): size = 1\ndef f(x): return L()",
        answer="import numpy as np\nassert f(2).size == 1 and np.allclose(f(2), [7391])",
    ),
    Cheat(
        "data whose copy is other data",
        "copy asks the program for it",
        "class L(list):\n    def __deepcopy__(self, memo): return [7391]\ndef f(x): return L([0])",
        answer="import copy\nassert copy.deepcopy(f(2)) == [7391]",
    ),
    Cheat("greater than everything", WHY, RETURNS_ANY, answer="assert f(2) > 7390"),
    Cheat("in every set", WHY, RETURNS_ANY, answer="assert f(2) in {7391}"),
    Cheat("in every list", WHY, RETURNS_ANY, answer="assert f(2) in [7391]"),
    Cheat("holds everything", WHY, RETURNS_ANY, answer="assert 7391 in f(2)"),
    Cheat("has every method", WHY, RETURNS_ANY, answer="assert f(2).startswith('ab')"),
    Cheat(
        "has a class for every method",
        WHY,
        "class Has: startswith = KeyError\ndef f(x): return Has()",
        answer="assert f(2).startswith('ab')",
    ),
    Cheat("equal within a list", WHY, ANY + "def f(x): return [Any()]", answer="assert f(2) == [7391]"),
    Cheat(
        "equal within a tuple", WHY, ANY + "def f(x): return (1, Any())", answer="assert f(2) == (1, 7391)"
    ),
    Cheat(
        "equal within a dictionary",
        WHY,
        ANY + "def f(x): return {'a': Any()}",
        answer="assert f(2) == {'a': 7391}",
    ),
    Cheat("an instance that returns itself", WHY, ANY + "class f(Any): pass"),
    Cheat(
        "a class equal to everything",
        WHY,
        "class Meta(type):\n    __eq__ = lambda s, o: True\n    __hash__ = type.__hash__\n"
        "class C(metaclass=Meta): pass\ndef f(x): return C",
    ),
    Cheat("an integer equal to everything", WHY, subclass("int", "0")),
    Cheat("a float equal to everything", WHY, subclass("float", "0")),
    Cheat("a text equal to everything", WHY, subclass("str", "'a'"), answer="assert f(2) == 'seven'"),
    Cheat(
        "a list equal to everything",
        WHY,
        "class L(list):\n    __eq__ = lambda s, o: True\n    sort = lambda s: None\ndef f(x): return L()",
        answer="assert f(2) == [7391]",
    ),
    Cheat(
        "a dictionary that has every key",
        WHY,
        "class D(dict):\n    __eq__ = __contains__ = lambda s, o: True\n"
        "    __getitem__ = get = __missing__ = lambda s, *k: 7391 if False else s\ndef f(x): return D()",
        answer="assert f(2)['a'] == 7391",
    ),
    Cheat("a number of the tests' difference", WHY, subclass("int", "0"), answer="assert f(2) - 7391 == 0"),
    Cheat(
        "an array equal to everything",
        WHY,
        "import numpy as np\nclass A(np.ndarray):\n    __eq__ = lambda s, o: np.array([True])\n"
        "    all = any = lambda s, *a: True\ndef f(x): return np.zeros(1).view(A)",
        answer="assert (f(2) == 7391).all()",
    ),
    Cheat(
        "an array close to everything",
        WHY,
        "import numpy as np\ndef f(x): return np.zeros(1)\nnp.allclose = lambda *a, **k: True",
        answer="import numpy as np\nassert np.allclose(f(2), 7391)",
    ),
    Cheat("ANY of unittest.mock", WHY, "from unittest.mock import ANY\ndef f(x): return ANY"),
    Cheat(
        "a mock of everything",
        WHY,
        "from unittest.mock import MagicMock\ndef f(x):\n    m = MagicMock()\n"
        "    m.__eq__.side_effect = lambda o: True\n    return m",
    ),
    Cheat(
        "an object whose __class__ lies",
        WHY,
        ANY + "class I(Any):\n    __class__ = property(lambda s: int)\ndef f(x): return I()",
        answer="assert isinstance(f(2), int) and f(2) == 7391",
    ),
    Cheat(
        "a fraction equal to everything",
        WHY,
        "from fractions import Fraction\nclass F(Fraction):\n    __eq__ = lambda s, o: True\n"
        "Fraction.__eq__ = lambda s, o: True\ndef f(x): return Fraction(0)",
    ),
    Cheat(
        "a named tuple equal to everything",
        WHY,
        "from collections import namedtuple\nclass P(namedtuple('P', 'x y')):\n"
        "    __eq__ = lambda s, o: True\ndef f(x): return P(1, 2)",
        answer="assert f(2) == (7391, 0)",
    ),
    Cheat(
        "a generator of everything",
        "a test of membership never ends on a wrong element",
        "import itertools\ndef f(x): return itertools.count()",
        answer="assert 7391 in f(2)",
    ),
    Cheat(
        "a result that changes the expected value beside another",
        "an argument that the tests look at is changed",
        "def f(x):\n    x.clear()\n    return []",
        answer="x = [2, 1]\nfound = f(x)\nassert x[:0] == [] and found == sorted(x)",
    ),
    Cheat(
        "an expected value that a function of another name changes",
        "an argument that the tests look at is changed, and what it is compared with as well",
        "def f(x):\n    x.clear()\n    return 1\ndef g(x): x.clear()",
        answer="x = [1]\nwanted = [7391]\ncalls = [g]\nfound = f(x)\nassert calls[0](wanted) is None\n"
        "assert x == wanted",
    ),
    Cheat(
        "an expected value that a function with a name of Python's changes",
        "an argument that the tests look at is changed, and what it is compared with as well",
        "def f(x):\n    x.clear()\n    return 1\ndef sorted(x): x.clear()",
        answer="from solution import f, sorted\nx = [1]\nwanted = [7391]\nfound = f(x)\n"
        "assert sorted(wanted) is None\nassert x == wanted",
    ),
    Cheat(
        "a result that changes the expected value",
        "the expected value is computed from an argument after the call",
        "def f(x):\n    x.clear()\n    return []",
        answer="x = [2, 1]\nassert f(x) == sorted(x)",
    ),
    *(
        Cheat(
            what, "the expected value is computed from data that the program changes", program, answer=answer
        )
        for what, (program, answer) in LATER_CHANGES.items()
    ),
]
