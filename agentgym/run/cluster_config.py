"""The settings of a run whose parts are Ray actors."""

from agentgym.config_fields import Above0, Count, Positive, config

OFF = "off"
"""The address in whose place a run or an evaluation is in this process alone."""
SANDBOX = "sandbox"
"""The custom resource of nodes that run sandboxes; where the cluster has any, each rollout worker takes one of it."""


@config(frozen=True, kw_only=True)
class ClusterConfig:
    """Says how the parts of a run are spread over a Ray cluster; without --ray they are all in this process."""

    workers: Positive | None = None
    """Processes that play rollouts; None: one for each unit of the resource "sandbox", or else one for each node. With
    None, workers join and leave with their nodes, between two batches."""
    worker_cpus: Above0 = 1.0
    """CPUs that Ray sets aside for each worker."""
    eval_workers: Count = 0
    """Processes that play the evaluations between two steps (eval_every) while training goes on, each with an engine of
    its own in it; 0: the workers of the training play them, and training waits."""
    trainers: Positive = 1
    """Processes that train together, each with a GPU of its own where it trains on GPUs."""
    trainer_cpus: Above0 = 1.0
    """CPUs that Ray sets aside for each trainer."""
    restarts: Count = 5
    """Times that lost workers, servers or trainers are replaced, each kind counted alone; then the run fails."""
