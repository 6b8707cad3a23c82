"""`[campaign.sweep]`: every condition of a file is multiplied with the values of some keys.

Lists multiply with each other; ranges are drawn together, so many points of a low-discrepancy sequence, or a
sampler proposes points. What follows is as if the file had listed all conditions that come of it; values are
checked as theirs.

Sobol's sequence, which fills a cube evenly, is shifted by a seed, and the same on every machine. scipy has it
too, but is not in the core, and its scrambling may change with its version.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from operator import eq
from typing import Any

from retrain.base.errors import Location, Problem
from retrain.base.registry import LARGEST, hint
from retrain.config.keys import Proposal, Table, Tables, keys_of, put, quote, table_at
from retrain.config.resolve import (
    RUN_SECTIONS,
    SECTIONS,
    flatten,
    label_of_modes,
    overrides_of,
    with_default_plugins,
)
from retrain.config.schema import DecisionSection

BITS = 30
# Joe and Kuo's direction numbers (SIAM J. Sci. Comput. 30, 2008), from the second dimension on: the
# coefficients of a primitive polynomial as bits, without the first and the last, and the initial numbers.
DIRECTIONS: tuple[tuple[int, tuple[int, ...]], ...] = (
    (0, (1,)),
    (1, (1, 3)),
    (1, (1, 3, 1)),
    (2, (1, 1, 1)),
    (1, (1, 1, 3, 3)),
    (4, (1, 3, 5, 13)),
    (2, (1, 1, 5, 5, 17)),
    (4, (1, 1, 5, 5, 5)),
    (7, (1, 1, 7, 11, 19)),
    (11, (1, 1, 5, 1, 1)),
    (13, (1, 1, 1, 3, 11)),
    (14, (1, 3, 5, 5, 31)),
    (1, (1, 3, 3, 9, 7, 49)),
    (13, (1, 1, 1, 15, 21, 21)),
    (16, (1, 3, 1, 13, 27, 49)),
)
MOST_DIMENSIONS = len(DIRECTIONS) + 1

AT: Location = ("campaign", "sweep")
SCALES = ("uniform", "log_uniform")
RANGE_KEYS = (*SCALES, "samples")
SEED = "seed"  # beside the swept keys: draws other points
FINENESS = 250  # drawn values are rounded to about this fraction of their range, so that names are short
MODES = ("algorithm.advantage_mode", "algorithm.transform_mode")
LONG = 24  # characters of a text, of which a name shows only what follows the last slash

MOST_RUNS = 10_000  # `explain --from` takes 5 s of CPU for them, as of 5,000 conditions with 2 seeds
MOST_SAMPLES = 100_000


@dataclass(frozen=True)
class Variant:
    """A condition, or the file itself, with one point of the sweep."""

    number: int  # of the condition in the file, from 1
    own: Tables  # the condition as it is in the file
    table: Tables  # with the point and a name of its own
    point: Table = field(default_factory=dict)
    stem: str = ""  # the condition's name without the point

    def swept(self, location: Location) -> Location | None:
        """Return where the sweep sets what is at a location of the condition; None if it does not."""
        if len(location) < 2:  # a section, of which it sets a part
            return None
        paths = {key: key.split(".") for key in self.point}
        key = next((key for key, path in paths.items() if all(map(eq, path, location))), "")
        return (*AT, key) if key else None


def with_plain_keys(raw: Tables) -> Table:
    """Return tables in which keys of the sweep in quotes, as `"training.lr"`, are tables, as without quotes.

    So that `--set campaign.sweep.training.lr=...` replaces either.
    """
    sweep = table_of(raw)
    if not sweep or any(part == "" for key in sweep for part in key.split(".")):
        return dict(raw)
    plain: Table = {}
    for key, value in sorted(sweep.items(), key=lambda item: "." in item[0]):
        if not put(plain, key.split("."), copy.deepcopy(value)):
            plain[key] = value  # given twice, which the check reports
    ordered = {key.partition(".")[0]: None for key in sweep} | dict.fromkeys(plain)
    return {**raw, "campaign": {**raw["campaign"], "sweep": {key: plain[key] for key in ordered}}}


def swept_keys(sweep: Tables) -> Table:
    """Return what `[campaign.sweep]` has by dotted key: a list, or the table of a range."""
    return {key: value for key, value in flatten(sweep, _is_range) if key != SEED}


def variants(raw: Tables, proposed: Sequence[Proposal] = ()) -> list[Variant]:
    """Return the conditions of a file, multiplied with its sweep; none for a file with neither.

    With a sampler, these are the conditions as they are in the file, then what it has proposed.
    The sweep must have no problems.
    """
    own, keys = conditions(raw), swept_keys(table_of(raw))
    if not keys:
        return [Variant(number, table, table) for number, table in enumerate(own, start=1)]
    tables, defaults = list(enumerate(own or [{}], start=1)), with_default_plugins(raw)
    shown = {key: _short(key, keys) for key in keys}
    whole = {key for key, listed in keys.items() if _are_alike(listed)}
    if not has_sampler(raw):
        all_points = product(tables, _points(raw))
        return [_variant(n, table, point, shown, whole, defaults) for (n, table), point in all_points]
    plain = [Variant(number, table, table) for number, table in tables]
    for proposal in proposed:
        if proposal.number <= len(tables):
            number, table = tables[proposal.number - 1]
            point = {key: proposal.point[key] for key in keys if key in proposal.point}
            plain.append(_variant(number, table, point, shown, whole, defaults))
    return plain


def expanded(raw: Tables, listed: Sequence[Variant]) -> Tables:
    """Return tables with the conditions that come of their sweep."""
    if not swept_keys(table_of(raw)):
        return raw
    campaign = {key: value for key, value in raw["campaign"].items() if key != "sweep"}
    return {**raw, "campaign": {**campaign, "conditions": [variant.table for variant in listed]}}


def conditions(raw: Tables) -> list[Tables]:
    """Return the tables `[[campaign.conditions]]` of a file."""
    tables = table_at(raw, "campaign").get("conditions")
    return [c for c in tables if isinstance(c, dict)] if isinstance(tables, list) else []


def called(condition: Tables, number: int) -> str:
    """Return how a problem names a condition of a file."""
    return quote(condition["name"]) if condition.get("name") else f"#{number}"


def stands_in(table: Tables, location: Sequence[str | int]) -> bool:
    """Whether tables have a value at a location."""
    value: Any = table
    for part in location:
        if not isinstance(value, dict) or part not in value:
            return False
        value = value[part]
    return True


def has_sampler(raw: Tables) -> bool:
    """Whether a sampler proposes the points of a file's sweep."""
    return bool(table_at(raw, "campaign", "search").get("sampler"))


