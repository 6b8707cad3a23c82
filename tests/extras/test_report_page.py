"""The report in a real browser: it fetches nothing, complains of nothing, and answers the pointer."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import CompletedProcess
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.records.layout import RunFiles
from retrain.records.samples import SamplesWriter
from retrain.results.report.contents import contents
from retrain.results.report.gather import gather
from retrain.results.report.outputs import write
from retrain.results.report.page import bundle, page, template
from retrain.results.report.tables import MOST_RUNS
from tests.extras.browser import Browser, chromium
from tests.extras.test_report_engines import crashed as on_a_server
from tests.simulated import Row, Simulated, flat, write_campaign

pytestmark = pytest.mark.extras

FIVE_MEGABYTES = 5_000_000
CONDITIONS = ("grpo", "maxrl", "maxrl+bp")
CHARTS = {
    "mean-reward", "eval-reward", "final-eval-reward", "usl", "regimes", "bp-p-star", "batch-size",
    "timeline", "step-time", "rate-ratio", "rate-sample-age-mean", "explored",
}  # fmt: skip
GAP = """
const chart = document.querySelector("#final-eval-reward, [data-chart=final-eval-reward]");
const all = (selector) => [...chart.querySelectorAll(selector)];
const names = all("text").filter((text) => ["grpo", "maxrl"].includes(text.textContent));
const edge = (mark, side) => mark.getBoundingClientRect()[side];
const circles = all(".mark-symbol path").filter((mark) => mark.getAttribute("stroke-width") === "1.8");
return Math.min(...circles.map((c) => edge(c, "left"))) - Math.max(...names.map((n) => edge(n, "right")));
"""
HIDDEN = "return [...document.querySelectorAll('.wide')].map(t => t.scrollWidth - t.clientWidth)"
HEADED = """
const cells = [...document.querySelectorAll("#comparison tr:last-child td")];
const top = (cell) => cell.getBoundingClientRect().top;
return cells.sort((a, b) => top(a) - top(b)).slice(0, 2).map((cell) => cell.dataset.head);
"""
UNUSED = """
const right = (selector) => Math.max(...[...document.querySelectorAll(`[data-chart=mean-reward] ${selector}`)]
  .map((one) => one.getBoundingClientRect().right));
return right("svg") - right(".mark-text text");
"""
# pixels between neighbouring tick labels of every axis below a chart
TICK_GAPS = """
return [...document.querySelectorAll(".chart .role-axis-label")].flatMap((labels) => {
  const isShown = (label) => label.getAttribute("opacity") !== "0" && label.textContent;
  const boxes = [...labels.children].filter(isShown)
    .map((label) => label.getBoundingClientRect());
  const isRow = boxes.length > 1 && Math.abs(boxes[0].top - boxes[1].top) < 2;
  return isRow ? boxes.slice(1).map((box, i) => box.left - boxes[i].right) : [];
});
"""
BEYOND = """
const shown = [...document.querySelectorAll(".mark-text.role-legend-label text, .talk li")];
return shown.filter((one) => one.getBoundingClientRect().right > innerWidth).map((one) => one.textContent);
"""
AXIS = """
const labels = document.querySelectorAll("[data-chart=step-time] .role-axis-label");
return [...labels].flatMap((axis) => [...axis.querySelectorAll("text")]).map((one) => one.textContent)
  .filter((text) => text.includes("="));
