"""Dear probes: the error of delta, what it does to dW_Q, and what the optimiser makes of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from . import measures
from .probe_registry import ProbeContext, measuring, nested, register


def _delta_differences(ctx: ProbeContext) -> list[Tensor]:
    """e of each layer [B, H, T]: delta from the stored O minus delta from the unrounded O."""
    if "delta_differences" not in ctx.scratch:
        taps, douts, _ = ctx.training_taps()
        if any(t.probe is None or t.probe.out_fp32 is None for t in taps):
            raise ValueError("this attention backend reports no unrounded O; use emulated, triton")
        ctx.scratch["delta_differences"] = [
            measures.delta_difference(d, t.out, t.probe.out_fp32) for d, t in zip(douts, taps)
        ]
    return ctx.scratch["delta_differences"]


@register("delta_error", cost="dear")
def delta_error(ctx: ProbeContext) -> dict:
    """Signed mean, standard error and rms of delta_lp - delta_hp per head, training batch.

    Of the *stored* O, whatever delta the run itself uses: in the high-precision twin it is the
    error that the run would make.
    """
    found = [measures.mean_per_head(e) for e in _delta_differences(ctx)]
    return {f"delta_error_{s}": nested([f[s] for f in found]) for s in ("mean", "stderr", "rms")}


@register("delta_answer", cost="dear")
def delta_answer(ctx: ProbeContext) -> dict:
    """How much of the mean of delta_lp - delta_hp is dO answering the rounding of O.

    e = dO (O_lp - O_hp), and dO is the gradient *at* O_lp. A further pass for each layer, which
    goes on with O_hp there, gives the dO that there would be without that rounding. Per head, over
    the rows of the training batch: the mean of e with it (`delta_clean_mean`), which has a sign
    only if the rounding has one, and of e with what the rounding added to dO
    (`delta_answer_mean`, with its standard error). The latter is, to first order, the second
    derivative of the loss along the rounding error: where the loss is convex there it is positive,
    whichever way O was rounded.
    """
    taps, _, _ = ctx.training_taps()
    clean, answer = [], []
    for index, (tap, e) in enumerate(zip(taps, _delta_differences(ctx))):
        dout = _gradient_without_rounding(ctx, index, tap)
        at_clean = measures.delta_difference(dout, tap.out, tap.probe.out_fp32)
        clean.append(measures.mean_per_head(at_clean))
        answer.append(measures.mean_per_head(e - at_clean))
    return delta_error(ctx) | {
        "delta_clean_mean": nested([f["mean"] for f in clean]),
        "delta_answer_mean": nested([f["mean"] for f in answer]),
        "delta_answer_stderr": nested([f["stderr"] for f in answer]),
    }


def _gradient_without_rounding(ctx: ProbeContext, index: int, tap) -> Tensor:
    """dO of layer `index`, [B, H, T, D], on the grid of O, where the layer goes on with O_hp.

    The projection behind it has the weight of every other pass and an input in fp32.
    """
    layer = ctx.model.attention_layers[index]
    if layer.c_gate is not None:
        raise ValueError("a gate stands between O and its projection; this probe does not pass it")
    clean = tap.probe.out_fp32.detach().requires_grad_()

    def project(module, given, result):
        x = clean.transpose(1, 2).reshape(result.shape)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x, module.weight.to(result.dtype).float(), module.bias).to(
                result.dtype
            )

    handle = layer.c_proj.register_forward_hook(project)
    try:
        with torch.enable_grad(), measuring(ctx):
            rows = tap.out.shape[0]
            _, loss = ctx.model(ctx.x[:rows], ctx.y[:rows], seed=ctx.step)
            (gradient,) = torch.autograd.grad(loss, clean)
    finally:
        handle.remove()
    return gradient.to(tap.out.dtype)


def weight_changes(ctx: ProbeContext) -> Tensor:
    """Error of dW_Q by the error of delta, [L, H, D, C] (mean loss over the sequences seen)."""
    if "weight_changes" not in ctx.scratch:
        if getattr(ctx.config, "qk_norm", False):
            raise ValueError("with qk_norm q is not W_Q x, so this decomposition does not apply")
        taps, _, _ = ctx.training_taps()
        scale = ctx.config.head_dim**-0.5
        ctx.scratch["weight_changes"] = torch.stack(
            [
                measures.weight_gradient_change(
                    e, measures.attended_keys(t.q, t.k), t.x.float(), scale
                ).detach()
                for e, t in zip(_delta_differences(ctx), taps)
            ]
        )
    return ctx.scratch["weight_changes"]


@register("weight_gradient_error", cost="dear")
def weight_gradient_error(ctx: ProbeContext) -> dict:
    """Relative size of the error in dW_Q, and its cosine with W_Q's first singular pair."""
    change = weight_changes(ctx)
    taps, _, dqs = ctx.training_taps()
    whole = torch.stack([measures.head_gradients(dq, t.x.detach()) for dq, t in zip(dqs, taps)])
    _, u, v = ctx.leading_pairs()
    return {
        "dwq_error_ratio": measures.relative_size(change, whole).tolist(),
        "dwq_error_cosine": measures.alignment(change, u, v).tolist(),
        "dwq_cosine": measures.alignment(whole, u, v).tolist(),
    }


