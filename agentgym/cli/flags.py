"""The flags of recipes and commands: tyro parses the words, and pydantic the values of a recipe's settings."""

import inspect
import io
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, suppress
from dataclasses import fields, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from traceback import walk_tb
from typing import Annotated, Any, NamedTuple, NoReturn, TypedDict, TypeVar, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError

from agentgym.cli.output import RefusedWords, stdout_read
from agentgym.config_fields import ALSO_CALLED, what_to_give
from agentgym.engines.custom import CustomEngineConfig
from agentgym.engines.sglang.config import SGLangConfig
from agentgym.engines.transformers.engine import TransformersConfig
from agentgym.environments.parameters import Parameter
from agentgym.errors import AgentGymError, EnvError
from agentgym.errors.extras import needs_extra
from agentgym.run.config import ModelRoleConfig, RunConfig
from agentgym.run.loop import is_first
from agentgym.run.tasks.envs import env_parameters, member_name, parameter_in, read_env_arguments
from agentgym.store.run_settings import begun_steps
from agentgym.store.schema import StoreError

T = TypeVar("T")

PACKAGE = Path(__file__).parents[1]
ENV, HELP = "--env.", ("-h", "--help")
ENGINES = {"transformers": TransformersConfig, "sglang": SGLangConfig}
"""Engines by their name in `--engine`."""
NO_ENV = "ENV"
"""Placeholder for the env in the help of a command line that names no env."""
NO_MODEL = "MODEL"
"""Placeholder for the model of a role that the recipe lacks, until the flag for that model is parsed."""
ROLE = re.compile(r"--models[.]([\w-]+)")
"""Prefix of a model role's flags, with the role's name."""
AT_A_URL = re.compile(r"--models[.]([\w-]+)[.](url|api[-_]key[-_]env)(=|$)")
"""Flags of a model role at a chat endpoint, which an evaluation has and a run doesn't."""
KIND = "kind"
"""Key of the flag that selects the kind of a part, such as `--engine sglang`.

In the tree of a part's flags, it is next to the fields of all kinds.
"""
ABOUT_ENGINES = (
    "Engines: `--engine transformers` runs the model in this process, `--engine sglang` uses SGLang servers, and "
    "`--engine package.module:Class` your own engine. Each has its own settings: `--engine sglang --help` lists "
    "SGLang's."
)
"""The help's text about the engines whose settings it doesn't list."""
BOUNDS = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
"""Words for the bounds of a number in JSON Schema."""
KINDS = {"integer": "INT", "number": "FLOAT", "boolean": "{true,false}", "string": "STR"}
"""JSON Schema types as the help displays them."""
NAMED = re.compile(r"([\w.-]+(?:, [\w.-]+)*): ")
"""The fields named at the start of a config's ValueError."""
_TITLE_OR_END = re.compile(r"[╭╰]| \S")
_RULE = re.compile(r"[─-]+")
_TYPE = re.compile(r" into \w+ type typing\..*")
_NEEDED = re.compile(r"Missing from .*?: ((?:--\S+ )?\S+) (.*?)(?: \(required\)|$)")
"""What tyro says about missing arguments: the first one's name, or its flag and the form of its value, and its help."""


class Given(NamedTuple):
    """The settings given on a command line."""

    settings: dict[str, Any]
    """The words after each flag, by field: a dict for a part that has fields, and True or False for a switch."""
    env: dict[str, str]
    """The values of `--env.NAME`, by NAME."""
    help: bool
    """Whether help was requested."""


def read_words(recipe: RunConfig, words: Sequence[str]) -> Given:
    """Parse the flags of a recipe.

    Each NAME of `--models.NAME` is a model role, even if the recipe has none of this name.

    Raises:
        RefusedWords: If a flag doesn't exist or is a setting after `--`; the message names it.
    """
    import tyro

    typed = {match[1].replace("-", "_"): match[1] for word in words if (match := ROLE.match(word))}
    new = typed.keys() - {name.replace("-", "_") for name in recipe.models}
    named = {typed[role]: ModelRoleConfig(model=NO_MODEL) for role in sorted(new)}
    tree = _tree(type(recipe), replace(recipe, models={**recipe.models, **named}))
    with needs_extra():  # tyro looks for torch
        found, rest = tyro.cli(
            _typed(tree), default=_switches(tree), args=words, return_unknown_args=True, add_help=False
        )
    others = [word for word in rest if word not in HELP]
    _refuse_urls(others)
    below = open_flags(others, (ENV,), known=_known(recipe, tree))
    env = {flag.removeprefix(ENV): text for flag, text in below.items()}
    return Given(_typed_alone(found, tree), env, help=len(others) < len(rest))


