"""`python -m book.ledger`: evaluate all claims; --write the file, --check that it is current."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from .. import RESULTS
from .claims import CLAIMS, evaluate, read_claims, stale, write_claims
from .findings import VERDICTS, Evidence


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 done, 1 the file is stale (--check), 2 a sentence says what is wrong."""
    p = argparse.ArgumentParser(prog="python -m book.ledger", description=__doc__)
    action = p.add_mutually_exclusive_group()
    action.add_argument("--write", action="store_true", help="bring the file up to date")
    action.add_argument("--check", action="store_true", help="exit 1 if the file is not current")
    p.add_argument("--claims", type=Path, default=CLAIMS, help="the file (book/claims.yml)")
    p.add_argument("--results", type=Path, default=RESULTS, help="archives (book/results)")
    args = p.parse_args(argv)
    try:
        claims = read_claims(args.claims)
        findings = evaluate(claims, Evidence(args.results))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    old = stale(claims, findings)
    if args.check:
        if old:
            print(f"stale: {', '.join(old)}; python -m book.ledger --write", file=sys.stderr)
        return 1 if old else 0
    for claim in claims:
        print(f"{findings[claim.id].verdict:18} {claim.id}")
    counts = Counter(f.verdict for f in findings.values())
    print("; ".join(f"{counts[v]} {v}" for v in VERDICTS))
    if args.write:
        write_claims(claims, findings, args.claims)
        print(f"{args.claims}: {len(old)} of {len(claims)} claims changed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
