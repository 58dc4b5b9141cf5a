"""What one attention forward pass hands to its backward pass, to probes and to tests."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass
class ForwardResult:
    """Shapes: B batch, H query heads, Tq queries, Dv value width.

    out: [B, H, Tq, Dv], values on the grid of the `output` site: in the carrier dtype from the
    emulator, in bf16 from the Triton kernels where the grid fits it.
    lse: [B, H, Tq], natural log, fp32 (fp64 when computing in fp64); -inf for a fully masked row.
    delta_output: [B, H, Tq, Dv] the O that delta reads, or None when it is `out` itself.
    The rest is filled only when probing, changes no bit of the above, and is 0 or -inf in fully
    masked rows. A forward's `probe` says what is wanted: False or "" nothing, True or "all"
    everything, "rows" all but out_fp32.
    ties: int32 [B, H, Tq], visible keys whose rounded score equals the row maximum (1 = no tie).
    ones: int32 [B, H, Tq], visible keys whose rounded P_bar is exactly 1.
    m, l: [B, H, Tq], the final reference and row sum.
    out_fp32: [B, H, Tq, Dv], O = (rounded P_bar) V / l before any rounding of O_bar and O.
    """

    out: Tensor
    lse: Tensor
    delta_output: Tensor | None = None
    ties: Tensor | None = None
    ones: Tensor | None = None
    m: Tensor | None = None
    l: Tensor | None = None
    out_fp32: Tensor | None = None


def wants_output(probe: bool | str) -> bool:
    """Whether a forward that is asked for `probe` fills out_fp32."""
    return bool(probe) and probe != "rows"
