"""What a report says in words: a headline, configuration, provenance and failures, and episodes to read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import chain, islice

import tomli_w

from retrain.base.clock import utc_now
from retrain.base.distribution import version
from retrain.config.digest import BESIDE_RESULTS
from retrain.records.files import readable
from retrain.records.layout import RunFiles
from retrain.records.run_row import last_output
from retrain.records.samples import KeptSample
from retrain.records.text import MISSING, count_of, counts_of, dollars, number, plain, plain_lines
from retrain.results.report.gather import CampaignRecord, RunHistory
from retrain.results.report.sides import Side
from retrain.results.status import cost_of
from retrain.results.status.one_run import choose_samples

MOST_CONDITIONS = 8  # of each, two conversations are shown
LONGEST_ANSWER = 60  # characters
MOST_KEPT = 100  # samples of a step; a run keeps a handful
TAIL_LINES = 30
LINE_LIMIT = 300
MOST_TAILS = 20
MOST_TOML = 20_000  # characters
MOST_SOFTWARE = 5  # distinct versions listed: the hosts of one campaign are usually alike
MOST_HOSTS = 20
TROUBLED = ("died", "interrupted")


def excerpt(toml: str) -> str:
    """Return the beginning of a TOML file, safe to show."""
    lines = plain_lines(toml[:MOST_TOML])
    return "\n".join([*lines, "…"] if len(toml) > MOST_TOML else lines)


def resolved(campaign: CampaignRecord) -> str:
    """Return the whole configuration of the first run that has one, as TOML."""
    config = next((run.config for run in campaign.runs if run.config), {})
    return tomli_w.dumps({key: value for key, value in config.items() if key not in BESIDE_RESULTS})


def headline(campaign: CampaignRecord) -> str:
    """Return a summary of the campaign in one sentence."""
    runs = campaign.runs
    seeds = len({run.seed for run in runs})
    steps = sum(run.last_step for run in runs)
    matrix = f"{count_of(len(campaign.conditions), 'condition')}, {count_of(seeds, 'seed')}"
    what = counts_of(run.state for run in runs) or "none begun"
    usd = cost_of(runs)
    cost = "" if usd is None else f", cost {dollars(usd)}"
    return f"{count_of(len(runs), 'run')} ({what}): {matrix}, {steps:,} steps{cost}."


def provenance(campaign: CampaignRecord) -> Sequence[tuple[str, str]]:
    """Return pairs of name and value; a dash where the records lack it."""
    facts = {"campaign": campaign.id}
    if manifest := campaign.manifest:
        facts |= {
            "retrain": plain(manifest.package_version),
            "Python": plain(manifest.python),
            "git commit": plain(str(manifest.git or "")),
            "started on": plain(manifest.host),
            "started": plain(manifest.started_at),
            "ended": plain(manifest.ended_at),
            "configuration hash": plain(manifest.config_hash),
        }
    attempts = [attempt for run in campaign.runs for attempt in run.attempts]
    hosts = dict.fromkeys(plain(attempt.host) for attempt in attempts)
    software = dict.fromkeys(plain(attempt.software) for attempt in attempts if attempt.software)
    facts |= {
        "command-line overrides": "  ".join(campaign.overrides),
        "workers' hosts": ", ".join(islice(hosts, MOST_HOSTS)),
        "workers' software": "; ".join(islice(software, MOST_SOFTWARE)),
        "report made": f"{utc_now()} by retrain {version()}",
    }
    return [(name, value or MISSING) for name, value in facts.items()]


def failures(runs: Sequence[RunHistory]) -> Iterator[tuple[RunHistory, list[str]]]:
    """Iterate over runs that failed, were interrupted or needed several attempts, the failed ones first.

    With each goes the end of its output; of all but the first few, which tend to fail alike, nothing.
    """
    troubled = [run for run in runs if run.has_failed or run.state in TROUBLED or run.was_tried_again]
    troubled.sort(key=lambda run: not run.has_failed)
    for i, run in enumerate(troubled):
        is_shown = i < MOST_TAILS and not run.is_done
        tail = readable(partial(last_output, count=TAIL_LINES), RunFiles(run.directory)) if is_shown else []
        yield run, [line[:LINE_LIMIT] for line in plain_lines("\n".join(tail or []))]


def conversations(sides: Sequence[Side]) -> tuple[tuple[str, KeptSample], ...]:
    """Return runs and episodes of the first conditions that have any: best and worst of a last step."""
    shown: list[list[tuple[str, KeptSample]]] = []
    for side in sides:
        for run in side.runs:
            read = partial(choose_samples, step=None, which="", count=MOST_KEPT)
            samples = readable(read, RunFiles(run.directory)) or []
            if episodes := [sample for sample in samples if sample.turns or sample.error]:
                ends = [episodes[0], episodes[-1]] if len(episodes) > 1 else episodes
                shown.append([(run.name, episode) for episode in ends])
                break
        if len(shown) == MOST_CONDITIONS:
            break
    return tuple(chain.from_iterable(shown))


def outline(sample: KeptSample) -> str:
    """Return what is known of an episode, apart from its texts."""
    unscored = f"unscored ({plain(sample.unscored)})" if sample.unscored else "unscored"
    reward = unscored if sample.reward is None else f"reward {number(sample.reward)}"
    facts = [f"step {sample.step}", f"prompt {sample.prompt_id}"]
    if sample.source:
        facts.append(f"source {plain(sample.source)}")
    if sample.answer:
        facts.append(f"answer {plain(sample.answer, LONGEST_ANSWER)}")
    return ", ".join([*facts, reward, *sample.extent, *["truncated"] * sample.truncated])


def safe(text: str) -> str:
    """Return a text that is safe to show."""
    return "\n".join(plain_lines(text)) or "(empty)"
