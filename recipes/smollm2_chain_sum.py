"""GRPO of SmolLM2-135M-Instruct on chain_sum, additions and subtractions, with the default settings.

`make models` fetches the model.
"""

import agentgym as ag
import envs.chain_sum.env  # noqa: F401  registers the env
from recipes.real_models import SMOLLM2

RECIPE = ag.RunConfig(
    recipe="smollm2_chain_sum",
    env="chain_sum",
    model=SMOLLM2.folder,
    max_steps=30,
    eval_tasks=200,
)


if __name__ == "__main__":
    ag.main(RECIPE)
