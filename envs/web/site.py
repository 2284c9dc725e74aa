"""The site: a small shop with pages, filters and forms, which only needs the standard library."""

import html
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

PER_PAGE = 5
LONGEST_NAME = 40
"""Largest number of characters in a customer's name."""
MOST_DONE = 8
"""Largest number of entries in the ledger, which is reported as a whole."""
REASONS = ("broken", "too late", "too small")
content: dict[str, Any] = {}
"""The content with which the site is opened: its products, its orders, and the token in its forms."""
ledger: list[list[Any]] = []
"""The orders, returns and ratings, in order."""
lock = threading.Lock()


class Refused(Exception):
    """A request that the site refuses; the message is shown."""


def link(path: str, text: str) -> str:
    return f'<a href="{html.escape(path)}">{html.escape(text)}</a>'


def form(method: str, action: str, **fields: Any) -> str:
    """Return a form, whose fields are hidden (a value), a choice (a tuple) or to be filled in (None)."""
    made = []
    for name, value in fields.items():
        if isinstance(value, tuple):
            choices = "".join(f"<option>{html.escape(str(choice))}</option>" for choice in value)
            made.append(f'{name} <select name="{name}">{choices}</select>')
        else:
            given = "" if value is None else f' type="hidden" value="{html.escape(str(value))}"'
            made.append(f'{"" if given else name + " "}<input name="{name}"{given}>')
    return f'<form method="{method}" action="{action}">{" ".join(made)} <button>send</button></form>'


def home(query: dict[str, str]) -> str:
    categories, colors = (tuple(sorted({row[key] for row in content["products"]})) for key in ("category", "color"))
    links = [link(f"/products?{urlencode({'category': category})}", category) for category in categories]
    search = form("get", "/products", category=("", *categories), color=("", *colors))
    return f"Categories: {', '.join(links)}\n{search}\nYour orders: {form('get', '/orders', name=None)}"


def products(query: dict[str, str]) -> str:
    wanted = {key: query[key] for key in ("category", "color") if query.get(key)}
    found = [row for row in content["products"] if all(row[key] == value for key, value in wanted.items())]
    page = number(query.get("page", "1"), "page")
    lines = [
        f"{link('/product?id=' + str(row['id']), row['name'])} {row['price']}.00, {row['stars']} stars"
        for row in found[(page - 1) * PER_PAGE : page * PER_PAGE]
    ]
    if page * PER_PAGE < len(found):
        lines.append(link(f"/products?{urlencode({**wanted, 'page': page + 1})}", "next"))
    return "\n".join(lines) or "nothing found"


def product(query: dict[str, str]) -> str:
    row, token = one("products", query), content["token"]
    buy = form("post", "/order", token=token, id=row["id"], count=None, name=None) if row["stock"] else "sold out"
    rate = form("post", "/rate", token=token, id=row["id"], stars=(1, 2, 3, 4, 5))
    facts = f"{row['name']}, {row['color']}, {row['price']}.00, {row['stars']} stars, {row['stock']} in stock"
    return f"{facts}\nOrder: {buy}\nRate it: {rate}"


def orders(query: dict[str, str]) -> str:
    found = [row for row in content["orders"] if row["name"] == query.get("name")]
    return "\n".join(link(f"/return?id={row['id']}", f"{row['id']}: {row['product']}") for row in found) or "no orders"


def give_back(query: dict[str, str]) -> str:
    row = one("orders", query)
    sent = form("post", "/return", token=content["token"], id=row["id"], reason=REASONS)
    return f"Order {row['id']} of {row['name']}: {row['product']}\nReturn it: {sent}"


def order(fields: dict[str, str]) -> list[Any]:
    row, count = one("products", fields), number(fields.get("count"), "count")
    if count > row["stock"]:
        raise Refused(f"there are {row['stock']}")
    if not 0 < len(fields.get("name", "")) <= LONGEST_NAME:
        raise Refused(f"name: fill it in, with {LONGEST_NAME} characters at most")
    row["stock"] -= count
    return ["order", row["id"], count, fields["name"]]


def returned(fields: dict[str, str]) -> list[Any]:
    if fields.get("reason") not in REASONS:
        raise Refused(f"reason: one of {', '.join(REASONS)}")
    return ["return", one("orders", fields)["id"], fields["reason"]]


def rate(fields: dict[str, str]) -> list[Any]:
    stars = number(fields.get("stars"), "stars")
    if stars > 5:
        raise Refused("stars: from 1 to 5")
    return ["rate", one("products", fields)["id"], stars]


def one(kind: str, query: dict[str, str]) -> dict[str, Any]:
    for row in content[kind]:
        if str(row["id"]) == query.get("id"):
            found: dict[str, Any] = row
            return found
    raise Refused("there is no such thing")


def number(text: "str | None", name: str) -> int:
    if text is None or not text.isdecimal() or len(text) > 4 or int(text) < 1:
        raise Refused(f"{name}: a number from 1 to 9999")
    return int(text)


PAGES = {"/": home, "/products": products, "/product": product, "/orders": orders, "/return": give_back}
ACTIONS = {"/order": order, "/return": returned, "/rate": rate}


class Handler(BaseHTTPRequestHandler):
    """Serves pages with GET and accepts forms with POST.

    PUT opens the site, once, and REPORT returns the ledger; only the env uses these two.
    """

    def do_GET(self) -> None:
        there = urlsplit(self.path)
        self.answer(lambda: PAGES[there.path](dict(parse_qsl(there.query))), there.path in PAGES)

    def do_POST(self) -> None:
        def act() -> str:
            fields = dict(parse_qsl(self.read()))
            if fields.get("token") != content["token"]:
                raise Refused("the form is not one of ours: open its page, and send its hidden fields too")
            with lock:
                if len(ledger) == MOST_DONE:
                    raise Refused(f"{MOST_DONE} forms were taken, and no more are")
                ledger.append(ACTIONS[self.path](fields))
            return "Thank you."

        self.answer(act, self.path in ACTIONS)

    def do_PUT(self) -> None:
        def fill() -> str:
            content.update(json.loads(self.read()))
            return "open"

        self.answer(fill, not content)

    def do_REPORT(self) -> None:
        self.answer(lambda: json.dumps(ledger), True)

    def read(self) -> str:
        return self.rfile.read(int(self.headers["Content-Length"])).decode()

    def answer(self, make: Any, there: bool) -> None:
        """Send the response that `make` returns."""
        try:
            status, text = (200, make()) if there else (404, "there is no such page")
        except Refused as error:
            status, text = 400, str(error)
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


server = ThreadingHTTPServer(("127.0.0.1", 8000), Handler)
