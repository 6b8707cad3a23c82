"""Arguments that the program may change in place by a function that returns something as well.

Such a function could also change what its result is compared with. So a name counts only if tests bind it to
data that they write out, and use it for nothing but calls of the program and comparisons with other data that
they write out: `nums = [1, 1, 2]`, `k = f(nums)`, `assert nums[:k] == [1, 2]`.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from collections.abc import Iterator, Sequence
from itertools import chain

from retrain.plugins.sandbox.inside.reading import DYNAMIC

READING_METHODS = ("items", "keys", "values", "get", "copy", "count", "index", "tolist")
READS = ("len", "sorted", "list", "tuple", "set", "sum", "min", "max")
PLAIN = (
    *(ast.Name, ast.Load, ast.Subscript, ast.Slice, ast.Constant, ast.Call),
    *(ast.UnaryOp, ast.USub, ast.Not, ast.Tuple),
)
ODD = (ast.Lambda, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)
NOT_ITS_OWN = {*dir(builtins), *sys.stdlib_module_names, "np", "numpy"}
CHECKS = re.compile(r"(self|np\.testing|numpy\.testing)\.assert\w+$")
LONGEST = 1 << 16  # characters of tests: it takes time to look at each of their numbers
MARK = "__changes__"
BINDS = dict.fromkeys(  # by kind of node, its attribute with the name that it binds
    (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler, ast.MatchAs, ast.MatchStar),
    "name",
) | {ast.arg: "arg", ast.MatchMapping: "rest"}


class Uses:
    """How tests bind and use names."""

    def __init__(self, tree: ast.Module) -> None:
        self._tree = tree
        nodes = list(ast.walk(tree))
        self.loads = [node for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)]
        self.values: dict[str, list[ast.expr]] = {}  # that names are assigned one by one
        targets = set()
        for target, value in chain.from_iterable(map(_assigned, nodes)):
            targets.add(id(target))
            if isinstance(target, ast.Name):
                self.values.setdefault(target.id, []).append(value)
        self.otherwise = {name for node in nodes if id(node) not in targets for name in _bound(node)}
        imports = [node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)]
        imported = {
            one.asname or one.name.partition(".")[0]
            for node in imports
            if getattr(node, "module", "") != "solution"
            for one in node.names
            if one.name != "solution"
        }
        bound = self.otherwise - imported | set(self.values)
        bound |= {one.name for node in imports for one in node.names} - imported
        self._python = (NOT_ITS_OWN | imported) - bound - {*DYNAMIC}
        self._python |= {
            name
            for name, values in self.values.items()
            if name not in self.otherwise and all(isinstance(value, ast.Constant) for value in values)
        }
        written = {name for name, values in self.values.items() if all(map(self._is_own, values))}
        self.written = written - self.otherwise
        calls = [node for node in nodes if isinstance(node, ast.Call) and self._is_program(node.func)]
        arguments = [value for call in calls for value in (*call.args, *call.keywords)]
        self.given = {name.id for name in _names(arguments)}
        inspected = set(map(id, _names([*chain.from_iterable(map(self._inspected, nodes))])))
        self._results = {one.id for one in self.loads if one.id not in self._python | bound} - {"self"}
        for node in nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ExceptHandler) and node.name:
                self._results.add(node.name)
            elif isinstance(node, ast.withitem) and node.optional_vars:
                self._results |= _stored(node.optional_vars)
        while more := {name for name, its in self.values.items() if self._has_results(its)} - self._results:
            self._results |= more
        looks = {*READS, "zip", "enumerate", "range", "all", "any", "abs"} & self._python
        others = [
            one for one in nodes if isinstance(one, ast.Call) and not CHECKS.match(ast.unparse(one.func))
        ]
        passing = [one for one in others if not (isinstance(one.func, ast.Name) and one.func.id in looks)]
        self._passed = {name.id for call in passing for name in _names([*call.args, *call.keywords])}
        # what the program gets nowhere, by whatever call
        self.constant = self.written - {one.id for one in self.loads if id(one) not in inspected}
        self.fine: set[int] = set()  # uses of names
        for node in nodes:
            self._inspect(node)

    def _has_results(self, values: Sequence[ast.expr]) -> bool:
        return any(name.id in self._results for name in _names(values))

    def changeable(self) -> frozenset[str]:
        """Return the names of arguments that may be changed."""
        names = (self.written & self.given) - {one.id for one in self.loads if id(one) not in self.fine}
        return frozenset(() if any(one.id in DYNAMIC for one in self.loads) else names)

    def inspections(self) -> set[int]:
        """Return the lines of assertions that compare names with nothing but data of the tests alone."""
        found: set[int] = set()
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Assert) or (
                isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
            ):
                sides = _compared(node.test if isinstance(node, ast.Assert) else node.value)
                results = [one for one in sides if not self._is_written(one)]
                is_look = len(sides) == 2 and len(results) == 1 and self._only_reads(results[0])
                if is_look or self._has_only_data(node):
                    found.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
        return found

    def _has_only_data(self, node: ast.Assert | ast.Expr) -> bool:
        """Whether nothing of the program is in an assertion but data it was given, on one side."""
        names = [name for name in _names([node]) if name.id not in self._python]
        bounds = {id(one) for part in ast.walk(node) if isinstance(part, ast.Slice) for one in _names([part])}
        if any(name.id in self._results and id(name) not in bounds for name in names):
            return False
        sides = [[{name.id for name in _names([side])} for side in _compared(one)] for one in ast.walk(node)]
        return all(sum(bool(names & self._passed) for names in compared) < 2 for compared in sides)

    def _inspected(self, node: ast.AST) -> Iterator[ast.expr]:
        """Iterate over a node's parts that only read data."""
        if isinstance(node, ast.Assert) and node.msg:
            yield node.msg
        yield from filter(self._only_reads, _compared(node))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "len" and self._only_reads(node):
            yield node

    def _inspect(self, node: ast.AST) -> None:
        """Note the uses of names in a node that compare nothing with what the program returns."""
        if isinstance(node, ast.Assert):
            parts = [node.test] if not isinstance(node.test, ast.BoolOp) else node.test.values
            fine = [part for part in parts if self._only_reads(part)] + ([node.msg] if node.msg else [])
            self.fine.update(map(id, _names(fine)))
        elif isinstance(node, ast.Call) and self._is_program(node.func):
            values = (*node.args, *(keyword.value for keyword in node.keywords))
            self.fine.update(id(value) for value in values if isinstance(value, ast.Name))
        elif isinstance(node, ast.Expr) and isinstance(call := node.value, ast.Call):
            if isinstance(call.func, ast.Attribute) and all(map(self._is_own, (*call.args, *call.keywords))):
                self.fine.add(id(_root(call.func.value)))  # as `nums.append(1)`
        elif isinstance(node, ast.Delete) or (
            isinstance(node, ast.Assign | ast.AugAssign) and self._is_own(node.value)
        ):
            places = [node.target] if isinstance(node, ast.AugAssign) else node.targets
            self.fine.update(id(_root(one)) for one in places if isinstance(one, ast.Subscript))
        sides = _compared(node)
        results = [one for one in sides if not self._is_written(one)]
        if len(results) == 1 and self._only_reads(results[0]):
            self.fine.update(map(id, _names(results)))
        if _is_identity(node):
            self.fine.update(id(one) for one in sides)

    def _is_program(self, function: ast.expr, seen: frozenset[str] = frozenset()) -> bool:
        """Whether a function is the program's, as far as its name tells."""
        if isinstance(function, ast.Name):
            name, values = function.id, self.values.get(function.id, [])
            is_other = name in seen or name in NOT_ITS_OWN or name in self.otherwise
            functions = [one.func if isinstance(one, ast.Call) else one for one in values]
            return not is_other and all(self._is_program(one, seen | {name}) for one in functions)
        owner = function.value if isinstance(function, ast.Attribute) else None
        owner = owner.func if isinstance(owner, ast.Call) else owner
        return owner is not None and self._is_program(owner, seen)

    def _is_own(self, node: ast.AST) -> bool:
        """Whether an expression is data of the tests alone, made by nothing but Python and its library."""
        nodes = list(ast.walk(node))
        inner = {name for one in nodes if isinstance(one, ast.comprehension) for name in _stored(one.target)}
        names = [one.id for one in nodes if isinstance(one, ast.Name) and one.id not in inner]
        return all(name in self._python for name in names) and not any(isinstance(one, ODD) for one in nodes)

    def _is_written(self, node: ast.expr) -> bool:
        """Whether a value is made by the tests alone, and out of the program's reach."""
        if self._is_own(node):
            return True
        if isinstance(node, ast.Call):
            owners = [node.func.value] if isinstance(node.func, ast.Attribute) else []
            return self._reads(node) and all(map(self._is_written, (*owners, *node.args)))
        node = node.value if isinstance(node, ast.Subscript) else node
        return isinstance(node, ast.Name) and node.id in self.constant

    def _only_reads(self, node: ast.AST) -> bool:
        """Whether an expression tells only what is in a value, such as `sorted(nums[:k])`."""
        nodes = list(ast.walk(node))
        calls = [one for one in nodes if isinstance(one, ast.Call)]
        methods = {id(one.func) for one in calls if _is_reading_method(one.func)}
        are_plain = all(isinstance(one, PLAIN) or id(one) in methods for one in nodes)
        return are_plain and all(map(self._reads, calls))

    def _reads(self, call: ast.Call) -> bool:
        if _is_reading_method(call.func):
            return all(map(self._is_own, (*call.args, *call.keywords)))
        name = call.func.id if isinstance(call.func, ast.Name) else ""
        return name in READS and name not in self.otherwise and name not in self.values and not call.keywords


