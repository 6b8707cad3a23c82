"""Which block of a completion is its program."""

from __future__ import annotations

import warnings
from contextlib import closing

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt

from retrain.base.rollouts import Prompt
from retrain.plugins.rewards import Answer, Score, python
from retrain.plugins.rewards.python import fences
from retrain.plugins.rewards.python.fences import Block, _string_after, blocks_of, program_of

ADD = "def add(a, b):\n    return a + b\n"
WRONG = "def add(a, b):\n    return a - b\n"
READS = "a, b = map(int, input().split())\nprint(a + b)\n"
DOCUMENTED = 'def add(a, b):\n    """Add.\n\n    ```\n    add(2, 3)\n    ```\n    """\n    return a + b\n'
NARROW = 'def add(a, b):\n  """Add.\n  ```\n  5\n  ```\n  """\n  return a + b\n'
TIMES = "def add(a, b):\n    return math.prod([a, b])\n"
MODULE = '"""Adds.\n\n```python\nadd(2, 3)\n```\n"""\n' + ADD


def block(text: str, label: str = "python", fence: str = "```") -> str:
    return f"{fence}{label}\n{text}{fence}\n"


def indented(text: str, prefix: str) -> str:
    return "".join(prefix + line for line in text.splitlines(keepends=True))


COMPLETIONS = {
    "no fence": (ADD, ADD),
    "a label in capitals, lines of Windows": ("```Python\r\na = 4\r\n```\r\n", "a = 4\r\n"),
    "the last of two": (block(WRONG) + "better:\n" + block(ADD, "py"), ADD),
    "after JSON": (block('{"a": 1}\n', "json") + block(ADD), ADD),
    "after a command": ("Run\n" + block("pip install numpy\n", "bash") + "then\n" + block(ADD), ADD),
    "before its output, without a label": (block(ADD) + "prints\n" + block("5\n", ""), ADD),
    "before its output, with one": (block(ADD) + block("5\n", "text"), ADD),
    "without a label, before its output": (block(ADD, "") + block("5\n", ""), ADD),
    "without a label, after words": (block("add 2 and 3\n", "") + block(ADD, ""), ADD),
    "before its use": (block(ADD) + block("print(add(2, 3))\n"), ADD),
    "before its use by assignment": (block(ADD) + block("total = add(2, 3)\nprint(total)\n"), ADD),
    "before a test": (block(ADD) + block("def test_add():\n    assert add(2, 3) == 5\n"), ADD),
    "before a test that imports it": (
        block(ADD) + block("from solution import add\nclass TestAdd: sums = [add(2, 3)]\n"),
        ADD,
    ),
    "a lambda after a wrong function": (
        block(WRONG) + block("add = lambda a, b: a + b\n"),
        "add = lambda a, b: a + b\n",
    ),
    "with a name of the one before": (
        block("def half(a): ...\n") + block("from math import gcd\n" + ADD),
        "from math import gcd\n" + ADD,
    ),
    "before what is cut": (block(ADD) + block("def add(a, b)\n    ...\n"), ADD),
    "a fence in a docstring": (block(DOCUMENTED), DOCUMENTED),
    "a fence in a docstring, two blanks deep": (block(NARROW), NARROW),
    "a fence in the module's docstring": (block(MODULE), MODULE),
    "a fence in the docstring of a program without fences": (MODULE, MODULE),
    "a docstring that never ends": ('```python\n"""a\n```\n' + block(ADD), ADD),
    "quotes that open no string": (
        block("# it's '''\n" + ADD) + "Don't.\n" + block("5\n", ""),
        "# it's '''\n" + ADD,
    ),
    "in a list": ("1. First\n\n   ```python\n   def add(a, b):\n       return a + b\n   ```\n", ADD),
    "in a list, as its item": ("- ```python\n  def add(a, b):\n      return a + b\n  ```\n", ADD),
    "in a list, deep": (
        "* a\n    * b\n\n        ```python\n        def add(a, b):\n            return a + b\n        ```\n",
        ADD,
    ),
    "in a list, by tabs": ("1.\tA\n\n\t```python\n\tdef add(a, b):\n\t    return a + b\n\t```\n", ADD),
    "in a list, not indented itself": (f"1. A\n   ```python\n{ADD}   ```\n", ADD),
    "tildes": (block(ADD, "python", "~~~"), ADD),
    "tildes that never close": (f"~~~python\n{ADD}", ADD),
    "a title": (block(ADD, 'python title="a.py"'), ADD),
    "a version": (block(ADD, "python3.12"), ADD),
    "a label in braces": (block(ADD, "{.python .numberLines}"), ADD),
    "a blank before the label": (block(ADD, " python"), ADD),
    "no closing fence": (f"Here:\n```python\n{ADD}", ADD),
    "longer fences": (block("```python\n5\n```\n", "text", "````") + block(ADD, "python", "````"), ADD),
    "a shorter fence closes nothing": ("````python\nx = '''\n```\n'''\n````\n", "x = '''\n```\n'''\n"),
    "tildes close no backticks": ("```python\nx = '''\n~~~\n'''\n```\n", "x = '''\n~~~\n'''\n"),
    "a label closes nothing": ("```text\n```python\n```\n" + block(ADD), ADD),
    "code within a line": ("Use ```python add``` here.\n```python``` \n" + block(ADD), ADD),
    "in a block of Markdown": ("```markdown\n# A\n```python\n" + ADD + "```\n", ADD),
    "no Python at all": (block("int a;\n", "c"), block("int a;\n", "c")),
    "an interactive session is no program": (block(ADD) + block(">>> add(2, 3)\n", "python-repl"), ADD),
    "a pattern with a backslash": (
        block("import re\n" + ADD) + block("re.sub('\\d', '', 'a')\n"),
        "import re\n" + ADD,
    ),
    "the last block is empty": (block(ADD) + "```python\n", ADD),
    "in a quote": (indented(block(ADD), "> ") + "\nDone.\n", ADD),
    "in a quote, without blanks": (indented(block(ADD), ">"), ADD.replace("    ", "   ")),
    "in a quote of a quote": (indented(block(ADD), "> > "), ADD),
    "in a quote that ends first": (f"> ```python\n{indented(ADD, '> ')}\nDone.\n" + block("5\n", ""), ADD),
    "in a quote's list": ("> 1. A\n" + indented(block(ADD), ">    "), ADD),
    "in a list's quote": ("- A\n" + indented(block(ADD), "  > "), ADD),
    "in a list's first quote": ("- > ```python\n" + indented(ADD + "```\n", "  > "), ADD),
    "tabs in a list of three blanks": (
        "1. A\n" + indented(block("def add(a, b):\n\treturn a + b\n"), "   "),
        "def add(a, b):\n\treturn a + b\n",
    ),
    "deeper than its fences": (block(indented(ADD, "    ")), ADD),
    "deeper than its fences, in a list": (f"1. A\n   ```python\n{indented(ADD, '       ')}   ```\n", ADD),
    "words after the closing fence": (block(ADD)[:-1] + " Done.\n" + block("5\n", ""), ADD),
    "a tag after the closing fence": (f"<answer>\n{block(ADD)[:-1]}</answer>\n", ADD),
    "a stop word after the closing fence": (block(ADD)[:-1] + "<|im_end|>", ADD),
    "words, then use": (block(ADD)[:-1] + " Use it:\n" + block("print(add(2, 3))\n"), ADD),
    "a closing fence after the code": (f"```python\n{ADD[:-1]}```\nDone.\n" + block("5\n", ""), ADD[:-1]),
    "a closing fence too deep": (f"```python\n{ADD}      ```\nDone.\n", ADD),
    "closed by an opening fence": (f"```python\n{ADD}```python\n", ADD),
    "opened by a fence after words": (f"Here it is: ```python\n{ADD}```\n", ADD),
    "opened by a fence after a tag": (f"<answer>```python\n{ADD}```</answer>", ADD),
    "opened again": ("```python\ndef add(a,\nNo, better:\n" + block(ADD), ADD),
    "after a fence too many": ("We add.\n```\n\n" + block(ADD), ADD),
    "after text that nothing closed": ("```text\n2 and 3\n" + block(ADD), ADD),
    "opened by its prompt": (f"{ADD}```\nThis adds.\n", ADD),
    "opened by its prompt, before use": (f"{ADD}```\nUse it:\n" + block("print(add(2, 3))\n"), ADD),
    "opened by its prompt, before output": (f"{ADD}```\nprints\n" + block("5\n", ""), ADD),
    "after thoughts": (f"<think>\n{block(WRONG)}</think>\n\n" + block(ADD, ""), ADD),
    "after thoughts, without a fence": (f"<think>\n{block(WRONG)}</think>\n{ADD}", "\n" + ADD),
    "after thoughts that a prompt began": (f"{block(WRONG)}No.\n</think>\n" + block(ADD, ""), ADD),
    "after thoughts that close no fence": ("<think>\n```\nadd\n</think>\n" + block(ADD, ""), ADD),
    "in thoughts alone": (f"<think>\n{block(ADD)}</think>\nDone.\n", ADD),
    "before a test that imports its module": (
        block(ADD) + block("import solution\nresult = solution.add(2, 3)\nassert result == 5\n"),
        ADD,
    ),
    "a module's function by the name of a variable": (
        block("def half(a):\n    prod = a / 2\n") + block("import math\n" + TIMES),
        "import math\n" + TIMES,
    ),
    "Python of another version": (block("type A = int\n"), "type A = int\n"),
    "only in a docstring": (f'"""\n{block(ADD)}"""\n', ADD),
}
LABELS = [
    *(
        "py",
        "py3",
        "python3",
        "Python",
        "PYTHON",
        "python3.12",
        "ipython",
        "ipython3",
        "{python}",
        "{.python}",
    ),
    *(
        "python:add.py",
        "add.py",
        "src/add.py",
        "python,linenos",
        "python {linenos=true}",
        "{code-cell} ipython3",
    ),
]


