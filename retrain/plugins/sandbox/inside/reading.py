"""What the text of tests says about how they use the program."""

from __future__ import annotations

import ast
import builtins
import importlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from retrain.plugins.sandbox.inside.judge import Judge

Node = TypeVar("Node", bound=ast.AST)
SAME, TYPE, GIVE, KINDS = "__same__", "__type__", "__give__", "__kinds__"
# a loop of the tests, such as over map, would take these for its end and skip their assertions
LOOP_ENDS: dict[type[BaseException], set[str]] = {
    StopIteration: {"StopIteration"},
    StopAsyncIteration: {"StopIteration"},
    IndexError: {"IndexError", "LookupError"},  # of a loop over a class that has only `__getitem__`
}
LOOPS = (ast.For, ast.AsyncFor, ast.While, ast.comprehension, ast.Starred)
LOOPING = {"map", "filter", "zip", "iter", "next", "enumerate", "reversed", "range", "islice", "starmap"}
OF_DATA = {name for kind in (int, float, str, bytes, list, tuple, dict, set) for name in dir(kind)}
ASKS_FOR_CLASS = re.compile("isinstance|issubclass|IsInstance|Raises")
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
}


class Rewriting(ast.NodeTransformer):
    """Rewrites what only holds within one interpreter: identity and the class of an object."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._kinds: set[str] = set()  # classes of the tests' own

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
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        self.generic_visit(node)
        if node.attr == "__class__" and isinstance(node.ctx, ast.Load):
            return ast.copy_location(_call(TYPE, node.value), node)
        return node

    def visit_MatchClass(self, node: ast.MatchClass) -> ast.MatchClass:
        self.generic_visit(node)
        if (
            isinstance(node.cls, ast.Name) and node.cls.id not in self._kinds
        ):  # a pattern needs a class, and a stand-in is none
            kinds = ast.copy_location(ast.Name(KINDS, ast.Load()), node.cls)
            node.cls = ast.copy_location(ast.Attribute(kinds, node.cls.id, ast.Load()), node.cls)
        return node

    def visit_Module(self, node: ast.Module) -> ast.Module:
        """Give the program the classes of the tests that it names, as if it were in one file with them."""
        self._kinds = {one.name for one in every(ast.ClassDef, node)}
        for imported in every(ast.ImportFrom, node):
            if imported.module != "solution":
                self._kinds |= {alias.asname or alias.name for alias in imported.names}
        self.generic_visit(node)
        for index in range(len(node.body), 0, -1):
            one = node.body[index - 1]
            if not (isinstance(one, ast.ClassDef) and re.search(rf"\b{one.name}\b", self._source)):
                continue
            bases = " ".join(map(ast.unparse, one.bases))
            # what checks the program, it may neither read nor change
            if "Test" not in one.name + bases and not re.search(r"\bassert", ast.unparse(one)):
                give = _call(GIVE, ast.Constant(one.name), ast.Name(one.name, ast.Load()))
                node.body.insert(index, ast.copy_location(ast.Expr(ast.copy_location(give, one)), one))
        return node


def _call(name: str, *args: ast.expr) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), [*args], [])


def rewritten(tree: ast.Module, tests: str, source: str) -> ast.Module:
    """Return tests that ask the program where only it knows; unchanged if there is nothing to ask."""
    if not re.search(r"\bis\b|\btype\b|__class__|\bclass\b|\bmatch\b", tests):
        return tree
    found: ast.Module = ast.fix_missing_locations(Rewriting(source).visit(tree))
    return found


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
    judge.classes = _classes(tree)
    judge.asserts_in_async_loops = any(any(every(ast.Assert, node)) for node in every(ast.AsyncFor, tree))
    judge.tried = {line for block in every(ast.Try, tree) for line in _lines(block)}
    if blocks := [*nodes_of(tree, ast.With, ast.AsyncWith)]:
        _watch_blocks(judge, blocks, Roots(tree))


def _watch_blocks(judge: Judge, blocks: Iterable[ast.With | ast.AsyncWith], names: Roots) -> None:
    """Note where a context manager of the program may end a block of the tests."""
    skipping, unchecked, checked = set[int](), set[int](), set[int]()
    for block in blocks:
        lines, ends = set(_lines(block)), _end_lines(block, names)
        judge.swallows |= ends
        skipping |= lines - ends
        (checked if any(map(names.is_check, ast.walk(block))) else unchecked).update(lines)
    judge.swallows -= skipping
    judge.unchecked = unchecked - checked


def _classes(tree: ast.Module) -> set[str]:
    """Return the capitalised names that tests use as only those of classes can be used.

    A function could be called, its result compared, and a method of data called on it.
    """
    if not any(_called(call)[:1].isupper() for call in every(ast.Call, tree)):
        return set()
    makers: dict[str, str] = {}  # by a variable, the name that was called for its value
    for assigned in every(ast.Assign, tree):
        if name := _called(assigned.value):
            makers.update((ast.unparse(target), name) for target in assigned.targets)
    names = {_name(handler.type) for handler in every(ast.ExceptHandler, tree) if handler.type}
    for item in every(ast.withitem, tree):
        name = _called(item.context_expr)
        names.add(name)
        if item.optional_vars and name:
            makers[ast.unparse(item.optional_vars)] = name
    for call in every(ast.Call, tree):
        if ASKS_FOR_CLASS.search(_name(call.func)):
            names.update(map(_name, call.args))
    for node in every(ast.Attribute, tree):
        if node.attr not in OF_DATA:
            names |= {_called(node.value), makers.get(ast.unparse(node.value), "")}
        if node.attr not in OF_DATA or isinstance(node.value, ast.Name):
            names.add(_name(node.value))
    for computed in every(ast.BinOp, tree):
        left, right = (
            {_called(node) or makers.get(_name(node), "") for node in ast.walk(side)}
            for side in (computed.left, computed.right)
        )
        names |= left & right
    return {name for name in names if name[:1].isupper()}


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _called(node: ast.AST) -> str:
    return _name(node.func) if isinstance(node, ast.Call) else ""


def _lines(node: Any) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _end_lines(block: ast.With | ast.AsyncWith, names: Roots) -> set[int]:
    """Return the lines of a block that skip no check of the tests if it ends there by an error."""
    body = [*block.body]
    while len(body) > 1 and _always_fails(body[-1]):  # as `assert False, "not reached"`
        body.pop()
    if isinstance(last := body.pop(), ast.With | ast.AsyncWith):
        return _end_lines(last, names)
    if not names.skips_nothing(last):
        return set()
    return set(_lines(last)) - {line for one in body for line in _lines(one)} - {block.lineno}


def _always_fails(node: ast.stmt) -> bool:
    return isinstance(node, ast.Raise) or (
        isinstance(node, ast.Assert) and isinstance(node.test, ast.Constant) and not node.test.value
    )


class Roots:
    """Whose the names of tests are: a call of the program's objects checks nothing."""

    def __init__(self, tree: ast.Module) -> None:
        bindings = Counter(_bindings(tree))
        loads = {node.id for node in every(ast.Name, tree) if isinstance(node.ctx, ast.Load)}
        imports = [*nodes_of(tree, ast.Import, ast.ImportFrom)]
        # a class without methods, such as an exception of the tests, checks nothing either
        bare = {one.name for one in every(ast.ClassDef, tree) if not any(every(ast.FunctionDef, one))}
        self._library = (
            (set(dir(builtins)) - {*bindings, *DYNAMIC})
            | bare
            | {
                (alias.asname or alias.name).partition(".")[0]
                for node in imports
                if getattr(node, "module", "") not in OF_TESTS
                for alias in node.names
                if alias.name not in OF_TESTS
            }
        )
        theirs = {
            alias.asname or alias.name
            for node in imports
            if isinstance(node, ast.ImportFrom) and node.module == "solution"
            for alias in node.names
        }
        self._program = (loads - {*bindings, *dir(builtins)}) | theirs
        values = defaultdict(list)  # that are bound to a name, or an attribute such as `self.cart`
        for item in every(ast.withitem, tree):
            if item.optional_vars:
                values[ast.unparse(item.optional_vars)].append(item.context_expr)
        for assigned in every(ast.Assign, tree):
            for target in assigned.targets:
                values[ast.unparse(target)].append(assigned.value)
        plain = {name for name in values if "." in name or bindings[name] == len(values[name])}
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
            root = node.func
            while isinstance(root, ast.Attribute):
                root = root.value
            is_safe = isinstance(root, ast.Name) and root.id in self._library | self._data
            is_safe = is_safe and not CHECKS.search(ast.unparse(node.func))
            return not (is_safe or self.is_of_program(node.func))
        return isinstance(node, ast.Assert | ast.If | ast.Try | ast.Compare | ast.BoolOp | ast.Match)


