"""What the text of tests says about how they use the program."""

from __future__ import annotations

import ast
import builtins
import importlib
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from retrain.plugins.sandbox.inside.judge import Judge


Node = TypeVar("Node", bound=ast.AST)
SAME, TYPE, GIVE = "__same__", "__type__", "__give__"
# a loop of the tests, such as over map, would take these for its end and skip their assertions
LOOP_ENDS: dict[type[BaseException], set[str]] = {
    StopIteration: {"StopIteration"},
    StopAsyncIteration: {"StopIteration"},
    IndexError: {"IndexError", "LookupError"},  # of a loop over a class that has only `__getitem__`
}
LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.comprehension, ast.Starred)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
LOOPING = {"map", "filter", "zip", "iter", "next", "enumerate", "reversed", "range", "islice", "starmap"}
CHECKS = re.compile("assert|check|verif|expect|raise|test", re.IGNORECASE)
OF_TESTS = ("solution", "tests", "__main__")  # modules
DYNAMIC = ("eval", "exec", "compile", "globals", "locals", "vars")
# functions of Python that check nothing if nobody looks at what they return
PASSIVE = set("next iter list tuple set sorted len sum str repr print getattr setattr delattr".split())
PATCHING = "tests that patch, or change settings of, what the program uses need shared = true"
DOUBTS = {  # by a pattern in tests, why they may fail although plain Python accepts the program
    r"\bpatch\b|monkeypatch|mock_open|\bsys\.(stdin|argv|path|modules)|environ|chdir|locale": PATCHING,
    r"\bopen\(|tempfile|\bos\.|shutil|Path\(": "the program and its tests have no files in common",
    r"assertLogs|logging|getLogger": "what the program logs is not seen by tests",
    r"inspect|__code__|__annotations__|get_type_hints|getsource|weakref|pickle|\bgc\.": "tests look into "
    "objects of the program by functions that do not reach it",
    r"threading|concurrent": "tests and the program have no threads in common",
    r"(?m)^\s+case [\w.]+\(": "tests name a class of the program in a pattern, which a proxy cannot be",
}
READING_METHODS = ("items", "keys", "values", "get", "copy", "count", "index", "tolist")
READS = ("len", "sorted", "list", "tuple", "set", "sum", "min", "max")
PLAIN = (
    *(ast.Name, ast.Load, ast.Subscript, ast.Slice, ast.Constant, ast.Call),
    *(ast.UnaryOp, ast.USub, ast.Not, ast.Tuple),
)
ODD = (ast.Lambda, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)
NOT_ITS_OWN = {*dir(builtins), *sys.stdlib_module_names, "np", "numpy"}
COMPARING_METHODS = re.compile(r"(self|np\.testing|numpy\.testing)\.assert\w+$")
LONGEST = 1 << 16  # characters of tests: it takes time to look at each of their numbers
IDENTITY = (".assertIs", ".assertIsNot")
MARK = "__changes__"
BINDS = dict.fromkeys(  # by kind of node, its attribute with the name that it binds
    (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler, ast.MatchAs, ast.MatchStar),
    "name",
) | {ast.arg: "arg", ast.MatchMapping: "rest"}


