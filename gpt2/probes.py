"""Probes: what a run measures about itself beside its loss, registered by name with its cost.

Cheap probes run at every `probe_interval`. Dear ones run where `config.probes` names them, each as
`name` (every `DEAR_STRIDE` probe intervals), `name@500` (every 500 steps), `name@100-120` (each
step from 100 to 120). `capture` knows other moments and a place as well: see `gpt2.capture`.

Two batches are looked at. *Held out*: a fixed batch of the held-out documents, evenly spaced and
the same in every run on a corpus, for what should be comparable over time (ties, scores).
*Training*: a micro-batch of this step, for what the optimiser is about to feel (gradient errors).

A probe takes a `ProbeContext` and returns {name: float | nested list [layer][head]}. An exception
in a probe is recorded under "probe_errors" and never reaches the run. No probe touches `.grad`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from . import gradient_probes, measures
from .coerce import nearest_hint
from .probe_registry import REGISTRY, ProbeContext, nested, register

TRIGGERS = ("failure", "spike", "onset")
DEAR_STRIDE = 5  # probe intervals between two calls of a dear probe without a schedule of its own

__all__ = ["REGISTRY", "ProbeContext", "ProbeSpec", "Probes", "parse_spec", "register"]


@register("spectral_norm_q", cost="cheap")
def spectral_norm_q(ctx: ProbeContext) -> dict:
    """Largest singular value of W_Q per head (exact, not a power iteration)."""
    norms = measures.spectral_norms(ctx.query_weights())
    return {"spectral_norm_q": norms.tolist()}


@register("spectral_norm_k", cost="cheap")
def spectral_norm_k(ctx: ProbeContext) -> dict:
    """Largest singular value of W_K per key head."""
    weights = torch.stack([layer.w_k().detach() for layer in ctx.model.attention_layers])
    return {"spectral_norm_k": measures.spectral_norms(weights).tolist()}


@register("tie_rate", cost="cheap")
def tie_rate(ctx: ProbeContext) -> dict:
    """Rows with a tied maximum and entries of P_bar equal to 1, per head, held-out batch."""
    rates, ones = [], []
    for tap in ctx.held_out_taps():
        if tap.probe is None:  # SDPA reports nothing; its scores are not rounded
            rates.append(measures.score_statistics(tap.q, tap.k)["tie_rate"])
        else:
            rates.append(measures.tie_rate(tap.probe.ties))
            ones.append(measures.ones_share(tap.probe.ones))
    return {"tie_rate": nested(rates)} | ({"ones_share": nested(ones)} if ones else {})


@register("scores", cost="cheap")
def scores(ctx: ProbeContext) -> dict:
    """Largest score, mean attention entropy (nats) and first key's share, fp32.

    Of the first two sequences of the held-out batch.
    """
    found = [measures.score_statistics(tap.q[:2], tap.k[:2]) for tap in ctx.held_out_taps()]
    names = ("max_logit", "attention_entropy", "first_key_mass")
    return {name: nested([f[name] for f in found]) for name in names}


# -- schedule and runner --------------------------------------------------------------------------


@dataclass(frozen=True)
class ProbeSpec:
    """One entry of `config.probes`: which probe, when, and what follows the colon.

    trigger: "failure", "spike" or "onset" (captures only), else None.
    """

    name: str
    every: int | None = None
    span: tuple[int, int] | None = None
    trigger: str | None = None
    rest: str = ""

    def due(self, step: int, interval: int) -> bool:
        if self.span is not None:
            return self.span[0] <= step <= self.span[1]
        return step % (self.every or interval * DEAR_STRIDE) == 0


def parse_spec(text: str) -> ProbeSpec:
    """'update@500', 'delta_error@100-120', 'update'. Raises ValueError naming what is wrong."""
    match = re.fullmatch(r"(\w+)(?:@(?:(\d+)(?:-(\d+))?|(\w+)))?(?::(.*))?", text.strip())
    known = [*REGISTRY, "capture"]
    if not match:
        raise ValueError(f"probe {text!r} is not understood; write it as 'name@500' or 'name@1-9'")
    name, first, last, trigger, rest = match.groups()
    if name not in known:
        raise ValueError(f"unknown probe {name!r}{nearest_hint(name, known)}")
    if trigger and (name != "capture" or trigger not in TRIGGERS):
        raise ValueError(
            f"probe {text!r}: {trigger!r} is no schedule; use a number of steps, or "
            f"capture@{', capture@'.join(TRIGGERS)}"
        )
    if first == "0" and last is None:
        raise ValueError(f"probe {text!r}: every 0 steps is never; use at least 1")
    span = (int(first), int(last)) if last is not None else None
    every = int(first) if first and not span else None
    if name == "capture" and not (span or every or trigger):
        trigger = "failure"
    return ProbeSpec(name, every, span, trigger, rest or "")


class Probes:
    """Runs the probes of a run: called by the training loop around each optimiser update."""

    def __init__(self, config, run_dir: Path | None = None):
        """Raises ValueError for a probe that does not exist, naming the nearest."""
        self.interval = config.probe_interval
        specs = [parse_spec(text) for text in config.probes]
        self.dear = [s for s in specs if s.name in REGISTRY and REGISTRY[s.name].cost == "dear"]
        self.captures = _captures([s for s in specs if s.name == "capture"], config, run_dir)

    def due(self, step: int) -> bool:
        """Whether anything is measured at this step."""
        return bool(self._names(step)) or any(c.due(step) for c in self.captures)

    def _names(self, step: int) -> list[str]:
        names = []
        if step % self.interval == 0:
            names = [n for n, kind in REGISTRY.items() if kind.cost == "cheap"]
        return names + [s.name for s in self.dear if s.due(step, self.interval)]

    def before_update(self, ctx: ProbeContext) -> dict:
        """Measurements with the weights that step `ctx.step` starts from."""
        names, errors = self._names(ctx.step), {}
        if "update" in names or "update_error" in names:
            _guarded("update", lambda: _remember(ctx, "update_error" in names), errors)
        row = run_probes(ctx, [n for n in names if REGISTRY[n].phase == "before"], errors)
        for capture in self.captures:
            _guarded("capture", lambda c=capture: c.before_update(ctx, row), errors)
        return row | ({"probe_errors": errors} if errors else {})

    def after_update(self, ctx: ProbeContext) -> dict:
        """Measurements of the update itself; then forgets what was kept for them."""
        errors: dict[str, str] = {}
        names = [n for n in self._names(ctx.step) if REGISTRY[n].phase == "after"]
        row = run_probes(ctx, names, errors)
        for capture in self.captures:
            _guarded("capture", lambda c=capture: c.after_update(ctx), errors)
        ctx.scratch.clear()
        return row | ({"probe_errors": errors} if errors else {})

    def on_end(self, ctx: ProbeContext, status: str, step: int | None) -> dict:
        """Let captures write their evidence after a divergence; {} or {"probe_errors": ...}."""
        errors: dict[str, str] = {}
        for capture in self.captures:
            _guarded("capture", lambda c=capture: c.on_end(ctx, status, step), errors)
        return {"probe_errors": errors} if errors else {}


def run_probes(ctx: ProbeContext, names: Sequence[str], errors: dict[str, str]) -> dict:
    """Metrics of the named probes; what one of them raises goes into `errors` by its name."""
    row: dict = {}
    for name in dict.fromkeys(names):
        row |= _guarded(name, lambda n=name: REGISTRY[n].function(ctx), errors) or {}
    return row


def _remember(ctx: ProbeContext, changes: bool) -> None:
    """Keep in scratch what the probes after the update compare with."""
    ctx.scratch["weights_before"] = ctx.query_weights().clone()
    ctx.leading_pairs()
    if changes:
        gradient_probes.weight_changes(ctx)


def _guarded(name: str, call: Callable, errors: dict[str, str]):
    """The call's result, or None with the exception noted: no probe ends the run it watches."""
    try:
        return call()
    except Exception as error:
        errors[name] = (
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        )
        return None


def _captures(specs: list[ProbeSpec], config, run_dir: Path | None) -> list:
    if not specs:
        return []
    from .capture import Capture

    return [Capture(spec, config, run_dir) for spec in specs]


def main() -> None:
    """`python -m gpt2.probes` lists every probe with its cost."""
    for name, kind in REGISTRY.items():
        print(f"{name:24}{kind.cost:8}{kind.summary}")
    print(f"{'capture':24}{'dear':8}Tensors of chosen heads, and bundles that replay.")


if __name__ == "__main__":
    main()
