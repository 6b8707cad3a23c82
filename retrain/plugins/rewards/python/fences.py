"""Finds the program in a completion: fenced blocks by CommonMark's rules, and which of them is the program.

Nothing of a completion runs here: whether a block is Python, and what it defines, is read from its syntax.

Source: CommonMark 0.31.2, section 4.5, with leniency where models are careless: a fence may be indented by
any amount, as in lists, or stand after words; three backticks that Python cannot hold (outside of strings
and comments) end a block of Python; and a fence that opens such a block ends the one before it.
"""

from __future__ import annotations

import ast
import builtins
import io
import itertools
import re
import sys
import textwrap
import threading
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

FILE = "<completion>"
OPENING = re.compile(
    r"(?P<prefix>[ \t]*+(?:(?:(?:[-*+]|\d{1,9}[.)])[ \t]+|>)[ \t]*+)*+)(?P<words>[^`~]*+)"
    r"(?P<mark>`{3,}+(?=[^`]*+\Z)|~{3,}+)(?P<info>.*)",
    re.DOTALL,
)
DEEPER = 3  # columns that a closing fence may be indented beyond its opening one
PYTHON = re.compile(
    r"(?:\{code-(?:block|cell)\} *)?\{?\.?(?:i?python|py|[\w./-]+\.py)[\d.]*(?![\w-])", re.IGNORECASE
)
MARKDOWN = re.compile(r"(?:markdown|md)\Z", re.IGNORECASE)
THOUGHT = re.compile(r"</think(?:ing)?>[ \t\r]*$", re.IGNORECASE | re.MULTILINE)
# in a line of Python: what opens a string of several lines, or looks as if it did, and backticks
QUOTES = re.compile(r"""("{3}|'{3}|`{3})|\\.|\#.*|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'""")
ASSIGNMENTS = (ast.Assign, ast.AnnAssign, ast.AugAssign)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, *ASSIGNMENTS)
# before 3.11.8 and 3.12.2, threads that parse at once may get a SystemError (depths of Python's are mixed up)
_PARSING = threading.Lock()


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of Markdown."""

    label: str
    text: str


@dataclass(frozen=True, slots=True)
class Fence:
    """A line that opens a block."""

    mark: str  # its backticks or tildes
    label: str
    quotes: int  # block quotes that it stands in
    columns: int  # of its indentation in the innermost of them
    is_alone: bool  # on its line


def program_of(completion: str, *, reads_input: bool = False) -> str:
    """Return the program in a completion: one of its fenced blocks, or the whole text if none can be it.

    Candidates are the blocks labelled as Python, else those without a label that are Python. The last one
    that defines something is the program, or, if programs read standard input, the last one that calls
    something. A block that uses what an earlier one defines only shows how that is used. What a model
    thought, before `</think>`, counts only where nothing after it is a program.
    """
    thought = THOUGHT.search(completion)
    answers = [completion[thought.end() :], completion] if thought else [completion]
    return next(filter(None, (_program(answer, reads_input=reads_input) for answer in answers)), completion)


def _program(answer: str, *, reads_input: bool) -> str | None:
    if "~~~" not in answer and _has(_parsed(answer), (*DEFINITIONS, ast.Call)):
        return answer  # fences are in its strings
    head = "".join(itertools.takewhile(lambda line: not _opening(line), io.StringIO(answer, newline="")))
    if _has(_parsed(head), (*DEFINITIONS, ast.Call)):  # the prompt ended with the opening fence
        answer = f"```python\n{answer}"
    blocks = [
        Block(block.label, block.text if _parsed(block.text) else textwrap.dedent(block.text))
        for block in blocks_of(answer)
        if block.text.strip()
    ]
    candidates = [block.text for block in blocks if PYTHON.match(block.label)] or [
        block.text for block in blocks if not block.label and _parsed(block.text)
    ]
    program, defined = candidates[-1] if candidates else None, set[str]()
    for candidate in candidates:
        tree = _parsed(candidate)
        if tree is None:
            continue
        bound, used = _names(tree)
        kinds = (ast.Call,) if reads_input else DEFINITIONS
        if _has(tree, kinds) and not (used - bound) & defined:
            program = candidate
        defined |= bound - vars(builtins).keys()
    return program


def blocks_of(markdown: str, *, is_outermost: bool = True) -> Iterator[Block]:
    """Iterate over fenced blocks; in place of a block labelled Markdown, over those in it."""
    lines = list(io.StringIO(markdown, newline=""))
    index, heeds_strings = 0, True
    while index < len(lines):
        fence = _opening(lines[index])
        index += 1
        if fence is None:
            continue
        content, index, is_whole = _content(lines, index, fence, heeds_strings=heeds_strings)
        heeds_strings = heeds_strings and is_whole  # or a text could be read once for each of its fences
        text = _dedented(content, fence.columns)
        if is_outermost and MARKDOWN.match(fence.label):
            yield from blocks_of(text, is_outermost=False)
        else:
            yield Block(fence.label, text)


def _opening(line: str) -> Fence | None:
    match = OPENING.match(line)
    if match is None:
        return None
    label = match["info"].strip()
    if match["words"] and not PYTHON.fullmatch(label):
        return None
    quotes, indent = match["prefix"].count(">"), match["prefix"].rpartition(">")[2]
    columns = len((indent.removeprefix(" ") if quotes else indent).expandtabs(4))
    return Fence(match["mark"], label, quotes, columns, not match["words"])


def _content(
    lines: Sequence[str], start: int, fence: Fence, *, heeds_strings: bool
) -> tuple[list[str], int, bool]:
    """Return the lines of a block, the index of the line after it, and False if a string has no end.

    Python's strings may hold fences that close nothing; of one without an end, the first does.
    """
    closing = re.compile(rf"([ \t]*){fence.mark[0]}{{{len(fence.mark)},}}\s*")
    quote = re.compile(rf"(?:[ \t]*>){{{fence.quotes}}} ?")
    is_python = PYTHON.match(fence.label) is not None
    content, end, string, in_string = list[str](), len(lines), "", None
    for index in range(start, len(lines)):
        line = lines[index]
        if fence.quotes:
            marks = quote.match(line)
            if marks is None:
                end = index
                break
            line = line[marks.end() :]
        match, other = closing.fullmatch(line), _opening(line)
        closes = match is not None and len(match[1].expandtabs(4)) <= fence.columns + DEEPER
        opens = other and other.is_alone and other.mark.startswith(fence.mark) and PYTHON.match(other.label)
        if closes or opens:
            after = index + 1 if closes else index
            if not string:
                return content, after, True
            in_string = in_string or (len(content), after)
        elif is_python:
            string, code = _string_after(line, string)
            if len(code) < len(line):
                return [*content, code.rstrip(" \t")], index + 1, True
            string = string if heeds_strings else ""
        content.append(line)
    if in_string:
        return content[: in_string[0]], in_string[1], False
    return content, end, True


def _string_after(line: str, string: str) -> tuple[str, str]:
    """Return the quotes of the string that is open after a line, given those of the one before it.

    Second, the line up to three backticks outside of strings and comments, which Python cannot hold.
    """
    position = 0
    while True:
        if string:
            match = re.compile(rf"(?:\\.|[^\\])*?{string}").match(line, position)
            if not match:
                return string, line
            string = ""
        else:
            match = QUOTES.search(line, position)
            if not match:
                return "", line
            string = match[1] or ""
            if string == "```":
                return "", line[: match.start()]
        position = match.end()


def _dedented(lines: Sequence[str], columns: int) -> str:
    """Return lines without the indentation of their fence, or of the first of them where that is less."""
    indents = (line[: -len(line.lstrip(" \t"))].expandtabs(4) for line in lines if line.strip())
    most = min(columns, len(next(indents, " " * columns)))
    dedented = []
    for line in lines:
        width, start = 0, 0
        while width < most and line[start] in " \t":
            width += 4 - width % 4 if line[start] == "\t" else 1
            start += 1
        dedented.append(" " * max(0, width - most) + line[start:])  # what is left of a tab
    return "".join(dedented)


def parse(source: str, file: str) -> ast.Module:
    """Return the syntax tree of a text; raise what `ast.parse` raises."""
    with _PARSING:
        return ast.parse(source, file)


def _parsed(source: str) -> ast.Module | None:
    """Return the syntax tree of a text, or None if it is not Python."""
    # a completion's warnings are not the run's, and catch_warnings is not for threads
    silence = ("ignore", None, Warning, re.compile(re.escape(FILE)), 0)
    if silence not in warnings.filters:
        warnings.filterwarnings("ignore", module=re.escape(FILE))
    try:
        return parse(source, FILE)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: nested too deeply
        return None


def _has(tree: ast.Module | None, kinds: tuple[type[ast.AST], ...]) -> bool:
    return tree is not None and any(isinstance(node, kinds) for node in ast.walk(tree))


def _names(tree: ast.Module) -> tuple[set[str], set[str]]:
    """Return the names that a program binds anywhere, and those that it uses."""
    bound, used, modules = set[str](), set[str](), set[str]()
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
                modules.update(alias.name for alias in names if not alias.asname)
            case ast.Attribute(value=ast.Name(id=module), attr=name) if module in modules:
                if module not in sys.stdlib_module_names:
                    used.add(name)  # `import solution` and `solution.f`
            case ast.ImportFrom(module=module, names=names):
                is_real = (module or "").partition(".")[0] in sys.stdlib_module_names
                (bound if is_real else used).update(alias.name for alias in names)  # `from solution import f`
                bound.update(alias.asname for alias in names if alias.asname)
    return bound, used
