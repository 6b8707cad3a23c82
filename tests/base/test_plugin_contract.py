"""A plugin of somebody else has every right that a built-in one has: keys, checks and hooks."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from retrain.backends import BackendSpec, connected
from retrain.base import extras, registry, user_code
from retrain.base.errors import ConfigError, Problem
from retrain.base.registry import call_problem, defines
from retrain.base.rollouts import Prompt
from retrain.campaign.conformance import check_plugin, kinds_of
from retrain.cli import app
from retrain.config.load import parse
from retrain.plan.build import plan_runs
from retrain.plan.preflight import preflight, sandboxes_of
from retrain.plugins.rewards import Answer, Score, match, python
from retrain.plugins.rewards.opening import open_reward

Retrain = Callable[..., subprocess.CompletedProcess[str]]
LAUNCHER = """
import sys
from retrain import find_plugin

def open_launcher(assignment, *, queue: str = "short", hours: int = 1):
    print(f"opened for {queue}", file=sys.stderr)
    return find_plugin("launchers", "inline")(assignment)

def check_options(options):
    return ["hours: needs queue = 'long'"] if options.get("hours", 1) > 8 else []

def check_campaign(assignment):
    return [f"[campaign].name: {assignment.campaign} is taken"] if "taken" in assignment.campaign else []

def script(assignment):
    return f"submit --queue {assignment.options.get('queue', 'short')} {len(assignment.runs)} runs"

def at_a_time(assignment):
    return 1
"""
BACKEND = """
from dataclasses import replace
from retrain import find_plugin

def connect(spec, *, width: int = 8):
    print("width", width)
    return find_plugin("backends", "numpy")(replace(spec, options={"hidden": width}))

def check_options(options):
    return ["width: needs an even number"] if options.get("width", 8) % 2 else []

def takes_permits(options):
    return False

def advise(config):
    return [f"width {config.backend.options.get('width')} is narrow"]
