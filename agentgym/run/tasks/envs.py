"""The env class of a run: one env or a mixture, with parameter values and sandboxes."""

from collections.abc import Mapping
from typing import Any

from agentgym.config_fields import nearest
from agentgym.environments.env import Env
from agentgym.environments.mixture import Member, Mixture, mix
from agentgym.environments.parameters import Parameter, configured, parameters, read_arguments, variant
from agentgym.environments.registry import find_env
from agentgym.sandboxes.choose import Kind, as_kind
from agentgym.scheduling.accounting import Groups

Envs = str | Mapping[str, float]
"""An env by name, or the members of a mixture with their weights."""


def open_envs(envs: Envs, arguments: Mapping[str, Any], sandbox: Kind) -> type[Env[Any]]:
    """Return the env class of a run, with these parameter values.

    Args:
        envs: The env, or the members of a mixture.
        arguments: Parameter values by name, or by MEMBER.PARAMETER for a mixture.
        sandbox: In a mixture, a kind other than "auto" replaces the sandbox of each member that has one. A single env
            is returned with the sandbox that it declares, and `open_collector` applies the kind.

    Raises:
        ValueError: If the env doesn't declare a parameter, or if an argument names an env that isn't a member.
    """
    if isinstance(envs, str):
        return configured(find_env(envs), arguments, prefix="env_args.")
    members = _members(envs)
    given = _by_member(members, arguments, "env_args.")
    made = {
        name: configured(env, given.get(name, {}), prefix=f"env_args.{name}.") for name, (env, _) in members.items()
    }
    return mix({name: Member(_in_sandbox(env, sandbox), members[name][1]) for name, env in made.items()})


def read_env_arguments(envs: Envs, texts: Mapping[str, str]) -> dict[str, Any]:
    """Parse the values of an env's parameters from command-line texts.

    Raises:
        ValueError: As in `open_envs`.
    """
    if isinstance(envs, str):
        return read_arguments(find_env(envs), texts)
    members = _members(envs)
    values: dict[str, Any] = {}
    for name, own in _by_member(members, texts, "").items():
        values |= read_arguments(members[name][0], own, prefix=f"{name}.")
    return values


def env_parameters(envs: Envs) -> dict[str, Parameter[Any]]:
    """Return the parameters of an env by name, or of a mixture by MEMBER.PARAMETER.

    Raises:
        ValueError: If an env is unknown.
        EnvError: If its module can't be imported.
    """
    if isinstance(envs, str):
        return parameters(find_env(envs))
    found = {name: parameters(env) for name, (env, _) in _members(envs).items()}
    return {f"{name}.{own}": parameter for name, those in found.items() for own, parameter in those.items()}


def env_metrics(env: type[Env[Any]], groups: Groups, prefix: str = "") -> dict[str, float]:
    """Return the metrics of each mixture member that has a task among the groups; empty for a single env.

    Their names are `env/MEMBER/...` after the `prefix`.
    """
    metrics: dict[str, float] = {}
    for name in env.members if issubclass(env, Mixture) else ():
        own = Groups([group for group in groups if group.group_id.startswith(f"{name}/")])
        if not own:
            continue
        rewards = [rollout.reward for rollout in own.rollouts if rollout.reward is not None]
        counts = {"groups": len(own), "rollouts": len(own.rollouts), "failed": len(own.rollouts) - len(rewards)}
        metrics |= {f"{prefix}env/{name}/{what}": float(count) for what, count in counts.items()}
        if rewards:
            means = {of: value for of, value in own.metrics().items() if of.partition("/")[0] == "reward"}
            metrics |= {f"{prefix}env/{name}/{of}": value for of, value in means.items()}
    return metrics


def members_of(env: type[Env[Any]]) -> list[type[Env[Any]]]:
    """Return the envs of a mixture; for a single env, a list with that env."""
    return [member.env for member in env.members.values()] if issubclass(env, Mixture) else [env]


def member_name(env: str) -> str:
    """Return an env's name as a member of a mixture: its name without its module."""
    return env.rpartition(":")[2]


def parameter_in(envs: Envs, parameter: str) -> tuple[str, str]:
    """Return the env that a parameter, such as "MEMBER.NAME", belongs to, and the parameter's name in that env."""
    if isinstance(envs, str):
        return envs, parameter
    member, _, name = parameter.rpartition(".")
    return next((env for env in envs if member_name(env) == member), member), name


def _members(envs: Mapping[str, float]) -> dict[str, tuple[type[Env[Any]], float]]:
    """Return the env and weight of each member, by its name without its module."""
    members: dict[str, tuple[type[Env[Any]], float]] = {}
    for named, weight in envs.items():
        name = member_name(named)
        if name in members:
            raise ValueError(f"env: two of {', '.join(envs)} are named {name}; register one under another name")
        members[name] = find_env(named), weight
    return members


def _by_member(members: Mapping[str, Any], arguments: Mapping[str, Any], prefix: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for named, value in arguments.items():
        name, _, parameter = named.rpartition(".")
        if name not in members:
            owners = [own for own, (env, _) in members.items() if parameter in parameters(env)]
            hint = (
                f"put the member's name in front, as in {owners[0]}.{parameter}"
                if owners and not name
                else f"it isn't a MEMBER.PARAMETER or a member; {nearest(name or parameter, members)}"
            )
            raise ValueError(f"{prefix}{named}: {hint}")
        found.setdefault(name, {})[parameter] = value
    return found


def _in_sandbox(env: type[Env[Any]], sandbox: Kind) -> type[Env[Any]]:
    """Return the env with sandboxes of that kind, if it has sandboxes and the kind isn't "auto"."""
    if sandbox == "auto" or env.sandbox_spec is None:
        return env
    spec = as_kind(env.sandbox_spec, sandbox)
    return variant(env, {"sandbox_spec": spec, "sandbox_for": classmethod(lambda cls, task: cls.sandbox_spec)})
