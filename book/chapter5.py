"""Words and tables of chapter 5, made from records of runs and from the archives.

Measurements are in `book.sfa_rows` (crafted rows) and `book.sfa_heads` (captured heads), what all
archives say together in `book.sfa_findings`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from IPython.display import Markdown

from gpt2.config import difference
from kernels.forensics import SignedMean

from .evidence import Archive
from .experiments import SWEEP_BETAS, Experiment
from .records import FAILED, failed_step
from .sfa_rows import CARRIER_UNDERFLOW
from .speed import by_shape
from .tables import half_width, markdown_table, number, over_runs, step_text

# Arms with the published rule -> beta.
BETAS = {"sfa2": 2.0, "sfa7": 7.0} | {f"beta_{b:g}": float(b) for b in SWEEP_BETAS}
REAL_TIES = 0.2  # share of tied rows that the worst head must pass before the failure


def ties_before_failure(row: Mapping) -> tuple[float, float] | None:
    """Mean and largest tie rate of the worst head up to the step where the trouble began."""
    curve = row["curves"].get("tie_rate")
    if curve is None:
        return None
    end = row["diverged_from"] or failed_step(row) or row["steps"]
    seen = [v for s, v in zip(curve["step"], curve["value"]) if s <= end and v is not None]
    return (sum(seen) / len(seen), max(seen)) if seen else None


def is_test(row: Mapping) -> bool:
    """Whether a run of plain softmax makes its seed a test of SFA: it fails, with real ties."""
    ties = ties_before_failure(row)
    return row["kind"] in FAILED and ties is not None and ties[1] > REAL_TIES


def accepted(rows: Sequence[Mapping]) -> bool:
    """Whether every seed of these records passes the test that was declared beforehand."""
    plain = [row for row in rows if row["arm"] == "low"]
    return bool(plain) and all(map(is_test, plain))


def regime_table(rows: Sequence[Mapping]) -> Markdown:
    """Whether the failing arm is a test of SFA, seed by seed."""
    lines = []
    for row in rows:
        if row["arm"] == "low":
            ties = ties_before_failure(row)
            told = "accepted" if is_test(row) else "not accepted"
            shown = ["none"] * 2 if ties is None else [f"{x:.0%}" for x in ties]
            lines.append([row["seed"], step_text(row), *shown, told])
    header = ["seed", "plain softmax", "ties before it, mean", "largest", "as a test of SFA"]
    return markdown_table(header, lines)


def score_sentences(rows: Sequence[Mapping]) -> str:
    """Of runs under the published rule: the last largest score seen, the bound, and the end."""
    told = []
    for row in rows:
        curve = row["curves"].get("max_logit")
        if row["arm"] in BETAS and curve and curve["value"]:
            seen = [v for v in curve["value"] if v is not None]
            bound = CARRIER_UNDERFLOW / (BETAS[row["arm"]] - 1)
            last = f"last seen {seen[-1]:.3g} at step {curve['step'][len(seen) - 1]:,}"
            told.append(f"{row['label']}: bound {bound:.3g}, {last}, {step_text(row)}")
    return "; ".join(told) + "."


def sweep_table(rows: Sequence[Mapping], groups: Mapping[str, str]) -> Markdown:
    """One line per arm: what is varied, and each seed's end."""
    lines = []
    for name in dict.fromkeys(row["arm"] for row in rows):
        mine = [row for row in rows if row["arm"] == name]
        ends = "; ".join(f"{step_text(row)}" for row in mine)
        lines.append([groups.get(name, ""), mine[0]["label"], ends])
    return markdown_table(["varied", "arm", "seed by seed"], lines)


# -- price ----------------------------------------------------------------------------------------


def price_table(rows: Sequence[Mapping], direction: str = "forward") -> Markdown:
    """Milliseconds of ours and of SDPA's fastest backend, and what SFA adds, per shape."""
    lines = []
    for (of, causal, width, length), ms in by_shape(rows, "ms_p50").items():
        if of != direction:
            continue
        sdpa = min((v for k, v in ms.items() if k.startswith("sdpa")), default=None)
        lines.append(
            [
                f"{'causal' if causal else 'full'}, {width}, {length:,}",
                *(number(ms.get(k)) for k in ("ours-flash", "ours-paper", "ours-stabilized")),
                number(sdpa),
                _ratio(ms.get("ours-stabilized"), ms.get("ours-paper")),
                _ratio(ms.get("ours-stabilized-tiled"), ms.get("ours-flash")),
                _ratio(ms.get("ours-stabilized"), sdpa),
            ]
        )
    header = ["shape (mask, width, keys)", "flash, ms", "paper, ms", "SFA, ms", "SDPA, ms"]
    header += ["SFA / paper", "SFA per tile / flash", "SFA / SDPA"]
    return markdown_table(header, lines)


