"""Values that a schema accepts, for as much of JSON Schema as the chart's has. (hypothesis-jsonschema does not run with today's hypothesis.)"""

import re
from typing import Any, TypeAlias

import hypothesis.strategies as st

Schema: TypeAlias = dict[str, Any]

KNOWN = {
    *("$ref", "type", "enum", "oneOf", "description", "minimum", "maximum", "pattern", "minLength", "maxLength"),
    *("items", "minItems", "properties", "required", "minProperties", "propertyNames", "additionalProperties"),
}
ITEMS_MAX = 3


def from_schema(schema: Schema, definitions: dict[str, Schema]) -> st.SearchStrategy[Any]:
    """Everything that `schema` accepts, but for long lists and objects."""
    if "$ref" in schema:
        return from_schema(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    assert schema.keys() <= KNOWN, f"new here: {schema.keys() - KNOWN}"
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "oneOf" in schema:
        return st.one_of(*(from_schema(one, definitions) for one in schema["oneOf"]))
    kinds = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return st.one_of(*(_of_kind(kind, schema, definitions) for kind in kinds))


def _of_kind(kind: str, schema: Schema, definitions: dict[str, Schema]) -> st.SearchStrategy[Any]:
    match kind:
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "integer":
            return st.integers(schema["minimum"], schema["maximum"])
        case "number":
            return st.floats(schema["minimum"], schema["maximum"], allow_subnormal=False)
        case "string":
            return _strings(schema)
        case "array":
            return st.lists(from_schema(schema["items"], definitions), min_size=schema.get("minItems", 0), max_size=ITEMS_MAX)
        case _:
            return _objects(schema, definitions)


def _strings(schema: Schema) -> st.SearchStrategy[str]:
    least, most = schema.get("minLength", 0), schema.get("maxLength", 40)
    if "pattern" not in schema:
        return st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Zl", "Zp")), min_size=least, max_size=most)
    matching = st.from_regex(re.compile(schema["pattern"], re.ASCII), fullmatch=True)
    return matching.filter(lambda text: least <= len(text) <= schema.get("maxLength", 1000))


def _objects(schema: Schema, definitions: dict[str, Schema]) -> st.SearchStrategy[dict[str, Any]]:
    named = {name: from_schema(inner, definitions) for name, inner in schema.get("properties", {}).items()}
    required = {name: named.pop(name) for name in schema.get("required", ())}
    least = schema.get("minProperties", 0)
    made = st.fixed_dictionaries(required, optional=named).filter(lambda drawn: len(drawn) >= least)
    more = schema.get("additionalProperties", True)
    if not isinstance(more, dict):
        return made
    names = from_schema(schema["propertyNames"], definitions)
    return st.dictionaries(names, from_schema(more, definitions), max_size=ITEMS_MAX)