@pytest.mark.parametrize(("completion", "program"), COMPLETIONS.values(), ids=COMPLETIONS)
def test_the_program_of_a_completion(completion: str, program: str) -> None:
    assert program_of(completion) == program


@pytest.mark.parametrize("label", LABELS)
def test_a_label_says_that_a_block_is_python(label: str) -> None:
    assert program_of(block(WRONG, "") + block(ADD, label) + block("add = 5\n", "")) == ADD


@pytest.mark.parametrize("label", ["pycon", "python-repl", "pyx", "json", "text", "cython", "bash python"])
def test_a_label_says_that_a_block_is_no_python(label: str) -> None:
    assert program_of(block(ADD, "") + block(WRONG, label)) == ADD


@pytest.mark.parametrize(
    "completion",
    [
        block(READS) + block("3 4\n", ""),
        block(READS, "") + "prints\n" + block("7\n", ""),
        block(WRONG) + block(READS),
        block(READS) + block("# or by hand\n"),
        f"{READS}```\nThis adds.\n",
        indented(block(READS), "> "),
    ],
)
def test_a_program_that_reads_its_input_is_the_last_that_does_anything(completion: str) -> None:
    assert program_of(completion, reads_input=True) == READS


def test_the_chosen_block_is_what_tests_run() -> None:
    completion = block('{"a": 1}\n', "json") + block(ADD) + block("total = add(2, 3)\nprint(total)\n")
    tests = Prompt(0, "add", "assert add(2, 3) == 5")
    with_output = block(READS, "") + block("5\n", "")
    cases = Prompt(0, "add", '[{"input": "2 3", "output": "5"}]')
    with closing(python.open_scorer(workers=1)) as scorer:
        assert scorer.score_all([Answer(completion, tests)]) == [Score(1.0)]
    with closing(python.open_scorer(tests="stdio", workers=1)) as scorer:
        assert scorer.score_all([Answer(with_output, cases)]) == [Score(1.0)]


