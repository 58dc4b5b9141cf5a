"""What the book shows of the ledger: a table with a filter, the rules, and a summary in words."""

from __future__ import annotations

import html
import inspect
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from IPython.display import Markdown

from gpt2.outcomes import VERDICT_RUNS

from ..tables import markdown_table
from .claims import Claim
from .findings import (
    NOT_SUPPORTED,
    NOT_TESTED,
    OBSERVED,
    PARTLY,
    RULES,
    SUPPORTED,
    VERDICTS,
    Finding,
)

Findings = Mapping[str, Finding]
OPEN = "open question"
BF16_BITS = 7  # of the fraction: what a claim about bf16 itself asks for
MEANING = {
    SUPPORTED: "enough runs in each arm, and the outcome is the claimed one, by the rule below; "
    "of arithmetic: it holds",
    PARTLY: "enough runs; it goes the claimed way, but not far enough, or not in every setting",
    NOT_SUPPORTED: "enough runs; the outcome is another one in the settings that we ran",
    OBSERVED: "fewer runs in some arm, and the effect says which way they point; or runs that "
    "cannot have a verdict, and it says why",
    NOT_TESTED: "no archived run can decide; the command that would is named",
}


def choices() -> dict[str, str | None]:
    """Label -> verdict, for the filter of the table."""
    return {"all": None, **{verdict: verdict for verdict in VERDICTS}}


def table(
    claims: Sequence[Claim], findings: Findings, verdict: str | None = None, ending: str = "html"
) -> str:
    """The claims with one verdict (all if None) as HTML, one row each, in the file's order.

    ending: of the links to chapters, "html" on the page and "ipynb" in JupyterLab.
    """
    chosen = [c for c in claims if verdict in (None, findings[c.id].verdict)]
    rows = "".join(_row(claim, findings[claim.id], ending) for claim in chosen)
    count = "1 claim" if len(chosen) == 1 else f"{len(chosen)} claims"
    head = "<tr><th>claim, verdict</th><th>effect, evidence</th></tr>"
    return (
        f'<div class="bit-scroll"><p>{count}.</p><table class="table bit-ledger"><thead>{head}'
        f"</thead><tbody>{rows}</tbody></table></div>"
    )


def _row(claim: Claim, found: Finding, ending: str) -> str:
    where = f'<a href="{claim.chapter}.{ending}">{_chapter(claim.chapter)}</a>'
    evidence = "; ".join(found.sources) or ", ".join(claim.experiment)
    if found.runs:
        seeds = f", seeds {', '.join(map(str, found.seeds))}" if found.seeds else ""
        evidence += f". {found.runs} run{'s' * (found.runs > 1)}{seeds}"
    effect = "<br>".join(html.escape(line) for line in found.lines)
    return (
        f"<tr><td>{_badge(found.verdict)}<br>{html.escape(claim.claim)}<br>"
        f"<small>{html.escape(claim.source)}; {where}</small></td>"
        f"<td>{effect}<br><small>{html.escape(evidence)}</small></td></tr>"
    )


def _chapter(name: str) -> str:
    number = re.match(r"(\d+)-", name)
    return f"chapter {int(number[1])}" if number else f"page “{name.capitalize()}”"


def _badge(verdict: str) -> str:
    return f'<span class="bit-verdict bit-{verdict.replace(" ", "-")}">{verdict}</span>'


def counts(findings: Findings) -> Markdown:
    """How many claims have each verdict, and what that means."""
    found = Counter(f.verdict for f in findings.values())
    lines = [[verdict, found[verdict], MEANING[verdict]] for verdict in VERDICTS]
    told = f"\n\nEnough are {VERDICT_RUNS} runs."
    return Markdown(markdown_table(["verdict", "claims", "meaning"], lines).data + told)


