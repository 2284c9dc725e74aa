"""GRPO of SmolLM2-135M-Instruct on guess_number, guessing a number with hints, with the default settings.

`make models` fetches the model.
"""

import agentgym as ag
import envs.guess_number.env  # noqa: F401  registers the env
from recipes.real_models import SMOLLM2

RECIPE = ag.RunConfig(
    recipe="smollm2_guess_number",
    env="guess_number",
    model=SMOLLM2.folder,
    max_steps=40,
    eval_tasks=200,
)


if __name__ == "__main__":
    ag.main(RECIPE)
