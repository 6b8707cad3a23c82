"""Tasks from files: templates, a split that is given, and what is missing."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from retrain.base import extras
from retrain.base.distribution import install_command
from retrain.base.errors import EXIT_INFRASTRUCTURE, ConfigError, RecordsError, exit_code_of
from retrain.base.json_lines import read_demonstrations
from retrain.config.load import parse
from retrain.plan.build import plan_runs
from retrain.plan.preflight import preflight
from tests.built_tasks import build

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write rows, each a prompt whose answer is its capital, into a file."""

    def to(name: str, prompts: str) -> str:
        path = tmp_path / name
        path.write_text("\n".join(json.dumps({"prompt": p, "answer": p.upper()}) for p in prompts))
        return str(path)

    return to


def test_a_template_words_the_prompt_and_leaves_other_braces_alone(write: Write) -> None:
    task = build("jsonl", path=write("a.jsonl", "x"), template='{"q": "{prompt}"} {n}', held_out=0)
    assert task.train[0].text == '{"q": "x"} {n}'


def test_a_template_without_a_place_for_the_prompt_is_refused(write: Write) -> None:
    with pytest.raises(ConfigError, match=r"template: got 'Solve:'; needs \{prompt\}"):
        build("jsonl", path=write("a.jsonl", "x"), template="Solve:")


def say(path: Path, *messages: tuple[str, str]) -> str:
    said = [{"role": role, "content": content} for role, content in messages]
    path.write_text(json.dumps({"prompt": said, "answer": "1"}) + "\n")
    return str(path)


def test_a_prompt_may_be_a_conversation(tmp_path: Path) -> None:
    path = say(tmp_path / "rows.jsonl", ("system", "Be brief."), ("user", "1+0"))
    (prompt,) = build("jsonl", path=path, template="{prompt}=?", held_out=0).train
    assert prompt.messages == (("system", "Be brief."), ("user", "1+0=?"))
    assert json.loads(prompt.text) == [["system", "Be brief."], ["user", "1+0=?"]]


def test_a_user_s_only_message_is_a_prompt_like_any_other(tmp_path: Path) -> None:
    (prompt,) = build("jsonl", path=say(tmp_path / "rows.jsonl", ("user", "1+0")), held_out=0).train
    assert (prompt.text, prompt.messages) == ("1+0", ())


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "'prompt' needs a last message that the model answers"),
        ([("user", "1+0"), ("assistant", "1")], "'prompt' needs a last message that the model answers"),
        ([("speaker", "1+0")], 'the role one of "?system'),
        ([("user", "")], "'content' is \"\"; needs"),
    ],
)
def test_a_conversation_that_cannot_be_answered_is_refused(tmp_path: Path, messages, words: str) -> None:
    with pytest.raises(ConfigError, match=rf"rows.jsonl:1: .*{words}"):
        build("jsonl", path=say(tmp_path / "rows.jsonl", *messages), held_out=0)


def test_a_conversation_without_a_chat_template_is_refused_by_the_plan(tmp_path: Path) -> None:
    data = {"task": "jsonl", "options": {"held_out": 0.0}}
    data["options"]["path"] = say(tmp_path / "rows.jsonl", ("system", "Be brief."), ("user", "1+0"))
    with pytest.raises(ConfigError, match=r"c \[data\]: prompt 1 is a conversation.*chat_template = true"):
        preflight(plan_runs(parse({"data": data}, "c"), "c"), "c")


