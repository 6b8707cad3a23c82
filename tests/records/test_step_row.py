"""A step's row: typed where it is written, flat in the file, every field declared once."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import retrain
from docs.metrics_page import kinds_of_parts, metrics_page
from retrain.control.rules.backpressure import BackPressure, StepObservation
from retrain.records.metrics import read_metrics
from retrain.records.row_parts import WRITERS, Evaluation, PermitUse, columns
from retrain.records.step_row import EpisodeSummary
from tests.trainer.test_trainer import SMALL, train

EVERYTHING_ON = {
    "eval": {"tables": [{"name": "hard", "every": 1, "samples": 2, "temperature": 1.0}]},
    "algorithm": {"kl_coef": 0.1},
    "teacher": {"teacher": "self"},
    "budget": {"prices": {"numpy": {"sample": 1.0}}},
    "data": {"eval_prompts": 2, "eval_samples": 2, "curriculum": "pool", "refill": "tied"},
    "reward": {"reward": "weighted", "params": {"parts": {"match": 1.0}}},
    "backend": {"max_concurrent": "auto"},
    "backpressure": {"enabled": True, "max_batch_size": 4, "peak_gflops": 100.0, "peak_bw_gb_s": 10.0},
    "throttle": {"enabled": True, "load_fn": "tests.plugins.idle"},
    "scaling": {"rule": "adascale"},
    "rate_limiter": {"max_staleness": 1, "buffer": "firo", "rate_limit_speed_batch_per_sim": 1},
}
EPISODES = EpisodeSummary(
    turns_mean=1.0,
    observation_tokens=1,
    episode_errors=0,
    episode_retries=0,
    separate_samples=0,
    tool_calls=0,
    tool_errors=0,
    cut_turns=0,
    episode_time_s=1.0,
    environment_time_s=1.0,
    environment_wait_s=0.1,
)


def declared_keys() -> set[str]:
    """The keys of the generated page, its capitals filled in as this run fills them."""
    page = metrics_page().partition("\n## RunRow")[0].replace("NAME", "hard")
    keys = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    capitals = {"PHASE": ("prefill", "decode", "train"), "K": ("1", "2")}
    capitals |= {"PART": ("match",), "KIND": ("prefill", "cached", "sample"), "BIN": ("50",)}
    for placeholder, names in capitals.items():
        filled = {key for key in keys if re.search(rf"_{placeholder}(_|$)", key)}
        keys = keys - filled | {key.replace(placeholder, name) for key in filled for name in names}
    return keys


def test_a_run_with_everything_on_writes_exactly_the_declared_fields(tmp_path: Path) -> None:
    raw = {name: {**SMALL.get(name, {}), **keys} for name, keys in {**SMALL, **EVERYTHING_ON}.items()}
    raw["training"] = {**raw["training"], "eval_every": 1, "updates_per_batch": 2}
    row = read_metrics(train(tmp_path / "r", raw).directory)[0]
    engine = {key for key in declared_keys() if key.startswith("engine_")}
    quiet = {"unscored_fraction", "unscored_outage_fraction", "unscored_reason", "mismatch_rise", "no_signal"}
    quiet |= {"eval_unscored_fraction", "eval_hard_unscored_fraction", "permits_fixed"}  # nothing to tell
    quiet |= {"eval_hard_questions"}  # which [decision] has asked
    quiet |= {f"{eval}reward_match_unscored" for eval in ("", "eval_", "eval_hard_")}
    quiet |= {"first_steps", "outside_teacher", "runaway"}  # after 10 or 20 steps, and of episodes that spin
    # no program runs, no environment answers, no server samples, and no API may pause
    api = {"api_pause_s", "api_pauses_s"}
    sources = {key for key in declared_keys() if key.startswith(("source", "eval_source"))}  # of several
    assert declared_keys() - set(row) == {"sandbox", *quiet, *engine, *api, *sources, *columns(EPISODES)}
    assert set(row) <= declared_keys()


def test_an_optional_field_is_left_out_and_an_unknown_one_is_null() -> None:
    assert columns(PermitUse(wait_s=1.0, held_s=2.0, permits=None)) == {
        "permit_wait_s": 1,
        "permit_held_s": 2,
    }
    evaluation = Evaluation(
        reward=0.5,
        correct_rate=0.5,
        prompts=2,
        reward_error_fraction=0.0,
        reward_timeout_fraction=0.0,
        pass_at={"1": 0.5, "4": None},
        time_s=1.0,
        billed={},
    )
    row = columns(evaluation)
    assert (row["eval_pass_at_1"], row["eval_pass_at_4"]) == (0.5, None)


def test_a_decision_is_its_part_of_the_row_and_no_peak_is_null() -> None:
    decision = BackPressure(batch_size=2, group_size=4).observe(StepObservation(2, 4, 100, 1.0))
    row = columns(dataclasses.replace(decision, p_star=math.inf))
    assert row["bp_p_star"] is None
    assert row["bp_batch_size"] == decision.batch_size


def test_every_part_names_the_files_that_write_it() -> None:
    package = Path(retrain.__file__).parent
    texts = {path.relative_to(package).as_posix(): path.read_text() for path in package.rglob("*.py")}
    named, made = {}, {}
    for name, kind in kinds_of_parts().items():
        call = re.compile(rf"(?<!class )\b{kind.__name__}\(")
        made[name] = {path for path, text in texts.items() if call.search(text)}
        writer, when = WRITERS[kind]
        named[name] = {writer, *re.findall(r"`([\w/]+\.py)`", when)}
    assert named == made


def test_a_part_that_is_off_has_no_fields() -> None:
    assert columns(None) == {}