def settings_of(recipe: RunConfig, given: Given, *, prog: str | None = None, about: str = "") -> RunConfig:
    """Return the recipe with the command line's settings; if it requests help, print that and exit with 0.

    `--env.NAME VALUE` sets a parameter of the env, in addition to those that the recipe sets; `--env.MEMBER.NAME VALUE`
    sets one of a mixture's members, and `--env.MEMBER VALUE` a member's weight. Settings that `--eval-sampling` leaves
    out are as in training.

    A resumed run without `--max-steps` keeps the number of steps that it was started with. Without `--output-dir`, it
    continues in the folder that `--resume` names.

    Args:
        recipe: The recipe.
        given: The command line's settings.
        prog: The program's name in the help; None takes it from the command line.
        about: The text at the start of the help.

    Raises:
        RefusedWords: If a flag is refused; the message names it.
    """
    try:
        if "resume" in given.settings and "output_dir" not in given.settings:
            recipe = replace(recipe, output_dir=None)  # a resumed run continues in its own folder
        sampling = given.settings.get("eval_sampling")
        if "env" in given.settings:
            recipe = _with_other_env(recipe, _value("env", _hints(RunConfig)["env"], given.settings["env"], recipe.env))
        run = _applied(
            recipe, {name: of for name, of in given.settings.items() if name not in ("env", "eval_sampling")}
        )
        if sampling:
            run = _applied(replace(run, eval_sampling=run.held_out_sampling), {"eval_sampling": sampling})
        if run.resume is not None and "max_steps" not in given.settings:
            begun = begun_steps(run.resume, run.max_steps)
            if begun != run.max_steps and is_first():
                other = f"--max-steps {run.max_steps} uses the recipe's"
                sys.stderr.write(
                    f"{run.name}: max_steps: continuing to {begun} steps, as when the run last started; {other}\n"
                )
            run = replace(run, max_steps=begun)
        run = _with_env(run, given.env)
    except ValueError as error:
        raise RefusedWords(_with_flags(str(error), given.settings)) from None
    if given.help:
        print_help(run, prog, about)
    return run


def print_help(run: RunConfig, prog: str | None, about: str) -> NoReturn:
    """Print every setting with its value in this run, and exit with 0; for `prog` and `about`, see `settings_of`."""
    import tyro

    try:
        with needs_extra():
            parameters = [
                f"--env.{name} {_said(one, run.env_args.get(name, one.value))}"
                for name, one in (env_parameters(run.env) if run.env != NO_ENV else {}).items()
            ]
    except (ValueError, EnvError) as error:
        parameters = []
        sys.stderr.write(f"{run.name}: the env's parameters cannot be listed: {error}\n")
    listed = "\n".join(["Parameters of the env (its docstring has more):", *parameters]) if parameters else ""
    with stdout_read():
        tyro.cli(
            RunConfig,
            prog=prog,
            args=["--help"],
            default=replace(run, eval_sampling=run.held_out_sampling),
            description="\n\n".join(filter(None, [inspect.cleandoc(about), ABOUT_ENGINES, listed])),
            config=(tyro.conf.AvoidSubcommands,),
        )
    raise AssertionError


def _said(parameter: Parameter[Any], value: Any) -> str:
    """Return a parameter's type, description, bounds and value."""
    schema = parameter.schema()
    choices = schema.get("enum") or [schema[key] for key in ("const",) if key in schema]
    kind = "{" + ",".join(map(str, choices)) + "}" if choices else KINDS.get(schema.get("type", ""), "VALUE")
    bounds = ", ".join(f"{word} {schema[key]}" for key, word in BOUNDS.items() if key in schema)
    return " ".join(filter(None, [kind, parameter.doc, f"({bounds})" if bounds else "", f"(default: {value})"]))


