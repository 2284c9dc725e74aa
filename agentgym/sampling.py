"""Settings of an engine's sampling."""

from dataclasses import dataclass

from agentgym.field_checks import NotNegative, PartBelow1, Positive, Share, Stops, check_fields, names_its_fields


@names_its_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Settings of an engine's sampling; log-probabilities are those of the whole distribution at this temperature.

    `top_p`, `top_k` and `min_p` leave a part of that distribution to draw from, each judged on the whole of it, and
    change no log-probability: they are for evaluation, where nothing is trained on what was drawn.
    """

    temperature: NotNegative = 1.0
    """The temperature; 0 takes the likeliest token, with the log-probabilities of temperature 1."""
    max_tokens: Positive | None = None
    """The most ids of one turn; None leaves this to the env's limits."""
    top_p: Share = 1.0
    """Draw from the fewest likeliest ids that have this probability together; 1 is all of them."""
    top_k: Positive | None = None
    """Draw from this many likeliest ids; None is all of them."""
    min_p: PartBelow1 = 0.0
    """Draw from the ids that are at least this many times as likely as the likeliest; 0 is all of them."""
    stop: Stops = ()
    """Texts that end a turn if it has sampled one of them: at most 16, of 256 characters. The turn keeps the text."""

    def __post_init__(self) -> None:
        check_fields(self, Sampling)

    @property
    def whole(self) -> bool:
        """Whether ids are drawn from the whole distribution, as training needs it."""
        return self.top_p == 1 and self.top_k is None and self.min_p == 0