class Rewriting(ast.NodeTransformer):
    """Rewrites what only holds within one interpreter: identity and the class of an object.

    It also marks changeable arguments of calls: `f(x)` becomes `f(__changes__(x))`.
    """

    def __init__(self, source: str, changeable: Set[str]) -> None:
        self._source, self._changeable = source, changeable

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        sides = [node.left, *node.comparators]
        if len(sides) > 2 or not isinstance(node.ops[0], ast.Is | ast.IsNot):
            return node
        if any(isinstance(side, ast.Constant) for side in sides):
            return node
        call = ast.copy_location(_call(SAME, *sides), node)
        return (
            call if isinstance(node.ops[0], ast.Is) else ast.copy_location(ast.UnaryOp(ast.Not(), call), node)
        )

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "type" and len(node.args) == 1:
            node.func = ast.copy_location(ast.Name(TYPE, ast.Load()), node.func)
        node.args = [self._marked(argument) for argument in node.args]
        for keyword in node.keywords:
            keyword.value = self._marked(keyword.value)
        return node

    def _marked(self, argument: ast.expr) -> ast.expr:
        is_marked = isinstance(argument, ast.Name) and argument.id in self._changeable
        return ast.copy_location(_call(MARK, argument), argument) if is_marked else argument

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        if node.attr == "__class__" and isinstance(node.ctx, ast.Load):
            return ast.copy_location(_call(TYPE, node.value), node)
        return node

    def visit_Module(self, node: ast.Module) -> ast.Module:
        """Give the program the classes of the tests that it names, as if it were in one file with them."""
        self.generic_visit(node)
        for index in range(len(node.body), 0, -1):
            kind = node.body[index - 1]
            if not (isinstance(kind, ast.ClassDef) and re.search(rf"\b{kind.name}\b", self._source)):
                continue
            bases = " ".join(map(ast.unparse, kind.bases))
            # what checks the program, it may neither read nor change
            if "Test" not in kind.name + bases and not re.search(r"\bassert", ast.unparse(kind)):
                give = _call(GIVE, ast.Constant(kind.name), ast.Name(kind.name, ast.Load()))
                node.body.insert(index, ast.copy_location(ast.Expr(ast.copy_location(give, kind)), kind))
        return node


def _call(name: str, *args: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), [*args], [])


def rewritten(tree: ast.Module, tests: str, source: str, changeable: Set[str]) -> ast.Module:
    """Return tests that ask the program where only it knows; unchanged if there is nothing to ask."""
    if changeable or re.search(r"\bis\b|\btype\b|__class__|\bclass\b", tests):
        ast.fix_missing_locations(Rewriting(source, changeable).visit(tree))
    return tree


def watch(judge: Judge, tree: ast.Module) -> None:
    """Note what calls of the program may not do where tests use them."""
    named = {node.id for node in every(ast.Name, tree)}
    defined = {node.name for node in every(ast.FunctionDef, tree)}
    steps = {"__getitem__", "__next__", "__anext__"} & defined
    judge.has_loops = any(nodes_of(tree, *LOOPS)) or bool(LOOPING & named or steps)
    if judge.has_loops:
        judge.refused = tuple(kind for kind, names in LOOP_ENDS.items() if not named & names)
    if {"TaskGroup", "create_task"} & {node.attr for node in every(ast.Attribute, tree)}:
        judge.refused += (importlib.import_module("asyncio").CancelledError,)  # a group would drop its task
    judge.asserts_in_async_loops = any(any(every(ast.Assert, node)) for node in every(ast.AsyncFor, tree))
    judge.tried = {line for block in every(ast.Try, tree) for line in _lines(block)}
    if not (blocks := [*nodes_of(tree, ast.With, ast.AsyncWith)]):
        return
    names = Roots(tree)
    skipping, unchecked, checked = set[int](), set[int](), set[int]()
    for block in blocks:  # where a context manager of the program may end one
        lines, ends = set(_lines(block)), _end_lines(block, names)
        judge.swallows |= ends
        skipping |= lines - ends
        (checked if any(map(names.is_check, ast.walk(block))) else unchecked).update(lines)
    judge.swallows -= skipping
    judge.unchecked = unchecked - checked


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _lines(node: Any) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _end_lines(block: ast.With | ast.AsyncWith, names: Roots) -> set[int]:
    """Return the lines of a block that skip no check of the tests if it ends there by an error."""
    body = [*block.body]
    while len(body) > 1:  # without a `raise`, or as `assert False, "not reached"`
        test = body[-1].test if isinstance(body[-1], ast.Assert) else None
        if not isinstance(body[-1], ast.Raise) and not (isinstance(test, ast.Constant) and not test.value):
            break
        body.pop()
    if isinstance(last := body.pop(), ast.With | ast.AsyncWith):
        return _end_lines(last, names)
    if not names.skips_nothing(last):
        return set()
    return set(_lines(last)) - {line for one in body for line in _lines(one)} - {block.lineno}


