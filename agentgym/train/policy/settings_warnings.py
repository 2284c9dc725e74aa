"""Warnings of settings that fit a policy, and that a user may not have meant."""

import logging

from agentgym.train.config import TrainConfig, peak_rate
from agentgym.train.policy.model import PolicyModel

_LOG = logging.getLogger("agentgym.train")

FULL_LR = 1e-4
"""Learning rate above which weights of a large model that are trained whole usually break."""
ADAPTER_LR = 1e-3
"""Learning rate above which an adapter beside a large model usually unlearns what the model knew."""
LARGE = 50_000_000
"""Number of weights from which on a model is large in this."""


def warn_of_settings(policy: PolicyModel, config: TrainConfig) -> None:
    """Log layers without an adapter, and a learning rate that a large model does not bear."""
    covered = policy.coverage
    if covered.bare and policy.adapted:
        _LOG.warning(
            "the adapter changes %.0f %% of the weights of the model's layers: %s; without one: %s",
            100 * covered.share,
            ", ".join(covered.adapted),
            ", ".join(covered.bare),
        )
    count = sum(weight.numel() for weight in policy.parameters())
    rate = peak_rate(config)
    if count <= LARGE:
        return
    if not policy.adapted and rate > FULL_LR:
        _LOG.warning(
            "train.lr is %g, the rate of an adapter; for weights that are trained whole set 1e-6 to 1e-5", rate
        )
    if policy.adapted and rate > ADAPTER_LR:
        _LOG.warning(
            "train.lr is %g, the rate of a tiny model; for an adapter beside a large one set 1e-5 to 5e-4", rate
        )
