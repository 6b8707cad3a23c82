"""Finds the program in a completion: fenced blocks by CommonMark's rules, and which of them is the program.

Nothing of a completion runs here: whether a block is Python, and what it defines, is read from its syntax.

Source: CommonMark 0.31.2, section 4.5, but fences may be indented by any amount, as in lists.
"""

from __future__ import annotations

import ast
import builtins
import io
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

FILE = "<completion>"
OPENING = re.compile(
    r"(?P<indent>[ \t]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)*)(?P<fence>`{3,}(?=[^`]*\Z)|~{3,})(?P<info>.*)",
    re.DOTALL,
)
DEEPER = 3  # columns that a closing fence may be indented beyond its opening one
PYTHON = re.compile(r"\{?\.?(?:python|py)[\d.]*(?![\w-])", re.IGNORECASE)
MARKDOWN = re.compile(r"(?:markdown|md)\Z", re.IGNORECASE)
# in a line of Python: what opens a string of several lines, or looks as if it did
QUOTES = re.compile(r"""("{3}|'{3})|\\.|\#.*|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'""")
DEFINITIONS = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.ClassDef,
    ast.Assign,
    ast.AnnAssign,
    ast.AugAssign,
)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of Markdown."""

    label: str
    text: str


def program_of(completion: str, *, reads_input: bool = False) -> str:
    """Return the program in a completion: one of its fenced blocks, or the whole text if none can be it.

    Candidates are the blocks labelled as Python, else those without a label that are Python. The last one
    that defines something is the program, or, if programs read standard input, the last one that calls
    something. A block that uses what an earlier one defines only shows how that is used.
    """
    blocks = list(blocks_of(completion))
    if not blocks or ("~~~" not in completion and _parsed(completion)):  # fences in its strings
        return completion
    labelled = [block.text for block in blocks if PYTHON.match(block.label) and block.text.strip()]
    candidates = labelled or [
        block.text for block in blocks if not block.label and block.text.strip() and _parsed(block.text)
    ]
    if len(candidates) < 2:
        return candidates[0] if candidates else completion
    program, defined = candidates[-1], set[str]()
    for candidate in candidates:
        tree = _parsed(candidate)
        if tree is None:
            continue
        bound, used = _names(tree)
        kinds = (ast.Call,) if reads_input else DEFINITIONS
        if any(isinstance(node, kinds) for node in ast.walk(tree)) and not (used - bound) & defined:
            program = candidate
        defined |= bound - vars(builtins).keys()
    return program


def blocks_of(markdown: str, *, is_outermost: bool = True) -> Iterator[Block]:
    """Iterate over fenced blocks; in place of a block labelled Markdown, over those in it."""
    lines = list(io.StringIO(markdown, newline=""))
    index, heeds_strings = 0, True
    while index < len(lines):
        opening = OPENING.match(lines[index])
        index += 1
        if not opening:
            continue
        label, columns = opening["info"].strip(), len(opening["indent"].expandtabs(4))
        is_python = heeds_strings and PYTHON.match(label) is not None
        end, is_whole = _end(lines, index, opening["fence"], columns, is_python=is_python)
        heeds_strings = heeds_strings and is_whole  # or a text could be read once for each of its fences
        text = _dedented(lines[index:end], columns)
        if is_outermost and MARKDOWN.match(label):
            yield from blocks_of(text, is_outermost=False)
        else:
            yield Block(label, text)
        index = end + 1


def _end(lines: Sequence[str], start: int, fence: str, columns: int, *, is_python: bool) -> tuple[int, bool]:
    """Return the line that closes a block, and False if it lies in a string that nothing ends.

    Python's strings of several lines may hold fences that close nothing.
    """
    closing = re.compile(rf"([ \t]*){fence[0]}{{{len(fence)},}}\s*")
    string, in_string = "", len(lines)
    for index in range(start, len(lines)):
        match = closing.fullmatch(lines[index])
        if match and len(match[1].expandtabs(4)) <= columns + DEEPER:
            if not string:
                return index, True
            in_string = min(in_string, index)
        elif is_python:
            string = _string_after(lines[index], string)
    return in_string, in_string == len(lines)


def _string_after(line: str, string: str) -> str:
    """Return the quotes of the string that is open after a line, given those of the one before it."""
    position = 0
    while True:
        if string:
            match = re.compile(rf"(?:\\.|[^\\])*?{string}").match(line, position)
            if not match:
                return string
            string = ""
        else:
            match = QUOTES.search(line, position)
            if not match:
                return ""
            string = match[1] or ""
        position = match.end()


def _dedented(lines: Sequence[str], columns: int) -> str:
    """Return lines without the indentation of their fence, or of the first of them where that is less."""
    texts = [line.lstrip(" \t") for line in lines]
    blanks = [line[: len(line) - len(text)] for line, text in zip(lines, texts, strict=True)]
    first = next(
        (len(blank.expandtabs(4)) for blank, text in zip(blanks, texts, strict=True) if text.strip()), columns
    )
    if not (most := min(columns, first)):
        return "".join(lines)
    return "".join(blank.expandtabs(4)[most:] + text for blank, text in zip(blanks, texts, strict=True))


def _parsed(source: str) -> ast.Module | None:
    """Return the syntax tree of a text, or None if it is not Python."""
    # a completion's warnings are not the run's, and catch_warnings is not for threads
    silence = ("ignore", None, Warning, re.compile(re.escape(FILE)), 0)
    if silence not in warnings.filters:
        warnings.filterwarnings("ignore", module=re.escape(FILE))
    try:
        return ast.parse(source, FILE)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: nested too deeply
        return None


def _names(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Return the names that a program binds anywhere, and those that it uses."""
    bound, used = set[str](), set[str]()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                used.add(name)
            case ast.Name(id=name) | ast.arg(arg=name):
                bound.add(name)
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                bound.add(name)
            case (
                ast.ExceptHandler(name=str(name))
                | ast.MatchAs(name=str(name))
                | ast.MatchStar(name=str(name))
            ):
                bound.add(name)
            case ast.Import(names=names):
                bound.update((alias.asname or alias.name).partition(".")[0] for alias in names)
            case ast.ImportFrom(module=module, names=names):
                is_real = (module or "").partition(".")[0] in sys.stdlib_module_names
                (bound if is_real else used).update(alias.name for alias in names)  # `from solution import f`
                bound.update(alias.asname for alias in names if alias.asname)
    return bound, used
