"""The market: an HTTP service over SQLite that only needs the standard library and runs in a separate container."""

import json
import sqlite3
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

DATABASE = "/tmp/market.db"
TABLES = """
create table stock (name text primary key, price integer not null, count integer not null);
create table orders (number integer primary key, name text not null, count integer not null);
"""
Answer = tuple[int, Any]


def open_market(stock: list[list[Any]]) -> Answer:
    """Fill the shelves, which is possible only once."""
    with closing(sqlite3.connect(DATABASE)) as market, market:
        if market.execute("select count(*) from stock").fetchone()[0]:
            return 409, "the market is open already"
        market.executemany("insert into stock values (?, ?, ?)", stock)
    return 201, "open"


def order(wanted: dict[str, Any]) -> Answer:
    """Sell the requested count of one product, or nothing at all."""
    name, count = wanted["name"], wanted["count"]
    if not isinstance(name, str) or not isinstance(count, int) or count < 1:
        return 400, 'an order is {"name": text, "count": a number from 1 on}'
    with closing(sqlite3.connect(DATABASE)) as market, market:
        taken = market.execute("update stock set count = count - ? where name = ? and count >= ?", (count, name, count))
        if not taken.rowcount:
            return 409, f"there are not {count} of {name}"
        market.execute("insert into orders (name, count) values (?, ?)", (name, count))
    return 201, "ordered"


def rows(query: str) -> Answer:
    """Return the rows of a table."""
    with closing(sqlite3.connect(DATABASE)) as market:
        return 200, market.execute(query).fetchall()


class Handler(BaseHTTPRequestHandler):
    """Serves GET /stock, GET /orders, POST /orders, and PUT /stock, which opens the market."""

    def do_GET(self) -> None:
        queries = {
            "/stock": "select name, price, count from stock order by name",
            "/orders": "select name, count from orders order by number",
        }
        self.answer(*rows(queries[self.path]) if self.path in queries else (404, "there are /stock and /orders"))

    def do_POST(self) -> None:
        self.answer(*order(self.read()) if self.path == "/orders" else (404, "only /orders takes a POST"))

    def do_PUT(self) -> None:
        self.answer(*open_market(self.read()) if self.path == "/stock" else (404, "only /stock takes a PUT"))

    def read(self) -> Any:
        """Return the parsed JSON of the request."""
        return json.loads(self.rfile.read(int(self.headers["Content-Length"])))

    def answer(self, status: int, content: Any) -> None:
        """Send a JSON response."""
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    with closing(sqlite3.connect(DATABASE)) as made:
        made.executescript(TABLES)
    ThreadingHTTPServer(("127.0.0.1", 8000), Handler).serve_forever()