"""


def problems(tables: dict[str, object]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(tables, "c.toml")
    return list(caught.value.problems)


@pytest.fixture
def own(here: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], str]:
    """Write a module with a name of its own, which Python finds."""
    monkeypatch.syspath_prepend(str(here))

    def write(name: str, code: str) -> str:
        unique = f"{name}_{abs(hash(str(here))):x}"
        (here / f"{unique}.py").write_text(code)
        return unique

    return write


@pytest.mark.parametrize("kind", registry.KINDS)
def test_every_built_in_plugin_keeps_the_contract_that_its_kind_declares(kind: str) -> None:
    spec = registry.spec_of(kind)
    for name in registry.built_in_names(kind):
        if extras.missing_problem(kind, name) is None:
            assert call_problem(registry.find_plugin(kind, name), spec.arguments, spec.given) == "", name
            assert not (spec.has_defaults and registry.problems_with_params(kind, name, {})), name
        for hook, arguments in spec.hooks.items():
            found = registry.hook(kind, name, hook)
            assert found is None or hook == "open_scorer" or call_problem(found, arguments) == ""


@pytest.mark.parametrize(
    ("kind", "name", "key", "value", "wanted"),
    [
        ("rewards", "custom", "params", 3, "a table"),
        ("environments", "harness", "config", [], "a table"),
        ("environments", "verifiers", "config", "x", "a table"),
        ("environments", "openenv", "reset", 3, "a table"),
        ("environments", "tools", "sandbox_options", 3, "a table"),
        ("tasks", "reasoning_gym", "config", 3, "a table"),
        ("tasks", "jsonl", "columns", [["level"]], "a list of strings"),
        ("tasks", "parquet", "columns", "level", "a list of strings"),
        ("transforms", "gtpo_hicra", "planning_phrases", "wait", "a list of strings"),
        ("sandbox", "command", "command", "docker run", "a list of strings"),
    ],
)
def test_a_value_that_is_no_table_or_list_is_told_by_its_key(
    kind: str, name: str, key: str, value: object, wanted: str
) -> None:
    told = registry.problems_with_params(kind, name, {key: value})
    assert Problem((key,), f"got {value!r}; needs {wanted}") in told


@pytest.mark.parametrize("is_text", [True, False])
def test_annotations_of_a_users_own_are_read_however_they_are_written(
    is_text: bool, own: Callable[[str, str], str]
) -> None:
    code = "from __future__ import annotations\n" * is_text + "from typing import Any, Mapping, Sequence"
    code += (
        "\ndef score(completion, prompt, *, one: Mapping[str, Any], many: Sequence[str] = ()): return 0.0\n"
    )
    path = own("typed", code) + ".score"
    assert registry.problems_with_params("rewards", path, {"one": {}, "many": ["a"]}) == []
    told = registry.problems_with_params("rewards", path, {"one": 1, "many": "a"})
    assert [problem.in_table for problem in told] == [
        "one: got 1; needs a table",
        "many: got 'a'; needs a list of strings",
    ]


@pytest.mark.parametrize(
    ("annotation", "told"),
    [
        ('Literal["soft", "hard"] | None', ["got 3; needs one of 'soft', 'hard'"]),
        ('Literal["soft"] | list[str]', []),
        ("Literal[Kind.SOFT]", []),
    ],
)
def test_a_choice_that_may_be_left_out_is_read(
    annotation: str, told: list[str], own: Callable[[str, str], str]
) -> None:
    code = "from __future__ import annotations\nfrom typing import Literal\n"
    code += f"def score(completion, prompt, *, kind: {annotation} = None): return 0.0\n"
    path = own(f"chosen{len(annotation)}", code) + ".score"
    assert registry.problems_with_params("rewards", path, {"kind": "soft"}) == []
    found = registry.problems_with_params("rewards", path, {"kind": 3})
    assert [problem.what for problem in found] == told


@pytest.mark.parametrize("key", ["beta1", "topK", "_2nd"])
def test_a_hook_may_name_a_key_with_digits_and_capitals(key: str, own: Callable[[str, str], str]) -> None:
    code = BACKEND.replace("width", key)
    table = {"backend": f"{own('keyed', code)}.connect", "options": {key: 3}}
    assert problems({"backend": table}) == [f"c.toml [backend.options].{key}: needs an even number"]


def test_a_hook_may_return_problems_with_keys_of_inner_tables(own: Callable[[str, str], str]) -> None:
    code = """
from retrain.base.errors import Problem
from retrain.campaign.launchers.inline import InlineLauncher

