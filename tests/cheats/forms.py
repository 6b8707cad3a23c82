"""Usual forms of solutions and of their tests: each must score 1 wherever programs run."""

from __future__ import annotations

from tests.cheats import Honest

FORMS = [
    Honest(
        "a decorator that reads annotations",
        """
import functools, inspect
def checked(f):
    @functools.wraps(f)
    def wrapper(*args):
        for value, one in zip(args, inspect.signature(f).parameters.values()):
            if not isinstance(value, one.annotation): raise TypeError(one.name)
        return f(*args)
    return wrapper
@checked
def double(x: int) -> int: return 2 * x
""",
        "assert double(2) == 4\ntry:\n    double('2')\n    assert False\nexcept TypeError: pass",
    ),
    Honest(
        "arguments by argparse, none given",
        "import argparse, sys\nparser = argparse.ArgumentParser()\nparser.add_argument('file', nargs='?')\n"
        "given = parser.parse_args().file\nfile = open(given) if given else sys.stdin\n"
        "print(sum(map(int, file.read().split())))",
        '[{"input": "1 2", "output": "3"}]',
        "stdio",
    ),
    Honest(
        "threads of the tests",
        "def f(x): return [x] * 500",
        "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(8) as pool:\n"
        "    assert list(pool.map(f, range(50))) == [[x] * 500 for x in range(50)]",
    ),
    Honest(
        "numbers of its own class",
        """
from fractions import Fraction
class Money:
    def __init__(self, cents): self.cents = cents
    def __float__(self): return self.cents / 100
    def __int__(self): return self.cents // 100
    def __index__(self): return self.cents
    def __round__(self, digits=0): return Money(round(self.cents, -2))
    def __divmod__(self, n): return divmod(self.cents, n)
    def __format__(self, spec): return format(self.cents / 100, spec or ".2f")
""",
        "m = Money(250)\nassert float(m) == 2.5 and int(m) == 2 and range(300)[m] == 250\n"
        "assert divmod(m, 100) == (2, 50) and f'{m}' == '2.50' and f'{m:.1f}' == '2.5'\n"
        "assert float(round(m)) == 2.0",
    ),
    Honest(
        "copies of its objects",
        "class Grid:\n    def __init__(self, n): self.rows = [[0] * n for _ in range(n)]\n"
        "    def set(self, i, j): self.rows[i][j] = 1\n"
        "    def __eq__(self, other): return self.rows == other.rows",
        "import copy\na = Grid(2)\nb = copy.deepcopy(a)\nassert a == b\nb.set(0, 1)\n"
        "assert a.rows == [[0, 0], [0, 0]] and b.rows == [[0, 1], [0, 0]] and a != b",
    ),
    Honest(
        "classes and subclasses",
        "class Shape: pass\nclass Square(Shape): pass",
        "assert issubclass(Square, Shape) and not issubclass(Shape, Square) and isinstance(Square(), Shape)",
    ),
    Honest(
        "tests that run if they are the program",
        "def f(x): return x + 1",
        "import unittest\nfrom solution import *\nclass T(unittest.TestCase):\n"
        "    def test(self): self.assertEqual(f(2), 3)\nif __name__ == '__main__':\n    unittest.main()",
    ),
    Honest(
        "tests that name their module",
        "def f(x): return x + 1",
        "import unittest\nclass T(unittest.TestCase):\n"
        "    def test(self): self.assertEqual(f(2), 3)\nunittest.main(module='tests')",
    ),
    Honest(
        "attributes named like methods of data",
        "class Book:\n    def __init__(self, title): self.title, self.count = title, 1\n"
        "class Library:\n    'Holds books.'\n    def find(self, title): return Book(title)\n"
        "def read(book):\n    'Return it.'\n    return book",
        "book = Library().find('Dune')\nassert book.title == 'Dune' and book.count == 1\n"
        "assert read.__doc__ == 'Return it.' and Library.__doc__ == 'Holds books.'",
    ),
    Honest(
        "an exception with attributes",
        "class Broke(Exception):\n    def __init__(self, code, by):\n"
        "        super().__init__(f'code {code}')\n"
        "        self.code, self.by = code, by\ndef f(): raise Broke(5, [1])",
        "try:\n    f()\n    assert False\nexcept Broke as error:\n"
        "    assert str(error) == 'code 5' and error.code == 5 and error.by == [1]",
    ),
    Honest(
        "dictionaries that have every key, and slices",
        "from collections import Counter, defaultdict\ndef count(x): return Counter(x)\n"
        "def empty(): return defaultdict(list)\n"
        "class Shows:\n    def __getitem__(self, i): return (i.start, i.stop)",
        "from collections import Counter\nassert count('aab') == Counter('aba') == {'a': 2, 'b': 1}\n"
        "assert count('a')['z'] == 0 and (count('a') + Counter('a'))['a'] == 2\n"
        "d = empty()\nd['a'].append(1)\nassert d == {'a': [1]} and d['b'] == [] and Shows()[1:3] == (1, 3)",
    ),
    Honest(
        "output by files of its own",
        "import os\nprint = open(1, 'w').write\nprint(f'{os.path.basename(__file__)[-3:]}\\n')",
        '[{"input": "", "output": ".py"}]',
        "stdio",
    ),
    Honest(
        "output that is written at exit",
        "import atexit, io, sys\nsys.stdout = held = io.StringIO()\n"
        "atexit.register(lambda: sys.__stdout__.write(held.getvalue()))\nprint(7)",
        '[{"input": "", "output": "7"}]',
        "stdio",
    ),
    Honest(
        "types as arguments and results",
        "def keep(xs, kind): return [x for x in xs if isinstance(x, kind)]\n"
        "def convert(xs, kind): return [kind(x) for x in xs if type(x) is not kind]\n"
        "def kinds(xs): return [type(x) for x in xs]",
        "assert keep([1, 'a'], int) == [1] and keep([1, None, 2.0], (float, type(None))) == [None, 2.0]\n"
        "assert convert(['1', 2], int) == [1] and kinds([1, 'a', []]) == [int, str, list]",
    ),
    Honest("a class of Python's under another name", "to_tuple = tuple", "assert to_tuple([1, 2]) == (1, 2)"),
    Honest(
        "members of an enumeration that are data",
        "from enum import Enum, IntEnum\nclass Color(str, Enum): RED = 'red'\n"
        "class Level(IntEnum): LOW = 1\ndef color(): return Color.RED\ndef level(): return Level.LOW",
        "assert color() is Color.RED and color() == 'red' and level() is Level.LOW and level() == 1",
    ),
    Honest(
        "an object that is made once",
        "class Settings:\n    made = None\n    def __new__(cls):\n"
        "        cls.made = cls.made or super().__new__(cls)\n        return cls.made",
        "assert Settings() is Settings()",
    ),
    Honest(
        "an exception of several",
        "def f(): raise ExceptionGroup('both', [ValueError(1), KeyError(2)])",
        "try:\n    f()\n    assert False\nexcept Exception as error:\n    assert 'both' in str(error)",
    ),
    Honest(
        "an argument that is changed, and a result",
        """
class Solution:
    def distinct(self, nums):
        k = 0
        for x in nums:
            if k == 0 or nums[k - 1] != x: nums[k], k = x, k + 1
        return k
def order(xs):
    xs.sort()
    return xs
""",
        "nums = [1, 1, 2]\nwanted = [1, 2]\nk = Solution().distinct(nums)\nassert k == len(wanted)\n"
        "assert nums[:k] == wanted\nxs = [2, 1]\nassert order(xs) == [1, 2] and xs == [1, 2]",
    ),
    Honest(
        "arguments that are one list, an array or a queue",
        "def move(a, b): a.append(1)\ndef double(x): x *= 2\ndef turn(q): q.rotate(1)",
        "import collections, numpy\nxs = []\nmove(xs, xs)\nassert xs == [1]\nys = []\nmove(a=ys, b=ys)\n"
        "assert ys == [1]\nx = numpy.array([1, 2])\ndouble(x)\nassert x.tolist() == [2, 4]\n"
        "q = collections.deque([1, 2, 3])\nturn(q)\nassert q == collections.deque([3, 1, 2])",
    ),
    Honest(
        "cases that a runner only reports",
        "def f(x): return 2 * x",
        "import unittest\nclass T(unittest.TestCase):\n    def test(self):\n        for x in range(3):\n"
        "            with self.subTest(x=x): self.assertEqual(f(x), x + x)\n    @unittest.expectedFailure\n"
        "    def test_other(self): self.assertEqual(f(2), 5)\nunittest.main(argv=['x'], exit=False)",
    ),
]
