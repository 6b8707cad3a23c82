"""`retrain publish`: which run is meant, what its card says, and what is never overwritten."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from retrain.backends.squeeze import WEIGHTS
from retrain.base.errors import EXIT_CONFIG, EXIT_RECORDS, ConfigError, RecordsError
from retrain.results.publish import FACTS, Wishes, publish, read_published
from retrain.results.publish.choice import Choice, choose
from retrain.results.report.compare import compare
from retrain.results.report.sides import choose as compared
from retrain.results.report.tables import significant
from retrain.trainer import checkpoint
from tests.simulated import Simulated, flat, write_campaign

Call = Callable[..., CompletedProcess[str]]
SEEDS = {("grpo", s): flat(0.5 + s / 100) for s in range(3)} | {("maxrl", s): flat(0.7) for s in range(3)}
IS_PUBLISHING = rf"link: process {os.getpid()} on .* is publishing there; wait for it"
UNFINISHED = Simulated([0.5] * 12, ending="interrupted")


def campaign(logs: Path, runs: dict[tuple[str, int], Simulated], steps: tuple[int, ...] = (10, 20)) -> Path:
    """Write a campaign of the backend in `tests.exporting`, each run with checkpoints of these steps."""
    directory = write_campaign(logs, runs)
    for run in (directory / "runs").iterdir():
        text = (run / "run.toml").read_text()
        (run / "run.toml").write_text(text.replace('"numpy"', '"tests.exporting.connect"'))
        for step in steps:
            weights = f"{run.name} {step}".encode()
            checkpoint.save(
                run / "checkpoints",
                step,
                {},
                lambda place, data=weights: (place / WEIGHTS).write_bytes(data),
                9,
            )
    return directory


def published(choice: Choice, output: Path, **wishes: object) -> str:
    """Publish, and return the card."""
    publish(choice, Wishes(output, **wishes), lambda _: None)
    return (output / "README.md").read_text()


def test_a_run_is_named_by_its_directory_or_its_campaign_and_id(tmp_path):
    directory = campaign(tmp_path, SEEDS)
    by_id, by_path = choose(directory, "grpo_s1"), choose(directory / "runs" / "grpo_s1", "")
    assert (by_id.run.run_id, by_id.checkpoint.step, by_id.why) == ("grpo_s1", 20, "")
    assert by_path.checkpoint == by_id.checkpoint
    assert len(by_path.campaign.runs) == 6


def test_one_of_several_seeds_is_never_chosen_silently(tmp_path):
    directory = campaign(tmp_path, SEEDS)
    with pytest.raises(ConfigError, match=r"has several conditions; name one after it: grpo, maxrl"):
        choose(directory, "")
    with pytest.raises(ConfigError, match=r"3 of 3 seeds finished; name one \(grpo_s0, .*\), or add --best"):
        choose(directory, "grpo")
    best = choose(directory, "grpo", best=True)
    assert (best.run.run_id, best.why) == ("grpo_s2", "the best by eval_reward, 0.520, of 3 finished seeds")
    assert f"It is {best.why}, and so better than what" in published(best, tmp_path / "out")


def test_seeds_without_an_evaluation_are_judged_by_their_reward(tmp_path):
    runs = {("grpo", s): Simulated([0.5 + s / 100] * 20) for s in range(2)} | {("grpo", 2): UNFINISHED}
    found = choose(campaign(tmp_path, runs), "", best=True)
    assert (found.run.run_id, found.why) == ("grpo_s1", "the best by mean_reward, 0.510, of 2 finished seeds")


def test_what_does_not_exist_is_named_with_what_does(tmp_path):
    directory = campaign(tmp_path, SEEDS)
    with pytest.raises(ConfigError, match=r"no condition or run 'gpro'; it has grpo, maxrl"):
        choose(directory, "gpro")
    with pytest.raises(ConfigError, match="is no campaign and no run"):
        choose(tmp_path / "nothing", "")
    with pytest.raises(ConfigError, match="is no campaign and no run"):
        choose(Path("/step-000020"), "")  # called as a checkpoint, with nothing above it
    with pytest.raises(ConfigError, match=r"is a checkpoint; name its run's directory, .* --step 20"):
        choose(directory / "runs" / "grpo_s1" / "checkpoints" / "step-000020", "")
    with pytest.raises(ConfigError, match="is a run; name only its campaign's directory"):
        choose(directory / "runs" / "grpo_s1", "maxrl")


def test_an_unfinished_run_is_published_only_if_that_is_said(tmp_path):
    directory = campaign(tmp_path, {("grpo", 0): UNFINISHED}, steps=(4, 8))
    with pytest.raises(ConfigError, match=r"interrupted, step 12 of 20\); --unfinished .* \(kept: 4, 8\)"):
        choose(directory, "")
    assert choose(directory, "", unfinished=True).checkpoint.step == 8
    assert choose(directory, "", step=4).checkpoint.step == 4
    with pytest.raises(RecordsError, match=r"no checkpoint of step 5 .* \(kept: 4, 8\)"):
        choose(directory, "", step=5)


def test_a_damaged_checkpoint_is_not_replaced_by_an_earlier_one(tmp_path):
    directory = campaign(tmp_path, {("grpo", 0): flat(0.5)})
    (directory / "runs" / "grpo_s0" / "checkpoints" / "step-000020" / WEIGHTS).write_bytes(b"damaged")
    with pytest.raises(RecordsError, match=r"no checkpoint of step 20 that can be read .* --step N"):
        choose(directory, "")
    assert choose(directory, "", step=10).checkpoint.step == 10


def test_the_card_says_what_compare_says(tmp_path):
    directory = campaign(tmp_path, SEEDS)
    text = published(choose(directory, "maxrl_s1"), tmp_path / "out")
    [match] = compared([str(directory)])
    [reward] = compare(match, ["eval_reward"]).metrics
    gap = reward.differences[0].difference
    assert f"{significant(gap.low, signed=True)} to {significant(gap.high, signed=True)}" in text
    assert "maxrl against grpo: higher, better (3 pairs of seeds; p " in text
    assert "eval_reward 0.700" in text


def test_a_single_condition_has_its_own_interval(tmp_path):
    alone = {key: how for key, how in SEEDS.items() if key[0] == "grpo"}
    text = published(choose(campaign(tmp_path, alone), "grpo_s0"), tmp_path / "out")
    assert "| grpo | 3 | 0.510 | 0.485 to 0.535 |" in text  # 4.303 x 0.01 / sqrt(3)


def test_the_card_has_what_hubs_read_and_nothing_of_this_machine(tmp_path):
    directory = campaign(tmp_path, {("grpo", 0): flat(0.5)})
    run = directory / "runs" / "grpo_s0"
    text = (run / "run.toml").read_text().replace('base_url = ""', 'base_url = "http://10.0.0.7:1"')
    (run / "run.toml").write_text(text.replace('adapter = ""', f'adapter = "{tmp_path}/secret/start"'))
    shown = published(choose(directory, ""), tmp_path / "out", license="apache-2.0")
    front = shown.split("---\n")[1].splitlines()
    assert 'base_model: "org/base"' in front
    assert 'license: "apache-2.0"' in front
    assert 'tags: ["retrain", "reinforcement-learning", "grpo", "lora"]' in front
    assert "| started from | start (digest not known) |" in shown
    assert "10.0.0.7" not in shown
    assert 'AutoTokenizer.from_pretrained("org/base")' in shown
    assert "secret" not in shown


def with_options(directory: Path, **tables: str) -> Choice:
    """Return the choice of a run whose plugins have these options."""
    path = directory / "runs" / "grpo_s0" / "run.toml"
    text = path.read_text()
    for name, options in tables.items():
        text = text.replace(f"[{name}.options]\n", f"[{name}.options]\n{options}\n")
    path.write_text(text)
    return choose(directory, "")


def test_option_tables_show_no_path_server_or_secret(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "acme").mkdir()
    (tmp_path / "acme" / "rows").touch()
    shown_as = {
        "../../acme/x.jsonl": "x.jsonl",
        "acme/2026/x.jsonl": "x.jsonl",
        "acme/rows": "rows",
        "python /home/me/acme/play.py --rows=../acme/rows -v": "python play.py --rows=rows -v",
        "~/acme/notes": "notes",
        "http://10.0.0.7/acme": "(a server)",
        "openai/gsm8k": "openai/gsm8k",
        "add and/or subtract\\n/no_think": "add and/or subtract\\n/no_think",
    }
    options = "\n".join(f'o{number} = "{value}"' for number, value in enumerate(shown_as))
    choice = with_options(
        campaign(tmp_path, {("grpo", 0): flat(0.5)}), data=f'{options}\napi_key = "hunter2"'
    )
    text = published(choice, tmp_path / "out")
    for number, value in enumerate(shown_as.values()):
        assert f'o{number} = "{value}"' in text
    assert 'key = "***"' in text


def test_a_system_prompt_is_in_the_card_unless_it_is_to_stay_private(tmp_path, retrain: Call):
    prompt = "Answer in French; see https://example.org/rules"
    directory = campaign(tmp_path, {("grpo", 0): flat(0.5)})
    with_options(directory, backend=f'chat_template = true\nsystem_prompt = "{prompt}"')
    shown = retrain("publish", directory, "-o", tmp_path / "shown")
    hidden = retrain("publish", directory, "-o", tmp_path / "hidden", "--no-system-prompt")
    card = (tmp_path / "shown" / "README.md").read_text()
    assert f'{{"role": "system", "content": "{prompt}"}}' in card
    assert f'system_prompt = "{prompt}"' in card
    assert "the card shows the system prompt" in shown.stderr
    card = (tmp_path / "hidden" / "README.md").read_text()
    assert '{"role": "system", "content": "(not published)"}' in card
    assert prompt not in card
    assert "system prompt" not in hidden.stderr
    again = [read_published(tmp_path / name) for name in ("shown", "hidden")]  # as --push does later
    assert [one.shows_system_prompt for one in again if one] == [True, False]


def test_weights_and_facts_are_those_of_the_step(tmp_path):
    directory = campaign(tmp_path, {("grpo", 0): flat(0.5)})
    published(choose(directory, "", step=10), tmp_path / "out", base_model="org/other")
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == b"grpo_s0 10"
    assert (tmp_path / "out" / "templates").stat().st_mode & 0o111  # a directory, which can be entered
    facts = json.loads((tmp_path / "out" / FACTS).read_text())
    assert (facts["run_id"], facts["step"], facts["kind"]) == ("grpo_s0", 10, "adapter")
    known = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (known["base_model_name_or_path"], known["task_type"]) == ("org/other", "CAUSAL_LM")


def test_a_directory_that_does_not_tell_a_runs_name_is_of_its_id(tmp_path):
    published(choose(campaign(tmp_path, {("grpo", 0): flat(0.5)}), ""), tmp_path / "out")
    facts = json.loads((tmp_path / "out" / FACTS).read_text())
    del facts["run_name"]
    (tmp_path / "out" / FACTS).write_text(json.dumps(facts))
    found = read_published(tmp_path / "out")
    assert found is not None
    assert found.run_name == "grpo_s0"


def test_only_what_was_published_is_overwritten_and_only_on_request(tmp_path):
    choice = choose(campaign(tmp_path, {("grpo", 0): flat(0.5)}), "")
    mine, ours = tmp_path / "mine", tmp_path / "ours"
    mine.mkdir()
    (mine / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match=r"exists, and is not from `retrain publish`"):
        published(choice, mine, force=True)
    published(choice, ours)
    (ours / "left.txt").touch()
    with pytest.raises(ConfigError, match="exists; --force replaces it"):
        published(choice, ours)
    published(choice, ours, force=True)
    assert sorted(path.name for path in mine.iterdir()) == ["thesis.txt"]
    assert not (ours / "left.txt").exists()


def test_the_current_directory_is_not_replaced(tmp_path, monkeypatch):
    choice = choose(campaign(tmp_path, {("grpo", 0): flat(0.5)}), "")
    before = published(choice, tmp_path / "out")
    monkeypatch.chdir(tmp_path / "out")
    with pytest.raises(ConfigError, match=r"-o needs a directory's name; write it as \.\./NAME"):
        published(choice, Path(), force=True)
    assert (tmp_path / "out" / "README.md").read_text() == before


def test_a_failure_leaves_nothing_and_what_was_there(tmp_path):
    directory = campaign(tmp_path, {("grpo", 0): flat(0.5)})
    choice, out = choose(directory, ""), tmp_path / "out"
    before = published(choice, out)
    (choice.checkpoint.directory / WEIGHTS).unlink()
    with pytest.raises(RecordsError, match=r"out: cannot write it"):
        published(choice, out, force=True)
    assert (out / "README.md").read_text() == before
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_backend_without_such_a_format_is_refused(retrain: Call, tmp_path, here):
    directory = write_campaign(tmp_path, {("grpo", 0): flat(0.5)})
    checkpoint.save(directory / "runs" / "grpo_s0" / "checkpoints", 20, {}, lambda _: None, 2)
    answer = retrain("publish", directory)
    assert (answer.returncode, answer.stdout) == (EXIT_CONFIG, "")
    assert answer.stderr.startswith("backend 'numpy': its policies have no format that others load")
    assert "can be published: local" in answer.stderr
    assert not (here / "published").exists()


@pytest.mark.parametrize("words", [["--private"], ["--dtype", "bfloat16"], ["--merge", "--dtype", "int3"]])
def test_options_without_meaning_are_usage_errors(words, retrain: Call, tmp_path):
    answer = retrain("publish", tmp_path, *words)
    assert (answer.returncode, "needs --" in answer.stderr) == (EXIT_CONFIG, True)


def test_the_command_prints_what_it_wrote(retrain: Call, tmp_path, here):
    directory = campaign(tmp_path, {("grpo", 0): flat(0.5)})
    found = json.loads(retrain("publish", directory, "--json").stdout)
    place = Path("published") / f"{directory.name}-grpo_s0"
    assert (found["version"], found["directory"], found["step"]) == (1, str(place), 20)
    assert (here / place / FACTS).is_file()
    again = retrain("publish", directory)
    assert (again.returncode, "--force replaces it" in again.stderr) == (EXIT_CONFIG, True)
    shown = retrain("publish", directory, "grpo_s0", "-o", "other").stdout
    assert shown == "other: adapters of grpo_s0, step 20, 0.00 MB\n"
    before = retrain("publish", "other", "--step", "10")
    assert (before.returncode, "it can only be pushed" in before.stderr) == (EXIT_CONFIG, True)
    (directory / "runs" / "grpo_s0" / "run.toml").write_text("damaged")
    assert retrain("publish", directory, "-o", "third").returncode == EXIT_RECORDS


def test_who_publishes_where_another_does_is_told_and_changes_nothing(tmp_path):
    choice = choose(campaign(tmp_path, {("grpo", 0): flat(0.5)}), "")
    told = []

    def publish_meanwhile(_: str) -> None:
        with pytest.raises(ConfigError, match=IS_PUBLISHING) as error:
            publish(choice, Wishes(tmp_path / "link"), lambda _: None)
        told.append(error)

    (tmp_path / "link").symlink_to(tmp_path / "out")
    publish(choice, Wishes(tmp_path / "out"), publish_meanwhile)
    assert told
    assert (tmp_path / "out" / WEIGHTS).read_bytes() == b"grpo_s0 20"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