class Roots:
    """Whose the names of tests are: a call of the program's objects checks nothing."""

    def __init__(self, tree: ast.Module) -> None:
        bound = bindings(tree)
        self._library = set(dir(builtins)) - {*bound, *DYNAMIC} | imported_names(tree)
        for kind in every(ast.ClassDef, tree):  # without functions, it checks nothing either
            is_bare = not any(isinstance(node, FUNCTIONS) for node in ast.walk(kind))
            if is_bare and bound[kind.name] == 1 and loaded_names(kind) <= self._library:
                self._library.add(kind.name)
        self._program = loaded_names(tree) - {*bound, *dir(builtins)} | program_names(tree)
        values = defaultdict(list)  # that are bound to a name, or an attribute such as `self.cart`
        for item in every(ast.withitem, tree):
            if item.optional_vars:
                values[ast.unparse(item.optional_vars)].append(item.context_expr)
        for assigned in every(ast.Assign, tree):
            for target in assigned.targets:
                values[ast.unparse(target)].append(assigned.value)
        plain = {name for name in values if "." in name or bound[name] == len(values[name])}
        displays = (ast.List, ast.Dict, ast.Set, ast.Constant)
        self._data = {name for name in plain if all(isinstance(one, displays) for one in values[name])}
        count = -1
        while count < (count := len(self._program)):
            self._program |= {name for name in plain if all(map(self.is_of_program, values[name]))}

    def is_of_program(self, node: ast.AST) -> bool:
        """Whether an expression is an object of the program, or a call of one."""
        while isinstance(node, ast.Attribute | ast.Call | ast.Subscript | ast.Await):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in self._program:
                return True
            node = node.func if isinstance(node, ast.Call) else node.value
        return isinstance(node, ast.Name) and node.id in self._program

    def skips_nothing(self, statement: ast.stmt) -> bool:
        """Whether the rest of a statement that raises checks nothing.

        Its error is the tests' own whatever the program does, or comes from a call without use of its result.
        """
        if isinstance(statement, ast.Raise):
            return statement.exc is None or self._is_plain(statement.exc)
        if isinstance(statement, ast.Expr):
            return self._is_plain(statement.value)
        if isinstance(statement, ast.Delete):
            return all(map(self._is_plain, statement.targets))
        if isinstance(statement, ast.AugAssign):
            return self.is_of_program(statement.target) and self._is_plain(statement.value)
        if not isinstance(statement, ast.Assign):
            return False
        is_theirs = all(
            not isinstance(one, ast.Name) and self.is_of_program(one) for one in statement.targets
        )
        return self._is_own(statement.value) or (is_theirs and self._is_plain(statement.value))

    def _is_own(self, node: ast.AST) -> bool:
        """Whether an expression has nothing of the program in it, and no function of the tests."""
        names = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
        return names <= self._library

    def _is_plain(self, node: ast.AST) -> bool:
        """Whether an expression only calls the program, or has nothing of it."""
        if isinstance(node, ast.Name | ast.Lambda) or self._is_own(node):
            return True
        if isinstance(node, ast.List | ast.Tuple | ast.Set):
            return all(map(self._is_plain, node.elts))
        if isinstance(node, ast.Starred | ast.Attribute | ast.Await | ast.keyword):
            return self._is_plain(node.value)
        if isinstance(node, ast.Subscript):
            return self.is_of_program(node.value) and all(map(self._is_plain, (node.value, node.slice)))
        if not isinstance(node, ast.Call):
            return False
        is_passive = isinstance(node.func, ast.Name) and node.func.id in PASSIVE & self._library
        is_called = self.is_of_program(node.func) and self._is_plain(node.func)
        return (is_passive or is_called) and all(map(self._is_plain, (*node.args, *node.keywords)))

    def is_check(self, node: ast.AST) -> bool:
        """Whether a node may check something: an assertion, a comparison, or a call of the tests' own."""
        if isinstance(node, ast.Call):
            is_known = _name(_root(node.func, ast.Attribute)) in self._library | self._data
            is_safe = is_known and not CHECKS.search(ast.unparse(node.func))
            return not (is_safe or self.is_of_program(node.func))
        return isinstance(node, ast.Assert | ast.If | ast.Try | ast.Compare | ast.BoolOp | ast.Match)


