"""Runs tests against a program in another sandbox, by stand-ins for what the tests call."""

from __future__ import annotations

import ast
import builtins
import importlib
import sys
import types
import typing
from collections.abc import Iterator
from typing import Any, TypeVar

from retrain.sandbox.inside import changes, values
from retrain.sandbox.inside.peer import Peer
from retrain.sandbox.inside.stand_in import StandIn

Node = TypeVar("Node", bound=ast.AST)
# a loop of the tests, such as over map, would take these for its end and skip their assertions
LOOP_ENDS: dict[type[BaseException], set[str]] = {
    StopIteration: {"StopIteration"},
    StopAsyncIteration: {"StopIteration"},
    IndexError: {"IndexError", "LookupError"},  # of a loop over a class that has only `__getitem__`
}


class Names(dict[str, Any]):
    """The namespace of tests: names that are not theirs are the program's, but for Python's own."""

    def __init__(self, peer: Peer, tests: str, tree: ast.Module) -> None:
        super().__init__(__name__="__main__", __file__="tests.py", __builtins__=builtins)
        self._peer = peer
        self._replaced = replaced_names(tests, tree)  # Python's own names that are the program's all the same
        self._tree = tree

    def __missing__(self, name: str) -> Any:
        """Return what the program calls by this name.

        Raises:
            KeyError: nothing.
            NameError: it lacks the function that is tested.
        """
        if hasattr(builtins, name) and name not in self._replaced:
            raise KeyError(name)
        if module := library_module(name, self._tree):
            return module
        try:
            found = self._peer.name(name)
            if isinstance(found, StandIn):  # data may change
                self[name] = found
            return found
        except AttributeError:
            if name in self._replaced:  # Python's own would pass without the program
                raise NameError(name) from None
            if name not in typing.__all__:
                raise KeyError(name) from None
            return getattr(typing, name)  # an annotation, whose import was the program's


def run(reads: int, writes: int, source: str, tests: str) -> dict[str, Any]:
    """Return how tests ended: only if they reach their end, and used the program, they have passed."""
    peer = Peer(reads, writes)
    tree = ast.parse(tests)
    names = Names(peer, tests, tree)
    names[changes.MARK] = peer.may_change
    if len(tests) <= changes.LONGEST:
        tree = changes.Marks(changes.Uses(tree).changeable()).visit(tree)
    watch(peer, tree)
    sys.modules["__main__"] = sys.modules["tests"] = module_of(names)
    sys.modules["solution"] = solution = types.ModuleType("solution")
    solution.__all__ = []  # type: ignore[attr-defined] # or `import *` could replace `abs`
    solution.__getattr__ = peer.name  # type: ignore[method-assign]
    passed, failed = False, failures(tests)
    try:
        values.write_frame(writes, {"job": "calls", "source": source})
        exec(compile(tree, "tests.py", "exec", dont_inherit=True), names)
        passed = True
    except SystemExit as error:
        passed = is_good_end(error, tree)
    except BaseException:  # noqa: BLE001 - also an end of the program
        pass
    passed = passed and not (failed or peer.garbage or peer.has_ended)
    return {
        "passed": passed,
        "garbage": peer.garbage,
        "used": peer.used,
        "needs_sharing": peer.needs_sharing,
    }


def watch(peer: Peer, tree: ast.Module) -> None:
    """Note what calls of the program may not do where tests use them."""
    named = {node.id for node in every(ast.Name, tree)}
    peer.refused = tuple(kind for kind, names in LOOP_ENDS.items() if not named & names)
    for block in every(ast.With, tree):
        if any(every(ast.Assert, block)):
            peer.asserting.update(range(block.lineno, (block.end_lineno or 0) + 1))


def failures(tests: str) -> list[Any]:
    """Return a list that fills with what fails by `unittest`, which tests may only report."""
    found: list[Any] = []
    if "unittest" not in tests:
        return found
    unittest = importlib.import_module("unittest")  # seldom loaded

    def watch(kind: type) -> None:
        run = kind.run  # type: ignore[attr-defined]

        def watched(one: Any, *arguments: Any, **named: Any) -> Any:
            result = run(one, *arguments, **named)
            if result is not None and not result.wasSuccessful():
                found.append(one)
            return result

        kind.run = watched  # type: ignore[attr-defined]

    watch(unittest.TestCase)
    watch(unittest.TestSuite)
    return found


def is_good_end(error: SystemExit, tree: ast.Module) -> bool:
    """Whether tests end themselves, without failure and in their last statement, as `unittest.main` does."""
    where = error.__traceback__ and error.__traceback__.tb_next
    is_last = where is not None and where.tb_lineno >= tree.body[-1].lineno
    return type(error) is SystemExit and is_last and not error.code and error.__context__ is None


def module_of(names: Names) -> types.ModuleType:
    """Return a module with what tests define, where `unittest.main` and others look for it."""
    module = types.ModuleType("__main__")

    def attribute(name: str) -> Any:
        if name in names:  # never the program's, such as its `load_tests`
            return names[name]
        raise AttributeError(name)

    module.__getattr__ = attribute  # type: ignore[method-assign]
    module.__dir__ = lambda: list(names)  # type: ignore[method-assign]
    return module


def every(kind: type[Node], tree: ast.AST) -> Iterator[Node]:
    """Iterate over the nodes of a kind."""
    return (node for node in ast.walk(tree) if isinstance(node, kind))


def library_module(name: str, tree: ast.Module) -> types.ModuleType | None:
    """Return the module that tests use without an import, which must not be an object of the program."""
    wanted = {"np": "numpy"}.get(name, name)
    if wanted not in {*sys.stdlib_module_names, "numpy"}:
        return None
    attributes = [node for node in every(ast.Attribute, tree) if isinstance(node.value, ast.Name)]
    used = {node.attr for node in attributes if ast.unparse(node.value) == name}
    try:
        module = importlib.import_module(wanted) if used else None
    except ImportError:
        return None
    return module if all(hasattr(module, attribute) for attribute in used) else None


def _own_names(tree: ast.Module) -> set[str]:
    """Return the names that tests bind."""
    names = {node.id for node in every(ast.Name, tree) if not isinstance(node.ctx, ast.Load)}
    names |= {node.name for node in every(ast.FunctionDef, tree)}
    names |= {node.name for node in every(ast.ClassDef, tree)}
    return names | {node.asname or node.name for node in every(ast.alias, tree)}


def replaced_names(tests: str, tree: ast.Module) -> frozenset[str]:
    """Return the one of Python's own names that tests take from the program, if any.

    This is none, or it could replace `abs` or `all`; unless tests use no name of another kind, and one
    function of Python's: then they test a function that is called like it.
    """
    loaded = frozenset(node.id for node in every(ast.Name, tree) if isinstance(node.ctx, ast.Load))
    python = frozenset(dir(builtins))
    if "solution" in tests or loaded - python - _own_names(tree):
        return frozenset()
    classes = frozenset(name for name in loaded & python if isinstance(getattr(builtins, name), type))
    found = (loaded & python) - classes or classes
    return found if len(found) == 1 else frozenset()


def run_shared(tests: str, namespace: dict[str, Any]) -> int:
    """Run tests in the program's own namespace; return how many of their own assertions were reached."""
    reached = 0

    def reach() -> None:
        nonlocal reached
        reached += 1

    tree = ast.parse(tests)
    for index in range(len(tree.body), 0, -1):
        if isinstance(tree.body[index - 1], ast.Assert):
            tree.body[index:index] = ast.parse("__reached__()").body
    namespace["__reached__"] = reach
    exec(compile(tree, "tests.py", "exec", dont_inherit=True), namespace)
    return reached
