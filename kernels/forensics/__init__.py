"""Forensics: the paper's equations as functions of one head's q, k, v, dO (and X, W_Q).

    from kernels.forensics import as_head, report
    print(report(as_head("head.npz"), numerics="paper"))

Yardsticks are float64; what is low precision goes through the rounding sites of `Numerics`.
"""

from .bias import BiasLaw, RoundingBias, bias_law, rounding_bias, simulate_bias
from .coherence import Coherence, coherence, coherent_gain, direction_cosine, pair_cosines
from .inputs import Head, as_head, load_head
from .stats import (
    SignedMean,
    SignFlipNull,
    SignTest,
    block_mean,
    clustered_mean,
    sign_flip_null,
    sign_test,
    signed_mean,
)
from .trace import RoundingTrace, trace_sum

__all__ = [
    "BiasLaw",
    "Coherence",
    "Head",
    "RoundingBias",
    "RoundingTrace",
    "SignFlipNull",
    "SignTest",
    "SignedMean",
    "as_head",
    "bias_law",
    "block_mean",
    "clustered_mean",
    "coherence",
    "coherent_gain",
    "direction_cosine",
    "load_head",
    "pair_cosines",
    "rounding_bias",
    "sign_flip_null",
    "sign_test",
    "signed_mean",
    "simulate_bias",
    "trace_sum",
]
