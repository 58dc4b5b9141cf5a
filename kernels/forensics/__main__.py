"""`python -m kernels.forensics FILE.npz`: examine one captured head."""

from __future__ import annotations

import argparse
import sys

from .report import report


def main(arguments: list[str] | None = None) -> int:
    """Print a report; returns 0, or 2 with one sentence on stderr for unusable input."""
    parser = argparse.ArgumentParser(
        prog="python -m kernels.forensics",
        description="Count and measure what low precision does in one attention head. FILE holds "
        "q, k, v and, as far as known, dO, X, W_Q: [T, D] or [N, T, D] for N sequences.",
    )
    parser.add_argument("file", metavar="FILE", help=".npz or .safetensors")
    parser.add_argument(
        "--numerics", default="paper", help="such as 'flash' or 'paper,delta=dP_P'"
    )
    parser.add_argument("--json", action="store_true", help="print JSON in place of text")
    parser.add_argument("--no-causal", action="store_true", help="every query sees every key")
    parser.add_argument("--scale", type=float, help="softmax scale (default 1/sqrt(D))")
    parser.add_argument("--tolerance", type=float, default=0.0, help="also count near ties")
    parser.add_argument("--index", help="B,H or H: which head of [B, H, T, D] tensors")
    parser.add_argument("--block", type=int, help="rows per cluster for standard errors")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    try:
        index = None if given.index is None else tuple(int(i) for i in given.index.split(","))
        result = report(
            given.file,
            numerics=given.numerics,
            causal=not given.no_causal,
            scale=given.scale,
            tolerance=given.tolerance,
            block=given.block,
            index=index,
            seed=given.seed,
        )
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(result.to_json() if given.json else result.text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
