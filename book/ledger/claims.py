"""`book/claims.yml`: reading it with checks, evaluating its rules, writing what they found.

A claim in the file:

    - id: delta-fp32                     # unique; anchors of the page
      claim: ...                         # one sentence that can be false
      source: section 3.2                # of the paper, or "open question"
      chapter: 02-isolation              # the page of the book that shows the evidence
      experiment: [failure*, isolation]  # archives of book/results, or [a function that computes]
      rule: {prevents: {arms: delta_fp32}}
      command: python -m ...             # what makes the evidence; by default book.evidence
      verdict, effect, runs, seeds       # written by `python -m book.ledger --write`

What is wrong with a file is said in one sentence that names the claim (`ClaimError`).
"""

from __future__ import annotations

import difflib
import fnmatch
import inspect
import pkgutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml

from .. import ROOT
from ..experiments import EXPERIMENTS
from ..gpu_experiments import BUILDERS
from . import computed, courses, heads, measures, runs  # noqa: F401 (they register their rules)
from .findings import NOT_TESTED, RULES, SEARCH, VERDICTS, Evidence, Finding, apply, untested

CLAIMS = ROOT / "book" / "claims.yml"
WRITTEN = ("verdict", "effect", "runs", "seeds")  # by rules, in this order
GIVEN = ("id", "claim", "source", "chapter", "experiment", "rule")
OPTIONAL = ("command",)
HEADER = """\
# The claims of the paper (arXiv:2510.04212) and questions that it leaves open, one entry each.
# id, claim, source, chapter, experiment, rule and command are written by people. verdict, effect,
# runs and seeds are what the rule found in book/results, written by
#     python -m book.ledger --write
# and never by hand; a test fails where they are not what a fresh evaluation finds.
"""


class ClaimError(ValueError):
    """A claims file that cannot be used; one sentence says what to change."""


@dataclass(frozen=True)
class Claim:
    """One entry of the file; `stored` holds what the file says was found, possibly nothing."""

    id: str
    claim: str
    source: str
    chapter: str
    experiment: tuple[str, ...]
    rule: str
    parameters: Mapping
    command: str | None
    stored: Mapping

    @property
    def run_command(self) -> str:
        """What makes the evidence, and so what to run where it is missing."""
        known = [name for name in EXPERIMENTS if _matches(name, self.experiment)]
        return self.command or f"python -m book.evidence {' '.join(known)}"

    def evaluate(self, evidence: Evidence) -> Finding:
        """What the rule finds now. Raises ClaimError naming the claim if it cannot judge."""
        try:
            found = apply(self.rule, self.parameters, evidence, self.experiment)
        except (KeyError, TypeError, IndexError, ValueError) as error:
            raise ClaimError(
                f"claim {self.id!r}: rule {self.rule} cannot judge it ({error!r}); "
                "compare its parameters with the archive"
            ) from error
        if found.verdict != NOT_TESTED:
            return found
        return untested(f"{found.effect}; the run that would: {self.run_command}")

    def entry(self, found: Finding) -> dict:
        """The claim as the file holds it, with a finding."""
        told = {
            "id": self.id,
            "claim": self.claim,
            "source": self.source,
            "chapter": self.chapter,
            "experiment": list(self.experiment),
            "rule": {self.rule: dict(self.parameters)},
        }
        if self.command:
            told["command"] = self.command
        return told | written(found)


def written(found: Finding) -> dict:
    """What a file keeps of a finding."""
    return {
        "verdict": found.verdict,
        "effect": found.effect,
        "runs": found.runs,
        "seeds": list(found.seeds),
    }


def read_claims(path: Path = CLAIMS) -> list[Claim]:
    """The claims of a file. Raises ClaimError in one sentence."""
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf8"))
    except FileNotFoundError:
        raise ClaimError(f"{path} does not exist; restore it from the repository") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        raise ClaimError(f"{path.name} is not YAML{where}; mend or restore it") from None
    if not isinstance(entries, list) or not entries:
        raise ClaimError(f"{path.name} holds no list of claims; it starts with '- id: ...'")
    claims = [_claim(entry, place) for place, entry in enumerate(entries, start=1)]
    seen: set[str] = set()
    for claim in claims:
        if claim.id in seen:
            raise ClaimError(f"two claims have the id {claim.id!r}; rename one")
        seen.add(claim.id)
    return claims