class Marks(ast.NodeTransformer):
    """Marks changeable arguments of calls: `f(x)` becomes `f(__changes__(x))`."""

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        node.args = [self._marked(one) for one in node.args]
        for keyword in node.keywords:
            keyword.value = self._marked(keyword.value)
        return node

    def _marked(self, node: ast.expr) -> ast.expr:
        if not (isinstance(node, ast.Name) and node.id in self._names):
            return node
        mark = ast.Call(ast.Name(MARK, ast.Load()), [node], [])
        return ast.fix_missing_locations(ast.copy_location(mark, node))


def _root(node: ast.expr) -> ast.expr:
    while isinstance(node, ast.Subscript):
        node = node.value
    return node


def _assigned(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Iterate over what a statement assigns to, and the value of each."""
    if isinstance(node, ast.AnnAssign) and node.value:
        yield node.target, node.value
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        (target,), value = node.targets, node.value
        yield target, value
        are_tuples = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
        if are_tuples and len(target.elts) == len(value.elts):  # type: ignore[attr-defined]
            yield from zip(target.elts, value.elts, strict=True)  # type: ignore[attr-defined]


def _is_reading_method(function: ast.expr) -> bool:
    return isinstance(function, ast.Attribute) and function.attr in READING_METHODS


def _is_identity(node: ast.AST) -> bool:
    """Whether a node asks only whether objects are the same."""
    if isinstance(node, ast.Compare):
        return all(isinstance(one, ast.Is | ast.IsNot) for one in node.ops)
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return is_call and node.func.attr in ("assertIs", "assertIsNot")  # type: ignore[attr-defined]


def _stored(target: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(target) if isinstance(one, ast.Name)}


def _bound(node: ast.AST) -> Iterator[str]:
    """Iterate over the names that a node binds."""
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id
    elif isinstance(node, ast.Import | ast.ImportFrom):
        names = {one.asname or one.name for one in node.names}
        is_program = isinstance(node, ast.ImportFrom) and node.module == "solution"
        yield from names & set(READS) if is_program else names
    elif isinstance(node, ast.Global | ast.Nonlocal):
        yield from node.names
    elif name := getattr(node, BINDS.get(type(node), ""), None):
        yield name


def _names(nodes: Sequence[ast.AST]) -> Iterator[ast.Name]:
    return (one for node in nodes for one in ast.walk(node) if isinstance(one, ast.Name))


def _compared(node: ast.AST) -> Sequence[ast.expr]:
    """Return the values that a node compares: by operators, or a method such as `assertEqual`."""
    if isinstance(node, ast.Compare):
        return [node.left, *node.comparators]
    return node.args[:2] if isinstance(node, ast.Call) and CHECKS.match(ast.unparse(node.func)) else []
