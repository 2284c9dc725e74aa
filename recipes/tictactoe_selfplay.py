"""Self-play of tic-tac-toe: a tiny model plays both sides, and each side learns from its own rewards.

`python -m recipes.tictactoe_selfplay` takes about two minutes on one core. Afterwards `agentgym eval tictactoe
--env.opponent perfect --env.illegal-moves 0 --model RUN/adapter --temperature 0.7` says how its X fares against a
player without mistakes. The first answer that is no free field forfeits a game, so that the model learns to give none.
The checkpoint is that of `python -m recipes.warm_start --env tictactoe --demos 5000 --steps 500 --context-weight
0.02`.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

import agentgym as ag
import envs.tictactoe.env  # noqa: F401  registers the env
from recipes.base import CHECKPOINTS, TRAIN, TinyGRPO


@dataclass(frozen=True, kw_only=True)
class TicTacToeSelfPlay(TinyGRPO):
    """Play tic-tac-toe against oneself, from a base that mostly takes any free field."""

    recipe: str = "tictactoe_selfplay"
    env: str = "tictactoe"
    env_args: dict[str, bool | int | float | str] = field(default_factory=lambda: {"illegal_moves": 0})
    model: Path | str = CHECKPOINTS / "tictactoe"
    steps: int = 100
    train: ag.TrainConfig = replace(TRAIN, decay_steps=95, normalise=1000.0)


if __name__ == "__main__":
    ag.main(TicTacToeSelfPlay)
