"""Runs tests against a program in another sandbox, by stand-ins for what the tests call."""

from __future__ import annotations

import ast
import builtins
import gc
import importlib
import sys
import types
import typing
import warnings
from typing import Any

from retrain.plugins.sandbox.inside import reading, values
from retrain.plugins.sandbox.inside.judge import Judge
from retrain.plugins.sandbox.inside.stand_in import StandIn, number_of, operate


class Names(dict[str, Any]):
    """The namespace of tests: names that are not theirs are the program's, but for Python's own."""

    def __init__(self, judge: Judge, tests: str, tree: ast.Module) -> None:
        super().__init__(__name__="__main__", __file__="tests.py", __builtins__=builtins)
        self._judge = judge
        self._replaced = replaced_names(tests, tree)  # Python's own names that are the program's all the same
        self._tree = tree

    def __contains__(self, name: object) -> bool:
        return self.get(name, self) is not self

    def get(self, name: Any, default: Any = None) -> Any:
        try:
            return self[name]
        except (KeyError, NameError):
            return default

    def __missing__(self, name: str) -> Any:
        """Return what the program calls by this name; NameError if it lacks the function that is tested."""
        if hasattr(builtins, name) and name not in self._replaced:
            raise KeyError(name)
        if module := library_module(name, self._tree):
            return module
        try:
            value = self._judge.name(name)
            if isinstance(value, StandIn):  # data may change
                self[name] = value
            return value
        except AttributeError:
            if name in self._replaced:  # Python's own would pass without the program
                raise NameError(name) from None
            if name not in typing.__all__:
                raise KeyError(name) from None
            return getattr(typing, name)  # an annotation, whose import was the program's


def run(reads: int, writes: int, source: str, tests: str, *, changes_all: bool = False) -> dict[str, Any]:
    """Return how tests ended: only if they reach their end, and used the program, they have passed.

    Args:
        reads: answers of the program come here.
        writes: requests go there.
        source: the program.
        tests: their text.
        changes_all: functions of the program may change all arguments, whatever they return.
    """
    judge = Judge(values.Frames(reads), writes)
    judge.changes_all = changes_all
    gc.disable()  # it would look at each node of a large tree again and again
    tree = ast.parse(tests)
    names = Names(judge, tests, tree)
    names[reading.MARK] = judge.may_change
    inspections, changeable = set[int](), frozenset[str]()
    if len(tests) <= reading.LONGEST:
        uses = reading.Uses(tree)
        inspections, changeable = uses.inspections(), uses.changeable()
    reading.watch(judge, tree)
    good_end = reading.good_end(tree)
    tree = reading.rewritten(tree, tests, source, changeable)
    gc.enable()
    names["__builtins__"] = {**vars(builtins), **overridden(judge)}
    sys.modules["__main__"] = sys.modules["tests"] = module_of(names)
    sys.modules["solution"] = solution = types.ModuleType("solution")
    solution.__all__ = []  # type: ignore[attr-defined] # or `import *` could replace `abs`
    solution.__getattr__ = judge.name  # type: ignore[method-assign]
    passed, cases = False, Cases(tests)
    try:
        patch_library(judge, tests)
        values.write_frame(writes, {"job": "calls", "source": source})
        exec(compile(tree, "tests.py", "exec", dont_inherit=True), names)
        cases.run_rest(sys.modules["__main__"])
        passed = True
    except SystemExit as error:
        passed = is_good_end(error, good_end)
    except BaseException as error:  # noqa: BLE001 - also an end of the program
        cases.errors.append(error)
    if judge.hides_changes and any(inspections.intersection(lines_of(error)) for error in cases.errors):
        judge.doubt = judge.doubt or CHANGED
    if judge.replicas.has_lost:
        judge.doubt = judge.doubt or "the tests and the program share more lists than are looked at"
    numbers = NUMPY if judge.has_numpy_numbers else ""
    passed = passed and not (cases.have_failed or judge.garbage or judge.has_ended)
    return {
        "passed": passed,
        "garbage": judge.garbage,
        "used": judge.used,
        "needs_sharing": judge.needs_sharing,
        "missing": judge.missing,
        "doubt": "" if passed else judge.doubt or numbers or reading.doubt(tests),
        "hides_changes": judge.hides_changes,
    }


