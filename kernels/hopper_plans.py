"""How the Hopper forward is compiled for a call, and from how many keys on it serves.

The settings move times and no bits. Which of them is fastest could not be told beforehand: the
assembler sorts the same loop differently for each, and a tile takes up to 18 % longer in one order
than in another. So each was timed on an H200: `python -m kernels.hopper_tuning`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """Settings of a launch.

    stages: buffers of each ring.
    early: whether P_bar is rounded before the product with the one before it is waited for, into
    registers of its own.
    apart: whether the first tile of a block has a copy of the softmax to itself: more code, and no
    product that is dropped.
    registers: per thread of a consumer; the producers' four warps take 24.
    """

    stages: int = 2
    early: bool = False
    apart: bool = False
    registers: int = 240

    @property
    def launch_registers(self) -> int:
        """Per thread at the launch: the mean of the three groups of four warps."""
        return (2 * self.registers + 24) // 3


# By kind (`hopper_attention.kind_of`), head dimension and whether causal. Timed at T = 1,024 to
# 4,096; other kinds than "plain" causal, and what was found stands for both.
PLANS = {
    ("plain", 64, True): Plan(),
    ("plain", 64, False): Plan(),
    ("plain", 128, True): Plan(),
    ("plain", 128, False): Plan(early=True, apart=True),
    ("running", 64, True): Plan(),
    ("running", 128, True): Plan(apart=True),
    ("row", 64, True): Plan(),
    ("row", 128, True): Plan(),
    ("probed", 64, True): Plan(),
    ("probed", 128, True): Plan(),
}

# Keys that a query sees, on average, from which on the forward was faster than the general kernel.
# Timed for T = 256 to 4,096, causal: at the shortest by 12 to 67 %.
LEAST_KEYS = {
    ("plain", 64): 128,
    ("plain", 128): 0,
    ("running", 64): 128,
    ("running", 128): 128,
    ("row", 64): 128,
    ("row", 128): 128,
    ("probed", 64): 128,
    ("probed", 128): 128,
}


def plan_of(kind: str, head_dim: int, causal: bool) -> Plan:
    """What was found fastest."""
    return PLANS[kind, head_dim, causal if kind == "plain" else True]