def open_launcher(assignment, *, limits: dict = {}): return InlineLauncher(assignment)
def check_options(options): return [Problem(("limits", "a b"), "needs a limit"), "no cluster: ask for one"]
"""
    path = f"{own('inner', code)}.open_launcher"
    assert problems({"campaign": {"launcher": path, path: {"limits": {"a b": 0}}}}) == [
        f'c.toml [campaign."{path}".limits]."a b": needs a limit',
        "c.toml [campaign].launcher: no cluster: ask for one",
    ]


def test_a_launchers_own_hooks_are_asked(retrain: Retrain, campaign_file: Path) -> None:
    (campaign_file.parent / "own_launcher.py").write_text(LAUNCHER)
    table = '[campaign."own_launcher.open_launcher"]\nqueue = "long"\n'
    campaign_file.write_text(campaign_file.read_text() + table)
    chosen = ("--set", "campaign.launcher=own_launcher.open_launcher")
    explained = json.loads(retrain("explain", campaign_file, "--json", *chosen).stdout)
    assert explained["script"] == "submit --queue long 4 runs"
    assert explained["effective_parallelism"] == 1
    taken = retrain("explain", campaign_file, *chosen, "--set", "campaign.name=taken")
    assert (taken.returncode, "is taken" in taken.stderr) == (2, True)
    done = retrain("run", campaign_file, *chosen, "--set", "campaign.seeds=[0]")
    assert (done.returncode, done.stderr.count("opened for long")) == (0, 1), done.stderr


def test_a_launchers_table_is_checked_like_any_plugins(own: Callable[[str, str], str]) -> None:
    name = own("launcher", LAUNCHER) + ".open_launcher"

    def with_table(**table: object) -> dict[str, object]:
        return {"campaign": {"launcher": name, "seeds": [0], name: table}}

    assert problems(with_table(quueue="a")) == [
        f"c.toml [campaign.\"{name}\"].quueue: unknown parameter of {name!r}; did you mean 'queue'?"
    ]
    assert "got 1; needs a string" in problems(with_table(queue=1))[0]
    assert problems(with_table(hours=9)) == [f"c.toml [campaign.\"{name}\"].hours: needs queue = 'long'"]
    campaign = parse(with_table(hours=2), "c.toml").campaign
    assert campaign is not None
    assert campaign.launcher_options == {"hours": 2}


def test_a_launchers_table_that_would_not_be_read_is_reported(own: Callable[[str, str], str]) -> None:
    name = own("launcher", LAUNCHER) + ".open_launcher"
    wrong = name.removesuffix("er") + "r"

    def with_campaign(**keys: object) -> dict[str, object]:
        return {"campaign": {"seeds": [0], **keys}}

    assert problems(with_campaign(launcher=name, **{wrong: {"hours": 2}})) == [
        f"c.toml [campaign].\"{wrong}\": is not read; did you mean '{name}'?"
    ]
    (forgotten,) = problems(with_campaign(**{name: {"hours": 2}}))
    assert forgotten.endswith("is not read; launcher is 'local'")
    both = with_campaign(launcher=name, launcher_options={"queue": "long"}, **{name: {"hours": 2}})
    assert problems(both) == [
        f"c.toml [campaign].launcher_options: is not read beside [campaign.{name}]; move its keys there"
    ]
    (ignored,) = problems(with_campaign(launcher="ray", launcher_options={"cpus": 2}, ray={"cpus": 1}))
    assert ignored.endswith("is not read beside [campaign.ray]; move its keys there")
    parse(with_campaign(launcher="local", **{name: {"hours": 2}}), "c.toml")  # one for another day


def test_a_launcher_that_takes_nothing_refuses_a_table() -> None:
    (problem,) = problems({"campaign": {"launcher_options": {"queue": "long"}}})
    assert "unknown parameter of 'local'; it takes nothing" in problem


def test_the_table_of_a_built_in_cluster_is_checked_while_another_launcher_is_used() -> None:
    (problem,) = problems({"campaign": {"launcher": "local", "slurm": {"partitoin": "gpu"}}})
    assert problem == "c.toml [campaign.slurm].partitoin: unknown key; did you mean 'partition'?"


def test_keyword_only_parameters_are_the_keys_of_a_backends_table(own: Callable[[str, str], str]) -> None:
    name = own("backend", BACKEND) + ".connect"

    def told(**options: object) -> list[str]:
        return problems({"backend": {"backend": name, "options": options}})

    assert told(widht=4) == [
        f"c.toml [backend.options].widht: unknown parameter of {name!r}; did you mean 'width'?"
    ]
    assert told(width="4") == ["c.toml [backend.options].width: got '4'; needs a whole number"]
    assert told(width=3) == ["c.toml [backend.options].width: needs an even number"]


def test_a_backend_that_checks_nothing_takes_no_options(own: Callable[[str, str], str]) -> None:
    name = own("bare", "def connect(spec): ...") + ".connect"
    (problem,) = problems({"backend": {"backend": name, "options": {"basse": 0.03}}})
    assert "unknown parameter" in problem
    assert "it takes nothing" in problem


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("async def connect(spec): ...", "connect is a coroutine function"),
        (
            "class Api(numpy.policy.NumpyBackend):\n    async def sample(self, prompts, sampling): ...\n"
            "def connect(spec):\n    return Api(spec, numpy.NumpyOptions())",
            "sample is a coroutine function; `connect` and a backend's methods are plain functions",
        ),
        (
            "class Bare:\n    info = None\ndef connect(spec):\n    return Bare()",
            "returned a Bare, which is no",
        ),
    ],
)
def test_what_is_no_plain_backend_is_refused(own: Callable[[str, str], str], code: str, problem: str) -> None:
    name = own("odd", f"from retrain.backends import numpy\nimport retrain.backends.numpy.policy\n{code}")
    with pytest.raises(ConfigError, match=problem):
        connected(f"{name}.connect", BackendSpec(0, alphabet="01"))


def test_a_backend_gets_its_options_and_its_hooks_are_asked(retrain: Retrain, campaign_file: Path) -> None:
    (campaign_file.parent / "own_backend.py").write_text(BACKEND)
    chosen = ["--set", "backend.backend=own_backend.connect", "--set", "backend.options.width=6"]
    explained = json.loads(retrain("explain", campaign_file, "--json", *chosen).stdout)
    assert "width 6 is narrow" in explained["warnings"]
    done = retrain("run", campaign_file, *chosen, "--set", "campaign.seeds=[0]")
    assert done.returncode == 0, done.stderr
    (log, *_) = (campaign_file.parent / "logs").glob("*/runs/*/output.log")
    assert "width 6" in log.read_text()


def test_a_file_is_a_plugin_beside_what_is_left_of_a_folder_of_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "moved.py").write_text("def score(completion, prompt):\n    return 1.0\n")
    (tmp_path / "moved" / "__pycache__").mkdir(parents=True)  # as git leaves it where a folder became a file
    assert defines("moved", "score")
    assert not defines("moved", "open_reward")


def test_a_folder_is_a_plugin_and_may_define_its_functions_in_files_of_its_own(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(here))
    folder = here / "folders_of_mine" / "policy"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("from .files import check_options, connect\n")
    (folder / "files.py").write_text(BACKEND)
    for name in ("folders_of_mine.policy", "folders_of_mine.policy.connect"):
        (problem,) = problems({"backend": {"backend": name, "options": {"width": 3}}})
        assert "needs an even number" in problem


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("def score(completion): return 0.0", "is (completion), and is called with (completion, prompt)"),
        ("def score(prompt, completion): return 0.0", "is (prompt, completion), and is called with (comp"),
        ("def score(prompt, completion, /): return 0.0", "is (prompt, completion, /), and is called with"),
        ("def score(completion, prompt): ...\ndef check_params(): ...", "check_params' is ()"),
        ("def score(completion, prompt): ...\nservers = {}", "servers' is of type dict, not a function"),
    ],
)
def test_what_cannot_be_called_as_declared_is_refused(
    code: str, says: str, own: Callable[[str, str], str]
) -> None:
    name = own("odd", code) + ".score"
    found = []
    for what in (lambda: registry.find_plugin("rewards", name), *hooks_of(name)):
        try:
            what()
        except ConfigError as error:
            found.append(str(error))
    assert any(says in one for one in found), found


@pytest.mark.parametrize("arguments", ["completion, /, prompt", "c, p, prompt=None", "text, /, *others"])
def test_a_function_may_name_its_arguments_otherwise(arguments: str, own: Callable[[str, str], str]) -> None:
    name = own("free", f"def score({arguments}): return 0.5") + ".score"
    assert registry.find_plugin("rewards", name)("a", None) == 0.5


def hooks_of(name: str) -> list[Callable[[], object]]:
    return [lambda h=h: registry.hook("rewards", name, h) for h in registry.spec_of("rewards").hooks]


def test_a_function_beside_the_entry_function_does_not_get_its_hooks(own: Callable[[str, str], str]) -> None:
    code = "def score(c, p): ...\ndef short(c, p): ...\ndef open_scorer(): ...\n"
    name = own("two", code)
    assert registry.hook("rewards", f"{name}.score", "open_scorer") is not None
    assert registry.hook("rewards", f"{name}.short", "open_scorer") is None


def test_of_plugins_in_one_file_the_one_that_raised_is_named(own: Callable[[str, str], str]) -> None:
    name = own("two", "def score(c, p): return 1 / c\ndef load(): return float('x')\n")
    score, load = (
        registry.find_plugin("rewards", f"{name}.score"),
        registry.find_function("a load", f"{name}.load"),
    )
    with pytest.raises(ZeroDivisionError) as of_score:
        score(0, "")
    with pytest.raises(ValueError, match="could not convert") as of_load:
        load()
    assert user_code.fault_of(of_score.value).endswith(f"raised by the reward '{name}.score'")
    assert user_code.fault_of(of_load.value).endswith(f"raised by the function '{name}.load'")


OPENER = """
from retrain import Score, score_with

