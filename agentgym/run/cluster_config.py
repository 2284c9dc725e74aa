"""Settings of a run whose parts are Ray actors."""

from agentgym.config_fields import Above0, Count, Positive, config

OFF = "off"
"""The Ray address that means no cluster: the run or evaluation stays in this process."""
SANDBOX = "sandbox"
"""Custom Ray resource of nodes that run sandboxes. If the cluster has any, each rollout worker takes one unit."""


@config(frozen=True, kw_only=True)
class ClusterConfig:
    """Sets how a run's parts are spread over a Ray cluster. Without --ray, all parts are in this process."""

    workers: Positive | None = None
    """Number of rollout worker processes. None starts one per unit of the Ray resource "sandbox" that eval_workers
    leave, or one per node if no node has it, at most prompts_per_step; workers then join and leave with their
    nodes, between batches.
    """
    worker_cpus: Above0 = 1.0
    """CPUs that Ray reserves for each rollout worker."""
    eval_workers: Count = 0
    """Number of processes that run the evaluations between steps (eval_every) while training continues, each with
    its own engine in the process. With 0, the rollout workers run them and training waits.
    """
    trainers: Positive = 1
    """Number of processes that train together. On GPUs, each gets its own."""
    trainer_cpus: Above0 = 1.0
    """CPUs that Ray reserves for each trainer."""
    restarts: Count = 5
    """How many times lost workers, servers or trainers are replaced, counted separately for each kind, before the
    run fails.
    """
