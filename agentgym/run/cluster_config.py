"""Settings of a run whose parts are Ray actors."""

from agentgym.config_fields import Above0, Count, Positive, config

OFF = "off"
"""The Ray address that means no cluster: the run or evaluation stays in this process."""
SANDBOX = "sandbox"
"""Custom Ray resource of nodes that run sandboxes. If any node has it, each rollout worker reserves one unit of it."""


@config(frozen=True, kw_only=True)
class ClusterConfig:
    """Settings for spreading a run's parts over a Ray cluster. Without --ray, all parts run in this process."""

    workers: Positive | None = None
    """Number of rollout worker processes. None starts one per node, or one per unit of the Ray resource "sandbox" if a
    node has it (units that eval_workers use don't count), but at most prompts_per_step. With None, workers also
    start and stop, between batches, as nodes join and leave.
    """
    worker_cpus: Above0 = 1.0
    """CPUs that Ray reserves for each rollout worker."""
    eval_workers: Count = 0
    """Number of processes that run the evaluations between steps (eval_every) while training continues, each with a
    separate engine in its process. With 0, the rollout workers run these evaluations, and training waits for them.
    """
    trainers: Positive = 1
    """Number of training processes. On GPUs, each process gets a separate GPU."""
    trainer_cpus: Above0 = 1.0
    """CPUs that Ray reserves for each trainer."""
    restarts: Count = 5
    """Maximum number of replacements of lost workers, evaluation workers, servers and trainers, counted separately for
    each kind.

    If another worker or trainer is lost after that, the run fails. If another evaluation worker is lost, the evaluation
    is missing, and the run continues. If another server is lost, the run continues with the remaining servers, and
    fails when none is left.
    """
