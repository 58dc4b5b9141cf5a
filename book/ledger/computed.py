"""Rules that compute: arithmetic, identities and crafted rows, asked of `kernels` when they run.

Nothing is trained and nothing is random but by a fixed seed, so there are no runs to count: what
is claimed holds or it does not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels.forensics import bias_law, signed_mean, simulate_bias, weight_gradient_error
from kernels.formats import parse_format
from kernels.rounding import decode, round_to, ulp

from ..chapter4 import attention_kinds, crafted_rows, offset_values, read_back, stored_error
from ..chapter4 import tied_rows as rows_with_ties
from ..numerics_page import crafted_bias
from ..sfa_rows import attend, boundary, crafted_scores, exact_differences
from .findings import Finding, computation, computed

FOUR = 4.0  # standard errors off zero that count as a bias
ZERO = 0.02  # ulp: a bias below this is none


@computation
def stored_sum(
    *, terms: list[float], stored: float, format: str = "bf16", mode: str = "nearest_even"
) -> Finding:
    """Claimed: the exact sum of `terms`, rounded once to `format`, is stored as `stored`."""
    fmt, exact = parse_format(format), sum(terms)
    bits = decode(exact, fmt, mode)
    effect = f"{' + '.join(f'({t})' for t in terms)} = {exact}, stored in {fmt} as {bits.rounded} "
    effect += f"(error {bits.rounded - exact!r}{', an exact tie' if bits.tie else ''})"
    return computed(bits.rounded == stored, effect)


@computation
def fraction_bits(*, format: str, bits: int) -> Finding:
    """Claimed: a format has so many fraction bits, read off the spacing of its numbers at 1."""
    fmt = parse_format(format)
    spacing = float(ulp(torch.tensor(1.0), fmt))
    effect = f"{format}: spacing {spacing:g} at 1, so {fmt.fraction_bits} fraction bits and "
    effect += f"{fmt.exponent_bits} exponent bits"
    return computed(spacing == 2.0**-bits == 2.0**-fmt.fraction_bits, effect)


@computation
def law_holds(*, formats: list[str], tied: int = 2, tail: float = 0.05) -> Finding:
    """Claimed: ties with a small tail of their sign round away from zero, by the law, in ulps.

    Holds if in every format 100,000 draws lie within four standard errors of the law and the law
    is off zero.
    """
    told, good = [], True
    for name in formats:
        law = bias_law(tied, tail, fmt=name).expected_ulp
        drawn = simulate_bias(tied, tail, fmt=name)
        good &= law > ZERO and abs(drawn.mean - law) <= FOUR * drawn.stderr
        told.append(f"{name} {law:+.3f} ({drawn.mean:+.3f} ± {2 * drawn.stderr:.3f})")
    return computed(good, f"law and draws (± 2 s.e.), ulp away from zero: {', '.join(told)}")


@computation
def biased_row(*, kind: str, numerics: str, biased: bool, sign: int = 1) -> Finding:
    """Claimed: crafted rows of a kind have a biased O_bar under these numerics, or have none.

    A bias is more than four standard errors and more than 0.02 ulp, of this sign away from zero.
    """
    found = crafted_bias(kind, numerics).measured
    off = abs(found.mean) > max(FOUR * found.stderr, ZERO)
    effect = f"{kind} rows under {numerics}: {found.mean:+.3f} ulp of Ō away from zero, to within "
    effect += f"{max(0.001, 2 * found.stderr):.1g} (2 s.e.)"
    return computed(off and sign * found.mean > 0 if biased else not off, effect)


@computation
def one_sided_values(*, offset: float, largest_weight: float = 0.003) -> Finding:
    """Claimed: the bias of tied rows needs values of one sign: an offset that balances V ends it.

    Rows sum to 1, so in exact arithmetic the offset only moves O. Errors are absolute: an offset
    also changes the size of an ulp.
    """
    rows = rows_with_ties(2, largest_weight)
    balanced = offset_values(rows, offset)
    before, after = (_absolute_bias(r) for r in (rows, balanced))
    gone = abs(after.mean) <= FOUR * after.stderr and abs(before.mean) > FOUR * before.stderr
    effect = f"two ties, tail up to {largest_weight:g}, Ō rounded to bf16, error of O along V: "
    effect += f"{before.mean:+.5f} ± {2 * before.stderr:.5f} with V in -(2, 4), "
    effect += f"{after.mean:+.5f} ± {2 * after.stderr:.5f} with V moved by {offset:+g}"
    return computed(gone, effect)


def _absolute_bias(rows):
    """Mean of the error of O_bar, negative along the sign that V had, one draw a set."""
    error = round_to(rows.o_bar, rows.fmt) - rows.o_bar
    return signed_mean(error.mean(1))


@computation
def output_rounding(*, largest_weight: float = 0.003, shared: float = 0.5) -> Finding:
    """Claimed: rounding O alone has no bias over heads, but an error that rows of a head share."""
    found = stored_error(rows_with_ties(2, largest_weight), unnormalized=False, output=True)
    off = abs(found.bias.mean) > max(FOUR * found.bias.stderr, ZERO)
    effect = f"two ties, tail up to {largest_weight:g}, O alone rounded: bias "
    effect += f"{found.bias.mean:+.4f} ± {2 * found.bias.stderr:.4f} ulp over heads; "
    effect += f"{found.shared:.0%} of the squared error is common to all rows of a head"
    return computed(not off and found.shared >= shared, effect)


@computation
def reads_the_bias(*, kinds: list[str], reads: bool) -> Finding:
    """Claimed: on tied rows these kinds of attention pass a biased O on to dS (the sum of dS over
    a row, 0 in theory, is off zero by four standard errors), or do not."""
    every, told, good = attention_kinds(), [], True
    rows = crafted_rows()
    for kind in kinds:
        found = read_back(rows, every[kind])
        off = abs(found.row_sum.mean) > FOUR * found.row_sum.stderr
        good &= off == reads
        size = round(found.output.mean, 2) + 0.0  # no negative zero
        word = "off" if off else "not off"
        told.append(f"{kind}: stored O {size:+.2f} ulp, sum of dS over a row {word} zero")
    return computed(good, f"{'; '.join(told)} (by {FOUR:g} standard errors)")


@computation
def identity(*, heads: int = 4, rows: int = 48, width: int = 16, most: float = 1e-6) -> Finding:
    """Claimed: dW_Q^hp - dW_Q^lp = alpha sum_T (delta_lp - delta_hp)[T] (PK)[T]^T X[T], exactly.

    Both sides for random heads, with the backward pass in float64 and O rounded to bf16.
    """
    generator = torch.Generator().manual_seed(0)
    residuals = []
    for _ in range(heads):
        q, k, v, dO = torch.randn(4, rows, width, generator=generator)
        X = torch.randn(rows, 2 * width, generator=generator)
        text = "exact,compute=fp64,unnormalized=bf16,output=bf16"
        residuals.append(weight_gradient_error(q, k, v, dO, X, numerics=text).residual)
    effect = f"largest residual {_bound(max(residuals))} of the difference, in float64, "
    effect += f"{heads} random heads of {rows} rows"
    return computed(max(residuals) <= most, effect)


# -- stabilised flash attention -------------------------------------------------------------------


@computation
def same_function(*, policies: list[str], most: float = 1e-9) -> Finding:
    """Claimed: in exact arithmetic these softmax policies change no output."""
    lines = exact_differences({text: text for text in policies})
    largest = max(max(line[1:]) for line in lines)
    effect = (
        f"largest difference {_bound(largest)} of the output over {len(lines)} kinds of rows and "
    )
    effect += f"{len(policies)} policies, in float64"
    return computed(largest <= most, effect)


@computation
def changes_sharpness(*, policies: list[str], least: float = 1e-9) -> Finding:
    """Claimed: these policies sharpen or flatten the softmax: the entropy of some row changes."""
    gaps = []
    for S in crafted_scores().values():
        plain = _entropy(S, "exact,compute=fp64")
        gaps += [
            float((_entropy(S, f"exact,compute=fp64,{text}") - plain).abs().max())
            for text in policies
        ]
    effect = f"largest change of a row's entropy {_bound(max(gaps))} nats over {len(gaps)} kinds "
    effect += "of rows and policies, in float64"
    return computed(max(gaps) > least, effect)


def _bound(x: float) -> str:
    """'under 1e-09', or the number: the last bits of a computation differ between machines."""
    return "under 1e-09" if x < 1e-9 else f"{x:.1e}"


def _entropy(S: Tensor, numerics: str) -> Tensor:
    """Entropy of each row of P in nats: with V the identity, O is P."""
    keys = S.shape[-1]
    v = torch.eye(keys, dtype=S.dtype).expand(len(S), keys, keys)
    return torch.special.entr(attend(S, v, numerics).out.clamp(min=0)).sum(-1).reshape(-1)


@computation
def underflows_by_law(
    *, betas: list[float], format: str = "bf16", within: float = 1e-3
) -> Finding:
    """Claimed: the maxima at which published SFA loses a tied row follow from its formula."""
    told, good = [], True
    for beta in betas:
        for sign in (1, -1):
            b = boundary(format, beta, sign)
            good &= abs(b.nan / b.law_nan - 1) <= 1e-3
            told.append(f"{'β = ' + format_number(beta) if sign > 0 else 'negative'} {b.nan:.2f}")
    effect = f"P̄ in {format}, sizes of a maximum from which a tied row is 0/0: "
    return computed(good, effect + ", ".join(dict.fromkeys(told)))


@computation
def safe_for_scores(*, betas: list[float], largest: float, format: str = "bf16") -> Finding:
    """Claimed: with these betas a tied row keeps weight at maxima of sizes up to `largest`."""
    bounds = {beta: min(boundary(format, beta, s).nan for s in (1, -1)) for beta in betas}
    told = ", ".join(f"β = {format_number(b)} lost from {x:.1f} on" for b, x in bounds.items())
    return computed(min(bounds.values()) > largest, f"P̄ in {format}, tied rows: {told}")


def format_number(x: float) -> str:
    return f"{x:g}"
