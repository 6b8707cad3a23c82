"""The JSON Schema of a campaign file, for completion and checks in editors.

It adds to pydantic's: the names of plugins, the keys of their tables, and that a condition's tables have the
same keys as the file's. A name that is not a built-in plugin's is allowed as a dotted path.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Any

from retrain import registry
from retrain.config.keys import keys_of
from retrain.config.resolve import PLUGINS, RUN_SECTIONS, SECTIONS, sections_of
from retrain.config.schema import Campaign, Condition

NAME = "retrain.schema.json"  # in the directory of a campaign file, whose first line names it
DIRECTIVE = f"#:schema ./{NAME}"  # the directive that editors' TOML extensions read
DOTTED = {"type": "string", "pattern": r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)+$"}
RUN_KINDS = {plugin.kind for plugin in PLUGINS}
_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_TYPES: dict[str, dict[str, Any]] = {
    "int": {"type": "integer"},
    "float": {"type": "number"},
    "Positive": {"type": "number", "exclusiveMinimum": 0},
    "NotNegative": {"type": "number", "minimum": 0},
    "Fraction": {"type": "number", "minimum": 0, "maximum": 1},
    "bool": {"type": "boolean"},
    "str": {"type": "string"},
}


def for_editors(schema: dict[str, Any]) -> dict[str, Any]:
    """Complete the schema that pydantic generates from `Config`."""
    schema["properties"].pop("run", None)
    definitions = schema["$defs"]
    classes = {_class_of(schema, section): kind for section, kind in SECTIONS.items() if section != "run"}
    classes |= {kind.__name__: kind for kind in (*sections_of(Campaign).values(), Condition)}
    for name, kind in classes.items():
        _complete(definitions[name]["properties"], kind)
    campaign = definitions["Campaign"]
    campaign["patternProperties"] = {DOTTED["pattern"]: {"type": "object"}}  # [campaign.<launcher>]
    condition = definitions["Condition"]["properties"]
    for section in RUN_SECTIONS:
        described = condition[section]["description"]
        condition[section] = {"$ref": f"#/$defs/{_class_of(schema, section)}", "description": described}
    return {"$schema": _DRAFT, **_without_null(schema), "title": "retrain campaign"}


def _complete(properties: dict[str, Any], section: Any) -> None:
    """Add what pydantic does not know to the schema: names of plugins, and what a key affects."""
    for name, key in keys_of(section).items():
        schema = properties[name]
        schema["description"] = key.help
        short, _, inside = key.means.stands_for.partition(".")
        stands_for = keys_of(SECTIONS[short])[inside] if short else key
        kind = stands_for.means.plugin
        if kind:
            _name_plugins(schema["items"] if schema.get("type") == "array" else schema, kind)
        if kind in RUN_KINDS and key.means.params:
            _name_parameters(properties[key.means.params], kind)


def _class_of(schema: dict[str, Any], section: str) -> str:
    found = schema["properties"][section]
    reference = found.get("$ref") or next(one["$ref"] for one in found["anyOf"] if "$ref" in one)
    return str(reference).rpartition("/")[2]


def _name_plugins(key: dict[str, Any], kind: str) -> None:
    key.pop("type", None)
    key["anyOf"] = [{"enum": registry.names(kind)}, DOTTED]


def _name_parameters(key: dict[str, Any], kind: str) -> None:
    """Add every key of the built-in plugins of a kind to the schema, with the plugin's name."""
    found: dict[str, dict[str, Any]] = {}
    for name in registry.built_in_names(kind):
        for parameter, described in _parameters(kind, name):
            known = found.setdefault(parameter, {"anyOf": [], "description": ""})
            kind_of_value = {k: v for k, v in described.items() if k != "description"}
            if kind_of_value not in known["anyOf"]:
                known["anyOf"].append(kind_of_value)
            use = f"{name}: {described['description']}" if "description" in described else name
            known["description"] += f"; {use}" if known["description"] else use
    key["properties"] = dict(sorted(found.items()))


def _parameters(kind: str, name: str) -> Iterable[tuple[str, dict[str, Any]]]:
    if kind == "backends":
        yield from _backend_options(name)
        return
    for parameter in registry.parameters(kind, name) or ():
        yield parameter.name, _value(parameter.annotation)


def _backend_options(name: str) -> Iterable[tuple[str, dict[str, Any]]]:
    """Read a backend's options from the dataclass in the file that defines its `check_options`."""
    source = registry.home_of(f"retrain.backends.{name}", "check_options").read_text(encoding="utf-8")
    options = next(
        node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and "Options" in node.name
    )
    for field in options.body:
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            comment = source.splitlines()[(field.end_lineno or field.lineno) - 1].partition("  # ")[2]
            described = {"description": comment} if comment else {}
            yield field.target.id, _value(ast.unparse(field.annotation)) | described


def _value(annotation: str) -> dict[str, Any]:
    """Return the JSON Schema of a Python annotation; empty if it is not a plain value."""
    if annotation.startswith("Literal["):
        return {"enum": list(ast.literal_eval(f"({annotation[8:-1]},)"))}
    if annotation.startswith(("tuple[str", "list[str", "Sequence[str")):
        return {"type": "array", "items": {"type": "string"}}
    return dict(_TYPES.get(annotation, {}))


def _without_null(node: Any) -> Any:
    """Return a schema without null, which TOML does not have: a key without a value is left out."""
    if isinstance(node, list):
        return [_without_null(one) for one in node]
    if not isinstance(node, dict):
        return node
    kept = {
        key: _without_null(value) for key, value in node.items() if not (key == "default" and value is None)
    }
    several = [one for one in kept.get("anyOf", []) if one != {"type": "null"}]
    if len(several) == 1 and "anyOf" in kept:
        del kept["anyOf"]
        return several[0] | kept
    return kept | ({"anyOf": several} if several else {})
