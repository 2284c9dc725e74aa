"""The settings file of a run, written when the run starts and compared when it is resumed."""

import json
import platform
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import MappingProxyType
from typing import Any

from agentgym.errors.extras import DISTRIBUTION
from agentgym.files.disk import write_whole
from agentgym.files.foreign.content import read_object
from agentgym.files.foreign.values import number, text_of
from agentgym.files.names import command
from agentgym.hub import exists
from agentgym.seeds import VERSION as DERIVATION
from agentgym.types.env_version import EnvVersion, as_json

SETTINGS = "settings.json"
"""The file in the run's folder with every setting and the versions that the run started with."""
FORMAT = 2
"""Version of the setting names in that file. A run or evaluation with another version can't be resumed."""

MAY_DIFFER = (
    *("recipe", "output_dir", "resume", "max_steps", "save_every", "keep_checkpoints", "solved", "sandbox", "merge"),
    "probe_tolerance",
    *("ray", "cluster", "cluster.*"),
    *(
        "engine",
        "engine.*",
        "teacher_engine",
        "teacher_engine.*",
        "models.*.engine",
        "models.*.engine.*",
        "report_to",
        "eval_every",
    ),
    *("train.lr", "train.value_lr", "train.warmup_steps", "train.decay_steps", "train.decay", "train.grad_clip"),
    *("train.layout", "train.max_tokens_per_microbatch", "train.balance", "train.gradient_checkpointing"),
    *("train.threads", "train.device", "train.shard", "train.replicas", "train.offload"),
)
"""Settings that may change when a run is resumed. Every other setting changes the policy, the tasks or the random
draws.
"""
OF_EVALUATIONS = ("eval_tasks", "eval_rollouts", "eval_sampling", "eval_sampling.*", "eval_seed")
"""Settings that define an evaluation.

A resumed run can't change them if it makes evaluations and has already made some, because these are compared.
"""

FOLLOW_MODEL = (
    *("train.lr", "train.max_tokens_per_microbatch", "train.threads"),
    *("engine.context_tokens", "engine.threads"),
)
"""Settings whose default depends on the model and the machine. A resumed run keeps the values that it started with."""

PACKAGES = ("torch", "transformers", "peft", "numpy", "sglang")


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Return the fields of a config and of the configs in it as JSON values, by dotted names such as "train.lr".

    Existing paths become absolute.
    """
    found: dict[str, Any] = {}
    for field in fields(config):
        name, value = f"{prefix}{field.name}", getattr(config, field.name)
        if is_dataclass(value):
            found |= {name: type(value).__name__} | flat(value, f"{name}.")
        elif isinstance(value, Mapping) and any(map(is_dataclass, value.values())):
            found[name] = sorted(value)
            for key, part in value.items():
                found |= flat(part, f"{name}.{key}.")
        else:
            found[name] = json.loads(json.dumps(value, default=_plain))
    return found


def _plain(value: Any) -> str:
    return str(value.resolve() if isinstance(value, Path) and exists(value) else value)


def write_settings(folder: Path, config: Any, envs: Mapping[str, EnvVersion] = MappingProxyType({})) -> None:
    """Write every setting of the run, the versions of its envs and the package versions into its folder.

    If a run is resumed without evaluations, the settings and seed of its earlier evaluations stay in the file, so
    that later ones have to match them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    now = flat(config)
    evaluated: Mapping[str, Any] = {name: value for name, value in now.items() if _is_of(name, OF_EVALUATIONS)}
    seed: int | None = config.held_out_seed
    if not config.eval_tasks:
        before = _evaluated(folder)
        evaluated, seed = (before, begun_eval_seed(folder)) if before else ({}, seed)
    content = {
        "format": FORMAT,
        "versions": versions(),
        "seeds": {"derivation": DERIVATION, "evaluation": seed},
        "envs": as_json(envs),
        "evaluations": evaluated,
        "settings": now,
    }
    write_whole(folder / SETTINGS, json.dumps(content, indent=2) + "\n")