def rules(claims: Sequence[Claim]) -> Markdown:
    """The rules that these claims use, in their own words, and how many use each."""
    used = Counter(claim.rule for claim in claims)
    lines = []
    for name, count in used.most_common():
        claimed, judged = _told(name)
        times = "one claim" if count == 1 else f"{count} claims"
        lines.append([f"`{name}` ({times}): {claimed}", judged])
    return markdown_table(["rule, and what is claimed", "how it is judged"], lines)


def _told(name: str) -> tuple[str, str]:
    """First sentences up to the verdicts, and the rest, of a rule's docstring."""
    first, _, rest = inspect.getdoc(RULES[name].judge).partition("\n\n")
    claimed = " ".join(first.removeprefix("Claimed: ").split())
    return claimed, " ".join(rest.split()) or "it holds"


def ranked(claims: Sequence[Claim], findings: Findings, verdict: str, runs: bool) -> list[Claim]:
    """Claims that others make, with a verdict, from runs or not; the strongest effect first.

    Strength is the cautious end of the effect's interval, so that few runs weigh little. Questions
    that the paper leaves open are no claims of others.
    """
    chosen = [
        c
        for c in claims
        if findings[c.id].verdict == verdict
        and (findings[c.id].runs > 0) == runs
        and c.source != OPEN
    ]
    return sorted(chosen, key=lambda c: -findings[c.id].strength)


def summary(claims: Sequence[Claim], findings: Findings, most: int = 7) -> Markdown:
    """The ledger in a few lines, for the front page: counts, strongest support, contradictions,
    and which way bf16 itself points."""
    found = Counter(f.verdict for f in findings.values())
    told = ", ".join(f"**{found[v]}** {v}" for v in VERDICTS)
    lines = [f"Of {len(claims)} claims and open questions ({{doc}}`ledger`): {told}."]
    groups = (
        ("Of the paper's claims these held in our runs, strongest effect first", SUPPORTED, True),
        ("These did **not** hold here, strongest effect first", NOT_SUPPORTED, True),
        ("These do not hold, by arithmetic", NOT_SUPPORTED, False),
    )
    for words, verdict, runs in groups:
        chosen = ranked(claims, findings, verdict, runs)[:most]
        if chosen:
            told = "\n".join(f"- {_quoted(c, findings)}" for c in chosen)
            lines.append(f"{words}:\n\n{told}")
    real = [c for c in claims if c.parameters.get("bits") == BF16_BITS]
    real = [c for c in real if findings[c.id].verdict == OBSERVED]
    if real:
        told = "\n".join(f"- {_pointing(c, findings)}" for c in real)
        words = f"In bf16 itself, on a GPU, from fewer than the {VERDICT_RUNS} runs of a verdict"
        lines.append(f"{words}:\n\n{told}")
    few = found[OBSERVED] + found[NOT_TESTED]
    lines.append(
        f"{few} wait for more runs. Read the small print in brackets: what fails with 2 fraction "
        "bits is evidence about a mechanism, and bf16 has 7."
    )
    return Markdown("\n\n".join(lines))


def _quoted(claim: Claim, findings: Findings) -> str:
    """The claim and where it was tried."""
    where = list(dict.fromkeys(e.where for e in findings[claim.id].effects if e.where))
    return f"{claim.claim}" + (f" *({'; '.join(where)})*" if where else "")


def _pointing(claim: Claim, findings: Findings) -> str:
    """The claim, and which way what was observed points in each setting."""
    effects = [e for e in findings[claim.id].effects if e.where and e.points]
    told = list(dict.fromkeys(f"{e.where.removeprefix('bf16, ')}: {e.points}" for e in effects))
    return f"{claim.claim}" + (f" *({'; '.join(told)})*" if told else "")


def missing(claims: Sequence[Claim], findings: Findings) -> Markdown:
    """The claims that no archived run decides, each with the command that would."""
    lines = [
        [claim.claim, f"`{claim.run_command}`"]
        for claim in claims
        if findings[claim.id].verdict == NOT_TESTED
    ]
    if not lines:
        return Markdown("Every claim was tested.")
    return markdown_table(["claim", "the run that is missing"], lines)