def open_flags(rest: Sequence[str], prefixes: tuple[str, ...], *, known: Iterable[str]) -> dict[str, str]:
    """Return the values of the flags with these prefixes among the words that tyro left over.

    tyro doesn't know these flags, because their names depend on the env. A flag that it does know is left over only if
    it comes after `--`.

    Args:
        rest: The words that tyro left over.
        prefixes: The prefixes of the flags.
        known: The flags that tyro knows, one of which an error may suggest.

    Raises:
        RefusedWords: If a word isn't such a flag, or if a flag has no value. For an unknown flag, the message suggests
            a known one.
    """
    found: dict[str, str] = {}
    words = iter(rest)
    for word in words:
        flag, equals, text = word.partition("=")
        if not flag.startswith("-"):
            raise RefusedWords(f"unexpected argument {word!r}")
        if not flag.startswith(prefixes):
            flags = sorted(known, key=_nearness)
            if flag.replace("_", "-") in (*flags, *HELP):
                raise RefusedWords(f"{flag}: expected before `--`, which ends the options; move the option there")
            meant = _meant(flag, flags)
            raise RefusedWords(f"there is no option {flag}" + (f"; did you mean {meant}?" if meant else ""))
        value = text if equals else next(words, "--")
        if not equals and value.startswith("--"):
            raise RefusedWords(f"{flag}: expected a value")
        found[flag] = value
    return found


def _refuse_urls(words: Iterable[str]) -> None:
    """Raise RefusedWords that explains how a run queries a model at a URL, if a word is a flag for that."""
    for word in words:
        if (match := AT_A_URL.match(word)) is not None:
            flag, name = word.partition("=")[0], match[1]
            raise RefusedWords(
                f"{flag}: only `agentgym eval` and `rescore` have this flag; in training, a function opens the "
                "endpoint: put `import agentgym as ag` and `def open_model(model): return ag.Endpoint(URL, "
                "model=str(model))` into a file such as my_models.py, and pass "
                f"--models.{name}.model MODEL --models.{name}.engine my_models:open_model"
            )


def without_flags(words: Iterable[str], valued: Sequence[str], *, switches: Sequence[str] = ()) -> list[str]:
    """Return a command line's words without some flags, which may be typed with hyphens or underscores.

    Args:
        words: The words.
        valued: Flags to remove together with their values.
        switches: Flags to remove that have no value.
    """
    kept, rest = list[str](), iter(words)
    for word in rest:
        flag, equals, _ = word.partition("=")
        typed = flag.replace("_", "-")
        if typed in valued and not equals:
            next(rest, None)
        elif typed not in (*valued, *switches):
            kept.append(word)
    return kept


def _known(recipe: RunConfig, tree: Mapping[str, Any]) -> Iterator[str]:
    """Yield the flags of a recipe and of its env's parameters."""
    yield from _names(tree)
    with suppress(ValueError, AgentGymError):  # an env that can't be found is refused later
        yield from (f"{ENV}{name}".replace("_", "-") for name in env_parameters(recipe.env))


def _nearness(flag: str) -> tuple[int, bool, str]:
    """Return a sort key for suggestions: first the run's own flags, then those of training, then all others."""
    return flag.count("."), not flag.startswith("--train."), flag


def _meant(flag: str, known: Sequence[str]) -> str | None:
    """Return the known flag that an unknown one probably means, or None.

    It is the flag whose setting has this name in another library, else one with the same last part, or a similar one.
    """
    name = flag.rpartition(".")[2].removeprefix("--").replace("-", "_")
    for typed in (ALSO_CALLED.get(name, name), name):
        named = [each for each in known if each.rpartition(".")[2].removeprefix("--") == typed.replace("_", "-")]
        if named:
            return named[0]
    return next(iter(get_close_matches(flag, known, n=1)), None)


def _tree(kind: type, now: Any) -> dict[str, Any]:
    """Return a config's flags as a tree, by field.

    The value of a part is its own tree, that of a switch is True or False, and that of any other field is None.

    Args:
        kind: The config's type.
        now: The config, from which the values of the switches and the names of the model roles are taken. None if the
            recipe has no such config.
    """
    tree: dict[str, Any] = {}
    for name, hint in _hints(kind).items():
        value = getattr(now, name, None)
        parts = [part for part in (hint, *get_args(hint)) if isinstance(part, type) and is_dataclass(part)]
        if isinstance(value, Mapping) and ModelRoleConfig in (
            inner for part in get_args(hint) for inner in get_args(part)
        ):
            tree[name] = {key: _tree(type(part), part) for key, part in value.items()}
        elif parts:
            kinds = {KIND: None} if len(parts) > 1 else {}
            tree[name] = kinds | {of: flag for part in parts for of, flag in _tree(part, value).items()}
        else:
            tree[name] = value if hint is bool else None
    return tree


