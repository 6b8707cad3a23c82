"""Solutions as models write them: each must score 1 wherever programs run."""

from __future__ import annotations

import json

from tests.cheats import Honest
from tests.cheats.forms import FORMS

HONEST = [
    Honest("a function", "def f(x): return x * 2", "assert f(2) == 4\nassert f(-1) == -2"),
    Honest(
        "a fenced function",
        "Doubling is enough.\n```python\ndef f(x):\n    return x * 2\n```\n",
        "assert f(2) == 4",
    ),
    Honest(
        "a method with annotations",
        """
from typing import List
class Solution:
    def twoSum(self, xs: List[int], t: int) -> List[int]:
        seen = {}
        for i, x in enumerate(xs):
            if t - x in seen: return [seen[t - x], i]
            seen[x] = i
""",
        "assert Solution().twoSum([2, 7, 11, 15], 9) == [0, 1]\n"
        "assert Solution().twoSum([3, 2, 4], 6) == [1, 2]",
    ),
    Honest(
        "a class with state",
        """
class Stack:
    def __init__(self): self.items = []
    def push(self, x): self.items.append(x)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
""",
        """
s = Stack()
s.push(1)
s.push(2)
assert s.pop() == 2 and len(s) == 1
assert s.items == [1]
""",
    ),
    Honest(
        "a class with operators",
        """
class V:
    def __init__(self, x): self.x = x
    def __add__(self, other): return V(self.x + other.x)
    def __eq__(self, other): return isinstance(other, V) and self.x == other.x
    def __repr__(self): return f"V({self.x})"
""",
        "assert V(1) + V(2) == V(3)\nassert V(1) != V(2)\nassert repr(V(1)) == str(V(1)) == 'V(1)'",
    ),
    Honest(
        "a data class",
        """
from dataclasses import dataclass, field
@dataclass(order=True)
class Item:
    price: float
    name: str = field(compare=False)
def cheapest(items): return min(items).name
""",
        "assert cheapest([Item(2, 'b'), Item(1, 'a')]) == 'a'\nassert Item(1, 'x') == Item(1, 'y')",
    ),
    Honest(
        "a generator",
        """
def fib():
    a, b = 0, 1
    while True:
        yield a
        a, b = b, a + b
""",
        "import itertools\nassert list(itertools.islice(fib(), 7)) == [0, 1, 1, 2, 3, 5, 8]",
    ),
    Honest(
        "a generator that ends",
        "def evens(xs):\n    for x in xs:\n        if x % 2 == 0: yield x",
        """
assert list(evens([1, 2, 3, 4])) == [2, 4]
g = evens([2])
assert next(g) == 2
try:
    next(g)
    assert False
except StopIteration:
    pass
assert [x for x in evens(range(5))] == [0, 2, 4] and sum(evens([2, 4])) == 6
""",
    ),
    Honest(
        "an exception",
        "def root(x):\n    if x < 0: raise ValueError('negative')\n    return x ** 0.5",
        """
assert root(9) == 3
try:
    root(-1)
    assert False
except ValueError as error:
    assert 'negative' in str(error)
""",
    ),
    Honest(
        "an exception of its own",
        "class Empty(Exception): pass\ndef first(xs):\n    if not xs: raise Empty(3)\n    return xs[0]",
        """
assert first([1]) == 1
try:
    first([])
except Empty as error:
    assert error.args == (3,)
else:
    assert False
""",
    ),
    Honest(
        "a context manager",
        """
from contextlib import contextmanager
log = []
@contextmanager
def logged(name):
    log.append("in " + name)
    yield name
    log.append("out")
def entries(): return log
""",
        "with logged('a') as name:\n    assert name == 'a'\nassert entries() == ['in a', 'out']",
    ),
    Honest(
        "a context manager that ignores an error",
        """
class ignoring:
    def __init__(self, *kinds): self.kinds, self.seen = kinds, []
    def __enter__(self): return self
    def __exit__(self, kind, error, trace):
        self.seen.append(str(error))
        return kind is not None and issubclass(kind, self.kinds)
""",
        """
with ignoring(ValueError) as used:
    int("x")
assert "invalid literal" in used.seen[0]
""",
    ),
    Honest(
        "numbers to a tolerance",
        "def mean(xs): return sum(xs) / len(xs)",
        """
import math
assert math.isclose(mean([1, 2, 4]), 7 / 3, rel_tol=1e-9)
assert abs(mean([0.1] * 3) - 0.1) < 1e-9
""",
    ),
    Honest(
        "a cached recursion",
        "from functools import lru_cache\n@lru_cache(None)\ndef f(n):\n"
        "    return n if n < 2 else f(n - 1) + f(n - 2)",
        "assert f(90) == 2880067194370816120\nassert [f(n) for n in range(4)] == [0, 1, 1, 2]",
    ),
    Honest(
        "a decorator",
        "def twice(f): return lambda *a: f(f(*a))",
        "assert twice(lambda x: x + 3)(1) == 7\n@twice\ndef g(x): return x * x\nassert g(3) == 81",
    ),
    Honest(
        "a list sorted in place",
        "def order(xs):\n    xs.sort()",
        "xs = [3, 1, 2]\norder(xs)\nassert xs == [1, 2, 3]",
    ),
    Honest(
        "a linked list of the tests",
        """
def reverse(head):
    last = None
    while head: head.next, last, head = last, head, head.next
    return last
""",
        """
class Node:
    def __init__(self, val, next=None): self.val, self.next = val, next
head = reverse(Node(1, Node(2, Node(3))))
assert (head.val, head.next.val, head.next.next.val) == (3, 2, 1) and head.next.next.next is None
""",
    ),
    Honest(
        "a check function",
        "def add(a, b): return a + b",
        "def check(candidate):\n    assert candidate(1, 2) == 3\ncheck(add)",
    ),
    Honest(
        "arrays",
        "import numpy as np\ndef norm(x): return np.asarray(x, float) / np.linalg.norm(x)",
        "import numpy as np\nassert np.allclose(norm([3, 4]), [0.6, 0.8])\nassert norm([3, 4]).shape == (2,)",
    ),
    Honest(
        "input and output",
        "n = int(input())\nprint(*sorted(map(int, input().split())))",
        json.dumps([{"input": "3\n3 1 2\n", "output": "1 2 3\n"}, {"input": "1\n5", "output": "5"}]),
        "stdio",
    ),
    Honest(
        "input by sys.stdin",
        """
import sys
def main():
    data = sys.stdin.read().split()
    print(len(data), sum(map(int, data)))
if __name__ == '__main__':
    main()
""",
        json.dumps([{"input": "1 2\n3\n", "output": "3 6"}]),
        "stdio",
    ),
    Honest(
        "input by the name of a device",
        "for name in ('/dev/stdin', '/dev/fd/0'): print(open(name).read(), end='')\nprint(input())",
        json.dumps([{"input": "7\n", "output": "7\n7\n7"}]),
        "stdio",
    ),
    Honest(
        "input until it ends",
        "try:\n    while True: print(input()[::-1])\nexcept EOFError: pass",
        json.dumps([{"input": "ab\nç d\n", "output": "ba\nd ç\n"}, {"input": "", "output": ""}]),
        "stdio",
    ),
    Honest(
        "input by descriptor, and a deep recursion",
        """
import os, sys, threading
sys.setrecursionlimit(10**6)
threading.stack_size(1 << 26)
def depth(n): return 0 if n == 0 else 1 + depth(n - 1)
def main():
    n = int(os.read(0, os.fstat(0).st_size))
    sys.stdout.write(f"{depth(n)}\\n")
t = threading.Thread(target=main)
t.start()
t.join()
sys.exit(0)
""",
        json.dumps([{"input": "20000\n", "output": "20000"}]),
        "stdio",
    ),
    Honest(
        "a test that subclasses",
        """
class Square:
    def __init__(self, a): self.a = a
    def area(self): return self.a ** 2
""",
        """
class Cube(Square):
    def area(self): return 6 * super().area()
assert Square(2).area() == 4
assert Cube(1).area() == 6
""",
        "shared",
    ),
    Honest(
        "a test that patches",
        "import time\ndef age(since): return time.time() - since",
        """
from unittest.mock import patch
with patch("time.time", lambda: 10.0):
    assert age(4) == 6
assert age(0) > 10
""",
        "shared",
    ),
    *FORMS,
]