def table_of(raw: Tables) -> Tables:
    """Return a file's `[campaign.sweep]`; empty if it has none."""
    return table_at(raw, "campaign", "sweep")


def _is_range(table: Tables) -> bool:
    samples = table.get("samples")
    has_count = samples is not None and not isinstance(samples, list | Mapping)
    return has_count or any(scale in table for scale in SCALES) or not table


def scale_of(table: Tables) -> str:
    """Return the key of a range's bounds, which names its scale."""
    return next(scale for scale in SCALES if scale in table)


def bounds_of(key: str, table: Tables) -> tuple[bool, float, float, bool]:
    """Return whether a range is of whole numbers, its bounds, and whether it is logarithmic."""
    scale = scale_of(table)
    low, high = table[scale]
    section, _, name = key.partition(".")
    declared = keys_of(SECTIONS[section]).get(name)
    is_float = declared is not None and declared.annotation.startswith("float")
    is_whole = isinstance(low, int) and isinstance(high, int) and not is_float
    return is_whole, low, high, scale == "log_uniform"


def ranges_of(raw: Tables) -> dict[str, Tables]:
    """Return the ranges of a sweep by dotted key."""
    return {key: value for key, value in swept_keys(table_of(raw)).items() if isinstance(value, Mapping)}


def _points(raw: Tables) -> list[Table]:
    keys, ranges = swept_keys(table_of(raw)), ranges_of(raw)
    lists = {key: value for key, value in keys.items() if key not in ranges}
    together = [
        dict(zip((*lists, *ranges), (*listed, *values), strict=True))
        for listed in product(*lists.values())
        for values in drawn(raw)
    ]
    return [{key: point[key] for key in keys} for point in together]