def _hints(kind: type) -> dict[str, Any]:
    return {field.name: field.type for field in fields(kind)}


def _typed(tree: Mapping[str, Any]) -> Any:
    """Return the flags as a type for tyro, so that it parses words and leaves out each flag that wasn't given."""
    import tyro

    types: dict[str, Any] = {
        name: _typed(flag) if isinstance(flag, Mapping) else tuple[str, ...] if flag is None else bool
        for name, flag in tree.items()
    }
    if KIND in types:
        types[KIND] = Annotated[types[KIND], tyro.conf.arg(name="")]
    return TypedDict("Flags", types, total=False)  # type: ignore[operator]


def _typed_alone(found: Mapping[str, Any], tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return only the flags that were typed: no switch with its old value, and no part of which no flag was typed."""
    typed = {name: _typed_alone(of, tree[name]) if isinstance(of, Mapping) else of for name, of in found.items()}
    return {name: of for name, of in typed.items() if of != {} and (not isinstance(of, bool) or of != tree[name])}


def _switches(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return only the values of the switches."""
    return {
        name: _switches(flag) if isinstance(flag, Mapping) else flag for name, flag in tree.items() if flag is not None
    }


def _names(tree: Mapping[str, Any], prefix: str = "--") -> Iterator[str]:
    """Yield each flag as it is typed."""
    for name, flag in tree.items():
        typed = f"{prefix}{name.replace('_', '-')}"
        if isinstance(flag, Mapping):
            yield from _names(flag, f"{typed}.")
        else:
            yield typed.removesuffix(f".{KIND}")
        if isinstance(flag, bool):
            yield f"{prefix}no-{name.replace('_', '-')}"


def _applied(config: T, given: Mapping[str, Any]) -> T:
    """Return a config with new values of some fields.

    Args:
        config: The config.
        given: For each field that changes, the words that were typed after its flag, as in `Given.settings`.

    Raises:
        ValueError: If a value is wrong; the message names the field and the expected value.
    """
    hints = _hints(type(config))
    changes: dict[str, Any] = {}
    for name, words in given.items():
        now = getattr(config, name)
        if not isinstance(words, Mapping):
            changes[name] = words if isinstance(words, bool) else _value(name, hints[name], words, now)
        else:
            changes[name] = _below(name, _part, now, words)
    return replace(config, **changes)  # type: ignore[type-var]


def _below(name: str, applied: Callable[[Any, Mapping[str, Any]], T], now: Any, given: Mapping[str, Any]) -> T:
    """Return a part of a config as changed by `applied(now, given)`.

    Args:
        name: The name of the part, which is put in front of the fields that a ValueError names, as in `train.lr`.
        applied: Function that returns the part with new values.
        now: The part.
        given: The words for the part, by field.
    """
    try:
        return applied(now, given)
    except ValueError as error:
        raise ValueError(_under(name, str(error))) from None


def _part(now: Any, given: Mapping[str, Any]) -> Any:
    """Return a part of a config with new values of some fields.

    Args:
        now: The part: a config, configs of model roles by name, or the config of an engine.
        given: The words typed for the part, by field; under `KIND`, the words that select an engine.

    Raises:
        ValueError: If a field or an engine doesn't exist, or a value is wrong; the message names the field.
    """
    if isinstance(now, Mapping):
        return {**now, **{name: _below(name, _role, now.get(name), words) for name, words in given.items()}}
    if KIND in given:
        (kind, *more) = given[KIND] or ("",)
        if more or (kind not in ENGINES and ":" not in kind):
            got = " ".join(given[KIND])
            raise ValueError(f"{KIND}: expected {', '.join(ENGINES)} or package.module:Class, got {got!r}")
        made = ENGINES[kind]() if kind in ENGINES else CustomEngineConfig(name=kind)
        now = now if type(now) is type(made) and kind in (*ENGINES, getattr(now, "name", "")) else made
    known = {field.name for field in fields(now)}
    for name in given.keys() - known - {KIND}:
        owner = next((kind for kind, engine in ENGINES.items() if name in _hints(engine)), "module:Class")
        raise ValueError(f"{name}: {type(now).__name__} has no such setting, but the engine {owner} does")
    return _applied(now, {name: words for name, words in given.items() if name != KIND})


def _role(now: ModelRoleConfig | None, given: Mapping[str, Any]) -> ModelRoleConfig:
    """Return a model role with new values of some fields.

    Args:
        now: The model role in the recipe; None if the recipe has no such role.
        given: The words typed for the role, by field.

    Raises:
        ValueError: If neither the recipe nor the command line names its model.
    """
    if now is None and "model" not in given:
        raise ValueError("model: missing; give the model's folder or name")
    return _applied(now or ModelRoleConfig(model=NO_MODEL), given)


def _value(name: str, hint: Any, words: Sequence[str], now: Any) -> Any:
    """Parse the words after a flag as a value of the field's type.

    Args:
        name: The field.
        hint: The field's type.
        words: The words.
        now: The field's value in the recipe. If it is a dict, the words change or add entries of it, except that the
            words for `env` replace all envs.

    Raises:
        ValueError: If the words don't have the field's type; the message names the field.
    """
    if name == "env" and len(words) > 1:
        return _read(name, dict[str, float], _pairs(name, words, "an env and its weight"))
    if isinstance(now, Mapping) and name != "env":
        return {**now, **{key: _variable(text) for key, text in _pairs(name, words, "a name and a value").items()}}
    if isinstance(now, tuple):
        return _read(name, hint, tuple(words))
    if len(words) != 1:
        raise ValueError(f"{name}: " + (f"unexpected argument {words[1]!r}" if words else "expected a value"))
    return None if words[0] == "None" and type(None) in get_args(hint) else _read(name, hint, words[0])


def _read(name: str, hint: Any, given: str | tuple[str, ...] | Mapping[str, str]) -> Any:
    """Parse words as a value of the type `hint`.

    Raises:
        ValueError: If the words don't have the field's type; the message names the field.
    """
    adapter: TypeAdapter[Any] = TypeAdapter(hint, config=ConfigDict(allow_inf_nan=False))
    try:
        return adapter.validate_python(given) if isinstance(given, tuple) else adapter.validate_strings(given)
    except ValidationError as error:
        raise ValueError(what_to_give(name, given, error.errors(include_url=False))) from None


def _variable(text: str) -> bool | int | float | str:
    """Parse the value of an untyped variable: a bool for true and false, a number, or else text."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    adapter = TypeAdapter[int | float | str](int | float | str, config=ConfigDict(allow_inf_nan=False))
    found: int | float | str = adapter.validate_strings(text)
    return found


def _pairs(name: str, words: Sequence[str], of: str) -> dict[str, str]:
    """Return words in which names and values alternate as a dict.

    Args:
        name: The field, for the message.
        words: The words.
        of: What each pair of words is, for the message, such as "a name and a value".

    Raises:
        ValueError: If a pair is incomplete or a word starts two pairs; the message names the field.
    """
    pairs = dict(zip(words[::2], words[1::2], strict=False))
    if 2 * len(pairs) != len(words):
        raise ValueError(f"{name}: expected pairs of {of}, each with a different first word, got {' '.join(words)!r}")
    return pairs


def _with_other_env(recipe: RunConfig, env: Any) -> RunConfig:
    """Return the recipe with another env.

    Values of parameters are kept for envs that stay. The others are dropped, and each is reported on stderr.
    """
    before = {parameter_in(recipe.env, name): value for name, value in recipe.env_args.items()}
    kept = {named: value for named, value in before.items() if named[0] in ((env,) if isinstance(env, str) else env)}
    for each, name in sorted(before.keys() - kept.keys()) if is_first() else ():
        sys.stderr.write(f"{recipe.name}: env_args: {name} is dropped: it belongs to {each}, which --env replaces\n")
    env_args = {
        name if isinstance(env, str) else f"{member_name(each)}.{name}": kept[each, name] for each, name in kept
    }
    return replace(recipe, env=env, env_args=env_args)


def _with_env(run: RunConfig, texts: Mapping[str, str]) -> RunConfig:
    """Return the run with these values of its env's parameters and of its members' weights."""
    if not texts:
        return run
    weights = (
        {} if isinstance(run.env, str) else {member_name(name): name for name in run.env} | {n: n for n in run.env}
    )
    env: Any = run.env
    values: dict[str, str] = {}
    for name, text in texts.items():
        if name in weights:
            env = {**env, weights[name]: _read(name, float, text)}
        else:
            member, dot, parameter = name.rpartition(".")
            values[f"{member}{dot}{parameter.replace('-', '_')}"] = text
    try:
        arguments = read_env_arguments(env, values)
    except ValueError as error:
        raise ValueError(_under("env", str(error))) from None
    return replace(run, env=env, env_args={**run.env_args, **arguments})


def _under(part: str, message: str) -> str:
    """Prefix the fields that a message names with the name of the part that they belong to."""
    named = NAMED.match(message)
    if named is None:
        return f"{part}: {message}"
    names = [part if name == KIND else f"{part}.{name}" for name in named[1].split(", ")]
    return f"{', '.join(names)}: {message[named.end() :]}"


def _with_flags(message: str, typed: Mapping[str, Any]) -> str:
    """Replace the names of fields in a message with the flags that were typed for them."""
    named = NAMED.match(message)
    if named is None:
        return message
    flags = [flag for name in named[1].split(", ") for flag in _flags_of(re.sub(r"([.][0-9]+)+$", "", name), typed)]
    return f"{', '.join(flags)}: {message[named.end() :]}"


def _flags_of(field: str, typed: Mapping[str, Any]) -> list[str]:
    """Return the flag of a field, or the flags that were typed for its subfields if it has any."""
    here: Any = typed
    for part in field.split("."):
        here = here.get(part) if isinstance(here, Mapping) else None
    if isinstance(here, Mapping) and here.keys() - {KIND}:
        return [flag for name in here if name != KIND for flag in _flags_of(f"{field}.{name}", typed)]
    part, dot, name = field.rpartition(".")
    return [f"--{part}{dot}{'no-' if here is False else ''}{name}".replace("_", "-")]


def is_told(error: Exception) -> bool:
    """Return whether an error's message says what to do.

    That is so for agentgym's own error types, and for a ValueError or TypeError that agentgym raises and that names a
    field.
    """
    if isinstance(error, AgentGymError | StoreError):
        return True
    last = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)][-1:]
    ours = any(Path(file).is_relative_to(PACKAGE) for file in last)
    return ours and type(error) in (ValueError, TypeError) and NAMED.match(str(error)) is not None


def commanded(parser: Any, words: Sequence[str], **how: Any) -> tuple[Any, list[str]]:
    """Return tyro's result for a command's words, and the words it leaves over.

    tyro only prints its errors, in a frame. The first sentence of the printed text becomes the message.

    Args:
        parser: The function or type that tyro parses the words for.
        words: The words.
        how: Further arguments of `tyro.cli`.

    Raises:
        RefusedWords: If tyro refuses a word.
    """
    import tyro

    said = io.StringIO()
    try:
        with redirect_stderr(said):
            made, rest = tyro.cli(parser, args=words, return_unknown_args=True, **how)
    except SystemExit as stopped:
        if not stopped.code:
            raise
        raise RefusedWords(refusal(said.getvalue())) from None
    return made, rest


def refusal(said: str) -> str:
    """Return the first sentence of tyro's error message, without the frame around it.

    If stdout is ASCII, the frame has no sides.
    """
    lines: list[str] = []
    for line in said.splitlines():
        words = line.strip("│ ")
        if lines and _RULE.fullmatch(words):
            break
        if words and not _TITLE_OR_END.match(line) and not _RULE.fullmatch(words):
            lines.append(words)
    text = " ".join(lines)
    if (needed := _NEEDED.match(text)) is not None:
        return f"{needed[1]} is missing: {_plain(needed[2])}"
    return _plain(text.partition(" Got errors:")[0])


def _plain(text: str) -> str:
    """Return a sentence of tyro's in a form that fits into another sentence.

    The period is removed, and so is the name of a type from `typing` at the end. The first letter becomes lowercase,
    unless the second one is a capital, too.
    """
    first = text[:1] if text[1:2].isupper() else text[:1].lower()
    return _TYPE.sub("", first + text[1:]).removesuffix(".")
