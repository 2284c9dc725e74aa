"""The wishes of the shop's customers: a story each, and the right calls, which depend on what the policy allows."""

from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple, TypeAlias

from envs.shop.store import Row, Rows

NAMES = ("Ada", "Bo", "Cleo", "Dov", "Eva", "Finn", "Gus", "Hana", "Ivo", "June")
CLOTHES = ("coat", "scarf", "shirt", "skirt", "sweater")
SIZES = ("S", "M", "L")
STREETS = ("Elm Road", "Mill Lane", "Harbour Street", "Station Square")
Call: TypeAlias = tuple[str, dict[str, Any]]
"""The name of a tool and its arguments."""


class Scene(NamedTuple):
    """A customer's wish and knowledge, and the right calls after the verification."""

    wish: str
    calls: list[Call]
    postcode: str | None = None
    """The wrong postcode that the customer believes to be theirs; empty if they know the right one."""


class Shelf:
    """The rows of a database that is being generated."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        names = rng.sample(NAMES, 4)
        self.customers: list[Row] = [
            [name, f"{name.lower()}{rng.randint(10, 99)}@example.com", str(rng.randint(10_000, 99_999))]
            for name in names
        ]
        self.articles: list[Row] = [
            [f"{name[:2].upper()}{size}", name, size, rng.randint(10, 90), rng.randint(1, 9)]
            for name in CLOTHES
            for size in SIZES
        ]
        numbers = rng.sample(range(1000, 9999), 12)
        self.orders: list[Row] = [
            [
                number,
                self.customers[place % 4][1],
                rng.choice(self.articles)[0],
                rng.choice(["pending", "delivered"]),
                rng.randint(1, 60),
                self.street(),
            ]
            for place, number in enumerate(numbers)
        ]

    def street(self) -> str:
        """Return a random address."""
        return f"{self.rng.choice(STREETS)} {self.rng.randint(1, 199)}"

    def order(self, status: str, days: int, customer: int = 0) -> int:
        """Set the status and age of the customer's first order, and return its number."""
        self.orders[customer][3:5] = [status, days]
        return int(self.orders[customer][0])

    def rows(self) -> Rows:
        """Return all rows by their table."""
        return {"customers": self.customers, "articles": self.articles, "orders": self.orders}


def cancel(shelf: Shelf) -> Scene:
    number = shelf.order("pending", 0)
    return Scene(f"I want to cancel my order {number}.", [("cancel", {"number": number})])


def cancel_too_late(shelf: Shelf) -> Scene:
    number = shelf.order("delivered", shelf.rng.randint(1, 20))
    return Scene(f"I want to cancel my order {number}. It is not needed.", [_refusal(number, "not pending")])


def cancel_anothers(shelf: Shelf) -> Scene:
    number = shelf.order("pending", 0, customer=1)
    return Scene(f"Cancel the order {number}, please. It is my friend's.", [_refusal(number, "not theirs")])


def move(shelf: Shelf) -> Scene:
    number, street = shelf.order("pending", 0), shelf.street()
    call = ("change_address", {"number": number, "address": street})
    return Scene(f"I have moved. Send my order {number} to {street}.", [call])


def move_unverified(shelf: Shelf) -> Scene:
    number, street = shelf.order("pending", 0), shelf.street()
    wrong = str(int(shelf.customers[0][2]) - 1)
    return Scene(f"Send my order {number} to {street}.", [_refusal(number, "not verified")], wrong)


def send_back(shelf: Shelf) -> Scene:
    number = shelf.order("delivered", shelf.rng.randint(1, 30))
    return Scene(f"I do not like what came. Take my order {number} back.", [("take_back", {"number": number})])


def send_back_too_late(shelf: Shelf) -> Scene:
    number = shelf.order("delivered", shelf.rng.randint(31, 60))
    return Scene(f"I do not like what came. Take my order {number} back.", [_refusal(number, "too late")])


def exchange(shelf: Shelf) -> Scene:
    number, other = _another_size(shelf)
    wish = f"Order {number} does not fit. I want it in size {other[2]}."
    return Scene(wish, [("exchange", {"number": number, "article": other[0]})])


def exchange_sold_out(shelf: Shelf) -> Scene:
    number, other = _another_size(shelf)
    other[4] = 0
    return Scene(f"Order {number} does not fit. I want it in size {other[2]}.", [_refusal(number, "not in stock")])


KINDS: tuple[Callable[[Shelf], Scene], ...] = (
    *(cancel, cancel_too_late, cancel_anothers, move, move_unverified),
    *(send_back, send_back_too_late, exchange, exchange_sold_out),
)


def _refusal(number: int, rule: str) -> Call:
    return "refuse", {"number": number, "rule": rule}


def _another_size(shelf: Shelf) -> tuple[int, Row]:
    """Return a delivered order, and the same article in another size."""
    number = shelf.order("delivered", shelf.rng.randint(1, 30))
    own = next(row for row in shelf.articles if row[0] == shelf.orders[0][2])
    return number, shelf.rng.choice([row for row in shelf.articles if row[1] == own[1] and row is not own])
