"""Joins or starts a Ray cluster, counts the workers that fit in it, and finds env names that all its nodes know."""

import asyncio
import logging
import math
import os
import signal
import socket
import sys
import sysconfig
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import ray

from agentgym.environments.env import Env
from agentgym.environments.mixture import Mixture
from agentgym.environments.registry import gallery
from agentgym.errors import AgentGymError
from agentgym.run.cluster_config import SANDBOX, ClusterConfig
from agentgym.run.tasks.envs import member_name

AUTO = "auto"
ANSWERS_S = 10.0
"""Timeout in seconds for a connection to an existing cluster."""
PASSED_ON = ("PYTHONPATH", "OMP_NUM_THREADS", "HF_HOME", "HF_HUB_OFFLINE", "DOCKER_HOST")
"""Environment variables that every actor gets from this process, besides those that begin with AGENTGYM_."""


@asynccontextmanager
async def joined(address: str, *, cpus: float) -> AsyncIterator[None]:
    """Join the Ray cluster at the address; auto joins a running cluster, or else starts one on this machine.

    A cluster started here has at least `cpus` CPUs and is shut down when the block ends. If this process has already
    joined a cluster, that cluster is used and stays joined.
    """
    started = not ray.is_initialized()
    if started:
        await asyncio.to_thread(_connect, address, cpus)
        _take_back_sigterm()
    try:
        yield
    finally:
        if started:
            await asyncio.to_thread(ray.shutdown)


def _connect(address: str, cpus: float) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    named = {name: value for name, value in os.environ.items() if name in PASSED_ON or name.startswith("AGENTGYM_")}
    options: dict[str, Any] = {"runtime_env": {"env_vars": named}, "logging_level": logging.WARNING}
    try:
        if address != AUTO:
            _refuse_silent(address)
            ray.init(address, **options)
            return
        try:
            ray.init("auto", **options)
        except ConnectionError:  # no cluster is running here
            here = max(os.cpu_count() or 1, math.ceil(cpus))
            ray.init("local", num_cpus=here, include_dashboard=False, **options)
    except (OSError, RuntimeError, ValueError) as error:
        said = str(error).splitlines()[0]
        raise AgentGymError(
            f"ray: could not join a cluster at {address!r} ({said}); start one with `ray start --head` and set its "
            "HOST:PORT, or set auto, which starts one on this machine"
        ) from error


def _take_back_sigterm() -> None:
    """Restore this process's SIGTERM handler. Ray's would write a stack trace and abort the process 3 s later."""
    handler = signal.getsignal(signal.SIGTERM)
    if handler is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, handler)


def _refuse_silent(address: str) -> None:
    """Raise OSError if nothing listens at HOST:PORT; Ray itself would try for many minutes and can't be stopped."""
    host, _, port = address.rpartition("//")[2].rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=ANSWERS_S).close()


def worker_count(config: ClusterConfig, most: int) -> int:
    """Return the configured number of rollout workers, or else the number that fits in the cluster, at most `most`."""
    if config.workers is not None:
        return config.workers
    sandboxes = ray.cluster_resources().get(SANDBOX, 0)
    nodes = sum(node["Alive"] for node in ray.nodes())
    return max(1, min(int(sandboxes) - config.eval_workers if sandboxes else nodes, most))


def worker_options(config: ClusterConfig) -> dict[str, Any]:
    """Return the Ray options of a rollout worker: its resources and its placement."""
    sandboxes = {SANDBOX: 1.0} if ray.cluster_resources().get(SANDBOX, 0) else {}
    return {"num_cpus": config.worker_cpus, "resources": sandboxes, "scheduling_strategy": "SPREAD"}


def portable_env(env: type[Env[Any]]) -> str | dict[str, float]:
    """Return the name by which another process finds an env class; for a mixture, its members' names and weights.

    Raises:
        ValueError: If another process can't find the class.
    """
    if not issubclass(env, Mixture):
        return _portable(env)
    found = {name: _portable(member.env) for name, member in env.members.items()}
    if renamed := [name for name, portable in found.items() if member_name(portable) != name]:
        raise ValueError(
            f"env: on Ray, the members of a mixture must be named after their classes; rename {renamed[0]}"
        )
    return {found[name]: member.weight for name, member in env.members.items()}


def _portable(env: type[Env[Any]]) -> str:
    module, name = sys.modules[env.__module__], env.__qualname__
    if not name.isidentifier():
        raise ValueError(
            f"env: {name} is defined inside a function or a class, where Ray workers can't find it; move it to the top "
            "level of a module"
        )
    file = getattr(module, "__file__", None)
    if file is None:
        raise ValueError(f"env: {name} isn't in a file that Ray workers can import; move it to one")
    path = Path(file).resolve()
    ours = [known for known, where in gallery().items() if where.resolve() == path]
    if len(ours) == 1:
        return ours[0]
    packages = {Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib", "stdlib")}
    return f"{env.__module__}:{name}" if packages.intersection(path.parents) else f"{path}:{name}"
