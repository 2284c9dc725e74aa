"""GRPO of SmolLM2-135M-Instruct on calculator, calling a calculator, with the default settings.

`make models` fetches the model.
"""

import agentgym as ag
import envs.calculator.env  # noqa: F401  registers the env
from recipes.real_models import SMOLLM2

RECIPE = ag.RunConfig(
    recipe="smollm2_calculator",
    env="calculator",
    model=SMOLLM2.folder,
    max_steps=20,
    max_turn_tokens=48,  # a call has about 25 tokens
    eval_tasks=200,
)


if __name__ == "__main__":
    ag.main(RECIPE)
