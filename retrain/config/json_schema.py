"""The JSON Schema of a campaign file, for completion and checks in editors.

It adds to pydantic's: the names of plugins, the keys of their tables, and that a condition's tables have the
same keys as the file's. A name that is not a built-in plugin's is allowed as a dotted path.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Any

from retrain import registry
from retrain.config.campaign import LARGEST_SEED, Campaign, Condition
from retrain.config.drafts import table_schema
from retrain.config.keys import keys_of
from retrain.config.resolve import PLUGINS, RUN_SECTIONS, SECTIONS, sections_of
from retrain.config.schema import Config

NAME = "retrain.schema.json"  # in the directory of a campaign file, whose first line names it
DIRECTIVE = f"#:schema ./{NAME}"  # the directive that editors' TOML extensions read
DOTTED = {"type": "string", "pattern": r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$"}
RUN_KINDS = {key.plugin for _, key in PLUGINS}
_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_TYPES: dict[str, dict[str, Any]] = {
    "int": {"type": "integer"},
    "Count": {"type": "integer", "minimum": 1},
    "Natural": {"type": "integer", "minimum": 0},
    "Workers": {"type": "integer", "minimum": 0, "maximum": 1024},
    "Megabytes": {"type": "integer", "minimum": 64, "maximum": 1 << 20},
    "float": {"type": "number"},
    "Positive": {"type": "number", "exclusiveMinimum": 0},
    "NotNegative": {"type": "number", "minimum": 0},
    "Fraction": {"type": "number", "minimum": 0, "maximum": 1},
    "bool": {"type": "boolean"},
    "str": {"type": "string"},
}


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of a campaign file."""
    from pydantic.json_schema import GenerateJsonSchema  # not at the top: takes 30 ms

    schema = GenerateJsonSchema().generate(table_schema(Config))
    definitions = schema["$defs"]
    _complete(schema["properties"], Config)
    for kind in (*SECTIONS.values(), *sections_of(Campaign).values(), Condition):
        _complete(definitions[kind.__name__]["properties"], kind)
    del schema["properties"]["run"], definitions["Run"]
    campaign = definitions["Campaign"]
    campaign["patternProperties"] = {DOTTED["pattern"]: {"type": "object"}}  # [campaign.<launcher>]
    campaign["properties"]["seeds"]["items"] = {"type": "integer", "minimum": 0, "maximum": LARGEST_SEED}
    condition = definitions["Condition"]["properties"]
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
        if kind in RUN_KINDS and key.params:
            _name_parameters(properties[key.params], kind)


def _name_parameters(key: dict[str, Any], kind: str) -> None:
    """Add every key of the built-in plugins of a kind to the schema, with the plugin's name."""
    values: dict[str, list[Any]] = {}
    uses: dict[str, list[str]] = {}
    for name in registry.built_in_names(kind):
        for parameter, value, comment in _parameters(kind, name):
            values.setdefault(parameter, []).append(value)
            uses.setdefault(parameter, []).append(f"{name}: {comment}" if comment else name)
    key["properties"] = {}
    for parameter, kinds in sorted(values.items()):
        several = [value for at, value in enumerate(kinds) if value not in kinds[:at]]
        allowed = several[0] if len(several) == 1 else {"anyOf": several}
        key["properties"][parameter] = {**allowed, "description": "; ".join(uses[parameter])}


def _parameters(kind: str, name: str) -> Iterable[tuple[str, dict[str, Any], str]]:
    """Iterate over the keys of a plugin's table: name, schema of the value, description."""
    if kind == "backends":
        yield from _backend_options(name)
        return
    for parameter in registry.plugin(kind, name).parameters() or ():
        yield parameter.name, _value(parameter.annotation), ""


def _backend_options(name: str) -> Iterable[tuple[str, dict[str, Any], str]]:
    """Read a backend's options from the dataclass in the file that defines its `check_options`."""
    source = registry.home_of(f"retrain.backends.{name}", "check_options").read_text(encoding="utf-8")
    options = next(
        node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and "Options" in node.name
    )
    for field in options.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            comment = source.splitlines()[(field.end_lineno or field.lineno) - 1].partition("  # ")[2]
            yield field.target.id, _value(ast.unparse(field.annotation)), comment


def _value(annotation: str) -> dict[str, Any]:
    """Return the JSON Schema of a Python annotation; empty if it is not a plain value."""
    if annotation.startswith("Literal["):
        return {"enum": list(ast.literal_eval(f"({annotation[8:-1]},)"))}
    if annotation.startswith(("tuple[str", "list[str", "Sequence[str")):
        return {"type": "array", "items": {"type": "string"}}
    return dict(_TYPES.get(annotation, {}))