def run_plainly(source: str, tests: str) -> bool:
    """Whether tests accept a program in one interpreter, where it could make them accept anything."""
    module = sys.modules["solution"] = types.ModuleType("solution")
    cases = Cases(tests)
    try:
        exec(compile(source, "solution.py", "exec", dont_inherit=True), module.__dict__)
        sys.modules["__main__"] = sys.modules["tests"] = module
        module.__name__ = "__main__"
        tree = ast.parse(tests)
        exec(compile(tree, "tests.py", "exec", dont_inherit=True), module.__dict__)
        cases.run_rest(module)
    except SystemExit as error:
        return not cases.have_failed and is_good_end(error, reading.good_end(tree))
    except BaseException:  # noqa: BLE001 - whatever they raise
        return False
    return not cases.have_failed


def overridden(judge: Judge) -> dict[str, Any]:
    """Return Python's functions that tests ask what an object is, where it may be the program's."""
    return {
        reading.SAME: judge.is_same,
        reading.TYPE: judge.type_of,
        reading.GIVE: lambda name, value: judge.request("define", name, value),
        "__import__": judge.imported,
        "isinstance": judge.is_instance,
        "issubclass": judge.is_subclass,
        "callable": lambda one: operate("callable", one) if isinstance(one, StandIn) else callable(one),
        "vars": lambda *one: one[0].__dict__ if one and isinstance(one[0], StandIn) else vars(*one),
        "id": lambda one: id(one) if (number := number_of(one)) is None else (1 << 62) + number,
    }


CHANGED = "a function of the program changed an argument, and returned something"
NUMPY = "numbers of numpy come back as Python's"
LIBRARY = {  # functions that look into an object, or that set what the program uses as well
    "dataclasses": "asdict astuple fields replace is_dataclass",
    "inspect": "isgeneratorfunction iscoroutinefunction isasyncgenfunction isfunction isclass ismethod"
    " isgenerator isabstract signature getdoc getmembers",
    "asyncio": "iscoroutinefunction",
    "typing": "get_type_hints",
    "random": "seed",
    "numpy.random": "seed",
}


def patch_library(judge: Judge, tests: str) -> None:
    """Have functions of the library ask the program where they are given its objects."""
    if "unittest" in tests:
        case: Any = importlib.import_module("unittest").case
        case.isinstance, case.issubclass = judge.is_instance, judge.is_subclass
        same, kind = judge.is_same, case.TestCase
        kind.assertIs = lambda self, one, other, msg=None: self.assertTrue(same(one, other), msg)  # noqa: PT009
        kind.assertIsNot = lambda self, one, other, msg=None: self.assertFalse(same(one, other), msg)  # noqa: PT009
    sys.warnoptions.append("default")  # or unittest would forget the next line
    warnings.filterwarnings("error", "NotImplemented should not be used in a boolean context")
    for place, names in LIBRARY.items():
        if place.rpartition(".")[2] in tests and (place in sys.modules or "numpy" not in place):
            module = importlib.import_module(place)
            for name in names.split():
                setattr(module, name, _asking(judge, place, name, getattr(module, name)))


def _asking(judge: Judge, place: str, name: str, function: Any) -> Any:
    def asking(*args: Any, **kwargs: Any) -> Any:
        if name == "seed":
            judge.request("library", place, name, args, kwargs)
        elif args and isinstance(args[0], StandIn):
            return judge.request("library", place, name, args, kwargs)
        return function(*args, **kwargs)

    return asking


def lines_of(error: BaseException) -> set[int]:
    """Return the lines of the tests through which an exception came."""
    lines, trace = set(), error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == "tests.py":
            lines.add(trace.tb_lineno)
        trace = trace.tb_next
    return lines


