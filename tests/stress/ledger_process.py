"""One process of a race for ledgers: carries out orders from stdin (JSON lines), answers on stdout.

open    open a book and make `releases` in all its nodes; the book is kept until `close`
wait    the same, again and again until the book is free
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from dpcsgp.errors import LedgerError
from dpcsgp.privacy.accounting import ReleaseEvent
from dpcsgp.privacy.ledger import LedgerBook

EVENT = ReleaseEvent("poisson", 0.5, 2.0)


def open_book(folder: str, nodes: list[int]) -> LedgerBook | str:
    try:
        return LedgerBook(Path(folder), nodes, "9f3c")
    except LedgerError as error:
        return str(error)


def record(book: LedgerBook, releases: int) -> None:
    attempt = book.next_attempt()
    for step in range(releases):
        book.record(step, attempt, dict.fromkeys(book.nodes, EVENT))


def answer(order: dict[str, Any], book: LedgerBook | str | None) -> tuple[Any, LedgerBook | None]:
    """Carry out one order; return what is to be told and the book that is open now."""
    match order["do"]:
        case "open" | "wait":
            book = open_book(order["folder"], order["nodes"])
            while isinstance(book, str) and "in use" in book and order["do"] == "wait":
                book = open_book(order["folder"], order["nodes"])
            if isinstance(book, str):
                return book, None
            found = [sum(count for _, count in book.releases(node)) for node in book.nodes]
            record(book, order["releases"])
            return found, book
        case "record":
            assert isinstance(book, LedgerBook)
            record(book, order["releases"])
        case "close":
            assert isinstance(book, LedgerBook)
            book.close()
            return "closed", None
    return "done", book if isinstance(book, LedgerBook) else None


def main() -> None:
    book: LedgerBook | None = None
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        told, book = answer(json.loads(line), book)
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
