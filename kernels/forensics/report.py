"""One head in, one readable verdict out: what was counted, measured and ruled out.

A report speaks of the tensors it was given. It does not say what training does next: whether a
biased error matters depends on how long it keeps its direction, which one capture cannot show.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

from ..numerics import Numerics, parse_numerics
from .coherence import Coherence
from .counts import Counts, counts
from .delta import DeltaMeasurement, delta_error
from .inputs import Head, as_head, describe
from .stats import SignedMean
from .weights import WeightGradientError, weight_gradient_error

CLEAR = 4.0  # standard errors off zero before a mean is called biased

NOT_TESTED = (
    "learning rate too high, warm-up too short, or a schedule that restarts",
    "batch size, micro-batches and gradient accumulation (mean of means)",
    "the optimiser: eps, betas, weight decay, clipping",
    "seed, data order, a bad or repeated batch",
    "growth of logits or norms from other causes (no normalisation of q and k, no z-loss)",
    "fp16 overflow, loss scaling, skipped steps",
    "precision elsewhere: LayerNorm, output head, residual stream, optimiser state",
    "a kernel's own defects: races in the backward, truncating casts, padding and masks",
    "versions of libraries and drivers, faulty hardware",
)


@dataclass(frozen=True)
class Report:
    """What one head shows. `text` (or print) to read, `to_dict` and `to_json` to keep.

    found, ruled_out, not_measured: sentences. delta and weights are None where the tensors that
    they need were not given, or where the numerics leave nothing to measure.
    """

    head: dict[str, str]
    numerics: str
    causal: bool
    counts: Counts
    delta: DeltaMeasurement | None
    weights: WeightGradientError | None
    coherence: Coherence | None
    found: list[str]
    ruled_out: list[str]
    not_measured: list[str]

    @property
    def text(self) -> str:
        mask = "causal" if self.causal else "not causal"
        parts = [
            ("Head", [f"{name}: {told}" for name, told in self.head.items()] + [mask]),
            (f"Counted under {self.numerics}", _count_lines(self.counts)),
            ("Measured", _delta_lines(self.delta) + _weight_lines(self.weights, self.coherence)),
            ("Found", self.found or ["nothing out of the ordinary"]),
            ("Ruled out, for these tensors and these numerics", self.ruled_out),
            ("Not measured", self.not_measured),
            ("Other known causes of a loss that rises, not tested here", list(NOT_TESTED)),
        ]
        lines = []
        for title, body in parts:
            if body:
                lines += [title, *(f"  - {line}" for line in body), ""]
        return "\n".join(lines + [_CLOSING])

    def __str__(self) -> str:
        return self.text

    def to_dict(self) -> dict:
        """Plain JSON types; numbers that are not finite become None."""
        c = self.counts
        sequence, key, share = c.sink
        out = {
            "head": self.head,
            "numerics": self.numerics,
            "causal": self.causal,
            "counted": {
                "rows": c.rows,
                "tied_rows": c.tied_rows,
                "tied_rows_by_sign_of_maximum": c.tied_rows_by_sign(),
                "largest_tie": int(c.ties.max()),
                "rows_within_tolerance": int((c.near > 1).sum()),
                "tolerance": c.tolerance,
                "closest_untied": c.closest,
                "ones": int(c.ones.sum()),
                "absorbing_rows": c.absorbing_rows,
                "sink": {"sequence": sequence, "key": key, "share_of_rows": share},
                "one_sided_features": c.one_sided,
                "nonfinite_rows": c.nonfinite,
                "max_score": c.max_score,
            },
            "delta": _delta_dict(self.delta),
            "weights": _weights_dict(self.weights),
            "coherence": _coherence_dict(self.coherence),
            "found": self.found,
            "ruled_out": self.ruled_out,
            "not_measured": self.not_measured,
            "not_tested": list(NOT_TESTED),
        }
        return _strict(out)

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)


_CLOSING = "This describes one capture of one head. It does not say what training does next."


def report(
    q,
    k=None,
    v=None,
    dO=None,
    X=None,
    W_Q=None,
    *,
    numerics: Numerics | str = "paper",
    causal: bool = True,
    scale: float | None = None,
    tolerance: float = 0.0,
    block: int | None = None,
    index=None,
    seed: int = 0,
) -> Report:
    """Examine one head.

    q, k, v (and dO, X, W_Q as far as known), index: as in `as_head`; a file, mapping or Head
    suffices. numerics: the arithmetic to test; ties are those of scores rounded as it says.
    tolerance: also count scores this close to the maximum. block: rows per cluster for standard
    errors, see `delta_error`. Raises ValueError with one sentence for unusable input.
    """
    head = as_head(q, k, v, dO, X, W_Q, index=index)
    numerics = parse_numerics(numerics)
    shared = dict(numerics=numerics, causal=causal, scale=scale, seed=seed)
    counted = counts(head, tolerance=tolerance, **shared)
    missing = []
    delta = weights = alike = None
    if head.dO is None:
        missing.append("the error of delta: dO was not given")
    elif numerics.delta != "dO_O":
        missing.append("the error of delta: these numerics take delta from dP*P and read no O")
    else:
        delta = delta_error(head, block=block, **shared)
        if head.X is None:
            missing.append("the error of dW_Q and its coherence: X was not given")
        elif counted.nonfinite:
            missing.append("the error of dW_Q: O is not finite in some rows")
        else:
            weights = weight_gradient_error(head, **shared)
            alike = weights.coherence(seed=seed)
    if weights is not None and head.W_Q is None:
        missing.append("the angle with W_Q's leading singular pair: W_Q was not given")
    found, ruled_out = _judge(head, counted, delta, weights, alike)
    return Report(
        head=describe(head, numerics.inputs),
        numerics=str(numerics),
        causal=causal,
        counts=counted,
        delta=delta,
        weights=weights,
        coherence=alike,
        found=found,
        ruled_out=ruled_out,
        not_measured=missing,
    )


# -- judgement ------------------------------------------------------------------------------------


def _judge(head: Head, c: Counts, d, w, alike) -> tuple[list[str], list[str]]:
    found, ruled_out = [], []
    if c.nonfinite:
        found.append(f"O is NaN or infinite in {c.nonfinite} of {c.rows} rows")
    if c.tied_rows:
        found.append(f"ties seen in {_of(c.tied_rows, c.rows)}")
    else:
        ruled_out.append(f"tied maxima: none in {c.rows} rows")
    if c.absorbing_rows:
        found.append(f"absorption (a tail below half an ulp) in {_of(c.absorbing_rows, c.rows)}")
    else:
        ruled_out.append(f"absorbing rows: none in {c.rows}")
    if d is not None:
        _judge_delta(d, found, ruled_out)
    if alike is not None and d.rms > 0:
        told = (
            f"gain {alike.gain:.3g}, fresh random directions give {alike.null.mean:.3g} +- "
            f"{alike.null.sd:.2g}"
        )
        if alike.null.p_value < 0.05 and alike.gain > alike.null.mean:
            found.append(f"the terms of dW_Q's error add up coherently: {told}")
        else:
            ruled_out.append(f"coherent adding up of dW_Q's error in this capture: {told}")
    return found, ruled_out


def _judge_delta(d: DeltaMeasurement, found: list[str], ruled_out: list[str]) -> None:
    if d.rms == 0:
        ruled_out.append("an error of delta: delta_lp equals delta_hp in every row")
        return
    mean, bound = d.mean, CLEAR * d.mean.stderr
    if math.isnan(bound):
        return
    told = f"mean {mean}, {mean.z:+.1f} standard errors ({d.clusters})"
    if abs(mean.mean) > bound:
        found.append(f"delta's error is one-sided: {told}")
        cause, part = max(d.causes.items(), key=lambda item: abs(item[1].total))
        found.append(f"its largest part comes from {cause} rows: {_share(part)}")
    else:
        ruled_out.append(f"a mean error of delta beyond +-{bound:.2g} in these rows: {told}")


# -- wording --------------------------------------------------------------------------------------


def _of(part: int, whole: int) -> str:
    return f"{part} of {whole} rows ({100 * part / max(whole, 1):.3g} %)"


def _share(part) -> str:
    return f"{100 * part.share:.3g} % of the sum (95 % interval {100 * part.low:.3g} to " + (
        f"{100 * part.high:.3g} %), {part.rows} rows"
    )


def _count_lines(c: Counts) -> list[str]:
    signs = ", ".join(f"{n} {name}" for name, n in c.tied_rows_by_sign().items())
    sequence, key, share = c.sink
    lines = [
        f"rows with a tied maximum: {_of(c.tied_rows, c.rows)}; maximum {signs}; "
        f"largest tie {int(c.ties.max())} keys",
        f"entries with P_bar = 1: {int(c.ones.sum())}",
        f"absorbing rows: {_of(c.absorbing_rows, c.rows)}",
        f"key {key} of sequence {sequence} leads {100 * share:.3g} % of its rows",
        f"features of V with one sign (9 of 10 values): {100 * c.one_sided:.3g} %",
        f"largest |score|: {c.max_score:.6g}",
    ]
    if c.closest is not None:
        _, row, top, second = c.closest
        near = top - second <= c.tolerance
        told = f"tied within {c.tolerance:g}" if near else "not tied"
        lines.insert(1, f"closest other score: {second:.6g} vs {top:.6g} in row {row}, {told}")
    if c.tolerance:
        near = _of(int((c.near > 1).sum()), c.rows)
        lines.insert(1, f"rows with another score within {c.tolerance:g} of the maximum: {near}")
    return lines


def _delta_lines(d: DeltaMeasurement | None) -> list[str]:
    if d is None:
        return []
    s = d.sign
    lines = [
        f"delta_lp - delta_hp: mean {d.mean} over {d.clusters}; rms {d.rms:.3g}, "
        f"{d.relative:.3g} of delta's own",
        f"signs: {s.positive} up, {s.negative} down, {s.zero} zero; p = {s.p_value:.2g} "
        "(rows taken as independent)",
    ]
    for name, part in d.causes.items():
        if part.rows:
            lines.append(f"{name} rows: {_share(part)}")
    for name, part in d.twin_sites.items():
        lines.append(f"rounding at {name}: total {part.total:+.3g}")
    for name, e in d.sites.items():
        lines.append(
            f"change of delta, {name} alone: {e.alone}, rms {e.alone_rms:.2g}; "
            f"all but it: {e.without}, rms {e.without_rms:.2g}"
        )
    return lines


def _weight_lines(w: WeightGradientError | None, alike: Coherence | None) -> list[str]:
    if w is None:
        return []
    lines = [
        f"|dW_hp - dW_lp| / |dW_hp| = {w.ratio:.3g}; rounding dS alone {w.grad_scores_ratio:.3g}, "
        f"storing dQ alone {w.gradients_ratio:.3g}",
        f"identity with alpha sum delta-error (PK)^T X: residual {w.residual:.2g}",
        f"cosine of the rank-1 terms: mean {alike.mean_cosine:.3g}, 5-50-95 % "
        + ", ".join(f"{x:.3g}" for x in alike.quantiles()),
        f"mean direction R: first singular value holds {100 * float(alike.energy[0]):.3g} % of "
        f"its energy; it explains {100 * alike.explained:.3g} % of the terms' energy",
        f"coherent gain {alike.gain:.3g} (random {alike.null.mean:.3g} +- {alike.null.sd:.2g}, "
        f"p = {alike.null.p_value:.2g})",
    ]
    if w.spectral_norm is not None:
        lines.append(
            f"W_Q: spectral norm {w.spectral_norm:.4g}; cosine of dW_hp - dW_lp with its leading "
            f"pair {w.error_leading_cosine:+.3g}, of dW_hp {w.gradient_leading_cosine:+.3g}"
        )
    return lines


# -- plain data -----------------------------------------------------------------------------------


def _mean_dict(m: SignedMean | None):
    return None if m is None else m._asdict()


def _delta_dict(d: DeltaMeasurement | None):
    if d is None:
        return None
    return {
        "mean": _mean_dict(d.mean),
        "clusters": d.clusters,
        "rows_independent": _mean_dict(d.naive),
        "sign_test": d.sign._asdict(),
        "rms": d.rms,
        "relative_rms": d.relative,
        "causes": {name: _part_dict(part) for name, part in d.causes.items()},
        "twin_sites": {name: _part_dict(part) for name, part in d.twin_sites.items()},
        "sites": {
            name: {
                "alone": _mean_dict(e.alone),
                "alone_rms": e.alone_rms,
                "without": _mean_dict(e.without),
                "without_rms": e.without_rms,
            }
            for name, e in d.sites.items()
        },
        "all_sites": _mean_dict(d.all_sites),
        "absorbing_elements": d.absorbing_elements,
    }


def _part_dict(part) -> dict:
    keys = ("rows", "total", "share", "low", "high", "energy")
    return {key: getattr(part, key) for key in keys} | {"mean": _mean_dict(part.mean)}


def _weights_dict(w: WeightGradientError | None):
    names = (
        "ratio",
        "grad_scores_ratio",
        "gradients_ratio",
        "residual",
        "error_leading_cosine",
        "gradient_leading_cosine",
        "spectral_norm",
    )
    return None if w is None else {name: getattr(w, name) for name in names}


def _coherence_dict(a: Coherence | None):
    if a is None:
        return None
    names = ("n", "mean_cosine", "explained", "gain", "approximation_cosine")
    plain = {name: getattr(a, name) for name in names}
    return plain | {
        "quantiles_5_50_95": a.quantiles(),
        "energy_first": float(a.energy[0]),
        "null": {"mean": a.null.mean, "sd": a.null.sd, "p_value": a.null.p_value},
    }


def _strict(x):
    if isinstance(x, dict):
        return {key: _strict(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [_strict(value) for value in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x