def _claim(entry, place: int) -> Claim:
    name = entry.get("id") if isinstance(entry, dict) else None
    if not isinstance(name, str):
        raise ClaimError(f"claim {place} of the file has no id in words; write '- id: some-name'")
    for key in entry:
        if key not in (*GIVEN, *OPTIONAL, *WRITTEN):
            hint = _nearest(key, (*GIVEN, *OPTIONAL, *WRITTEN))
            raise ClaimError(f"claim {name!r}: unknown key {key!r}{hint}; remove or rename it")
    for key in GIVEN:
        if not entry.get(key):
            raise ClaimError(f"claim {name!r} has no {key}; add it")
    rule, parameters = _rule(name, entry["rule"])
    experiment = entry["experiment"]
    if not isinstance(experiment, list) or not all(isinstance(e, str) for e in experiment):
        raise ClaimError(f"claim {name!r}: experiment is a list of names, not {experiment!r}")
    _check_experiments(name, rule, experiment, entry.get("command"))
    verdict = entry.get("verdict", NOT_TESTED)
    if verdict not in VERDICTS:
        hint = _nearest(str(verdict), VERDICTS)
        raise ClaimError(f"claim {name!r}: unknown verdict {verdict!r}{hint}; --write sets it")
    return Claim(
        id=name,
        claim=str(entry["claim"]),
        source=str(entry["source"]),
        chapter=str(entry["chapter"]),
        experiment=tuple(experiment),
        rule=rule,
        parameters=parameters,
        command=entry.get("command"),
        stored={key: entry.get(key) for key in WRITTEN},
    )


def _rule(name: str, given) -> tuple[str, Mapping]:
    if not isinstance(given, dict) or len(given) != 1:
        raise ClaimError(f"claim {name!r}: rule is one name with its parameters, not {given!r}")
    ((rule, parameters),) = given.items()
    parameters = parameters or {}
    if rule not in RULES:
        hint = _nearest(str(rule), RULES)
        raise ClaimError(f"claim {name!r}: unknown rule {rule!r}{hint}; {', '.join(RULES)}")
    known = RULES[rule].parameters
    for key in parameters:
        if key not in known:
            hint = _nearest(str(key), known)
            raise ClaimError(f"claim {name!r}: rule {rule} has no parameter {key!r}{hint}")
    for key, parameter in known.items():
        if parameter.default is inspect.Parameter.empty and key not in parameters:
            raise ClaimError(f"claim {name!r}: rule {rule} needs the parameter {key!r}; add it")
    return rule, parameters


def _check_experiments(name: str, rule: str, experiments: list[str], command) -> None:
    """Archives have a command that makes them; computations name a function that exists."""
    for experiment in experiments:
        if not RULES[rule].reads:
            try:
                pkgutil.resolve_name(experiment)
            except (ImportError, AttributeError, ValueError):
                raise ClaimError(
                    f"claim {name!r}: {experiment!r} is no function that computes it; "
                    "write it as kernels.rounding.round_to"
                ) from None
        elif not fnmatch.filter([*EXPERIMENTS, *BUILDERS, SEARCH], experiment) and not command:
            raise ClaimError(
                f"claim {name!r}: {experiment!r} is no experiment of book.evidence"
                f"{_nearest(experiment, EXPERIMENTS)}; rename it, or add the command that makes it"
            )


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1)
    return f", did you mean {near[0]!r}?" if near else ""


def evaluate(claims: Sequence[Claim], evidence: Evidence | None = None) -> dict[str, Finding]:
    """Id -> what the claim's rule finds in the archives now."""
    evidence = evidence or Evidence()
    return {claim.id: claim.evaluate(evidence) for claim in claims}


def stale(claims: Sequence[Claim], findings: Mapping[str, Finding]) -> list[str]:
    """Ids of the claims of which the file says something else than was found."""
    return [c.id for c in claims if dict(c.stored) != written(findings[c.id])]


def write_claims(
    claims: Sequence[Claim], findings: Mapping[str, Finding], path: Path = CLAIMS
) -> None:
    """Write the file anew, in one format, with these findings."""
    blocks = [
        yaml.safe_dump(
            [claim.entry(findings[claim.id])],
            sort_keys=False,
            allow_unicode=True,
            default_flow_style=None,
            width=98,
        )
        for claim in claims
    ]
    path.write_text(HEADER + "\n" + "\n".join(blocks), encoding="utf8")
