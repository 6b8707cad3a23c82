"""What a campaign file may contain: a page for readers, and the JSON Schema for editors.

The JSON Schema adds to pydantic's: the names of plugins, the keys of their tables, and that a condition's
tables have the same keys as the file's. A name that is not a built-in plugin's is allowed as a dotted path.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, get_args

from retrain.base import registry
from retrain.base.registry import ACCEPTS, choices_of
from retrain.config.keys import LARGEST_COUNT, Normalization, as_toml, keys_of
from retrain.config.resolve import PLUGINS, RUN_SECTIONS, SECTIONS, sections_of
from retrain.config.schema import CampaignSection, ConditionSection, Config, EvalSection, SourceSection
from retrain.config.toml_files import EXTENDS

BOUNDS = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
PREFACE = """\
# Configuration

Every table and key of a campaign's TOML file, with its default. `retrain schema --markdown` prints this
page, and `retrain schema` the JSON Schema for editors. A key that is not here is an error, and nothing is
coerced: `3.9` is not an int and `"false"` is not a bool.

The last column says what a key affects. `result`: it is part of a run's identity, so changing it makes
another experiment, which `retrain resume` refuses. `time`, `schedule` and `display` (speed, when and where
runs execute, and what is recorded) can change between a run's attempts.

## `extends`