@given(st.text(st.sampled_from(list("`~\n\r\t -1.>#\"'\\pyx=()\u2028"))))
def test_any_completion_has_a_program_of_its_own_lines(completion: str) -> None:
    program = program_of(completion)
    assert {line.strip() for line in program.splitlines()} <= {
        part.strip() for line in completion.splitlines() for part in (line, line.lstrip(" \t-1.>"))
    }


@given(st.lists(st.sampled_from(["x = 1", "", "  y", "'''", "# ```", "```python"])), st.integers(0, 9))
def test_what_a_longer_fence_encloses_is_kept(lines: list[str], columns: int) -> None:
    text = "".join(f"{line}\n" for line in lines)
    indented = "".join(f"{' ' * columns}{line}\n" for line in ["````text", *lines, "````"])
    assert list(blocks_of(indented)) == [Block("text", text)]


INNER = st.sampled_from([ADD, "x = 1\n\n\ny = 2\n", 's = "```"\n', "def add(a, b):\n\treturn a\n"])
MARKS = st.sampled_from(["```", "````", "~~~", "~~~~~"])
FENCED = st.builds(block, INNER, st.sampled_from(["python", "", "text"]), MARKS)


def item(text: str, marker: str) -> str:
    return marker + indented(text, " " * len(marker))[len(marker) :]


DOCUMENTS = st.recursive(
    FENCED | st.sampled_from(["Words.\n", "Use `add`.\n"]),
    lambda parts: (
        st.lists(parts, min_size=1, max_size=3).map("\n".join)
        | st.builds(indented, parts, st.sampled_from(["> ", " ", "   "]))
        | st.builds(item, parts, st.sampled_from(["- ", "1. ", "10) ", "*   "]))
    ),
)


@given(DOCUMENTS)
def test_blocks_are_those_that_commonmark_finds(document: str) -> None:
    tokens = MarkdownIt("commonmark").parse(document)
    expected = [Block(token.info.strip(), token.content) for token in tokens if token.type == "fence"]
    blocks = blocks_of(document)
    assert all(block in blocks for block in expected)  # in their order, between those that are indented more


def test_warnings_of_a_completion_are_not_the_runs() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert program_of(block("x = '\\d'\n") + block("y\n")) == "x = '\\d'\n"


UNITS = [
    "```python\n'''\n```\n'''\n",
    "```\n",
    "~~~python\n",
    "```markdown\n",
    "- ",
    "'''\n```python\n",
    "> ```py\n",
    "a ",
]


@pytest.mark.parametrize("unit", UNITS)
def test_each_line_of_a_long_completion_is_read_a_few_times_at_most(
    unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = 100_000 // len(unit) * max(1, unit.count("\n"))
    read = 0

    def counted(line: str, string: str) -> tuple[str, str]:
        nonlocal read
        read += 1
        return _string_after(line, string)

    monkeypatch.setattr(fences, "_string_after", counted)
    list(blocks_of(unit * (100_000 // len(unit))))
    assert read <= 2 * lines