class Length:
    def __init__(self, longest):
        self.longest = longest

    def score_all(self, answers):
        return [Score(min(1.0, len(answer.completion) / self.longest)) for answer in answers]

    def close(self):
        pass

def open_scorer(*, longest: int = 10):
    return Length(longest)

score = score_with(open_scorer)
"""


@pytest.mark.parametrize("kind", ["rewards", "launchers"])
@pytest.mark.parametrize("name", ["nosuch", "nosuch.score"])
def test_a_plugin_that_cannot_be_loaded_is_told_once(kind: str, name: str) -> None:
    answer = CliRunner().invoke(app, ["plugins", kind, "--check", name])
    assert (answer.output, repr(name) in str(answer.exception)) == ("", True)


def test_a_key_without_a_plugin_to_check_is_refused() -> None:
    answer = CliRunner().invoke(app, ["plugins", "rewards", "--set", "longest=4"])
    assert (answer.output, "--check NAME" in str(answer.exception)) == ("", True)


@pytest.mark.parametrize("named", [".score", ".open_scorer"])
def test_the_parameters_of_a_rewards_opener_are_its_keys(named: str, own: Callable[[str, str], str]) -> None:
    name = own(f"opener{len(named)}", OPENER) + named
    assert problems({"reward": {"reward": name, "params": {"longst": 4}}}) == [
        f"c.toml [reward.params].longst: unknown parameter of {name!r}; did you mean 'longest'?"
    ]
    assert kinds_of(name) == ["rewards"]
    findings = check_plugin("rewards", name, {"longest": 4})
    assert [finding for finding in findings if finding.problem] == []
    scorer = open_reward(name, {"longest": 4})
    assert scorer.score_all([Answer("ab", Prompt(0, "?", ""))]) == [Score(0.5)]


def test_an_openers_parameters_are_those_of_the_function_for_one_completion() -> None:
    assert [*inspect.signature(python.score).parameters] == [
        *("completion", "prompt"),
        *inspect.signature(python.open_scorer).parameters,
    ]
    assert match.score("4", Prompt(0, "2+2=", "4")) == 1.0


@pytest.mark.parametrize("imports", ["", "from __future__ import annotations\n"])
def test_bounds_and_choices_hold_however_annotations_are_evaluated(
    imports: str, own: Callable[[str, str], str]
) -> None:
    code = f"{imports}from typing import Literal\nfrom retrain.base.registry import Fraction\n"
    code += "def score(c, p, *, share: Fraction = 0.5, mode: Literal['a', 'b'] = 'a'): ...\n"
    name = own(f"bounds{len(imports)}", code) + ".score"
    found = problems({"reward": {"reward": name, "params": {"share": 2.0, "mode": "c"}}})
    assert [one.partition(": ")[2] for one in found] == [
        "got 2.0; needs a number from 0 to 1",
        "got 'c'; needs one of 'a', 'b'",
    ]


def test_a_key_without_a_default_must_be_given(own: Callable[[str, str], str]) -> None:
    name = own("needy", "def score(c, p, *, judge: str): ...") + ".score"
    assert problems({"reward": {"reward": name}}) == [f"c.toml [reward.params].judge: is needed by {name!r}"]


TASK = """
from retrain import Prompt, Task

