"""The settings of a run in its folder: written when it begins, and compared when it is resumed."""

import json
import platform
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
from agentgym.seeds import VERSION as DERIVATION
from agentgym.types.env_version import EnvVersion, as_json

SETTINGS = "settings.json"
"""The file in the run's folder that holds every setting, and the versions of what it was begun with."""
FORMAT = 2
"""The version of the names in that file; what was begun with another one is not resumed."""

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
"""Settings that a resumed run may have otherwise than it was begun with; every other one makes another policy, other
tasks or other draws."""
OF_EVALUATIONS = ("eval_tasks", "eval_rollouts", "eval_sampling", "eval_sampling.*", "eval_seed")
"""Settings that make another evaluation. A resumed run whose evaluations are compared with earlier ones keeps them."""

PACKAGES = ("torch", "transformers", "peft", "numpy", "sglang")


def flat(config: Any, prefix: str = "") -> dict[str, Any]:
    """Give the fields of nested dataclasses under dotted names, in JSON's types; a folder as its whole path."""
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
    return str(value.resolve() if isinstance(value, Path) and value.exists() else value)


def write_settings(folder: Path, config: Any, envs: Mapping[str, EnvVersion] = MappingProxyType({})) -> None:
    """Write every setting of the run, what its envs are, and the versions that it runs with into its folder.

    Of its evaluations, the settings and the seed are kept if it is resumed without any: later ones are held to them.
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


def versions() -> dict[str, str | None]:
    """Give the versions of Python and of the packages that a run's metrics depend on; None for one that is missing."""
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


def begun_envs(folder: Path) -> dict[str, EnvVersion]:
    """Return what the envs of the run in `folder` were when it was last begun or resumed; none where it is not said."""
    try:
        return {name: _env_version(of) for name, of in _kept(folder)["envs"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _env_version(kept: Mapping[str, Any]) -> EnvVersion:
    found = EnvVersion(**kept)
    if not isinstance(found.where, str) or not all(isinstance(of, str | None) for of in (found.version, found.sha256)):
        raise TypeError("envs: where, version and sha256 must be texts")
    return found


def _kept(folder: Path) -> dict[str, Any]:
    """Read the settings of the run or the evaluation in `folder`, whoever has made it."""
    return read_object(folder / SETTINGS, within=folder)


def begun_model(folder: Path) -> str | None:
    """Return the model of the run or the evaluation in `folder`; None where it is not said."""
    try:
        kept = _kept(folder)
        found = (kept.get("settings") or kept).get("model")
    except (OSError, ValueError, AttributeError):
        return None
    return found if isinstance(found, str) else None


def begun_seed(folder: Path) -> int:
    """Return the seed of the run or the evaluation in `folder`; 0 if nothing says it."""
    try:
        kept = _kept(folder)
        found = (kept.get("settings") or kept).get("seed")
    except (OSError, ValueError, AttributeError):
        return 0
    return found if isinstance(found, int) else 0


def begun_env(folder: Path) -> tuple[str | dict[str, float], dict[str, Any]]:
    """Return the env of the run or the evaluation in `folder`, or the members of its mixture, and its parameters.

    :raises ValueError: where its settings do not say it.
    """
    try:
        kept = _kept(folder)
        begun = kept.get("settings") or kept
        env = begun["env"]
        if not isinstance(env, str):
            env = {text_of(name, "env"): number(weight, f"env.{name:.80}") for name, weight in env.items()}
        return env, dict(begun.get("env_args") or {})
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"env: {folder / SETTINGS} names none; name the env") from None


def rescored_from(folder: Path) -> str | None:
    """Return the folder whose rollouts were scored again in this one; None for one that was played."""
    try:
        found = _kept(folder)["rescored"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(found)


def begun_steps(folder: Path, otherwise: int) -> int:
    """Return the steps of the run in `folder`, as it was last begun or resumed; `otherwise` where none can be read."""
    try:
        return int(_begun(folder)["max_steps"])
    except (ValueError, KeyError, TypeError):
        return otherwise


def begun_eval_seed(folder: Path) -> int | None:
    """Return the seed of the evaluations in `folder`; None where it is not said, or seeds were derived otherwise."""
    try:
        kept = _kept(folder)["seeds"]
        return int(kept["evaluation"]) if kept["derivation"] == DERIVATION else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def refuse_other_format(folder: Path) -> None:
    """Refuse to resume what is in `folder` if its settings have other names, or its seeds were derived in another way.

    Raises:
        ValueError: It was begun by another version of agentgym; the message says what to do.
    """
    try:
        kept = _kept(folder)
        form, derivation = kept.get("format"), kept["seeds"]["derivation"]
    except (OSError, ValueError):  # what reads it next says why
        return
    except (KeyError, TypeError):
        form, derivation = FORMAT, None
    if form != FORMAT:
        raise ValueError(
            f"resume: {folder} was begun by an agentgym whose settings have other names; finish it with that agentgym, "
            "or begin anew in another folder"
        )
    if derivation != DERIVATION:
        raise ValueError(
            f"resume: {folder} was begun by an agentgym that derives seeds in another way, and the rest would be "
            "played with other draws; finish it with that agentgym, or begin anew in another folder"
        )


def _begun(folder: Path) -> Mapping[str, Any]:
    """Read the settings of the run in `folder`; ValueError where there is none."""
    try:
        begun: Mapping[str, Any] = dict(_kept(folder)["settings"])
    except FileNotFoundError:
        raise ValueError(f"resume: {folder} is not the folder of a run: there is no {folder / SETTINGS}") from None
    except KeyError:
        raise ValueError(
            f"resume: {folder} is not the folder of a run: its {SETTINGS} holds no settings of one; an evaluation is "
            f"resumed by `agentgym eval ... --output-dir {folder} --resume`"
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"resume: {folder} is not the folder of a run: its {SETTINGS} cannot be read ({error})"
        ) from None
    return begun


def is_run(folder: Path) -> bool:
    """Return whether the settings in `folder` are those of a run, rather than of an evaluation or of something else."""
    try:
        return "recipe" in _begun(folder)
    except ValueError:
        return False


def refuse_changes(folder: Path, config: Any) -> None:
    """Raise ValueError, naming each field and both values, where the run in `folder` was begun with other settings."""
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
            f"resume: the run in {folder} was begun with other settings; {'; '.join(changed)}. Resume it with those of "
            f"its {SETTINGS}, or start a new run {_start_from(folder, begun)}in another output_dir"
        )


def _evaluated(folder: Path) -> Mapping[str, Any]:
    """Return the settings of the evaluations that the run in `folder` has made; none if it has made none."""
    try:
        return dict(_kept(folder).get("evaluations") or {})
    except (OSError, ValueError, TypeError):
        return {}


def _is_of(name: str, settings: Sequence[str]) -> bool:
    return any(fnmatchcase(name, each) for each in settings)


def _start_from(folder: Path, begun: Mapping[str, Any]) -> str:
    """Say how a run goes on from what the one in `folder` has trained; nothing where it has written nothing yet."""
    if (folder / "model").is_dir() and begun.get("train.method") == "full":
        return f"from what it trained, model {folder / 'model'}, "
    if (folder / "adapter").is_dir():
        return f"from what it trained: `{command('merge', folder / 'adapter', 'MODEL')}`, then model MODEL, "
    return ""
