"""The claims ledger: what the paper claims, which run decides, and what it decided.

    python -m book.ledger            print the verdicts, evaluated from the archives
    python -m book.ledger --check    exit 1 if book/claims.yml says anything else
    python -m book.ledger --write    bring book/claims.yml up to date

`book/claims.yml` holds the claims: text, source, experiment and *rule* are written by people;
verdict, effect, runs and seeds are written by the rule, and by nothing else. `claims` reads and
writes the file; the rules are in `runs`, `courses`, `heads`, `measures` and `computed`, with what
they share in `findings` and `shares`; `page` is what the book shows.
"""

from . import computed
from .claims import CLAIMS, Claim, ClaimError, evaluate, read_claims, stale, write_claims
from .findings import VERDICTS, Evidence, Finding

__all__ = [
    "CLAIMS",
    "VERDICTS",
    "Claim",
    "ClaimError",
    "Evidence",
    "Finding",
    "computed",
    "evaluate",
    "read_claims",
    "stale",
    "write_claims",
]