@register("shared_direction", cost="dear")
def shared_direction(ctx: ProbeContext) -> dict:
    """Whether the rows' contributions to the error of dW_Q point one way, training batch.

    The directions exist in any run; only their weights, the errors of delta, need rounding. Where
    nothing is rounded the gain is null.
    """
    taps, _, _ = ctx.training_taps()
    found = [
        measures.shared_direction(e, measures.attended_keys(t.q, t.k), t.x.float())
        for e, t in zip(_delta_differences(ctx), taps)
    ]
    return {name: nested([f[name] for f in found]) for name in found[0]}


@register("update", cost="dear", phase="after")
def update(ctx: ProbeContext) -> dict:
    """Size of the optimiser's change of W_Q relative to W_Q, and its cosine with the pair."""
    before = ctx.scratch["weights_before"]
    _, u, v = ctx.scratch["leading_pairs"]
    change = ctx.query_weights() - before
    return {
        "update_ratio": measures.relative_size(change, before).tolist(),
        "update_cosine": measures.alignment(change, u, v).tolist(),
    }


@register("update_error", cost="dear", phase="after")
def update_error(ctx: ProbeContext) -> dict:
    """What the error in dW_Q did to Adam's update: relative size, cosine with the pair.

    Clipping and Adam's division break the proportionality between gradient and update that the
    paper's formula assumes; this measures what is left of the error after both.
    """
    pairs = [
        _adam_change(ctx, layer.c_attn.weight, change)
        for layer, change in zip(ctx.model.attention_layers, ctx.scratch["weight_changes"])
    ]
    change, taken = (torch.stack(part) for part in zip(*pairs))
    _, u, v = ctx.scratch["leading_pairs"]
    return {
        "update_error_ratio": measures.relative_size(change, taken).tolist(),
        "update_error_cosine": measures.alignment(-change, u, v).tolist(),  # Adam steps downhill
    }


def _adam_change(ctx: ProbeContext, weight: Tensor, change: Tensor) -> tuple[Tensor, Tensor]:
    """`measures.adam_change` for the W_Q rows of c_attn.weight; change [H, D, C]."""
    optimizers = ctx.optimizer.all() if hasattr(ctx.optimizer, "all") else [ctx.optimizer]
    state = next((o.state[weight] for o in optimizers if o is not None and weight in o.state), {})
    if "exp_avg_sq" not in state or weight.grad is None:
        raise ValueError("update_error needs AdamW's moments of c_attn.weight")
    c, rows = ctx.config, change.shape[0] * change.shape[1]
    shape = change.shape

    def slices(t: Tensor) -> Tensor:
        return t[:rows].detach().double().view(shape)

    return measures.adam_change(
        slices(weight.grad),
        change.double() * _clip_scale(ctx),
        slices(state["exp_avg"]),
        slices(state["exp_avg_sq"]),
        int(state["step"]),
        beta1=c.beta1,
        beta2=c.beta2,
        eps=c.adam_eps,
    )


def _clip_scale(ctx: ProbeContext) -> float:
    """What clipping multiplied the gradient with; `grad_norm` is from before it."""
    if not ctx.config.grad_clip:
        return 1.0
    return min(1.0, ctx.config.grad_clip / (float(ctx.scratch["grad_norm"]) + 1e-6))