def bindings(tree: ast.Module) -> Counter[str]:
    """Return the names that tests bind, with how often they do."""
    return Counter(chain.from_iterable(map(_bound, ast.walk(tree))))


def loaded_names(tree: ast.AST) -> set[str]:
    """Return the names that tests, or a part of them, use."""
    return {node.id for node in every(ast.Name, tree) if isinstance(node.ctx, ast.Load)}


def imported_names(tree: ast.Module) -> set[str]:
    """Return the names that tests import, but not from the program or themselves."""
    return {
        alias.asname or alias.name.partition(".")[0]
        for node in nodes_of(tree, ast.Import, ast.ImportFrom)
        if getattr(node, "module", "") not in OF_TESTS
        for alias in node.names
        if alias.name not in OF_TESTS
    }


def program_names(tree: ast.Module) -> set[str]:
    """Return the names that tests import from the program."""
    imports = (node for node in every(ast.ImportFrom, tree) if node.module == "solution")
    return {alias.asname or alias.name for node in imports for alias in node.names}


def good_end(tree: ast.Module) -> int:
    """Return the line from which on tests may end themselves; 0 if they may not."""
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.If):
        last = last.body[-1] if not last.orelse else None
    if isinstance(last, ast.Raise):
        return last.lineno
    if not (isinstance(last, ast.Expr) and isinstance(last.value, ast.Call)):
        return 0
    root = _root(last.value.func, ast.Attribute)
    return last.lineno if _name(root) in {"exit", "quit", "sys", "unittest", *imported_names(tree)} else 0


def doubt(tests: str) -> str:
    """Return why tests may fail although plain Python accepts the program; empty: nothing is known."""
    return next((why for pattern, why in DOUBTS.items() if re.search(pattern, tests)), "")


def runs_only_the_programs_doctests(tests: str) -> bool:
    """Whether tests check nothing but examples that are written in the program."""
    if "doctest" not in tests or ">>>" in tests:
        return False
    tree = ast.parse(tests)
    of_doctest = {"doctest"}
    for _ in range(3):  # names of results of its functions
        for node in every(ast.Assign, tree):
            if of_doctest & {one.id for one in every(ast.Name, node.value)}:
                of_doctest |= {one.id for target in node.targets for one in every(ast.Name, target)}
        for imported in every(ast.ImportFrom, tree):
            if imported.module == "doctest":
                of_doctest |= {one.asname or one.name for one in imported.names}
    checks: list[ast.AST] = [*every(ast.Assert, tree), *every(ast.Raise, tree)]
    checks += [node for node in every(ast.Call, tree) if re.search(r"\.assert\w+$", ast.unparse(node.func))]
    return all(of_doctest & {one.id for one in every(ast.Name, node)} for node in checks)


def every(kind: type[Node], tree: ast.AST) -> Iterable[Node]:
    """Iterate over the nodes of a kind; those of whole tests are only looked up once."""
    if not isinstance(tree, ast.Module):
        return (node for node in ast.walk(tree) if isinstance(node, kind))
    if "kinds" not in vars(tree):
        kinds = vars(tree)["kinds"] = defaultdict(list)
        for node in ast.walk(tree):
            kinds[type(node)].append(node)
    nodes: list[Node] = vars(tree)["kinds"][kind]
    return nodes


def nodes_of(tree: ast.Module, *kinds: type[ast.AST]) -> Iterator[Any]:
    """Iterate over the nodes of some kinds."""
    return chain.from_iterable(every(kind, tree) for kind in kinds)