def drawn(raw: Tables) -> list[tuple[float, ...]]:
    """Return the points of the ranges, drawn together; one of no values without ranges."""
    ranges = ranges_of(raw)
    count = next((table["samples"] for table in ranges.values() if "samples" in table), 1)
    if not ranges:
        return [()]
    return [
        tuple(_value(*one, unit, count) for one, unit in zip(ranges.items(), units, strict=True))
        for units in sobol(count, len(ranges), table_of(raw).get(SEED, 0))
    ]


def _value(key: str, table: Tables, unit: float, count: int) -> float:
    """Return the value at a fraction of a range: rounded, so that a name tells all of it."""
    is_whole, low, high, is_log = bounds_of(key, table)
    if is_whole:
        high += 1
    value = low * (high / low) ** unit if is_log else low + (high - low) * unit
    if is_whole:
        return min(int(value), int(high) - 1)
    return as_told(key, table, value, count)


def as_told(key: str, table: Tables, value: float, count: int) -> float:
    """Return a value of a range, of which `count` are drawn, rounded so that a name tells all of it."""
    is_whole, low, high, is_log = bounds_of(key, table)
    if is_whole:
        return value
    width = value * math.log(high / low) if is_log else high - low
    places = math.ceil(-math.log10(width / max(FINENESS, 2 * count)))  # still all different
    return min(max(round(value, places), float(low)), float(high))


def _variant(
    number: int,
    condition: Tables,
    point: Table,
    shown: Mapping[str, str],
    whole: Collection[str],
    defaults: Tables,
) -> Variant:
    """Return a condition with the values of a point, and a name that tells them."""
    table = copy.deepcopy(dict(condition))
    for key, value in point.items():
        put(table, key.split("."), value)
    stem, shown_keys = str(condition.get("name") or ""), list(point)
    if not stem:
        algorithm = {**defaults.get("algorithm", {}), **overrides_of(table).get("algorithm", {})}
        stem = label_of_modes(*(str(algorithm[mode.partition(".")[2]]) for mode in MODES))
        shown_keys = [key for key in shown_keys if key not in MODES]
    texts = (f"{shown[key]}={point[key] if key in whole else text_of(point[key])}" for key in shown_keys)
    name = " ".join([stem, *texts])
    return Variant(number, condition, {**table, "name": name}, point, stem)


def _are_alike(listed: Iterable[Any]) -> bool:
    """Whether names would show texts of a list alike, as models of one name by two makers."""
    texts = [text_of(value) for value in listed if isinstance(value, str)]
    return len(set(texts)) < len(texts)


def _short(key: str, keys: Tables) -> str:
    """Return as many of a key's last parts as distinguish it from the other keys."""
    parts = key.split(".")
    for count in range(1, len(parts)):
        ending = "." + ".".join(parts[-count:])
        if sum(f".{other}".endswith(ending) for other in keys) == 1:
            return ending[1:]
    return key