"""
HOSTILE = '</script><script>window.pwned = 1</script><img src=x onerror="window.pwned = 1">'


def run(condition: int, seed: int, steps: int = 40, metrics: int = 0) -> Simulated:
    """A run that learns; the last condition with back pressure, the one before with a rate limiter."""
    rng = np.random.default_rng([condition, seed])
    rewards = (0.2 * condition + 0.4 * np.arange(steps) / steps + rng.normal(0, 0.02, steps)).tolist()

    def more(step: int) -> Row:
        row: Row = {f"metric_{i}": round(math.sin(i + step / 9 + seed), 6) for i in range(metrics)}
        if step % 10 == 0:
            row["eval_reward"] = rewards[step - 1]
        if condition == 1:
            row |= {"rate_ratio": 1 + 1 / step, "rate_sample_age_mean": 1.5}
        if condition == 2:
            p = 8 * (1 + step % 16)
            rate = 100 * p / (1 + 0.02 * (p - 1) + 2e-4 * p * (p - 1))
            regime = "warmup" if step < 10 else "optimal"
            row |= {"batch_size": p // 8, "group_size": 8, "tokens_per_second": rate}
            row |= {"bp_regime": regime, "bp_p_star": 70.0 + seed}
        return row

    return Simulated(rewards, held_out=rewards[-1], more=more)


def campaign(log_dir: Path, seeds: int = 4, **how: int) -> Path:
    """Three conditions, and a run that failed with hostile words."""
    runs = {(name, s): run(c, s, **how) for c, name in enumerate(CONDITIONS) for s in range(seeds)}
    runs["grpo", seeds] = flat(0.1, 5, ending="failed", message=HOSTILE, output=f"{HOSTILE}\n")
    return write_campaign(log_dir, runs, steps=how.get("steps", 40))


def report(directory: Path, target: Path) -> Path:
    target.write_text(page(contents(gather(directory))), encoding="utf-8")
    return target


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as opened:
        yield opened


@pytest.fixture(scope="module")
def shown(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """The report opened once: what was drawn, fetched and complained of."""
    directory = tmp_path_factory.mktemp("report")
    file = report(campaign(directory), directory / "report.html")
    states = browser.open(file)
    return {"file": file, "states": states, "fetched": browser.fetched(), "complaints": browser.complaints()}


def test_every_chart_is_drawn(shown):
    assert shown["states"] == dict.fromkeys(CHARTS, "drawn")


def test_nothing_is_fetched_but_the_file(shown):
    asked = [url for url in shown["fetched"] if not url.startswith("data:")]
    assert asked == [shown["file"].resolve().as_uri()]


def test_the_console_stays_silent(shown):
    assert shown["complaints"] == []


def test_hostile_words_stay_words(shown, browser):
    assert browser.run("return window.pwned") is None
    assert browser.run("return document.body.innerText.includes('<img src=x onerror=')") is True


@pytest.mark.parametrize(
    ("chart", "right", "down", "says"),
    [
        ("mean-reward", 0.1, 0.2, ["condition", "step", "mean reward", "95 % from", "seeds"]),
        ("eval-reward", 0.1, 0.2, ["condition", "held-out reward"]),
        ("explored", 0.1, 0.1, ["condition", "step"]),
        ("bp-p-star", 0.1, 0.1, ["p* (rollouts at a time)"]),
        ("batch-size", 0.1, 0.1, ["batch size (prompts)"]),
        ("rate-ratio", 0.1, 0.1, ["samples per batch over target"]),
        ("rate-sample-age-mean", 0.1, 0.1, ["mean age (policy versions)"]),
    ],
)
def test_hovering_anywhere_over_a_curve_shows_the_nearest_value(shown, browser, chart, right, down, says):
    tooltip = browser.hover(f"#{chart}" if chart == "explored" else f"[data-chart={chart}]", right, down)
    assert [word for word in says if word not in tooltip] == []
    assert any(name in tooltip for name in CONDITIONS)
    assert re.search(r"\d", tooltip)
    assert "undefined" not in tooltip


@pytest.mark.parametrize(
    ("chart", "mark", "says"),
    [
        ("usl", "path[aria-roledescription=point]", ["concurrency", "tokens per second"]),
        ("regimes", "path[aria-roledescription=bar]", ["run", "regime"]),
        (
            "timeline",
            "path[aria-roledescription='rect mark']",
            ["run", "attempt", "ended", "waited for permits"],
        ),
        ("step-time", "path[aria-roledescription=bar]", ["part", "share"]),
        ("final-eval-reward", "path[aria-roledescription=point]", ["condition", "seed"]),
    ],
)
def test_hovering_a_mark_shows_its_values(shown, browser, chart, mark, says):
    tooltip = browser.hover(f"[data-chart={chart}] {mark}")
    assert "undefined" not in tooltip
    assert [word for word in says if word not in tooltip] == []


def test_ctrl_and_the_wheel_zoom_in_and_a_double_click_resets(shown, browser):
    texts = "[data-chart=mean-reward] .role-axis-label text"
    labels = f"[...document.querySelectorAll('{texts}')].map((text) => text.textContent).sort().join()"
    browser.hover("[data-chart=mean-reward]")
    before = browser.run(f"return {labels}")
    assert {"0", "20", "40"} <= set(before.split(","))
    browser.zoom("[data-chart=mean-reward] svg")
    browser.until(f"return {labels} !== '{before}'")
    browser.double_click("[data-chart=mean-reward] svg")
    browser.until(f"return {labels} === '{before}'")


def test_any_metric_can_be_chosen(shown, browser):
    browser.choose("#metric", "permit_wait_s")
    browser.until("return document.querySelector('#explored svg').textContent.includes('permit wait (s)')")
    assert browser.complaints() == []


@settings(max_examples=30)
@given(st.text())
def test_text_never_becomes_markup(value):
    shown = template("{{ value }}").render(value=value)
    assert not set("<>\"'\0") & set(shown)
    shown.encode()
    assert "<" not in template("{{ value | tojson }}").render(value=[value])


@pytest.mark.parametrize(
    "runs",
    [
        {("grpo", 0): flat(0.5)},
        {("grpo", 0): flat(0.5, more=on_a_server)},
        {("grpo", s): Simulated([], ending="") for s in range(2)},
        {("grpo", 0): flat(0.5, 1, ending="")},
        {(f"c{i}", 0): flat(i / 40, 2) for i in range(40)},
        {},
    ],
    ids=["one run", "on a server", "no rows", "one row", "forty conditions", "no runs"],
)
def test_other_sizes_are_drawn_without_complaint(browser, tmp_path, runs):
    states = browser.open(report(write_campaign(tmp_path, runs), tmp_path / "report.html"))
    assert set(states.values()) <= {"drawn"}
    assert browser.complaints() == []


def test_two_seeds_without_a_reward_stay_readable(browser, tmp_path):
    runs = {(name, seed): flat(0.0, 5) for name in ("grpo", "maxrl") for seed in (0, 1)}
    browser.open(report(write_campaign(tmp_path / "logs", runs, steps=5), tmp_path / "zero.html"))
    assert set(browser.run(HIDDEN)) == {0}, "a verdict is cut off"
    assert browser.run(GAP) > 0, "a circle lies on the name of its condition"


def test_a_phone_shows_every_legend_and_conversation_whole(browser, tmp_path):
    waits = flat(0.5, 12, more=lambda step: {"environment_wait_s": 0.2})
    directory = write_campaign(tmp_path, {("grpo", 0): waits}, steps=12)
    turns = [{"policy": "x" * 300, "reward": 0.5, "environment": HOSTILE}]
    samples = SamplesWriter(RunFiles(directory / "runs" / "grpo_s0").samples, 1)
    samples.append(12, [{"reward": 0.5, "prompt": "What?", "turns": turns}])
    samples.close()
    with browser.width(390):
        browser.open(report(directory, tmp_path / "report.html"))
        assert browser.run(BEYOND) == []
        assert HOSTILE in browser.find(".talk .given:last-child pre").text
        assert browser.run("return window.pwned") is None


def test_a_phone_shows_every_verdict_without_scrolling_sideways(browser, tmp_path):
    names = ("grpo", "maxrl with a long name and a low learning rate")
    runs = {(name, seed): flat(0.1 * seed, 5) for name in names for seed in (0, 1)}
    browser.open(report(write_campaign(tmp_path / "logs", runs, steps=5), tmp_path / "small.html"))
    with browser.width(390):
        assert set(browser.run(HIDDEN)) == {0}
        assert browser.run(HEADED) == ["condition", "outcome"], "the outcome stands below the name"


def test_long_names_hide_no_verdict_and_leave_no_room_beside_the_lines(browser, tmp_path):
    names = ["a" * 33 + str(i) for i in range(9)]
    runs = {(name, seed): flat(0.1 * seed + 0.01 * i, 5) for i, name in enumerate(names) for seed in range(4)}
    browser.open(report(write_campaign(tmp_path / "logs", runs, steps=5), tmp_path / "small.html"))
    assert set(browser.run(HIDDEN)) == {0}
    assert browser.run(UNUSED) < 40


@pytest.mark.parametrize(("width", "conditions"), [(1000, 6), (390, 2)])
def test_long_names_are_whole_and_told_apart_in_every_chart(browser, tmp_path, width, conditions):
    names = [f"learning_rate=0.001 group_size=16 number={i}" for i in range(conditions)]
    names[0] = "kl_coef=0.01 learning_rate=0.01"
    runs = {(name, 0): flat(0.1, 5) for name in names}
    with browser.width(width):
        browser.open(report(write_campaign(tmp_path, runs, steps=5), tmp_path / "report.html"))
        assert browser.run(BEYOND) == []
        shown = browser.run(AXIS)
        assert len(set(shown)) == len(shown) == conditions


@pytest.mark.parametrize("scale", [1, 1e-4])
def test_a_phone_shows_tick_labels_apart(browser, tmp_path, scale):
    names = ("grpo learning_rate=0.001", "maxrl learning_rate=0.005")
    runs = {
        (name, seed): flat(scale * (0.123 * seed + 0.1 * i), 5)
        for i, name in enumerate(names)
        for seed in range(3)
    }
    with browser.width(390):
        browser.open(report(write_campaign(tmp_path, runs, steps=5), tmp_path / "report.html"))
        gaps = browser.run(TICK_GAPS)
        assert len(gaps) > 1
        assert min(gaps) >= 6


def test_names_in_any_script_keep_a_report_small(tmp_path):
    def measured(step: int) -> Row:
        return {f"metric_{i}": math.sqrt(step + i) for i in range(30)}

    names = [f"学习率 {i} {'長い名前' * 6}" for i in range(12)]
    runs = {(name, seed): flat(0.1, 100, more=measured) for name in names for seed in range(5)}
    found = gather(write_campaign(tmp_path, runs, steps=100))
    assert len(page(contents(found))) < FIVE_MEGABYTES


def test_runs_beyond_the_table_are_counted(tmp_path):
    runs = {("grpo", seed): Simulated([], ending="") for seed in range(MOST_RUNS + 7)}
    shown = page(contents(gather(write_campaign(tmp_path, runs))))
    assert "7 more runs are not listed." in shown
    assert shown.count('data-head="seed">') == MOST_RUNS


def test_hostile_names_stay_names(browser, tmp_path):
    name = "<img src=x onerror='window.pwned=1'>\"{{1}}"
    odd = Simulated(
        [0.5] * 20, held_out=0.5, more=lambda step: {name: float(step), "__proto__": 1.0, "a.b[0]": 2.0}
    )
    states = browser.open(
        report(write_campaign(tmp_path, {(name, 0): odd, ("grpo", 0): odd}), tmp_path / "report.html")
    )
    assert set(states.values()) == {"drawn"}
    browser.choose("#metric", name)
    browser.until("return document.querySelector('#explored svg').textContent.includes('onerror')")
    assert name in browser.hover("[data-chart=step-time] path[aria-roledescription=bar]")
    assert browser.run("return window.pwned") is None
    assert browser.complaints() == []


def test_a_hundred_runs_of_sixty_metrics_stay_under_five_megabytes(browser, tmp_path):
    found = gather(campaign(tmp_path, seeds=33, steps=300, metrics=45))
    file = tmp_path / "report.html"
    file.write_text(page(contents(found)), encoding="utf-8")
    assert len(found.runs) == 100
    assert file.stat().st_size < FIVE_MEGABYTES
    assert browser.open(file) == dict.fromkeys(CHARTS, "drawn")


def test_the_scripts_of_charts_are_made_once_where_they_can_be_kept(temporary, monkeypatch):
    folder = temporary / f"retrain-charts-{os.getuid()}"
    folder.mkdir(mode=0o755)  # which others can read
    made = bundle.__wrapped__()
    folder.rmdir()
    assert bundle.__wrapped__() == made
    monkeypatch.setattr("sys.executable", "none")
    assert bundle.__wrapped__() == made


def test_images_stand_alone(tmp_path):
    found = gather(campaign(tmp_path, seeds=3))
    files = write(found, tmp_path / "figure.svg", "svg", ["step_time_s"])
    names = {file.name for file in files}
    assert {"figure-mean-reward.svg", "figure-usl.svg", "figure-step-time-s.svg"} <= names
    for file in files:
        assert "href" not in ElementTree.parse(file).getroot().attrib
    small = gather(write_campaign(tmp_path / "small", {("grpo", 0): flat(0.5)}))
    png = write(small, tmp_path / "figure.png", "png", [])
    assert png
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in png)


def test_parquet_gives_back_the_rows(tmp_path):
    import pyarrow.parquet

    (file,) = write(gather(campaign(tmp_path, seeds=2)), tmp_path / "rows.parquet", "parquet", [])
    read = pyarrow.parquet.read_table(file)
    assert read.num_rows == 3 * 2 * 40 + 5
    assert read.column("mean_reward").type == "double"
    assert set(read.column("bp_regime").to_pylist()) == {None, "warmup", "optimal"}


def test_a_chart_of_a_metric_with_a_long_name_gets_a_file(tmp_path):
    name = "精度" * 100
    found = gather(write_campaign(tmp_path, {("grpo", 0): flat(0.5, more=lambda step: {name: step})}))
    files = write(found, tmp_path / "figure.svg", "svg", [name])
    assert any(file.name.startswith("figure-精度") for file in files)


def test_metrics_that_differ_in_punctuation_have_a_chart_each(tmp_path):
    named = {"pass@1": 0.25, "pass_1": 0.75, "p" * 150 + "a": 1.0, "p" * 150 + "b": 2.0}
    found = gather(write_campaign(tmp_path, {("grpo", 0): flat(0.5, more=lambda step: named)}))
    files = write(found, tmp_path / "figure.svg", "svg", list(named))
    assert {"figure-pass-1.svg", "figure-pass-1-2.svg"} < {file.name for file in files}
    assert len({file.read_bytes() for file in files if file.name.startswith("figure-p")}) == len(named)


def test_the_command_writes_the_file_and_says_where(retrain: Callable[..., CompletedProcess[str]], tmp_path):
    campaign(tmp_path / "logs", seeds=1)
    answer = retrain("report", "logs")
    assert (answer.returncode, answer.stdout.split()[0]) == (0, "report.html")
    assert (tmp_path / "report.html").stat().st_size < FIVE_MEGABYTES


def test_the_best_and_the_worst_episode_are_shown_turn_by_turn(tmp_path):
    directory = write_campaign(tmp_path, {("grpo", 0): flat(0.5), ("maxrl", 0): flat(0.5)})
    talk = [
        {"policy": "4", "reward": 0.1, "environment": "\x1b[31m<"},
        {"policy": "3", "reward": None, "environment": ""},
    ]
    samples = SamplesWriter(RunFiles(directory / "runs" / "grpo_s0").samples, 1)
    common = {"prompt_id": 7, "prompt": "?", "answer": "3"}
    failed = {
        "reward": None,
        "turns": talk[:1],
        "error": "prompt 7: no board",
        "tool_calls": 3,
        "tool_errors": 1,
    }
    samples.append(2, [{"reward": 1.0, "turns": talk} | common, failed | common])
    samples.close()
    shown = re.findall(
        r"<h3>(grpo_s0)</h3>\n<p class=\"note\">(.+)</p>\s+<ol class=\"talk\">([^\0]+?)</ol>",
        page(contents(gather(directory))),
    )
    said = [
        re.findall(r'<li class="(.+)"><span>(.+)</span><pre>(.+)</pre></li>', parts) for *_, parts in shown
    ]
    assert [about for *about, _ in shown] == [
        ["grpo_s0", "step 2, prompt 7, answer 3, reward 1.000, 2 turns"],
        ["grpo_s0", "step 2, prompt 7, answer 3, unscored, 1 turn, 3 tool calls, 1 failed"],
    ]
    assert said[0] == [
        ("given", "prompt", "?"),
        ("policy", "turn 1 <b>reward 0.1</b>", "4"),
        ("given", "observation", "&lt;"),
        ("policy", "turn 2", "3"),
    ]
    assert said[1][-1] == ("failed", "failed", "prompt 7: no board")
