"""The tasks at the site, generated from a seed: the site's content, the task's wording, and the right action."""

from random import Random
from typing import Any, NamedTuple, TypeAlias

THINGS = {"lamps": "lamp", "chairs": "chair", "rugs": "rug"}
COLORS = ("black", "green", "red", "white")
NAMES = ("Ada", "Bo", "Cleo", "Dov", "Eva", "Finn")
WORDS = ("Alba", "Brio", "Cirrus", "Dune", "Echo", "Fjell", "Gale", "Haven", "Isla", "Juno", "Kite", "Lumen")
REASONS = {"broken": "it came broken", "too late": "it came too late", "too small": "it is too small"}
Row: TypeAlias = dict[str, Any]


class Chore(NamedTuple):
    """The wording of a task, and the one entry that the site's ledger should have."""

    words: str
    action: list[str | int]


def draw_content(rng: Random) -> dict[str, Any]:
    """Generate the site's content: 36 products, and one or two orders per customer."""
    products: list[Row] = []
    prices = rng.sample(range(10, 400), 36)
    for place, number in enumerate(rng.sample(range(100, 1000), 36)):
        category, thing = list(THINGS.items())[place % 3]
        facts = {"price": prices[place], "stars": rng.randint(1, 5), "stock": rng.choice([0, 3, 8, 20])}
        color = COLORS[place % 4]
        products.append(
            {"id": number, "name": f"{WORDS[place // 3]} {thing}", "category": category, "color": color, **facts}
        )
    rng.shuffle(products)
    orders: list[Row] = [
        {"id": number, "name": rng.choice(NAMES), "product": product["name"]}
        for number, product in zip(rng.sample(range(10_000, 99_999), 9), rng.sample(products, 9), strict=True)
    ]
    return {"products": products, "orders": orders, "token": f"{rng.getrandbits(40):010x}"}


def buy(rng: Random, content: dict[str, Any]) -> Chore:
    """Create a chore: order the cheapest product that meets the conditions."""
    wanted = rng.choice([row for row in content["products"] if row["stock"]])
    stars, count, name = rng.randint(1, wanted["stars"]), rng.randint(1, 3), rng.choice(NAMES)
    found = [
        row
        for row in content["products"]
        if (row["category"], row["color"]) == (wanted["category"], wanted["color"])
        if row["stock"] and row["stars"] >= stars
    ]
    best = min(found, key=lambda row: int(row["price"]))
    words = (
        f"Order {count} of the cheapest of the {wanted['color']} {wanted['category']} that have {stars} stars or more "
        f"and are in stock, for {name}."
    )
    return Chore(words, ["order", best["id"], count, name])


def give_back(rng: Random, content: dict[str, Any]) -> Chore:
    """Create a chore: return a customer's order."""
    order, reason = rng.choice(content["orders"]), rng.choice(list(REASONS))
    words = f"{order['name']} wants to return an order, the {order['product']}: {REASONS[reason]}. Return it."
    return Chore(words, ["return", order["id"], reason])


def rate(rng: Random, content: dict[str, Any]) -> Chore:
    """Create a chore: rate the most expensive product of a category, which may be on any of its pages."""
    category, stars = rng.choice(list(THINGS)), rng.randint(1, 5)
    dearest = max(
        (row for row in content["products"] if row["category"] == category), key=lambda row: int(row["price"])
    )
    return Chore(f"Rate the dearest of all {category} with {stars} stars.", ["rate", dearest["id"], stars])


KINDS = (buy, give_back, rate)