def begun_defaults(folder: Path) -> dict[str, Any]:
    """Return the values that the run in `folder` found for `FOLLOW_MODEL`; {} if its settings can't be read."""
    try:
        begun = _begun(folder)
    except ValueError:
        return {}
    return {name: begun[name] for name in FOLLOW_MODEL if begun.get(name) is not None}


def with_defaults(content: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    """Return a settings file's content with the values found for `FOLLOW_MODEL`.

    Args:
        content: The content of the file.
        found: The values, by the setting's name.
    """
    return {**content, "settings": {**content["settings"], **found}}


def versions() -> dict[str, str | None]:
    """Return the versions of Python and the packages that affect metrics; None for a missing package."""
    return {
        "python": platform.python_version(),
        "agentgym": _version(DISTRIBUTION),
        **{name: _version(name) for name in PACKAGES},
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def other_version(folder: Path) -> str | None:
    """Return the agentgym version in the settings of `folder`, or None if it is this one or can't be read."""
    try:
        found = _kept(folder)["versions"]["agentgym"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) and found != _version(DISTRIBUTION) else None


def begun_envs(folder: Path) -> dict[str, EnvVersion]:
    """Return the env versions of the last start or resumption of the run in `folder`, or {} if they can't be read."""
    try:
        return {name: _env_version(of) for name, of in _kept(folder)["envs"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _env_version(kept: Mapping[str, Any]) -> EnvVersion:
    found = EnvVersion(**kept)
    if not isinstance(found.where, str) or not all(isinstance(of, str | None) for of in (found.version, found.sha256)):
        raise TypeError("envs: where, version and sha256 must be strings")
    return found


def _kept(folder: Path) -> dict[str, Any]:
    """Read the settings file of the run or evaluation in `folder`, without trusting its content."""
    return read_object(folder / SETTINGS, within=folder)


def begun_model(folder: Path) -> str | None:
    """Return the model of the run or evaluation in `folder`, or None if it can't be read."""
    try:
        kept = _kept(folder)
        found = (kept.get("settings") or kept).get("model")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None


def begun_seed(folder: Path) -> int:
    """Return the seed of the run or evaluation in `folder`, or 0 if it can't be read."""
    try:
        kept = _kept(folder)
        found = (kept.get("settings") or kept).get("seed")
    except (OSError, ValueError, AttributeError):
        return 0
    return found if isinstance(found, int) else 0


def begun_env(folder: Path) -> tuple[str | dict[str, float], dict[str, Any]]:
    """Return the env of the run or evaluation in `folder`, and its parameters.

    A mixture is returned as its members and their weights.

    Raises:
        ValueError: If the settings don't name an env.
    """
    try:
        kept = _kept(folder)
        begun = kept.get("settings") or kept
        env = begun["env"]
        if not isinstance(env, str):
            env = {text_of(name, "env"): number(weight, f"env.{name:.80}") for name, weight in env.items()}
        return env, dict(begun.get("env_args") or {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"env: {folder / SETTINGS} names no env; name one") from None


def rescored_from(folder: Path) -> str | None:
    """Return the folder whose rollouts were rescored into `folder`, or None if `folder` isn't from a rescore."""
    try:
        found = _kept(folder)["rescored"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(found)


def begun_steps(folder: Path, otherwise: int) -> int:
    """Return the step count that the run in `folder` last started or resumed with, or `otherwise` if unreadable."""
    try:
        return int(_begun(folder)["max_steps"])
    except (ValueError, KeyError, TypeError):
        return otherwise


def begun_eval_seed(folder: Path) -> int | None:
    """Return the seed of the evaluations in `folder`.

    Returns None if it can't be read, or if the agentgym version that wrote it derives seeds in another way than this
    one.
    """
    try:
        kept = _kept(folder)["seeds"]
        return int(kept["evaluation"]) if kept["derivation"] == DERIVATION else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def refuse_other_format(folder: Path) -> None:
    """Refuse to resume a folder whose setting names or derivation of seeds differ from those of this agentgym version.

    Raises:
        ValueError: If another version of agentgym started the run; the message says what to do.
    """
    try:
        kept = _kept(folder)
        form, derivation = kept.get("format"), kept["seeds"]["derivation"]
    except (OSError, ValueError):  # the next reader reports why
        return
    except (KeyError, TypeError):
        form, derivation = FORMAT, None
    if form != FORMAT:
        raise ValueError(
            f"resume: {folder} was started by an agentgym version with other setting names; finish it with that "
            "version, or start over in another folder"
        )
    if derivation != DERIVATION:
        raise ValueError(
            f"resume: {folder} was started by an agentgym version that derives seeds differently, so the remaining "
            "steps would use other random draws; finish it with that version, or start over in another folder"
        )


def _begun(folder: Path) -> Mapping[str, Any]:
    """Read the settings of the run in `folder`.

    Raises:
        ValueError: If the folder has no readable run settings.
    """
    try:
        begun: Mapping[str, Any] = dict(_kept(folder)["settings"])
    except FileNotFoundError:
        raise ValueError(f"resume: {folder} is not the folder of a run: there is no {folder / SETTINGS}") from None
    except KeyError:
        raise ValueError(
            f"resume: {folder} is not the folder of a run: its {SETTINGS} has no run settings; resume an evaluation "
            f"with `agentgym eval ... --output-dir {shlex.quote(str(folder))} --resume`"
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"resume: {folder} is not the folder of a run: its {SETTINGS} cannot be read ({error})"
        ) from None
    return begun


def is_run(folder: Path) -> bool:
    """Return whether `folder` has the settings of a run, not of an evaluation or anything else."""
    try:
        return "recipe" in _begun(folder)
    except ValueError:
        return False


def refuse_changes(folder: Path, config: Any) -> None:
    """Refuse to resume the run in `folder` with other settings.

    Raises:
        ValueError: If a setting changed; the message names each changed field and both values.
    """
    begun = {**_begun(folder), **_evaluated(folder)}
    now = flat(config)
    compared = bool(begun.get("eval_tasks") and now.get("eval_tasks"))
    free = MAY_DIFFER if compared else (*MAY_DIFFER, *OF_EVALUATIONS)
    changed = [
        f"{name}: the run has {json.dumps(begun.get(name))}, not {json.dumps(now.get(name))}"
        for name in sorted(begun.keys() | now.keys())
        if begun.get(name) != now.get(name) and not _is_of(name, free)
    ]
    if changed:
        raise ValueError(
            f"resume: the run in {folder} was started with other settings; {'; '.join(changed)}. Resume it with those "
            f"in its {SETTINGS}, or start a new run {_start_from(folder, begun)}in another output_dir"
        )


def _evaluated(folder: Path) -> Mapping[str, Any]:
    """Return the settings of the evaluations that the run in `folder` made, or {} if it made none."""
    try:
        return dict(_kept(folder).get("evaluations") or {})
    except (OSError, ValueError, TypeError):
        return {}


def _is_of(name: str, settings: Sequence[str]) -> bool:
    return any(fnmatchcase(name, each) for each in settings)


def _start_from(folder: Path, begun: Mapping[str, Any]) -> str:
    """Return the part of a message that says how to start a new run from the trained model or adapter in `folder`.

    Returns "" if the run has written neither yet.
    """
    if (folder / "model").is_dir() and begun.get("train.method") == "full":
        return f"from its trained model, model {folder / 'model'}, "
    if (folder / "adapter").is_dir():
        return f"from its trained adapter: `{command('merge', folder / 'adapter', 'MODEL')}`, then model MODEL, "
    return ""
