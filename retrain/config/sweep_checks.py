"""Checks of `[campaign.sweep]`; values are checked as those of the conditions that come of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from retrain.base.errors import Problem
from retrain.base.registry import LARGEST, hint
from retrain.config.campaign import DecisionSection
from retrain.config.keys import Tables, quote
from retrain.config.points import MOST_DIMENSIONS, Proposal
from retrain.config.resolve import RUN_SECTIONS, SECTIONS, overrides_of
from retrain.config.sweep import (
    AT,
    RANGE_KEYS,
    SCALES,
    SEED,
    conditions,
    drawn,
    has_sampler,
    ranges_of,
    scale_of,
    stands_in,
    swept_keys,
    table_of,
    text_of,
)

MOST_RUNS = 10_000  # `explain --from` takes 5 s of CPU for them, as of 5,000 conditions with 2 seeds
MOST_SAMPLES = 100_000


def check_sweep(raw: Tables) -> Iterator[Problem]:
    """Check the sweep by itself and against the conditions."""
    campaign = raw.get("campaign")
    if not isinstance(campaign, Mapping) or not isinstance(campaign.get("sweep", {}), Mapping):
        return
    seed = table_of(raw).get(SEED, 0)
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        yield Problem((*AT, SEED), f"got {quote(seed)}; needs a whole number from 0 on")
        return
    wrong = [
        Problem((*AT, key), what)
        for key, value in swept_keys(table_of(raw)).items()
        for what in (*_key_problems(key, raw), *_value_problems(value))
    ]
    yield from wrong
    if not wrong and (runs := _count(raw)) > MOST_RUNS:
        yield _too_many(runs, raw)
    elif not wrong:
        yield from _sampled_ranges(raw) if has_sampler(raw) else _range_problems(raw)


def _too_many(runs: int, raw: Tables) -> Problem:
    """Return that there are too many runs, where what makes them so many is given."""
    refused = f"would be {runs:,} runs; at most {MOST_RUNS:,} can be planned"
    if has_sampler(raw):
        return Problem(("campaign", "search", "trials"), f"{refused}: ask for fewer points or seeds")
    if swept_keys(table_of(raw)):
        return Problem(AT, f"{refused}: sweep fewer keys or values")
    most = ", or a smaller decision.max_seeds" if "decision" in raw else ""
    return Problem(AT[:1], f"{refused}: use fewer conditions or seeds{most}")


def _key_problems(key: str, raw: Tables) -> Iterator[str]:
    section, _, inside = key.partition(".")
    if section not in RUN_SECTIONS or not all(key.split(".")) or not inside:
        if section in SECTIONS and section not in RUN_SECTIONS:
            yield f"is the same for all runs of a campaign; sections that differ: {', '.join(RUN_SECTIONS)}"
        else:
            others = hint(section, RUN_SECTIONS, f"sections: {', '.join(RUN_SECTIONS)}")
            yield f"needs section.key, such as training.lr; {others}"
        return
    if key == "training.seed":
        yield "every condition runs with every seed of the campaign; list seeds in campaign.seeds"
    if key in table_of(raw) and "." in key:
        yield "is given twice, with and without quotes; keep one"
    for number, condition in enumerate(conditions(raw), start=1):
        if stands_in(overrides_of(condition), key.split(".")):
            name = quote(condition["name"]) if condition.get("name") else f"#{number}"
            yield f"condition {name} sets it; a key is either swept or set by conditions"


def _value_problems(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield from _one_range(value)
    elif not isinstance(value, list):
        yield f"got {quote(value)}; needs a list, or {{ uniform = [low, high], samples = n }}"
    elif not value:
        yield "got []; needs at least one value"
    elif odd := [each for each in value if not isinstance(each, str | bool) and not _is_number(each)]:
        yield f"got {quote(odd[0])}; needs numbers, strings, or true and false"
    else:
        for (_, one), times in Counter((isinstance(one, bool), one) for one in value).items():
            if times > 1:
                yield f"lists {text_of(one)} {times} times, which would repeat the same runs; list it once"


def _one_range(table: Tables) -> Iterator[str]:
    for key in table:
        if key not in RANGE_KEYS:
            yield f"unknown key {quote(key)}; {hint(key, RANGE_KEYS, 'known: ' + ', '.join(RANGE_KEYS))}"
    scales = [scale for scale in SCALES if scale in table]
    if len(scales) != 1:
        yield "needs one of uniform = [low, high] and log_uniform = [low, high]"
        return
    yield from _bounds_problems(scales[0], table[scales[0]])
    samples = table.get("samples", 1)
    if isinstance(samples, bool) or not isinstance(samples, int) or not 1 <= samples <= MOST_SAMPLES:
        yield f"samples: got {quote(samples)}; needs a whole number from 1 to {MOST_SAMPLES}"


def _bounds_problems(scale: str, bounds: Any) -> Iterator[str]:
    if not isinstance(bounds, list) or len(bounds) != 2 or not all(map(_is_number, bounds)):
        yield f"{scale}: got {quote(bounds)}; needs [low, high], two numbers"
    elif bounds[0] >= bounds[1]:
        yield f"{scale}: got {quote(bounds)}; needs low below high"
    elif scale == "log_uniform" and bounds[0] <= 0:
        yield f"log_uniform: got {quote(bounds)}; needs bounds above 0, which have a logarithm"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def _range_problems(raw: Tables) -> Iterator[Problem]:
    """Check ranges, each of them right by itself, against each other."""
    if not (ranges := ranges_of(raw)):
        return
    counts = [table["samples"] for table in ranges.values() if "samples" in table]
    last = next(reversed(ranges))
    if len(set(counts)) > 1:
        listed = " and ".join(map(str, dict.fromkeys(counts)))
        what = f"ranges are drawn together, but samples are {listed}; give all the same number"
        yield Problem((*AT, last), what)
    elif not counts:
        yield Problem((*AT, last), "needs samples, how many points are drawn")
    elif len(ranges) > MOST_DIMENSIONS:
        yield Problem(AT, f"draws {len(ranges)} ranges together; at most {MOST_DIMENSIONS} are spread evenly")
    elif repeated := sum(times - 1 for times in Counter(drawn(raw)).values()):
        what = f"of {counts[0]} samples {repeated} would repeat others; draw fewer, or list the values"
        yield Problem((*AT, last), what)


def _sampled_ranges(raw: Tables) -> Iterator[Problem]:
    for key, table in ranges_of(raw).items():
        if "samples" in table:
            what = "campaign.search.sampler proposes campaign.search.trials points; leave samples out"
            yield Problem((*AT, key), f"samples: got {table['samples']}; {what}")


def _count(raw: Tables) -> int:
    """Return how many runs there would be, with those that `[decision]` may add."""
    found = swept_keys(table_of(raw)).values()
    count, own = _seed_count(raw), len(conditions(raw)) or 1
    if has_sampler(raw):
        trials = raw["campaign"]["search"].get("trials")
        return count * (own + (trials if isinstance(trials, int) else 0))
    lengths = [len(value) for value in found if isinstance(value, list)]
    samples = [value["samples"] for value in found if isinstance(value, Mapping) and "samples" in value]
    return math.prod([*lengths, *samples[:1], count, own])


def _seed_count(raw: Tables) -> int:
    """Return how many seeds a condition may have."""
    seeds, search = raw["campaign"].get("seeds"), raw["campaign"].get("search")
    given = len(seeds) if isinstance(seeds, list) else 1
    decision = raw.get("decision", {} if isinstance(search, Mapping) else None)
    most = decision.get("max_seeds", DecisionSection.max_seeds) if isinstance(decision, Mapping) else 1
    most = most if isinstance(most, int) else 1
    return given + most if isinstance(search, Mapping) else max(given, most)


def ends_of(raw: Tables) -> list[Proposal]:
    """Return points that hold each bound and each listed value of a sweep with a sampler, for checks."""
    if not has_sampler(raw):
        return []
    ends = {
        key: list(value) if isinstance(value, list) else value[scale_of(value)]
        for key, value in swept_keys(table_of(raw)).items()
    }
    points = [
        {key: values[place % len(values)] for key, values in ends.items()}
        for place in range(max(map(len, ends.values()), default=0))
    ]
    return [Proposal(point, n) for n in range(1, 1 + (len(conditions(raw)) or 1)) for point in points]
