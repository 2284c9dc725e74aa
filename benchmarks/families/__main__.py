"""Tiny random models of many transformers families, in each layout, compared with the plain forward pass.

The log-probabilities and the adapter's gradient of every family are compared in float32 with the forward pass of each
sequence alone. A cell of the table is `right`, `refused` (a ValueError at opening that names the setting), `wrong`,
or `error` (any other exception). With `--shard`, FAMILIES_SHARDED are also trained by two processes, sharded with
FSDP2.
"""

import sys
from collections import Counter

from benchmarks.families.comparison import KINDS, compare_families, compare_sharded, rows, transformers_version
from benchmarks.harness import at_least, at_most, report, report_parser
from tests.support.model_families import FAMILIES, FAMILIES_SHARDED


def main() -> None:
    """Compare the families, and print the table and the report."""
    parser = report_parser(__doc__ or "")
    parser.add_argument("--only", nargs="+", default=None, metavar="FAMILY", help="compare only these")
    parser.add_argument("--shard", action="store_true", help="also train FAMILIES_SHARDED on two processes")
    args = parser.parse_args()
    table = compare_families(args.only or sorted(FAMILIES))
    if args.shard:
        for name, cells in compare_sharded([name for name in FAMILIES_SHARDED if not args.only or name in args.only]):
            table[name] |= {f"{layout}, 2 ranks": cell for layout, cell in cells.items()}
    out = sys.stderr if args.json else sys.stdout
    print("\n".join(rows(table)), file=out)
    found = Counter(cell.kind for cells in table.values() for cell in cells.values())
    count = sum(found.values())
    report(
        "families",
        figures={kind: float(found[kind]) for kind in KINDS} | {"families": float(len(table)), "cells": float(count)},
        reference={"transformers": transformers_version()},
        goals={
            "families": at_least(len(table), 40),
            "wrong": at_most(found["wrong"], 0),
            "errors": at_most(found["error"], 0),
            "share of cells that are right": at_least(found["right"] / count, 0.75),
            "families that are right in padded": at_least(
                sum(cells["padded"].kind == "right" for cells in table.values()) / len(table), 1
            ),
        },
        as_json=args.json,
    )


if __name__ == "__main__":
    main()
