"""GRPO of Qwen3-4B on python_math, on one 80 GB GPU that the trainer and SGLang share.

`python -m recipes.qwen3_4b_grpo` runs both on one GPU. With `--engine.colocate off`, the server uses a second GPU;
with `--engine.urls`, the run uses a server that is already running. docs/gpus.md lists the memory and the commands.
This recipe hasn't been run on a GPU.
"""

import agentgym as ag
import envs.python_math.env  # noqa: F401  registers the env

TRAIN = ag.TrainConfig(
    lr=4e-5,
    warmup_steps=5,
    lora_rank=32,
    clip_eps_high=0.28,  # rare good tokens may rise further than bad ones fall: DAPO, arXiv 2503.14476
    dtype="bfloat16",
    layout="packed",
    max_tokens_per_microbatch=16_384,
    gradient_checkpointing=True,
)
"""An adapter of rank 32 in bfloat16. With checkpointing, rows of 16,384 tokens keep 6 GiB of activations."""

ENGINE = ag.SGLangConfig(
    colocate="drop",
    slots=128,
    context_tokens=8192,
    # The fraction is of the memory that the trainer leaves free. The trainer's logits are float32, too.
    arguments="--mem-fraction-static 0.6 --enable-fp32-lm-head",
)
EVALUATION = ag.Sampling(temperature=0.7, top_p=0.8, top_k=20)
"""The sampling that the model card recommends for answers without thinking."""

RECIPE = ag.RunConfig(
    recipe="qwen3_4b_grpo",
    env="python_math",
    model="Qwen/Qwen3-4B",
    engine=ENGINE,
    train=TRAIN,
    max_steps=200,
    prompts_per_step=32,
    max_turn_tokens=1024,
    chat_template_kwargs={"enable_thinking": False},
    eval_sampling=EVALUATION,
    eval_every=20,
)


if __name__ == "__main__":
    ag.main(RECIPE)
