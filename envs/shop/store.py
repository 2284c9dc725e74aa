"""The shop's database, and the actions of its staff."""

import sqlite3
from typing import Annotated, Any, Literal

from pydantic import Field

import agentgym as ag

TABLES = """
create table customers (name text, email text primary key, postcode text);
create table articles (article text primary key, name text, size text, price integer, stock integer);
create table orders (number integer primary key, email text, article text, status text, days integer, address text);
create table verifications (email text, postcode text, primary key (email, postcode));
create table refunds (number integer primary key, price integer);
create table refusals (number integer, rule text, primary key (number, rule));
"""
Row = list[str | int]
Rows = dict[str, list[Row]]
"""The rows of each table that has any."""
Rule = Literal["not verified", "not theirs", "not pending", "too late", "not in stock"]
Number = Annotated[int, Field(ge=1, description="the number of an order")]


class Store:
    """An in-memory database whose public methods are tools.

    They do what they are told; following the policy is up to the agent.
    """

    def __init__(self, rows: Rows) -> None:
        # Each tool call runs in a separate thread.
        self.database = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self.database.row_factory = sqlite3.Row
        self.database.executescript(TABLES)
        for table, found in rows.items():
            marks = ", ".join("?" * len(found[0]))
            self.database.executemany(f"insert into {table} values ({marks})", found)

    def verify(self, email: str, postcode: str) -> str:
        """Check a customer's email and postcode, and return the name and the numbers of the orders."""
        self._run("insert or ignore into verifications values (?, ?)", email, postcode)
        found = self._run("select name from customers where email = ? and postcode = ?", email, postcode)
        if not found:
            return "there is no such customer"
        orders = self._run("select number from orders where email = ?", email)
        return f"{found[0]['name']}, orders: {', '.join(str(order['number']) for order in orders)}"

    def look_up(self, number: Number) -> dict[str, Any]:
        """Show an order: its customer, article, status, the days since its delivery, and its address."""
        return dict(self._order(number))

    def sizes(self, name: str) -> list[dict[str, Any]]:
        """List the articles of a name, such as "coat": one for each size, with price and stock."""
        return [dict(row) for row in self._run("select * from articles where name = ?", name)]

    def cancel(self, number: Number) -> str:
        """Cancel an order and refund it."""
        return self._refunded(number, "cancelled")

    def take_back(self, number: Number) -> str:
        """Take a delivered order back and refund it."""
        return self._refunded(number, "returned")

    def change_address(self, number: Number, address: Annotated[str, Field(max_length=100)]) -> str:
        """Send an order to another address."""
        self._order(number)
        self._run("update orders set address = ? where number = ?", address, number)
        return "changed"

    def exchange(self, number: Number, article: str) -> str:
        """Exchange the article of an order for another one."""
        old = self._order(number)["article"]
        if not self._run("select 1 from articles where article = ?", article):
            raise ag.ToolError(f"there is no article {article!r}")
        self._run("update articles set stock = stock + (article = ?) - (article = ?)", old, article)
        self._run("update orders set article = ?, status = 'exchanged' where number = ?", article, number)
        return "exchanged"

    def refuse(self, number: Number, rule: Rule) -> str:
        """Note that you refused what was asked for an order, and by which rule."""
        self._run("insert or ignore into refusals values (?, ?)", number, rule)
        return "noted; tell the customer"

    def _order(self, number: int) -> sqlite3.Row:
        found = self._run("select * from orders join articles using (article) where number = ?", number)
        if not found:
            raise ag.ToolError(f"there is no order {number}")
        return found[0]

    def _refunded(self, number: int, status: str) -> str:
        price = self._order(number)["price"]
        self._run("update orders set status = ? where number = ?", status, number)
        self._run("insert or ignore into refunds values (?, ?)", number, price)
        return f"{status}, {price} refunded"

    def _run(self, query: str, *values: object) -> list[sqlite3.Row]:
        return self.database.execute(query, values).fetchall()
