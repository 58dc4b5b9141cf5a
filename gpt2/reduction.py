"""What the sum of gradients over processes rounds, beside what delta rounds.

    torchrun --standalone --nproc_per_node=2 -m gpt2.reduction RUN --json reduction.json

With data parallelism each process has the gradient g_r of its share of the batch, and the sum over
processes is itself rounded: in fp32, or in bf16 where `grad_reduce_dtype` says so. At the weights
of a run's newest checkpoint, for the next few batches, this takes dW_Q of every head in three ways
from the same g_r: their sum in fp64, in fp32 and in bf16; and once more in fp64 with delta from
the unrounded O. The differences are the errors that the reduction and delta make. One that adds up
over steps has a mean, or points the same way in every batch; both are measured.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from . import hardware, measures
from .checkpoint import load_newest
from .data import load_corpus
from .distributed import Group, join, leave
from .loop import Trainer
from .runs import Run

BATCHES = 4
CAUSES = {
    "float32": "sum in fp32",
    "bfloat16": "sum in bf16",
    "delta": "delta from the stored O",
}


def query_gradients(trainer: Trainer) -> Tensor:
    """dW_Q as it now stands in the gradient buffer, [L, H, D, C] fp32."""
    parts = []
    for layer in trainer.model.attention_layers:
        rows = layer.n_head * layer.head_dim
        grad = layer.c_attn.weight.grad[:rows]
        parts.append(grad.view(layer.n_head, layer.head_dim, -1))
    return torch.stack(parts).clone()


def local_gradient(trainer: Trainer, step: int) -> Tensor:
    """This process's share of the gradient of batch `step`, all parameters, flat fp32 (a copy)."""
    trainer.optimizers.gradient.zero()
    trainer.model.train()
    trainer.forward_backward(step, *trainer.feed.batch(step))
    return trainer.optimizers.gradient.buffer.clone()


def exact_sum(trainer: Trainer) -> Tensor:
    """dW_Q summed over processes in fp64, from the buffer that holds each process's share."""
    mine = query_gradients(trainer).double()
    dist.all_reduce(mine)
    return mine


def reduced(trainer: Trainer, share: Tensor, dtype: str) -> Tensor:
    """dW_Q after the reduction as training does it, over the whole flat buffer."""
    buffer = trainer.optimizers.gradient.buffer
    buffer.copy_(share)
    trainer.group.sum_(buffer, dtype)
    return query_gradients(trainer).double()


def one_batch(trainer: Trainer, step: int, attention: str, twin: str) -> dict[str, Tensor]:
    """{"whole": dW_Q, and the errors "float32", "bfloat16", "delta"}, each [L, H, D, C] fp64."""
    trainer.model.set_attention(attention)
    share = local_gradient(trainer, step)
    whole = exact_sum(trainer)
    found = {"whole": whole}
    for dtype in ("float32", "bfloat16"):
        found[dtype] = reduced(trainer, share, dtype) - whole
    trainer.model.set_attention(twin)
    local_gradient(trainer, step)
    found["delta"] = whole - exact_sum(trainer)
    return found


def statistics(errors: Tensor, whole: Tensor, u: Tensor, v: Tensor) -> dict:
    """Sizes, means and directions of errors [batches, L, H, D, C] of dW_Q; plain numbers.

    mean_in_rms: mean of all entries over their rms, with its standard error if entries were
    independent. between_batches: mean cosine of a head's errors in two batches; 0 for errors that
    do not accumulate, 1 for one direction.
    """
    size = measures.relative_size(errors, whole)
    n, entries = errors.shape[0], errors.numel()
    rms = errors.square().mean().sqrt().item()
    flat = errors.flatten(3)
    unit = flat / flat.norm(dim=-1, keepdim=True).clamp(min=1e-300)
    pairs = unit.sum(dim=0).square().sum(dim=-1) - unit.square().sum(dim=-1).sum(dim=0)
    along = measures.alignment(errors, u.expand(n, *u.shape), v.expand(n, *v.shape))
    return {
        "relative_size_median": size.median().item(),
        "relative_size_max": size.max().item(),
        "mean_in_rms": errors.mean().item() / rms if rms else 0.0,
        "mean_in_rms_stderr": 1 / math.sqrt(entries),
        "between_batches": (pairs / (n * (n - 1))).mean().item(),
        "between_batches_stderr": 1 / math.sqrt(errors[0].numel() * n * (n - 1) / 2),
        "cosine_with_leading_pair": along.nan_to_num().mean().item(),
    }


def measure(trainer: Trainer, twin: str, batches: int) -> list[dict]:
    """One row for each cause of error in dW_Q."""
    first, attention = trainer.step, trainer.config.attention
    found = [one_batch(trainer, first + i, attention, twin) for i in range(batches)]
    weights = torch.stack([layer.w_q().detach() for layer in trainer.model.attention_layers])
    _, u, v = measures.leading_pair(weights)
    whole = torch.stack([f["whole"] for f in found])
    return [
        {
            "cause": cause,
            "processes": trainer.group.world,
            "at_step": first,
            "batches": batches,
            **statistics(torch.stack([f[name] for f in found]), whole, u, v),
        }
        for name, cause in CAUSES.items()
    ]


def reduction(path: str, group: Group, *, data: str, twin: str | None, batches: int) -> dict:
    """The rows and where they come from. Raises ValueError where there is nothing to compare."""
    run = Run(path)
    config = run.config.at(compile="off")
    if group.world < 2:
        raise ValueError("one process sums nothing; start this with torchrun --nproc_per_node=2")
    if twin is None and (";" in config.attention or config.attention == "sdpa"):
        raise ValueError(
            f"give the numerics with delta from the unrounded O of {config.attention!r}: --twin"
        )
    twin = twin or f"{config.attention},delta_output=fp32"
    corpus = group.first(lambda: load_corpus(config, data, progress=False))
    device = torch.device(config.device_type(), group.local_rank)
    if device.type != "cuda":
        device = torch.device(device.type)
    trainer = Trainer(config, corpus, device, group, run.path)
    checkpoint = load_newest(run.path, device) if group.writer else None
    if not group.share(checkpoint is not None):
        raise ValueError(f"{path} has no checkpoint; train it first")
    trainer.restore(checkpoint)
    rows = measure(trainer, twin, batches)
    trainer.close()
    return {
        "what": "rounding of the gradient's reduction",
        "attention": config.attention,
        "twin": twin,
        "environment": hardware.environment(device, group.world),
        "rows": rows,
    }


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(
        prog="python -m gpt2.reduction",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("run", help="folder of a run with a checkpoint")
    p.add_argument("--json", metavar="PATH", help="write the rows there")
    p.add_argument("--data", default="data", metavar="DIR", help="corpus cache (data)")
    p.add_argument("--twin", help="numerics with delta from the unrounded O")
    p.add_argument("--batches", type=int, default=BATCHES, help="at least 2 (4)")
    args = p.parse_args(argv)
    try:
        group = join(Run(args.run).config.device_type())
        told = reduction(
            args.run, group, data=args.data, twin=args.twin, batches=max(2, args.batches)
        )
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        leave()
    if group.writer:
        text = json.dumps(told, indent=1, allow_nan=False)
        print(text)
        if args.json:
            Path(args.json).write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