def sfa_cost(rows: Sequence[Mapping]) -> str:
    """What SFA adds to the time of the plain kernel, over shapes, in words."""
    told = []
    for direction in ("forward", "backward"):
        found = [ms for key, ms in by_shape(rows, "ms_p50").items() if key[0] == direction]
        pairs = [(ms.get("ours-stabilized"), ms.get("ours-paper")) for ms in found]
        extra = [100 * (a / b - 1) for a, b in pairs if a and b]
        if extra:
            least, most = round(min(extra)), round(max(extra))
            told.append(f"{least:+d} to {most:+d} % {direction}")
    return ", ".join(told) or "not measured"


def _ratio(a: float | None, b: float | None) -> str:
    return "none" if a is None or b is None else f"{a / b:.3f}"


def loss_at(row: Mapping, step: int) -> float | None:
    """Held-out loss of a record at a step, or None where it has none."""
    curve = row["curves"].get("held_out_loss", {"step": [], "value": []})
    return dict(zip(curve["step"], curve["value"])).get(step)


def settings_table(settings: Sequence[Experiment], seed: int = 0) -> Markdown:
    """In what the settings' runs differ from the first's, field by field."""
    configs = {e.name: e.arm("low").config(e, seed) for e in settings}
    first = next(iter(configs.values()))
    names = dict.fromkeys(n for c in configs.values() for n in difference(first, c))
    names = [n for n in names if n not in ("probes", "checkpoint_interval", "keep_checkpoints")]
    lines = [[name, *(getattr(c, n) for n in names)] for name, c in configs.items()]
    return markdown_table(["setting", *(f"`{n}`" for n in names)], lines)


def fp32_runs(archive: Archive, failure: Archive | None) -> list[dict]:
    """The archive's own runs with attention in fp32, else chapter 1's on the same text.

    The latter are of setting `sfa` alone, whose plain runs are chapter 1's.
    """
    own = archive.arm("fp32")
    if own or failure is None or archive.path.parent.name != "sfa":
        return own
    same = failure.provenance["corpus_sha256"] == archive.provenance["corpus_sha256"]
    return failure.arm("fp32") if same else []


def loss_differences(
    rows: Sequence[Mapping], reference: Sequence[Mapping]
) -> list[tuple[str, int, SignedMean]]:
    """(label, step, held-out loss minus the reference's over seeds), each arm at the last step at
    which all of its seeds that the reference has are still finite and none has failed."""
    base = {row["seed"]: row for row in reference}
    out = []
    for name in dict.fromkeys(row["arm"] for row in rows):
        mine = [row for row in rows if row["arm"] == name and row["seed"] in base]
        steps = [_sound_steps(r) & _sound_steps(base[r["seed"]]) for r in mine]
        shared = set.intersection(*steps) if steps else set()
        if not shared:
            continue
        step = max(shared)
        x = [loss_at(r, step) - loss_at(base[r["seed"]], step) for r in mine]
        out.append((mine[0]["label"], step, over_runs(x)))
    return out


def _sound_steps(row: Mapping) -> set[int]:
    end = row["diverged_from"] or row["nonfinite_step"] or math.inf
    curve = row["curves"].get("held_out_loss", {"step": [], "value": []})
    return {s for s, v in zip(curve["step"], curve["value"]) if v is not None and s < end}


def loss_table(found: Sequence[tuple[str, int, SignedMean]]) -> Markdown:
    lines = [
        [label, f"{step:,}", f"{d.mean:+.3f}", _interval(d), d.n]
        if step
        else [label, "none", "broke before the first evaluation", "-", d.n]
        for label, step, d in found
    ]
    header = ["arm", "step", "held-out loss minus fp32's (nats)", "95 % interval", "seeds"]
    return markdown_table(header, lines)


def _interval(d: SignedMean) -> str:
    if d.n < 2:
        return "one seed"
    half = half_width(d)
    return f"{d.mean - half:+.3f} to {d.mean + half:+.3f}"


# -- words ----------------------------------------------------------------------------------------


def capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def what_you_saw(
    rows: Sequence[Mapping], broken: Sequence[str], archived: Sequence[str]
) -> Markdown:
    """The chapter's findings as a list, every number from a record.

    broken: what ended the nonfinite runs. archived: sentences of `book.sfa_findings`.
    """
    told = [f"{capital(row['label'])}: {step_text(row)}." for row in rows]
    by = {row["arm"]: row for row in rows}
    sfa = [by[a] for a in ("sfa2", "sfa7", "guarded") if a in by]
    saved = [r["label"] for r in sfa if r["kind"] not in FAILED]
    if by.get("low", {}).get("kind") in FAILED and sfa:
        told.append(
            "Of the stabilised runs, these did not fail: " + ", ".join(saved) + "."
            if saved
            else "No stabilised run outlived the failure that it is meant to prevent."
        )
    elif sfa:
        told.append("Plain softmax did not fail here, so this seed is no test of SFA.")
    twin = by.get("delta_fp32")
    if twin is not None and twin["kind"] not in FAILED:
        told.append("The same forward pass with delta from an fp32 O did not fail.")
    told += [*broken, *archived]
    return Markdown("\n".join(f"- {sentence}" for sentence in told))
