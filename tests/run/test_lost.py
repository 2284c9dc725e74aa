"""A run's count of lost workers and rollouts on a cluster: across a resume, and in its summary."""

from agentgym.run.lost import PREFIX, Losses
from agentgym.run.summary import account


def metrics(losses: Losses) -> dict[str, float]:
    return {f"{PREFIX}{name}": float(count) for name, count in losses.counts().items()}


def test_a_resumed_driver_continues_counting_from_the_last_saved_step() -> None:
    resumed = Losses()
    resumed.begin(metrics(Losses(workers_lost=2, workers_replaced=2, rollouts_lost=16)))
    resumed.workers_lost += 1
    assert resumed == Losses(workers_lost=3, workers_replaced=2, rollouts_lost=16)


def test_a_run_that_returns_to_its_checkpoint_keeps_the_losses_of_the_cut_steps() -> None:
    losses = Losses(workers_lost=3, rollouts_lost=24)
    losses.begin(metrics(Losses(workers_lost=2, workers_replaced=2, rollouts_lost=16)))
    assert losses == Losses(workers_lost=3, workers_replaced=2, rollouts_lost=24)


def test_the_final_report_says_what_was_lost_and_how_it_was_handled() -> None:
    assert account([], {}, Losses(workers_lost=2, workers_replaced=2, servers_lost=1, rollouts_lost=16).counts()) == [
        "lost: workers 2 (2 replaced)",
        "      servers 1 (0 replaced)",
        "      16 rollouts that were running on lost workers, counted as dropped and run again",
    ]


def test_a_run_without_losses_does_not_mention_them() -> None:
    assert account([], {}, Losses().counts()) == []
