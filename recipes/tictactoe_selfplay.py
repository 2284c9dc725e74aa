"""Self-play of tic-tac-toe: a tiny model plays both sides, and each side learns from its own rewards.

`python -m recipes.tictactoe_selfplay` takes about two minutes on one core. Afterward, `agentgym eval tictactoe
--env.opponent perfect --env.illegal-moves 0 --model RUN/adapter --temperature 0.7` shows how its X does against a
player that makes no mistakes. The first answer that isn't a free field forfeits a game, so the model learns to avoid
such answers. The checkpoint was made by `python -m recipes.warm_start --env tictactoe --demos 5000 --max-steps 500
--context-weight 0.02`.
"""

from dataclasses import replace

import agentgym as ag
import envs.tictactoe.env  # noqa: F401  registers the env
from recipes.base import CHECKPOINTS, TINY, TRAIN

RECIPE = replace(
    TINY,
    recipe="tictactoe_selfplay",
    env="tictactoe",
    env_args={"illegal_moves": 0},
    model=CHECKPOINTS / "tictactoe",
    max_steps=100,
    train=replace(TRAIN, decay_steps=95, loss_agg=1000.0),
)


if __name__ == "__main__":
    ag.main(RECIPE)
