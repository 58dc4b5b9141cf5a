"""Forensics: the paper's equations as functions of one head's q, k, v, dO (and X, W_Q).

    from kernels.forensics import report
    print(report("head.npz", numerics="paper"))

Yardsticks are float64; what is low precision goes through the rounding sites of `Numerics`.
"""

from .bias import BiasLaw, RoundingBias, bias_law, rounding_bias, simulate_bias
from .coherence import Coherence, coherence, coherent_gain, direction_cosine, pair_cosines
from .counts import Counts, counts
from .delta import DeltaMeasurement, delta_error
from .inputs import Head, as_head, load_head, offset_values
from .report import Report, report
from .stats import (
    SignedMean,
    SignFlipNull,
    SignTest,
    block_mean,
    clustered_mean,
    share_intervals,
    sign_flip_null,
    sign_test,
    signed_mean,
)
from .trace import RoundingTrace, rounding_trace, trace_sum
from .weights import WeightGradientError, weight_gradient_error

__all__ = [
    "BiasLaw",
    "Coherence",
    "Counts",
    "DeltaMeasurement",
    "Head",
    "Report",
    "RoundingBias",
    "RoundingTrace",
    "SignFlipNull",
    "SignTest",
    "SignedMean",
    "WeightGradientError",
    "as_head",
    "bias_law",
    "block_mean",
    "clustered_mean",
    "coherence",
    "coherent_gain",
    "counts",
    "delta_error",
    "direction_cosine",
    "load_head",
    "offset_values",
    "pair_cosines",
    "report",
    "rounding_bias",
    "rounding_trace",
    "share_intervals",
    "sign_flip_null",
    "sign_test",
    "signed_mean",
    "simulate_bias",
    "trace_sum",
    "weight_gradient_error",
]
