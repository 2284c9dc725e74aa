"""Schemas with patterns that cannot be matched in linear time: how they are simplified, and what they then allow."""

from importlib.util import find_spec
from typing import Any

import pytest

from agentgym.tools.hard_patterns import without_hard_patterns

pytestmark = pytest.mark.skipif(find_spec("jsonschema") is None, reason="needs the package jsonschema")

HARD, EASY = "(?=a)b", "^a+$"
TEXT = {"type": "string"}


def an_object(**keywords: Any) -> dict[str, Any]:
    return {"type": "object", **keywords}


def test_a_schema_without_hard_patterns_is_unchanged() -> None:
    schema = an_object(
        properties={"q": {"pattern": EASY}, "pattern": TEXT, "not": TEXT, "n": {"enum": [{"pattern": HARD}]}},
        patternProperties={EASY: TEXT},
        additionalProperties=False,
        oneOf=[{"required": ["q"]}],
    )
    assert without_hard_patterns(schema) == (schema, (), False)


def test_hard_patterns_are_removed_and_their_fields_named_once() -> None:
    schema = an_object(
        properties={
            "q": TEXT | {"pattern": HARD},
            "both": {"anyOf": [{"pattern": HARD}, {"pattern": HARD}, {"pattern": EASY}]},
            "below": an_object(properties={"deep": {"items": {"pattern": HARD, "minLength": 1}}}),
        },
        **{"$defs": {"word": {"pattern": HARD}}},
    )
    relaxed, fields, allows_all = without_hard_patterns(schema)
    assert fields == ("q", "both", "below.deep", "word")
    assert not allows_all
    assert relaxed == an_object(
        properties={
            "q": TEXT,
            "both": {"anyOf": [{}, {}, {"pattern": EASY}]},
            "below": an_object(properties={"deep": {"items": {"minLength": 1}}}),
        },
        **{"$defs": {"word": {}}},
    )


def test_without_hard_name_patterns_additional_properties_are_allowed() -> None:
    for rest in ("additionalProperties", "unevaluatedProperties"):
        schema = an_object(patternProperties={HARD: TEXT, EASY: TEXT | {"pattern": HARD}}, **{rest: False})
        relaxed, fields, _ = without_hard_patterns(an_object(properties={"of": schema}))
        assert fields == ("of.^a+$", "of")
        assert relaxed["properties"]["of"] == an_object(patternProperties={EASY: TEXT})
    relaxed, fields, _ = without_hard_patterns(an_object(patternProperties={HARD: TEXT}, additionalProperties=False))
    assert (relaxed, fields) == (an_object(patternProperties={}), ("arguments",))


@pytest.mark.parametrize("keyword", ["not", "oneOf", "if", "contains"])
def test_a_relaxed_schema_inside_a_negation_or_choice_allows_everything(keyword: str) -> None:
    below: Any = {"pattern": HARD}
    schema = an_object(properties={"q": {keyword: [below] if keyword == "oneOf" else below}})
    assert without_hard_patterns(schema) == (an_object(), ("q",), True)
