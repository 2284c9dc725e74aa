"""GRPO on chase: a tiny model learns to follow pointers through a Python tool instead of guessing.

`python -m recipes.chase_grpo` takes about a minute on one core; `--help` lists every setting. Under
`torchrun --nproc-per-node 2 -m recipes.chase_grpo` each process runs and trains its share.
"""

from dataclasses import replace

import agentgym as ag
from recipes.base import TINY

RECIPE = replace(TINY, recipe="chase_grpo", max_steps=20)


if __name__ == "__main__":
    ag.main(RECIPE)