@pytest.mark.parametrize("is_custom", [False, True])
def test_a_column_that_a_reward_needs_and_the_task_has_not_is_named_by_the_plan(
    tmp_path: Path, is_custom: bool
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1+0", "answer": "1", "level": 3}\n')
    function = "tests.reward_functions.playing_as_in_trl"
    reward = {"reward": "custom", "params": {"path": function}} if is_custom else {"reward": function}

    def plan(*columns: str) -> None:
        options = {"path": str(path), "held_out": 0.0, "columns": list(columns)}
        raw = {"data": {"task": "jsonl", "options": options}, "reward": reward}
        preflight(plan_runs(parse(raw, "c"), "c"), "c")

    with pytest.raises(
        ConfigError, match=r"c \[reward\].reward: .*_in_trl' needs environments, level; if the data"
    ):
        plan()
    with pytest.raises(ConfigError, match=r"needs environments; .* give it a default in the function"):
        plan("level")


@pytest.mark.parametrize("answer", ["", "  "])
def test_an_answer_that_is_empty_is_none(tmp_path: Path, answer: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(f'{{"prompt": "a", "answer": "1"}}\n{{"prompt": "b", "answer": "{answer}"}}\n')
    with pytest.raises(ConfigError, match=r"rows.jsonl:2: 'answer' is empty.*answer_field = \"\""):
        build("jsonl", path=str(path), held_out=0)


def test_a_reward_that_compares_with_nothing_needs_no_answers(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "write a poem"}\n')
    task = build("jsonl", path=str(path), answer_field="", held_out=0)
    assert [(p.text, p.answer) for p in task.train] == [("write a poem", "")]


def test_a_reward_gets_the_columns_that_are_named_or_all(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "2+2", "answer": "4", "level": 1, "tests": ["a"]}\n')

    def row(columns: object) -> object:
        return build("jsonl", path=str(path), columns=columns, held_out=0).train[0].row

    assert row([]) == {}
    assert row(["level"]) == {"level": 1}
    assert row(["*"]) == {"prompt": "2+2", "answer": "4", "level": 1, "tests": ["a"]}
    with pytest.raises(ConfigError, match=r"rows.jsonl:1: no field 'levle'.*columns"):
        row(["levle"])


def test_a_second_file_is_what_is_held_out(write: Write) -> None:
    task = build("jsonl", path=write("a.jsonl", "abcdef"), held_out_path=write("b.jsonl", "xyz"))
    assert {p.answer for p in task.train} == set("ABCDEF")
    assert [p.text for p in task.held_out] == ["x", "y", "z"]
    assert [p.id for p in task.held_out] == [7, 8, 9]
    assert task.alphabet == "ABCDEFXYZabcdefxyz"


def test_the_order_of_training_prompts_depends_on_the_seed_only(write: Write) -> None:
    files = {"path": write("a.jsonl", "abcdefgh"), "held_out_path": write("b.jsonl", "x")}
    assert build("jsonl", **files, seed=1) == build("jsonl", **files, seed=1)
    assert build("jsonl", **files, seed=1).train != build("jsonl", **files, seed=2).train


def test_a_prompt_on_both_sides_is_refused(write: Write) -> None:
    with pytest.raises(ConfigError, match="1 training prompt is also held out, such as 'c'"):
        build("jsonl", path=write("a.jsonl", "abc"), held_out_path=write("b.jsonl", "cde"))


@pytest.mark.parametrize("path", ["none.jsonl", "no\0ne.jsonl"])
def test_a_second_file_that_cannot_be_read_is_named_by_its_option(write: Write, path: str) -> None:
    with pytest.raises(ConfigError, match=f"held_out_path: cannot read {re.escape(repr(path))}"):
        build("jsonl", path=write("a.jsonl", "abc"), held_out_path=path)


@pytest.mark.skipif(sys.platform != "linux", reason="needs a file that opens and cannot be read")
def test_a_disk_or_file_server_that_fails_is_no_wrong_path(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.symlink_to("/proc/self/mem")  # which begins with an input/output error
    with pytest.raises(RecordsError, match=r"a\.jsonl: cannot read") as raised:
        build("jsonl", path=str(path))
    assert exit_code_of(raised.value) == EXIT_INFRASTRUCTURE


@pytest.mark.parametrize(
    ("path", "fix"),
    [
        ("none.jsonl", "paths are relative to the file that names them, in --set to the working directory"),
        ("/no/such.jsonl", "correct the path"),
    ],
)
def test_only_a_relative_path_is_called_relative(path: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=f"; {fix}$"):
        build("jsonl", path=path)


@pytest.mark.parametrize(
    ("task", "options"),
    [("parquet", {"path": "a.parquet"}), ("datasets", {"path": "."}), ("reasoning_gym", {"dataset": "x"})],
)
def test_a_missing_package_names_the_extra_and_the_command(
    task: str, options: dict[str, str], here: Path
) -> None:
    wanted = extras.needs("tasks", task)
    found = importlib.util.find_spec(wanted.packages[0])
    with pytest.raises(ConfigError) as raised:
        build(task, **options)
    missing = install_command(wanted.extra) in str(raised.value)
    assert missing == (found is None)


def test_a_folder_that_is_called_like_a_package_is_not_the_package(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "no_such_package").mkdir()
    monkeypatch.syspath_prepend(here)
    assert extras.Needs("x", ("no_such_package", "json")).missing() == ["no_such_package"]


def test_a_task_and_a_warm_up_take_the_same_conversations(tmp_path: Path) -> None:
    system, asked, answer = (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+0"},
        {"role": "assistant", "content": "1"},
    )
    rows = [
        {"messages": [system, asked, answer], "answer": "1"},
        {"prompt": [system, asked], "completion": [answer], "answer": "1"},
        {"prompt": [system, asked], "completion": "1", "answer": "1"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    wanted = (("system", "Be brief."), ("user", "1+0"))
    assert [one.messages for one in build("jsonl", path=str(path), held_out=0).train] == [wanted] * 3
    shown = read_demonstrations(str(path))
    assert [(one.prompt.messages, one.completion) for one in shown] == [(wanted, "1")] * 3
