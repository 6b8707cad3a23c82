"""Tasks: right answers, distinct prompts, and a split that never leaks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.base.errors import ConfigError
from retrain.base.json_lines import read_rows
from tests.built_tasks import build, problem_of

GENERATED = ["sort", "copy", "reverse", "addition", "successor"]


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("sort", lambda text: "".join(sorted(text))),
        ("copy", lambda text: text),
        ("reverse", lambda text: text[::-1]),
        ("addition", lambda text: str(sum(map(int, text.split("+"))))),
        ("successor", lambda text: str(int(text) + 1)),
    ],
)
def test_every_answer_is_right(name, right):
    task = build(name)
    for prompt in task.train + task.held_out:
        assert prompt.text.endswith("=")
        assert prompt.answer == right(prompt.text[:-1])


@pytest.mark.parametrize("name", GENERATED)
@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**40))
def test_prompts_are_distinct_and_the_split_is_disjoint(name, seed):
    task = build(name, seed=seed, count=50, held_out=0.2)
    train, held_out = ({p.text for p in side} for side in (task.train, task.held_out))
    assert (len(train), len(held_out)) == (40, 10)
    assert not train & held_out
    assert len({p.id for p in task.train + task.held_out}) == 50


@pytest.mark.parametrize("name", GENERATED)
def test_a_seed_decides_the_task(name):
    assert build(name, seed=1) == build(name, seed=1)
    assert build(name, seed=1) != build(name, seed=2)


@pytest.mark.parametrize("name", GENERATED)
def test_the_alphabet_holds_every_character_of_prompts_and_answers(name):
    task = build(name, base=16)
    used = {c for p in task.train + task.held_out for c in p.text + p.answer}
    assert used <= set(task.alphabet)
    assert list(task.alphabet) == sorted(set(task.alphabet))


def test_no_count_takes_all_prompts_up_to_a_thousand():
    assert len(build("sort", length=2, held_out=0).train) == 100
    assert len(build("sort", length=5, held_out=0).train) == 1000


def test_the_longest_answer_is_told():
    assert build("addition", digits=1).longest_answer == 2


def test_numbers_are_written_in_the_base_asked_for():
    task = build("successor", base=2, digits=3, held_out=0)
    assert {(p.text, p.answer) for p in task.train} >= {("0=", "1"), ("11=", "100"), ("111=", "1000")}


def test_problems_too_many_to_list_are_drawn_all_the_same():
    task = build("copy", length=64, base=36, count=20)
    assert len({p.text for p in task.train + task.held_out}) == 20


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"length": 0}, "length: got 0; needs a whole number from 1 to 64"),
        ({"length": 2.0}, "length: got 2.0"),
        ({"length": True}, "length: got True"),
        ({"base": 37}, "base: got 37"),
        ({"count": -1}, "count: got -1"),
        ({"held_out": 1.0}, "held_out: got 1.0"),
        ({"held_out": float("nan")}, "held_out: got nan"),
        ({"held_out": "0.1"}, "held_out: got '0.1'"),
        ({"count": 1001}, "only 1000 distinct prompts"),
        ({"length": 1, "base": 2}, "use more prompts"),
    ],
)
def test_an_option_out_of_range_says_what_would_do(options, said):
    assert said in problem_of("sort", **options)


def test_a_secret_that_no_guess_could_name_is_refused_by_its_own_options():
    problems = problem_of("guess", digits=65, base=16).splitlines()
    assert [said.rpartition("].")[2] for said in problems] == [
        "digits: got 65; needs a whole number from 1 to 64",
        "base: got 16; needs a whole number from 2 to 10",
    ]


def test_all_wrong_options_are_told_at_once():
    assert len(problem_of("addition", digits=0, base=1, count=-1, held_out=2).splitlines()) == 4


@pytest.fixture
def rows(tmp_path: Path):
    """Write a file of rows, given as objects or raw text, and name it."""

    def write(*lines: object) -> str:
        path = tmp_path / "rows.jsonl"
        path.write_text(
            "\n".join(x if isinstance(x, str) else json.dumps(x) for x in lines), encoding="utf-8"
        )
        return str(path)

    return write


def test_jsonl_reads_rows_and_keeps_their_line_numbers(rows):
    path = rows({"prompt": "a>", "answer": "é"}, "", {"prompt": "b>", "answer": "2", "more": 1})
    task = build("jsonl", path=path, held_out=0)
    assert {(p.id, p.text, p.answer) for p in task.train} == {(1, "a>", "é"), (3, "b>", "2")}
    assert (task.alphabet, task.longest_answer) == ("2>abé", 1)


def test_jsonl_path_is_relative_to_the_current_directory(rows, monkeypatch):
    monkeypatch.chdir(Path(rows({"prompt": "a", "answer": "b"})).parent)
    assert build("jsonl", path="rows.jsonl", held_out=0).train[0].text == "a"


def test_jsonl_fields_can_have_other_names(rows):
    path = rows({"question": "a", "solution": "b"})
    task = build("jsonl", path=path, prompt_field="question", answer_field="solution", held_out=0)
    assert task.train[0].answer == "b"


def test_jsonl_skips_a_byte_order_mark(rows):
    path = rows('\ufeff{"prompt": "a", "answer": "b"}')
    assert build("jsonl", path=path, held_out=0).train[0].text == "a"


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 1000))
def test_jsonl_rows_of_one_prompt_stay_on_one_side(tmp_path_factory, seed):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"p{i % 7}", "answer": str(i)}) for i in range(40)))
    task = build("jsonl", path=str(path), held_out=0.3, seed=seed)
    train, held_out = ({p.text for p in side} for side in (task.train, task.held_out))
    assert not train & held_out
    assert len(held_out) == 2
    assert len(task.train) + len(task.held_out) == 40


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{prompt}", "rows.jsonl:2: not JSON"),
        ("[" * 100_000, "rows.jsonl:2: not JSON"),
        ("[1]", "rows.jsonl:2: got a list; needs an object"),
        ("null", "rows.jsonl:2: got null; needs an object"),
        ("7", "rows.jsonl:2: got a number; needs an object"),
        ({"answer": "x"}, "rows.jsonl:2: no field 'prompt'"),
        ({"prompt": "x", "answer": 7.5}, "rows.jsonl:2: 'answer' is 7.5; needs a text or a whole number"),
        ({"prompt": "", "answer": "7"}, "rows.jsonl:2: 'prompt' is empty"),
        ({"prompt": "\ud800", "answer": "7"}, "rows.jsonl:2: 'prompt' holds half a surrogate pair"),
    ],
)
def test_jsonl_names_file_and_line_of_a_bad_row(rows, line, said):
    assert said in problem_of("jsonl", path=rows({"prompt": "a", "answer": "b"}, line))


def test_jsonl_tells_all_bad_rows_but_not_without_end(rows):
    assert len(problem_of("jsonl", path=rows("1", "[]", "null")).splitlines()) == 3

    def refuse(number: int, row: str) -> list[str]:
        raise ValueError(f"{row} is unknown")

    with pytest.raises(ConfigError) as error:
        read_rows(enumerate("x" * n for n in range(100)), refuse, "rows.jsonl", needs="rows")
    assert str(error.value).endswith("80 more problems")


def test_the_same_problem_on_many_lines_is_one_message(rows):
    (told,) = problem_of("jsonl", path=rows(*["1"] * 20)).splitlines()
    assert "rows.jsonl:1: " in told
    assert told.endswith("(the same on 19 others: 2, 3, 4, 5, 6, ...)")


def test_so_is_one_with_another_value_on_each_line(rows):
    wrong = [{"prompt": "x", "answer": n + 0.5} for n in range(20)]
    (told,) = problem_of("jsonl", path=rows(*wrong)).splitlines()
    assert "rows.jsonl:1: 'answer' is 0.5; needs a text or a whole number (the same on 19 others:" in told


def test_a_whole_number_is_an_answer_as_in_parquet(rows):
    (prompt,) = build("jsonl", path=rows({"prompt": "2+3", "answer": 5}), held_out=0).train
    assert prompt.answer == "5"


def test_jsonl_refuses_text_that_is_not_utf_8(tmp_path):
    path = tmp_path / "latin.jsonl"
    path.write_bytes(b'{"prompt": "a", "answer": "b"}\n{"prompt": "\xe9", "answer": "b"}\n')
    assert "latin.jsonl:2: not UTF-8" in problem_of("jsonl", path=str(path))


def test_jsonl_refuses_an_empty_file_a_missing_one_and_no_path(rows, tmp_path):
    assert "no rows" in problem_of("jsonl", path=rows(""))
    assert "path: cannot read" in problem_of("jsonl", path=str(tmp_path / "none.jsonl"))
    assert "path: got ''" in problem_of("jsonl")