class Cases:
    """The cases of `unittest` in tests, whose failures tests may only report."""

    def __init__(self, tests: str) -> None:
        self.have_run = self.have_failed = False
        self._unittest: Any = importlib.import_module("unittest") if "unittest" in tests else None
        self.errors: list[BaseException] = []
        if self._unittest:
            self._watch(self._unittest.TestCase)
            self._watch(self._unittest.TestSuite)
            for name in ("addError", "addFailure", "addSubTest"):
                self._note(self._unittest.TestResult, name)

    def _note(self, kind: Any, name: str) -> None:
        add = getattr(kind, name)

        def noted(*arguments: Any) -> Any:
            if arguments[-1] is not None:
                self.errors.append(arguments[-1][1])
            return add(*arguments)

        setattr(kind, name, noted)

    def _watch(self, kind: Any) -> None:
        run = kind.run

        def watched(*arguments: Any, **named: Any) -> Any:
            self.have_run = True
            result = run(*arguments, **named)
            self.have_failed |= result is not None and not result.wasSuccessful()
            return result

        kind.run = watched

    def run_rest(self, module: types.ModuleType) -> None:
        """Run the cases that a module defines if it runs none itself, as benchmarks do."""
        if self._unittest and not self.have_run:
            self._unittest.defaultTestLoader.loadTestsFromModule(module).run(self._unittest.TestResult())


def is_good_end(error: SystemExit, line: int) -> bool:
    """Whether tests end themselves, without failure and from that line on, as `unittest.main` does."""
    where = error.__traceback__ and error.__traceback__.tb_next
    is_last = where is not None and bool(line) and where.tb_lineno >= line
    return type(error) is SystemExit and is_last and not error.code and error.__context__ is None


def module_of(names: Names) -> types.ModuleType:
    """Return a module with what tests define, where `unittest.main` and others look for it."""
    module = types.ModuleType("__main__")

    def attribute(name: str) -> Any:
        if dict.__contains__(names, name):  # never the program's, such as its `load_tests`
            return names[name]
        raise AttributeError(name)

    module.__getattr__ = attribute  # type: ignore[method-assign]
    module.__dir__ = lambda: list(names)  # type: ignore[method-assign]
    return module


def library_module(name: str, tree: ast.Module) -> types.ModuleType | None:
    """Return the module that tests use without an import, which must not be an object of the program."""
    module_name = {"np": "numpy"}.get(name, name)
    if module_name not in {*sys.stdlib_module_names, "numpy"}:
        return None
    used = {
        node.attr
        for node in reading.every(ast.Attribute, tree)
        if isinstance(node.value, ast.Name) and node.value.id == name
    }
    try:
        module = importlib.import_module(module_name) if used else None
    except ImportError:
        return None
    return module if all(hasattr(module, attribute) for attribute in used) else None


def replaced_names(tests: str, tree: ast.Module) -> set[str]:
    """Return the one of Python's own names that tests take from the program, if any.

    This is none, or it could replace `abs` or `all`; unless tests use no name of another kind, and one
    function of Python's: then they test a function that is called like it.
    """
    loaded, python = reading.loaded_names(tree), set(dir(builtins))
    if "solution" in tests or loaded - python - reading.bindings(tree).keys():
        return set()
    classes = {name for name in loaded & python if isinstance(getattr(builtins, name), type)}
    replaced = (loaded & python) - classes or classes
    return replaced if len(replaced) == 1 else set()


def run_shared(tests: str, namespace: dict[str, Any]) -> int:
    """Run tests in the program's namespace; return how many assertions were reached, -1 if cases failed."""
    reached = 0

    def reach() -> None:
        nonlocal reached
        reached += 1

    tree = ast.parse(tests)
    for index in range(len(tree.body), 0, -1):
        if isinstance(tree.body[index - 1], ast.Assert):
            tree.body[index:index] = ast.parse("__reached__()").body
    namespace["__reached__"] = reach
    cases = Cases(tests)
    exec(compile(tree, "tests.py", "exec", dont_inherit=True), namespace)
    cases.run_rest(sys.modules["solution"])
    return -1 if cases.have_failed else reached
