"""On-policy distillation on chase: a teacher scores each token that the student samples; rewards aren't used.

The teacher is the careful imitator of `recipes.chase_sft`, as a separate model::

    python -m recipes.chase_sft --output-dir teacher
    agentgym merge teacher/adapter teacher/model
    python -m recipes.chase_distill
"""

from dataclasses import replace
from pathlib import Path

import agentgym as ag
from recipes import chase_grpo

RECIPE = replace(
    chase_grpo.RECIPE, recipe="chase_distill", teacher=Path("teacher/model"), prompts_per_step=16, group_size=2
)


if __name__ == "__main__":
    ag.main(RECIPE)
