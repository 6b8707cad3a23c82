"""Tasks that need a package: Parquet files, Hugging Face data sets on disk, reasoning-gym."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from retrain.plugins.rewards import reasoning_gym as gym_reward
from retrain.trainer.scoring import Scorer
from tests.built_tasks import build, problem_of
from tests.trainer.test_scoring import group

pytestmark = pytest.mark.extras
# datasets closes tables of CSV from 5.2 on
LEAVES_FILES_OPEN = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
ROWS = {"question": [f"{i} + 1 = ?" for i in range(10)], "answer": [str(i + 1) for i in range(10)]}


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)


@pytest.fixture
def datasets() -> ModuleType:
    """The library, imported in no process that runs none of this file: it takes seconds."""
    return importlib.import_module("datasets")


def parquet(path: Path, **columns: list) -> str:
    pq.write_table(pa.table(columns), path)
    return str(path)


def test_parquet_reads_two_columns_and_writes_whole_numbers_out(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", prompt=["a", "b"], answer=[7, 8], other=[0.5, 0.5])
    task = build("parquet", path=path, held_out=0)
    assert {(p.id, p.text, p.answer) for p in task.train} == {(1, "a", "7"), (2, "b", "8")}


@pytest.mark.parametrize("columns", [["other"], ["*"]])
def test_parquet_hands_further_columns_to_the_reward(tmp_path: Path, columns: list[str]) -> None:
    path = parquet(tmp_path / "a.parquet", prompt=["a"], answer=[7], other=[8])
    (prompt,) = build("parquet", path=path, columns=columns, held_out=0).train
    assert (prompt.answer, prompt.row["other"], "prompt" in prompt.row) == ("7", 8, columns == ["*"])


@pytest.mark.parametrize("reader", ["parquet", "datasets"])
def test_a_column_of_messages_is_the_prompt_where_there_is_no_other(tmp_path: Path, reader: str) -> None:
    asked, answer = {"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}
    path = parquet(tmp_path / "a.parquet", messages=[[asked, answer]], answer=["2"])
    (prompt,) = build(reader, path=path, held_out=0).train
    assert (prompt.text, prompt.answer) == ("1+1", "2")


def test_parquet_takes_a_second_file_to_hold_out(tmp_path: Path) -> None:
    train = parquet(tmp_path / "a.parquet", prompt=["a", "b"], answer=["1", "2"])
    test = parquet(tmp_path / "b.parquet", prompt=["c"], answer=["3"])
    task = build("parquet", path=train, held_out_path=test)
    assert ({p.text for p in task.train}, [p.text for p in task.held_out]) == ({"a", "b"}, ["c"])


def test_parquet_names_the_row_of_a_missing_answer(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", prompt=["a", "b"], answer=["1", None])
    assert "a.parquet row 2: 'answer' is null; needs a text" in problem_of("parquet", path=path)


def test_parquet_says_which_columns_there_are(tmp_path: Path) -> None:
    path = parquet(tmp_path / "a.parquet", question=["a"], solution=["1"])
    assert problem_of("parquet", path=path).splitlines() == [
        f"prompt_field: {path} has no column 'prompt'; it has question, solution",
        f"answer_field: {path} has no column 'answer'; it has question, solution",
    ]


def test_parquet_refuses_an_empty_file_a_missing_one_and_another_format(tmp_path: Path) -> None:
    empty = parquet(
        tmp_path / "a.parquet", prompt=pa.array([], pa.string()), answer=pa.array([], pa.string())
    )
    (tmp_path / "b.parquet").write_text("prompt,answer\n")
    assert "no rows" in problem_of("parquet", path=empty)
    for missing in ("none.parquet", f"{'n' * 300}.parquet"):
        assert f"no file {missing!r}" in problem_of("parquet", path=missing)
    assert "not a Parquet file" in problem_of("parquet", path=str(tmp_path / "b.parquet"))


def test_parquet_that_breaks_off_in_the_middle_says_where(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    rows = {"prompt": [f"q{i}" for i in range(5000)], "answer": [f"{i}" for i in range(5000)]}
    pq.write_table(pa.table(rows), path, compression="none")
    damaged = bytearray(path.read_bytes())
    damaged[2000:6000] = b"\xff" * 4000
    path.write_bytes(damaged)
    assert re.search(r"rows.parquet row \d+: cannot be read", problem_of("parquet", path=str(path)))


def test_parquet_whose_text_is_no_utf_8_says_where(tmp_path: Path) -> None:
    offsets = pa.array([0, 2, 4], pa.int32()).buffers()[1]
    broken = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"ab\xfd\xfe")])
    pq.write_table(pa.table({"prompt": broken, "answer": ["1", "2"]}), tmp_path / "rows.parquet")
    assert "row 1: cannot be read" in problem_of("parquet", path=str(tmp_path / "rows.parquet"))


@LEAVES_FILES_OPEN
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rows.csv", "prompt,answer\na,1\nb,2\n"),
        ("rows.tsv", "prompt\tanswer\na\t1\nb\t2\n"),
        ("rows.jsonl", '{"prompt": "a", "answer": "1"}\n{"prompt": "b", "answer": "2"}\n'),
        ("rows.json", '[{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": "2"}]'),
    ],
)
def test_a_data_set_may_be_one_file(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    task = build("datasets", path=str(tmp_path / name), held_out=0.0)
    assert sorted((p.text, p.answer) for p in task.train) == [("a", "1"), ("b", "2")]


@LEAVES_FILES_OPEN
def test_text_in_a_table_stays_as_it_was_written(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt,answer\na,007\nb,NA\nc,1.50\n")
    task = build("datasets", path=str(tmp_path / "rows.csv"), held_out=0.0)
    assert sorted(p.answer for p in task.train) == ["007", "1.50", "NA"]


@pytest.mark.parametrize(
    "path", ["./nowhere", "/nowhere/at/all", "rows.jsonl", "folder/rows.parquet", "n" * 300 + ".json"]
)
def test_what_looks_like_a_path_and_is_not_there_is_not_asked_of_the_hub(path: str) -> None:
    assert f"path: no file or directory {path!r}" in problem_of("datasets", path=path)


def test_a_data_set_that_was_saved_to_disk_is_read_by_split(datasets: ModuleType, tmp_path: Path) -> None:
    saved = datasets.DatasetDict(
        train=datasets.Dataset.from_dict(ROWS),
        test=datasets.Dataset.from_dict({"question": ["what?"], "answer": ["that"]}),
    )
    saved.save_to_disk(tmp_path / "set")
    task = build("datasets", path=str(tmp_path / "set"), prompt_field="question", held_out_split="test")
    assert ({p.text for p in task.train}, [p.answer for p in task.held_out]) == (
        set(ROWS["question"]),
        ["that"],
    )
    whole = datasets.Dataset.from_dict(ROWS)
    whole.save_to_disk(tmp_path / "one")
    task = build("datasets", path=str(tmp_path / "one"), prompt_field="question", held_out=0.2)
    assert (len(task.train), len(task.held_out)) == (8, 2)


def test_a_directory_of_files_is_loaded_and_can_be_sliced(tmp_path: Path) -> None:
    lines = [json.dumps({"prompt": q, "answer": a}) for q, a in zip(*ROWS.values(), strict=True)]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    task = build("datasets", path=str(tmp_path), split="train[:4]", held_out=0)
    assert {p.id for p in task.train} == {1, 2, 3, 4}


def test_a_data_set_that_cannot_be_loaded_says_so(datasets: ModuleType, tmp_path: Path) -> None:
    assert "path: cannot load" in problem_of("datasets", path=str(tmp_path))
    assert "path: cannot load 'nobody/nothing' [train]" in problem_of("datasets", path="nobody/nothing")
    datasets.DatasetDict(train=datasets.Dataset.from_dict(ROWS)).save_to_disk(tmp_path / "set")
    assert "[tset]" in problem_of("datasets", path=str(tmp_path / "set"), split="tset")


def test_reasoning_gym_generates_what_the_package_does() -> None:
    import reasoning_gym  # here: it imports matplotlib, which takes four seconds

    task = build(
        "reasoning_gym", dataset="chain_sum", count=20, config={"max_terms": 3}, held_out=0.25, seed=5
    )
    wanted = reasoning_gym.create_dataset("chain_sum", seed=5, size=20, max_terms=3)
    prompts = task.train + task.held_out
    assert {(p.text, p.answer) for p in prompts} == {(e["question"], e["answer"]) for e in wanted}
    assert len(task.held_out) == 5


def test_reasoning_gym_refuses_what_it_does_not_know() -> None:
    assert "did you mean 'chain_sum'" in problem_of("reasoning_gym", dataset="chain_sums")
    assert "config: 'chain_sum' refuses" in problem_of("reasoning_gym", dataset="chain_sum", config={"x": 1})
    assert "config: 'chain_sum' refuses" in problem_of(
        "reasoning_gym", dataset="chain_sum", config={"min_terms": -1}
    )
    assert "needs one of 'text', 'entry'" in problem_of("reasoning_gym", dataset="chain_sum", answers="all")
    assert problem_of("reasoning_gym", count=0).count("\n") == 1


@pytest.mark.parametrize("dataset", ["countdown", "chain_sum"])
def test_reasoning_gym_scores_its_own_answers_with_its_own_rules(dataset: str) -> None:
    import reasoning_gym

    task = build("reasoning_gym", dataset=dataset, count=8, answers="entry", held_out=0, seed=3)
    entries = reasoning_gym.create_dataset(dataset, seed=3, size=8)
    scorer = Scorer("reasoning_gym", {"workers": 1})
    try:
        right = [entries[p.id - 1]["answer"] for p in task.train]
        texts = [(f"\\boxed{{{a}}}", f"hm <answer>{a}</answer>", a, "no") for a in right]
        rewards = scorer.score([group(p, t) for p, t in zip(task.train, texts, strict=True)]).rewards
    finally:
        scorer.close()
    assert (rewards[:, :3] == 1.0).all()
    assert (rewards[:, 3] < 0.1).all()


def test_a_prompt_of_another_task_names_no_entry() -> None:
    with pytest.raises(Exception, match="names no entry"):
        gym_reward.score("4", build("successor").train[0])
