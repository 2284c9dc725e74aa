"""GRPO of Qwen3-8B on python_math, on one machine with eight GPUs: four train while four sample.

`torchrun --nproc-per-node 4 -m recipes.qwen3_8b_grpo_8gpu`; docs/gpus.md lists the memory, and the commands for
several machines. This recipe hasn't been run on a GPU.
"""

from dataclasses import replace

import agentgym as ag
from recipes import qwen3_4b_grpo as one_gpu

RECIPE = replace(
    one_gpu.RECIPE,
    recipe="qwen3_8b_grpo_8gpu",
    model="Qwen/Qwen3-8B",
    engine=replace(
        one_gpu.ENGINE, colocate="off", servers=4, arguments="--mem-fraction-static 0.85 --enable-fp32-lm-head"
    ),
    # A token sampled by an older policy is weighted by how much likelier it has become, or masked.
    train=replace(one_gpu.TRAIN, clip_eps_high=0.2, importance_sampling="token_mask"),
    max_staleness=1,
    prompts_per_step=64,
)


if __name__ == "__main__":
    ag.main(RECIPE)