def build(*, seed):
    return Task(train=%s, held_out=(), alphabet="ab", longest_answer=1)
"""


@pytest.mark.parametrize(
    ("train", "says"),
    [
        ("()", "has no prompt to train on"),
        ("(Prompt(0, '', 'b', [('user', 'a')]),)", "[('user', 'a')], not a tuple of (role, content) pairs"),
        (
            "(Prompt(0, '', 'b', ({'role': 'user', 'content': 'a'},)),)",
            "the messages of prompt 0 are ({'role'",
        ),
        ("('1+1=',)", "'1+1=' is no retrain.Prompt"),
        ("(Prompt(0, 'a', 2),)", "the answer of prompt 0 is 2, not a text"),
        ("(Prompt(n, 'a', 'b') for n in range(3))", "train is of type generator, not a tuple"),
    ],
)
def test_what_is_wrong_with_a_tasks_prompts_is_said_before_a_start(
    train: str, says: str, own: Callable[[str, str], str]
) -> None:
    name = f"{own('prompts', TASK % train)}.build"
    plan = plan_runs(parse({"data": {"task": name}}, "c.toml"))
    with pytest.raises(ConfigError, match=re.escape(says)):
        preflight(plan, "c.toml")


def test_what_a_reward_or_a_sandbox_opens_must_be_usable(own: Callable[[str, str], str]) -> None:
    name = own("forgetful", "def open_scorer(): pass\ndef score(c, p): ...\ndef open_sandbox(): pass\n")
    with pytest.raises(ConfigError, match=r"returned a NoneType without score_all, close"):
        open_reward(f"{name}.score", {})
    config = parse({"reward": {"reward": "python", "sandbox": f"{name}.open_sandbox"}}, "c.toml")
    with pytest.raises(ConfigError, match=r"open_sandbox' returned a NoneType without name, command"):
        sandboxes_of([config])


def test_what_a_task_returns_must_be_a_task(retrain: Retrain, campaign_file: Path) -> None:
    (campaign_file.parent / "own_task.py").write_text("def build(*, seed):\n    return ['1+1=']\n")
    told = retrain("explain", campaign_file, "--set", "data.task=own_task.build")
    assert told.returncode == 2
    assert "'own_task.build' returned a list without train, held_out, alphabet" in told.stderr


def test_an_installed_package_offers_plugins_by_name(retrain: Retrain, campaign_file: Path) -> None:
    site = campaign_file.parent / "site"
    info = site / "others-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[retrain.launchers]\ncluster = others_launcher\n[retrain.backends]\nwide = others_backend:connect\n"
        "[retrain.rewards]\nshort = others_rewards:brevity\n"
    )
    (site / "others_rewards.py").write_text(
        'def brevity(completion, prompt):\n    """Prefer short ones."""\n    return -len(completion) / 1000\n'
    )
    (site / "others_launcher.py").write_text(f'"""Jobs of ours."""\n{LAUNCHER}')
    (site / "others_backend.py").write_text(BACKEND)
    campaign_file.write_text(campaign_file.read_text() + '[campaign.cluster]\nqueue = "night"\n')
    chosen = ["--set", "campaign.launcher=cluster", "--set", "backend.backend=wide"]
    env = {**os.environ, "PYTHONPATH": str(site)}
    explained = json.loads(retrain("explain", campaign_file, "--json", *chosen, env=env).stdout)
    assert explained["script"] == "submit --queue night 4 runs"
    listed = json.loads(retrain("plugins", "launchers", "--json", env=env).stdout)["plugins"]
    assert [row["summary"] for row in listed if row["name"] == "cluster"] == ["Jobs of ours."]
    tried = json.loads(retrain("plugins", "--check", "short", "--json", env=env).stdout)
    assert [one["problem"] for one in tried["findings"]] == [""] * 3
    rewards = json.loads(retrain("plugins", "rewards", "--json", env=env).stdout)["plugins"]
    assert [row["summary"] for row in rewards if row["name"] == "short"] == ["Prefer short ones."]
    wrong = retrain("explain", campaign_file, *chosen, "--set", "backend.options.width=3", env=env)
    assert "backend.options.width: needs an even number" in wrong.stderr