def text_of(value: Any) -> str:
    """Return a value as names show it."""
    if isinstance(value, str):
        return value.rpartition("/")[2] if len(value) > LONG else value
    if isinstance(value, bool):
        return str(value).lower()
    mantissa, e, exponent = repr(value).partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}" if e else repr(value)


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
    if wrong:
        yield from wrong
        return
    if (runs := _count(raw)) <= MOST_RUNS:
        yield from _range_problems(raw)
        return
    refused = f"would be {runs:,} runs; at most {MOST_RUNS:,} can be planned"
    if has_sampler(raw):  # named where what makes them so many is given
        yield Problem(("campaign", "search", "trials"), f"{refused}: ask for fewer points or seeds")
    elif swept_keys(table_of(raw)):
        yield Problem(AT, f"{refused}: sweep fewer keys or values")
    else:
        most = ", or a smaller decision.max_seeds" if "decision" in raw else ""
        yield Problem(AT[:1], f"{refused}: use fewer conditions or seeds{most}")


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
            yield f"condition {called(condition, number)} sets it; a key is either swept or set by conditions"


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
    scale, bounds = scales[0], table[scales[0]]
    if not isinstance(bounds, list) or len(bounds) != 2 or not all(map(_is_number, bounds)):
        yield f"{scale}: got {quote(bounds)}; needs [low, high], two numbers"
    elif bounds[0] >= bounds[1]:
        yield f"{scale}: got {quote(bounds)}; needs low below high"
    elif scale == "log_uniform" and bounds[0] <= 0:
        yield f"log_uniform: got {quote(bounds)}; needs bounds above 0, which have a logarithm"
    samples = table.get("samples", 1)
    if isinstance(samples, bool) or not isinstance(samples, int) or not 1 <= samples <= MOST_SAMPLES:
        yield f"samples: got {quote(samples)}; needs a whole number from 1 to {MOST_SAMPLES}"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


def _range_problems(raw: Tables) -> Iterator[Problem]:
    """Check ranges, each of them right by itself, against each other."""
    ranges = ranges_of(raw)
    if has_sampler(raw):
        for key, table in ranges.items():
            if "samples" in table:
                what = "campaign.search.sampler proposes campaign.search.trials points; leave samples out"
                yield Problem((*AT, key), f"samples: got {table['samples']}; {what}")
        return
    if not ranges:
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


def _count(raw: Tables) -> int:
    """Return how many runs there would be, with those that `[decision]` may add."""
    seeds, search = raw["campaign"].get("seeds"), raw["campaign"].get("search")
    count, own = len(seeds) if isinstance(seeds, list) else 1, len(conditions(raw)) or 1
    decision = raw.get("decision", {} if isinstance(search, Mapping) else None)
    most = decision.get("max_seeds", DecisionSection.max_seeds) if isinstance(decision, Mapping) else 1
    most = most if isinstance(most, int) else 1
    count = count + most if isinstance(search, Mapping) else max(count, most)
    if has_sampler(raw):
        trials = raw["campaign"]["search"].get("trials")
        return count * (own + (trials if isinstance(trials, int) else 0))
    values = swept_keys(table_of(raw)).values()
    lengths = [len(value) for value in values if isinstance(value, list)]
    samples = [value["samples"] for value in values if isinstance(value, Mapping) and "samples" in value]
    return math.prod([*lengths, *samples[:1], count, own])


def sobol(count: int, dimensions: int, seed: int | None) -> list[tuple[float, ...]]:
    """Return the first points of the sequence in [0, 1), each of so many dimensions.

    A seed shifts all points digit by digit, which keeps them as even as they are; None does not. More points
    begin with the same ones.
    """
    columns = []
    for dimension in range(dimensions):
        value, column = 0, list[float]()
        directions = [1 << (BITS - bit) for bit in range(1, BITS + 1)]
        if dimension:
            polynomial, first = DIRECTIONS[dimension - 1]
            degree = len(first)
            directions = [number << (BITS - bit) for bit, number in enumerate(first, start=1)]
            for bit in range(degree, BITS):
                following = directions[bit - degree] ^ (directions[bit - degree] >> degree)
                for k in range(1, degree):
                    if polynomial >> (degree - 1 - k) & 1:
                        following ^= directions[bit - k]
                directions.append(following)
        if seed is not None:
            digits = hashlib.sha256(f"{seed} {dimension}".encode()).digest()
            value = int.from_bytes(digits[:4]) >> (32 - BITS)
        for number in range(1, count + 1):  # in the order of the Gray code (Antonov and Saleev)
            column.append(value / 2**BITS)
            value ^= directions[(number & -number).bit_length() - 1]
        columns.append(column)
    return list(zip(*columns, strict=True))