class Uses:
    """How tests bind and use names: which arguments a function may change that returns something as well.

    It could also change what its result is compared with. So a name counts only if tests bind it to data that
    they write out, and use it for nothing but calls of the program and comparisons with other data that they
    write out: `nums = [1, 1, 2]`, `k = f(nums)`, `assert nums[:k] == [1, 2]`.
    """

    def __init__(self, tree: ast.Module) -> None:
        self._nodes = nodes = list(ast.walk(tree))
        self.loads = [node for node in every(ast.Name, tree) if isinstance(node.ctx, ast.Load)]
        self.values: dict[str, list[ast.expr]] = {}  # that names are assigned one by one
        targets = set()
        for target, value in chain.from_iterable(map(_assigned, nodes)):
            targets.add(id(target))
            if isinstance(target, ast.Name):
                self.values.setdefault(target.id, []).append(value)
        imported, of_program = imported_names(tree), program_names(tree)
        shared = chain.from_iterable(node.names for node in nodes_of(tree, ast.Global, ast.Nonlocal))
        self.otherwise = (
            of_program & {*READS}
            | {*shared}
            | {
                name
                for node in nodes
                if id(node) not in targets and getattr(node, "module", "") != "solution"
                for name in _bound(node)
            }
        )
        bound = (self.otherwise | of_program) - imported | {*self.values}
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
        count = -1
        while count < (count := len(self._results)):
            self._results |= {
                name
                for name, values in self.values.items()
                if any(part.id in self._results for part in _names(values))
            }
        looks = {*READS, "zip", "enumerate", "range", "all", "any", "abs"} & self._python
        others = [
            node
            for node in nodes
            if isinstance(node, ast.Call) and not COMPARING_METHODS.match(ast.unparse(node.func))
        ]
        passing = [one for one in others if not (isinstance(one.func, ast.Name) and one.func.id in looks)]
        self._passed = {name.id for call in passing for name in _names([*call.args, *call.keywords])}
        # what the program gets nowhere, by whatever call
        self.constant = self.written - {one.id for one in self.loads if id(one) not in inspected}
        self.fine: set[int] = set()  # uses of names
        for node in nodes:
            self._inspect(node)

    def changeable(self) -> frozenset[str]:
        """Return the names of arguments that may be changed."""
        if any(name.id in DYNAMIC for name in self.loads):
            return frozenset()
        return frozenset(self.written & self.given) - {
            name.id for name in self.loads if id(name) not in self.fine
        }

    def inspections(self) -> set[int]:
        """Return the lines of assertions that compare names with nothing but data of the tests alone."""
        found: set[int] = set()
        for node in self._nodes:
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
                self.fine.add(id(_root(call.func.value, ast.Subscript)))  # as `nums.append(1)`
        elif isinstance(node, ast.Delete) or (
            isinstance(node, ast.Assign | ast.AugAssign) and self._is_own(node.value)
        ):
            targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
            items = [target for target in targets if isinstance(target, ast.Subscript)]
            self.fine.update(id(_root(item, ast.Subscript)) for item in items)
        sides = _compared(node)
        results = [one for one in sides if not self._is_written(one)]
        if len(results) == 1 and self._only_reads(results[0]):
            self.fine.update(map(id, _names(results)))
        if isinstance(node, ast.Compare):
            is_identity = all(isinstance(operator, ast.Is | ast.IsNot) for operator in node.ops)
        else:
            is_identity = isinstance(node, ast.Call) and ast.unparse(node.func).endswith(IDENTITY)
        if is_identity:  # asks only whether objects are the same
            self.fine.update(map(id, sides))

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


def _root(node: ast.expr, kind: type[ast.Attribute | ast.Subscript]) -> ast.expr:
    """Return what `a` is in `a.b.c`, or in `a[0][1]`."""
    while isinstance(node, kind):
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


def _stored(target: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(target) if isinstance(one, ast.Name)}


def _bound(node: ast.AST) -> Iterator[str]:
    """Iterate over the names that a node binds."""
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
        yield node.id
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in node.names)
    elif name := getattr(node, BINDS.get(type(node), ""), None):
        yield name


def _names(nodes: Sequence[ast.AST]) -> Iterator[ast.Name]:
    return (one for node in nodes for one in ast.walk(node) if isinstance(one, ast.Name))


def _compared(node: ast.AST) -> Sequence[ast.expr]:
    """Return the values that a node compares: by operators, or a method such as `assertEqual`."""
    if isinstance(node, ast.Compare):
        return [node.left, *node.comparators]
    return (
        node.args[:2]
        if isinstance(node, ast.Call) and COMPARING_METHODS.match(ast.unparse(node.func))
        else []
    )
