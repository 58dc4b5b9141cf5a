"""Which settings of the forward for Hopper GPUs are fastest: `python -m kernels.hopper_tuning`.

Every plan of `candidates` is compiled, its bits are compared with those of the general kernel, and
then all are timed turn by turn. Prints one table a case, in TFLOP/s, and the table `PLANS` of
`kernels.hopper_plans` that follows. The general kernel comes last in each: `LEAST_KEYS` was read
from it.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import sys
import time
from dataclasses import asdict, replace
from functools import cache, partial

import torch

from . import bench, hopper_attention, triton_attention
from .compile_ahead import compile_ahead
from .hopper_plans import Plan
from .numerics import parse_numerics

TILED = "stabilized,decide=tile,reference=running"
# (kind, numerics, probes, head dimension, causal)
CASES = [
    *(("plain", "flash", False, D, causal) for D in (64, 128) for causal in (True, False)),
    *(("running", text, False, D, True) for D in (64, 128)
      for text in (TILED, "flash,delta_output=fp32")),
    *(("row", text, False, D, True) for D in (64, 128) for text in ("paper", "stabilized")),
    *(("probed", "flash", True, D, True) for D in (64, 128)),
]  # fmt: skip
LENGTHS = (256, 512, 1024, 2048, 4096)
JUDGED = 1024  # plans are judged by the lengths from here on
GENERAL = "general"
numerics_of = cache(parse_numerics)  # a call that waits for its host would be timed with it


def candidates(kind: str, head_dim: int) -> list[Plan]:
    """Plans that may be fastest: P_bar is rounded early for plain `flash` only."""
    plain = kind == "plain"
    stages = (2, 4) if plain and head_dim == 64 else (2,)
    early = (False, True) if plain else (False,)
    return [
        Plan(stages=s, early=e, apart=a)
        for s, e, a in itertools.product(stages, early, (False, True))
    ]


def words(plan: Plan | str) -> str:
    """A plan in a table."""
    if plan == GENERAL:
        return plan
    return f"{plan.stages} stages{', early' * plan.early}{', apart' * plan.apart}"


def forward(case, plan: Plan | str, q, k, v):
    """The forward of a case under a plan, or by the general kernel."""
    _, text, probe, head_dim, causal = case
    choices = dict(numerics=numerics_of(text), causal=causal, scale=1 / math.sqrt(head_dim))
    if plan == GENERAL:
        n, limit = choices["numerics"], triton_attention._shared_limit(q.device)
        blocks = triton_attention._blocks("forward", n, head_dim, head_dim, 2, limit, probe)
        return triton_attention.forward(q, k, v, probe=probe, blocks=blocks, **choices)
    return hopper_attention.forward(q, k, v, probe=probe, plan=plan, **choices)


def shape_of(case, length: int) -> bench.Shape:
    """As in the bench."""
    head_dim, causal = case[3:]
    return bench.Shape(causal, head_dim, length, bench.TOKENS // length, 768 // head_dim)


def compile_one(case, plan: Plan | str) -> None:
    """A first call, on a small shape (in a worker)."""
    q, k, v, _ = bench.operands(replace(shape_of(case, 256), batch=1, heads=2))
    forward(case, plan, q, k, v)
    torch.cuda.synchronize()


def check_bits(case, plans, length: int = 1000) -> None:
    """Raise AssertionError if a plan has other bits than the general kernel."""
    q, k, v, _ = bench.operands(replace(shape_of(case, 256), seq_len=length, batch=2))
    wanted = forward(case, GENERAL, q, k, v)
    for plan in plans:
        found = forward(case, plan, q, k, v)
        for name in ("out", "lse", "ties", "ones", "delta_output"):
            a, b = getattr(found, name), getattr(wanted, name)
            if a is not None and not torch.equal(a, b):
                raise AssertionError(f"{case}: {words(plan)} has other bits in {name}")


def measure(case, plans, rounds: int) -> dict:
    """{(plan, length): median milliseconds}, plans by turns."""
    found = {}
    for length in LENGTHS:
        q, k, v, _ = bench.operands(shape_of(case, length))
        for i in range(rounds):
            for plan in plans[i % len(plans) :] + plans[: i % len(plans)]:
                call = partial(forward, case, plan, q, k, v)
                _, ms = bench.time_call(call, least_ms=8, most=30)
                found.setdefault((plan, length), []).append(ms)
    return {key: statistics.median(times) for key, times in found.items()}


def score(case, plan, times: dict) -> float:
    """Sum of the logarithms of the times that count: less is better."""
    return sum(math.log(times[case][plan, n]) for n in LENGTHS if n >= JUDGED)


def best_plans(times: dict) -> dict:
    """PLANS: for each kind, head dimension and mask, what was fastest over all its cases."""
    groups = {}
    for case in times:
        groups.setdefault((case[0], *case[3:]), []).append(case)
    return {
        key: min(candidates(*key[:2]), key=lambda p: sum(score(c, p, times) for c in cases))
        for key, cases in groups.items()
    }


def table(case, times: dict, chosen: Plan) -> str:
    """TFLOP/s of each plan at each length; * is what was chosen."""
    kind, text, probe, head_dim, causal = case
    lines = [f"{text}{' with probes' * probe}, head dimension {head_dim}, "
             f"{'causal' if causal else 'no mask'}"]  # fmt: skip
    lines.append(f"{'':32}" + "".join(f"{n:>8}" for n in LENGTHS))
    for plan in [*candidates(kind, head_dim), GENERAL]:
        rates = (shape_of(case, n).flops / times[case][plan, n] * 1e-9 for n in LENGTHS)
        star = "*" if plan == chosen else ""
        lines.append(f"{words(plan):31}{star:1}" + "".join(f"{x:8.1f}" for x in rates))
    return "\n".join(lines)


def source(plans: dict) -> str:
    """`PLANS` as Python."""
    lines = ["PLANS = {"]
    for key, plan in plans.items():
        changed = {k: v for k, v in asdict(plan).items() if v != getattr(Plan(), k)}
        lines.append(f"    {key!r}: Plan({', '.join(f'{k}={v}' for k, v in changed.items())}),")
    return "\n".join([*lines, "}"]).replace("'", '"')


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(prog="python -m kernels.hopper_tuning", description=__doc__)
    parser.add_argument("--json", metavar="PATH", help="write provenance and rows to this file")
    parser.add_argument("--limit-s", type=float, default=240.0, help="begin no case after this")
    parser.add_argument("--rounds", type=int, default=2, help="measurements of each plan")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        parser.error("there is no Hopper GPU here; this program times its forward")
    began = time.monotonic()
    ahead = [(c, p) for c in CASES for p in [*candidates(c[0], c[3]), GENERAL]]
    for one, failed in zip(ahead, compile_ahead(compile_one, ahead, limit_s=0.6 * args.limit_s)):
        if failed:  # also of a kernel that hangs: nothing may call it then
            sys.exit(f"{one[0]}, {words(one[1])}: {failed}")
    print(f"compiled after {time.monotonic() - began:.0f} s", flush=True)
    times = {}
    for case in CASES:
        if time.monotonic() - began > args.limit_s:
            sys.exit(f"{len(CASES) - len(times)} cases are left after {args.limit_s:.0f} s")
        plans = candidates(case[0], case[3])
        check_bits(case, plans)
        times[case] = measure(case, [*plans, GENERAL], args.rounds)
    best = best_plans(times)
    for case in CASES:
        print(table(case, times, best[case[0], *case[3:]]), flush=True)
    print(source(best))
    if args.json:
        rows = [
            dict(kind=case[0], numerics=case[1], probe=case[2], head_dim=case[3], causal=case[4],
                 plan=words(plan), seq_len=length, ms=round(ms, 5))
            for case in times for (plan, length), ms in times[case].items()
        ]  # fmt: skip
        found = dict(provenance=bench.provenance(time.monotonic() - began), rows=rows)
        bench.save(found, args.json)


if __name__ == "__main__":
    main()
