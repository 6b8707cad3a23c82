"""What the text of tests says about how they use the program."""

from __future__ import annotations

import ast
import builtins
import importlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
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
LOOPING = {"map", "filter", "zip", "iter", "next", "enumerate", "reversed", "range", "islice", "starmap"}
OF_DATA = {name for kind in (int, float, str, bytes, list, tuple, dict, set) for name in dir(kind)}
ASKS_FOR_CLASS = re.compile("isinstance|issubclass|IsInstance|Raises")
CHECKS = re.compile("assert|check|verif|expect|raise|test", re.IGNORECASE)
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

    def visit_Module(self, node: ast.Module) -> ast.Module:
        """Give the program the classes of the tests that it names, as if it were in one file with them."""
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
    if not re.search(r"\bis\b|\btype\b|__class__|\bclass\b", tests):
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
    blocks = [*nodes_of(tree, ast.With, ast.AsyncWith)]
    safe = _safe_roots(tree) if blocks else set()
    skipping, unchecked, checked = set[int](), set[int](), set[int]()
    for block in blocks:
        lines, ends = set(_lines(block)), _end_lines(block, safe)
        judge.swallows |= ends
        skipping |= lines - ends
        is_checked = any(_is_check(node, safe) for node in ast.walk(block))
        (checked if is_checked else unchecked).update(lines)
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


def _end_lines(block: ast.With | ast.AsyncWith, safe: set[str]) -> set[int]:
    """Return the lines of a block that skip nothing if it ends there by an error."""
    last = block.body[-1]
    if isinstance(last, ast.With | ast.AsyncWith):
        return _end_lines(last, safe)
    is_plain = isinstance(last, ast.Expr | ast.Assign | ast.AugAssign | ast.Raise | ast.Delete)
    if not is_plain or any(_is_check(node, safe) for node in ast.walk(last)):
        return set()
    return set(_lines(last)) - {line for one in block.body[:-1] for line in _lines(one)} - {block.lineno}


def _is_check(node: ast.AST, safe: set[str]) -> bool:
    """Whether a node may check something: an assertion, or a call of a function of the tests."""
    if isinstance(node, ast.Call):
        root = node.func
        while isinstance(root, ast.Attribute | ast.Call | ast.Subscript):
            root = root.func if isinstance(root, ast.Call) else root.value
        is_safe = isinstance(root, ast.Constant) or (isinstance(root, ast.Name) and root.id in safe)
        return not is_safe or bool(CHECKS.search(ast.unparse(node.func)))
    return isinstance(node, ast.Assert | ast.If | ast.Try)


def _safe_roots(tree: ast.Module) -> set[str]:
    """Return the names whose calls check nothing: Python's, the program's, and what these have returned."""
    loads = {node.id for node in every(ast.Name, tree) if isinstance(node.ctx, ast.Load)}
    plain = {_name(item.optional_vars) for item in every(ast.withitem, tree) if item.optional_vars}
    for assigned in every(ast.Assign, tree):
        if isinstance(assigned.value, ast.Call | ast.Constant | ast.List | ast.Dict | ast.Set | ast.Tuple):
            plain.update(_name(target) for target in assigned.targets)
    others = {node.name for node in nodes_of(tree, ast.FunctionDef, ast.ClassDef)}
    return (loads - own_names(tree)) | (plain - others) | set(dir(builtins))


def own_names(tree: ast.Module) -> set[str]:
    """Return the names that tests bind."""
    names = {node.id for node in every(ast.Name, tree) if not isinstance(node.ctx, ast.Load)}
    names |= {node.name for node in nodes_of(tree, ast.FunctionDef, ast.ClassDef)}
    names |= {node.arg for node in every(ast.arg, tree)}
    return names | {node.asname or node.name for node in every(ast.alias, tree)}


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