def own_names(tree: ast.Module) -> set[str]:
    """Return the names that tests bind."""
    return set(_bindings(tree))


def _bindings(tree: ast.Module) -> Iterator[str]:
    yield from (node.id for node in every(ast.Name, tree) if not isinstance(node.ctx, ast.Load))
    yield from (node.name for node in nodes_of(tree, ast.FunctionDef, ast.ClassDef))
    yield from (node.arg for node in every(ast.arg, tree))
    yield from (node.asname or node.name for node in every(ast.alias, tree))


def good_end(tree: ast.Module) -> int:
    """Return the line from which on tests may end themselves; 0 if they may not."""
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.If):
        last = last.body[-1] if not last.orelse else None
    if isinstance(last, ast.Raise):
        return last.lineno
    if not (isinstance(last, ast.Expr) and isinstance(last.value, ast.Call)):
        return 0
    root = last.value.func
    while isinstance(root, ast.Attribute):
        root = root.value
    imported = {
        alias.asname or alias.name.partition(".")[0]
        for node in nodes_of(tree, ast.Import, ast.ImportFrom)
        if isinstance(node, ast.Import) or node.module != "solution"
        for alias in node.names
        if alias.name != "solution"
    }
    return last.lineno if _name(root) in {"exit", "quit", "sys", "unittest", *imported} else 0


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


def attributes_of(name: str, tree: ast.Module) -> set[str]:
    """Return the attributes of a name that tests use."""
    return {
        node.attr
        for node in every(ast.Attribute, tree)
        if isinstance(node.value, ast.Name) and node.value.id == name
    }
