"""Which arguments the program may change in place by a function that returns something."""

from __future__ import annotations

import ast

import pytest

from retrain.plugins.sandbox.inside.reading import Uses

SAFE = [
    "x = [2, 1]\nassert f(x) == [1, 2]\nassert x == [1, 2], f'{x}'",
    "x = [1, 1]\nk = f(x)\nassert x[:k] == [1]",
    "x = [1, 1]\nwanted = [1]\nk = f(x)\nassert k == len(wanted)\n"
    "for i in range(k):\n    assert x[i] == wanted[i]",
    "s = Solution()\nx = [3, 2]\nk = s.f(x, 3)\nassert sorted(x[:k]) == [2]",
    "class T(TestCase):\n    def test(self):\n        x = [1]\n        k = Solution().f(nums=x)\n"
    "        self.assertEqual(x[:k], [1])",
    "x = [1, 2]\nwanted = [1]\nr = f(x)\nassert len(x) == len(wanted), f'{x} for {wanted}'\n"
    "for i in range(len(wanted)): assert x[i] == wanted[i]",
    "x = list(range(3))\nassert list(f(x)) == [2, 1]\nassert not x",
    "x = []\n@f(x)\ndef g(y): return y\nassert g(1) == 1\nassert x == [0] * 3",
    "x = []\nwith f(x):\n    x.append('work')\nassert x == ['start', 'work'] and len(x)",
    "x = [1]\nassert f(x) is x\nassert x == sorted([2, 1])",
    "x = {}\nstore = Store(x)\nx['a'] = 1\nassert store.get('a') == 1\nassert 'b' not in x",
    "from collections import deque\nx = deque([1])\nk = f(x)\nassert x == deque()",
    "x = {}\nf(x)\nassert sorted(x.items()) == [(1, 2)]\nassert x.get(1) == 2",
    "x, wanted = [2, 1], [1]\nr = f(x)\nassert x == wanted",
    "x: list[int] = [2, 1]\nr = f(x)\nassert x == [1]",
    "from solution import f\nx = {1: 2}\nr = f(x)\nassert x == {1: 3} and r is not None",
]
UNSAFE = {
    "compared with the result": "x = [2, 1]\nr = f(x)\nassert r == sorted(x)",
    "compared in the call's own line": "x = [2, 1]\nassert f(x) == sorted(x)",
    "compared with itself": "x = [2, 1]\nr = f(x)\nassert x == sorted(x)",
    "compared in a generator's line": "x = [2, 1]\nassert list(f(x)) == sorted(x)",
    "looked up by a result": "x = [2, 1]\nr = f(x)\nassert x.index(r) == 0",
    "compared with its own method": "x = {1: 2}\nr = f(x)\nassert r == x.copy()",
    "compared with another's method": "x = {}\ny = {}\nf(x)\nf(y)\nassert x == y.copy()",
    "swapped": "x, y = [2], [1]\nx, y = y, x\nr = f(x)\nassert x == [1]",
    "unpacked": "x, *y = [[2], [1]]\nr = f(x)\nassert x == [1]",
    "its parts in a loop": "x = [2, 1]\nassert all(a == b for a, b in zip(f(x), x))",
    "sorted by the program": "x = [2, 1]\nr = f(x)\nx.sort(key=g)\nassert r == x",
    "made by the program": "x = list(g())\nr = f(x)\nassert x == [1]",
    "made by the program's sorted": "from solution import f, sorted\nx = sorted([1])\nf(x)\nassert x == [1]",
    "made by a name of the program": "x = [0] * g\nr = f(x)\nassert x == [1]",
    "its length compared": "x = [2, 1]\nr = f(x)\nassert len(r) == len(x)",
    "looped over": "x = [2, 1]\nr = f(x)\nfor y in x: assert y in r",
    "read by more than a look": "x = [2, 1]\nr = f(x)\nassert all(map(ok, x)) == True",
    "computed with": "x = [2, 1]\nr = f(x)\nassert x[0] - x[0] == 0",
    "given to a check of the tests": "def check(r, x): assert r == sorted(x)\nx = [2, 1]\ncheck(f(x), x)",
    "given to a library": "import numpy as np\nx = [2, 1]\nr = f(x)\nnp.testing.assert_array_equal(r, x)",
    "given to a library that is not imported": "x = [2, 1]\nr = f(x)\nnp.testing.assert_array_equal(x, r)",
    "known by another name": "x = [2, 1]\ny = x\nr = f(x)\nassert r == sorted(y)",
    "another's data": "y = [2, 1]\nx = y\nr = f(x)\nassert r == sorted(y)",
    "a part of it known": "x = [[2], [1]]\nrow = x[0]\nr = f(x)\nassert row == r",
    "compared with another argument": "x = [2, 1]\ny = [1, 2]\nr = f(x)\nf(y)\nassert x == y",
    "compared with what any function gets": "x = [2]\ny = [1]\nfs = [g]\nr = f(x)\nassert fs[0](y) == 1\n"
    "assert x == y",
    "compared by a method of the program": "x = [2]\ny = [1]\nf(x)\nfs[0].assert_same(y, 1)\nassert x == y",
    "read by a function of the program": "from solution import f, len\nx = [2]\nf(x)\nassert len(x) == 1",
    "compared with what an argument holds": "x = [2]\ny = [1]\nd = {1: y}\nf(d)\nr = f(x)\nassert x == y",
    "read by its name": "x = [2, 1]\nr = f(x)\nassert x == [1, 2] and r == eval('sorted(x)')",
    "with readers of the program's": "x = [2, 1]\nsorted = solution.sorted\nf(x)\nassert sorted(x) == [1, 2]",
    "made by nothing but itself": "s = s.f(s)\nx = [1]\ns.f(x)\nassert x == [1]",
    "bound by a loop": "for x in data:\n    f(x)\n    assert x == [1]",
    "bound by a pattern": "x = [1]\nf(x)\nmatch y:\n    case [*x]: pass\nassert x == [1]",
}


@pytest.mark.parametrize("tests", SAFE)
def test_an_argument_that_is_only_compared_with_written_data_may_change(tests: str) -> None:
    assert Uses(ast.parse(tests)).changeable() == {"x"}


@pytest.mark.parametrize("how", UNSAFE)
def test_an_argument_that_tells_more_stays(how: str) -> None:
    assert Uses(ast.parse(UNSAFE[how])).changeable() == frozenset()
