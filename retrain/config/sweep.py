"""`[campaign.sweep]`: every condition of a file is multiplied with the values of some keys.

Lists multiply with each other; ranges are drawn together, so many points of a low-discrepancy sequence. What
follows is as if the file had listed all conditions that come of it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from operator import eq
from typing import Any

from retrain.base.errors import Location
from retrain.config.keys import Table, Tables, keys_of, put, table_at
from retrain.config.points import Point, Proposal, sobol
from retrain.config.resolve import (
    SECTIONS,
    flatten,
    label_of_modes,
    overrides_of,
    with_default_plugins,
)

AT: Location = ("campaign", "sweep")
SCALES = ("uniform", "log_uniform")
RANGE_KEYS = (*SCALES, "samples")
SEED = "seed"  # beside the swept keys: draws other points
FINENESS = 250  # drawn values are rounded to about this fraction of their range, so that names are short
MODES = ("algorithm.advantage_mode", "algorithm.transform_mode")
LONG = 24  # characters of a text, of which a name shows only what follows the last slash


@dataclass(frozen=True)
class Variant:
    """A condition, or the file itself, with one point of the sweep."""

    number: int  # of the condition in the file, from 1
    own: Tables  # the condition as it is in the file
    table: Tables  # with the point and a name of its own
    point: Point = field(default_factory=dict)
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
    own, found = conditions(raw), swept_keys(table_of(raw))
    if not found:
        return [Variant(number, table, table) for number, table in enumerate(own, start=1)]
    tables, defaults = list(enumerate(own or [{}], start=1)), with_default_plugins(raw)
    shown = {key: _short(key, found) for key in found}
    whole = {key for key, listed in found.items() if _are_alike(listed)}
    if not has_sampler(raw):
        all_points = product(tables, _points(raw))
        return [_variant(n, table, point, shown, whole, defaults) for (n, table), point in all_points]
    plain = [Variant(number, table, table) for number, table in tables]
    chosen = _chosen(dict(tables), found, proposed)
    return plain + [_variant(*one, shown, whole, defaults) for one in chosen]


def _chosen(
    tables: Mapping[int, Tables], swept: Collection[str], proposed: Sequence[Proposal]
) -> Iterator[tuple[int, Tables, dict[str, Any]]]:
    """Iterate over proposed points, each with the number and the table of its condition."""
    for one in proposed:
        if one.number in tables:
            yield one.number, tables[one.number], {key: one.point[key] for key in swept if key in one.point}


def expanded(raw: Tables, listed: Sequence[Variant]) -> Tables:
    """Return tables with the conditions that come of their sweep."""
    if not swept_keys(table_of(raw)):
        return raw
    campaign = {key: value for key, value in raw["campaign"].items() if key != "sweep"}
    return {**raw, "campaign": {**campaign, "conditions": [variant.table for variant in listed]}}


def conditions(raw: Tables) -> list[Tables]:
    """Return the tables `[[campaign.conditions]]` of a file."""
    found = table_at(raw, "campaign").get("conditions")
    return [c for c in found if isinstance(c, dict)] if isinstance(found, list) else []


def stands_in(table: Tables, location: Sequence[str | int]) -> bool:
    """Whether tables have a value at a location."""
    here: Any = table
    for part in location:
        if not isinstance(here, dict) or part not in here:
            return False
        here = here[part]
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


def _points(raw: Tables) -> list[Point]:
    found, ranges = swept_keys(table_of(raw)), ranges_of(raw)
    lists = {key: value for key, value in found.items() if key not in ranges}
    together = [
        dict(zip((*lists, *ranges), (*listed, *values), strict=True))
        for listed in product(*lists.values())
        for values in drawn(raw)
    ]
    return [{key: point[key] for key in found} for point in together]


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
    point: Point,
    shown: Mapping[str, str],
    whole: Collection[str],
    defaults: Tables,
) -> Variant:
    """Return a condition with the values of a point, and a name that tells them."""
    table = copy.deepcopy(dict(condition))
    for key, value in point.items():
        put(table, key.split("."), value)
    stem, told = str(condition.get("name") or ""), list(point)
    if not stem:
        algorithm = {**defaults.get("algorithm", {}), **overrides_of(table).get("algorithm", {})}
        stem = label_of_modes(*(str(algorithm[mode.partition(".")[2]]) for mode in MODES))
        told = [key for key in told if key not in MODES]
    texts = (f"{shown[key]}={point[key] if key in whole else text_of(point[key])}" for key in told)
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
