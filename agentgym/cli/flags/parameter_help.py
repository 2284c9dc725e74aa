"""The parameters of a recipe's env, for its `--help`."""

import argparse
from collections.abc import Sequence
from dataclasses import field, fields, make_dataclass
from typing import Annotated, Any

from agentgym.environments.parameters import Parameter
from agentgym.run.config import RunConfig
from agentgym.run.tasks.envs import Envs, env_parameters

BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
"""Bounds of a number in JSON schema, and our words for them."""
KINDS = {"integer": "INT", "number": "FLOAT", "boolean": "{true,false}", "string": "STR"}
"""Types of JSON schema, as a command line shows them."""


def with_parameters(default: RunConfig, arguments: Sequence[str]) -> RunConfig:
    """Return a run of a class with the fields of `default` and one flag for each parameter of its env, to be shown.

    `--env` among the arguments names the env; without it the recipe's own is shown. A parameter's default is the
    recipe's value where the recipe sets it.

    :raises ValueError: for an env that is not known.
    :raises EnvError: where its module cannot be imported.
    """
    import tyro

    named = env_parameters(_env(default, arguments))
    if not named:
        return default
    flags = [
        (f"parameter_{number}", Annotated[str, tyro.conf.arg(name=name, metavar=_kind(one), help=_said(one))], shown)
        for number, (name, one) in enumerate(named.items())
        for shown in [field(default=str(default.env_args.get(name, one.value)))]
    ]
    made = make_dataclass("Parameters", flags, frozen=True, kw_only=True)
    part: Any = Annotated[made, tyro.conf.arg(name="env", help="Parameters of the env; its guide is its docstring.")]
    recipe = type(default)
    whole = make_dataclass(
        recipe.__name__,
        [("parameters", part, field(default_factory=made))],
        bases=(recipe,),
        namespace={"__doc__": recipe.__doc__},
        frozen=True,
        kw_only=True,
    )
    shown: RunConfig = whole(**{own.name: getattr(default, own.name) for own in fields(default)})
    return shown


def _env(default: RunConfig, arguments: Sequence[str]) -> Envs:
    if not isinstance(default.env, str):
        return default.env
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--env", default=default.env)
    named: str = parser.parse_known_args(arguments)[0].env
    return named


def _kind(parameter: Parameter[Any]) -> str:
    """Return a parameter's type: its choices, or what it is."""
    schema = parameter.schema()
    choices = schema.get("enum") or [schema[key] for key in ("const",) if key in schema]
    return "{" + ",".join(map(str, choices)) + "}" if choices else KINDS.get(schema.get("type", ""), "VALUE")


def _said(parameter: Parameter[Any]) -> str:
    """Return what its class says of a parameter, and its bounds."""
    schema = parameter.schema()
    bounds = ", ".join(f"{word} {schema[key]}" for key, word in BOUNDS.items() if key in schema)
    return " ".join(part for part in (parameter.doc, f"({bounds})" if bounds else "") if part)
