"""Accounts in cents, and what happened to them."""


class Ledger:
    """Accounts by name; none may fall below its limit."""

    def __init__(self, fee: int = 0) -> None:
        self.fee = fee
        self.balances: dict[str, int] = {}
        self.limits: dict[str, int] = {}
        self.history: list[tuple[str, str, int]] = []

    def open(self, name: str, balance: int = 0, limit: int = 0) -> None:
        """A new account; `limit` is how far it may be overdrawn."""
        if name in self.balances:
            raise KeyError(name)
        if balance < 0 or limit < 0:
            raise ValueError("negative")
        self.balances[name] = balance
        self.limits[name] = limit

    def transfer(self, source: str, target: str, amount: int) -> None:
        """Move money; the source pays the fee, which is gone. ValueError where it cannot pay."""
        if amount <= 0 or source == target:
            raise ValueError("nothing to move")
        if self.balances[source] - amount - self.fee < -self.limits[source]:
            raise ValueError("not enough")
        self.balances[source] -= amount + self.fee
        self.balances[target] += amount
        self.history.append((source, target, amount))

    def interest(self, percent: int) -> None:
        """Positive balances grow, rounded down; overdrawn ones pay twice as much, rounded up."""
        for name, balance in self.balances.items():
            if balance > 0:
                self.balances[name] = balance + balance * percent // 100
            elif balance < 0:
                self.balances[name] = balance + balance * 2 * percent // 100

    def total(self) -> int:
        """Of all accounts."""
        return sum(self.balances.values())

    def moved(self, name: str) -> int:
        """What came in less what went out, fees not counted."""
        came = sum(amount for _, target, amount in self.history if target == name)
        went = sum(amount for source, _, amount in self.history if source == name)
        return came - went