At the top of a file, before any table: `extends = "base.toml"`, or a list, of which later files win, and this
file over all. A path is relative to the file in which it stands, as are the inputs that a base file names.
Tables are merged key by key, also below other tables. An array, such as `[[campaign.conditions]]`, `[[eval]]`
or `campaign.seeds`, replaces the whole of another; a plugin that replaces another drops its parameters.
`--set` wins over all files. See [Getting started](getting-started.md#files-that-share).
"""
NAME = "retrain.schema.json"  # in the directory of a campaign file, whose first line names it
DIRECTIVE = f"#:schema ./{NAME}"  # the directive that editors' TOML extensions read
DOTTED = {"type": "string", "pattern": r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$"}
RUN_KINDS = {key.plugin for _, key in PLUGINS}
_DRAFT = "https://json-schema.org/draft/2020-12/schema"


def tables() -> list[tuple[str, Any]]:
    """Return the name and the class of every table of a campaign file, in the order of the schema."""
    lists = {"eval": ("[eval]", EvalSection)}  # written as [[eval]]
    classes = [lists.get(name, (name, kind)) for name, kind in SECTIONS.items() if name != "run"]
    inner = [(f"campaign.{name}", kind) for name, kind in sections_of(CampaignSection).items()]
    return [*classes, *inner, ("[data.source]", SourceSection), ("[campaign.conditions]", ConditionSection)]


def markdown() -> str:
    """Write the reference as a page: one heading per table, one row per key."""
    page = PREFACE
    for name, table in tables():
        page += f"\n## `[{name}]`\n\n{inspect.getdoc(table)}\n\n"
        page += "| key | type | default | meaning | affects |\n|---|---|---|---|---|\n"
        for key in keys_of(table).values():
            bounds = _bounds(key.bounds)
            kind = _cell(_type(key.annotation) + (f", {bounds}" if bounds else ""))
            default = "{}" if dataclasses.is_dataclass(key.default) else as_toml(key.default)
            default = key.stands_for or ("-" if key.default is None else default)
            page += f"| `{key.name}` | {kind} | `{default}` | {_cell(key.description)} | {key.affects} |\n"
    return page


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _type(annotation: str) -> str:
    plain = re.sub(r"\w+Section", "table", annotation.removesuffix(" | None"))
    plain = re.sub(r"Literal\[(.*?)\]", lambda found: found[1].replace("'", '"').replace(", ", " or "), plain)
    normalizations = " or ".join(f'"{name}"' for name in get_args(Normalization))
    aliases = {"Table": "table", "str": "string", "Permits": 'int or "auto"', "Stall": 'float or "auto"'}
    aliases["Over"] = 'list of numbers, "whole" or "last"'
    aliases["Finish"] = 'bool or "reference and winner"'
    aliases["Normalization"] = normalizations
    return aliases.get(plain, plain)


def _bounds(constraints: Mapping[str, Any]) -> str:
    return " and ".join(
        f"{words} {constraints[name]:,}"
        for name, words in BOUNDS.items()
        if abs(constraints.get(name, math.inf)) < LARGEST_COUNT  # larger ones only keep arithmetic sane
    )


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a campaign file."""
    from pydantic.json_schema import GenerateJsonSchema  # not at the top: takes 30 ms

    from retrain.config.checks import table_schema  # nor this, which completion does not need

    schema = GenerateJsonSchema().generate(table_schema(Config))
    definitions = schema["$defs"]
    _complete(schema["properties"], Config)
    listed = (ConditionSection, EvalSection, SourceSection)
    for kind in (*SECTIONS.values(), *sections_of(CampaignSection).values(), *listed):
        _complete(definitions[kind.__name__]["properties"], kind)
    del schema["properties"]["run"], definitions["RunSection"]
    file = {"type": "string", "minLength": 1}
    schema["properties"][EXTENDS] = {
        "anyOf": [file, {"type": "array", "items": file}],
        "description": "files that this one is laid over, relative to it; later ones win",
    }
    evals = definitions.pop("EvalsSection")["properties"]["tables"]
    schema["properties"]["eval"] = {**evals, "description": schema["properties"]["eval"]["description"]}
    campaign = definitions["CampaignSection"]
    campaign["patternProperties"] = {DOTTED["pattern"]: {"type": "object"}}  # [campaign.<launcher>]
    condition = definitions["ConditionSection"]["properties"]
    for section in RUN_SECTIONS:
        described = condition[section]["description"]
        reference = f"#/$defs/{SECTIONS[section].__name__}"
        condition[section] = {"$ref": reference, "description": described}
    return {"$schema": _DRAFT, **schema, "title": "retrain campaign"}


def _complete(properties: dict[str, Any], section: Any) -> None:
    """Add what pydantic does not know to the schema: names of plugins, and what a key affects."""
    for name, key in keys_of(section).items():
        schema = properties[name]
        schema["description"] = key.help
        if key.default is None:  # TOML has no null: a key without a value is left out
            del schema["default"]
        short, _, inside = key.stands_for.partition(".")
        stands_for = keys_of(SECTIONS[short])[inside] if short else key
        kind = stands_for.plugin
        if kind:
            named = schema["items"] if schema.get("type") == "array" else schema
            del named["type"]
            named["anyOf"] = [{"enum": registry.names(kind)}, DOTTED]
        if kind not in RUN_KINDS or not key.params:
            continue
        values: dict[str, list[Any]] = {}  # of every key of the built-in plugins of a kind
        uses: dict[str, list[str]] = {}
        for plugin in registry.built_in_names(kind):
            for parameter, value, comment in _parameters(kind, plugin):
                values.setdefault(parameter, []).append(value)
                uses.setdefault(parameter, []).append(f"{plugin}: {comment}" if comment else plugin)
        inside_table = properties[key.params]["properties"] = {}
        for parameter, kinds in sorted(values.items()):
            several = [value for at, value in enumerate(kinds) if value not in kinds[:at]]
            allowed = several[0] if len(several) == 1 else {"anyOf": several}
            inside_table[parameter] = {**allowed, "description": "; ".join(uses[parameter])}


def _parameters(kind: str, name: str) -> Iterable[tuple[str, dict[str, Any], str]]:
    """Iterate over the keys of a plugin's table: name, schema of the value, description.

    A backend's are read from the dataclass in the file that defines its `check_options`.
    """
    if kind != "backends":
        for parameter in registry.plugin(kind, name).parameters or ():
            yield parameter.name, _value(parameter.annotation), ""
        return
    home: Any = inspect.getmodule(registry.hook("backends", name, "check_options"))
    source = inspect.getsource(home)
    options = next(
        node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and "Options" in node.name
    )
    for field in options.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            comment = source.splitlines()[(field.end_lineno or field.lineno) - 1].partition("  # ")[2]
            yield field.target.id, _value(ast.unparse(field.annotation)), comment


def _value(annotation: str) -> dict[str, Any]:
    """Return the JSON Schema of a Python annotation; empty if it is not a plain value."""
    plain = annotation.removesuffix(" | None")  # which no file can give
    if choices := choices_of(plain):
        return {"enum": list(choices)}
    return dict(ACCEPTS[plain][0]) if plain in ACCEPTS else {}
