"""Captures: the tensors of chosen heads, ready for `kernels.forensics`, and bundles that replay.

Named in `config.probes`, with a moment after @ and a place after the colon:

    capture@500:L1H0+3      every 500 steps, heads 0 and 3 of layer 1 (counted from 0)
    capture@1000-1010:L1    each step from 1000 to 1010, all heads of layer 1
    capture@500:worstx2     the worst head, 2 sequences
    capture                 at failure (the same as capture@failure:worst)
    capture@onset           once, when a head's spectral norm has grown by `ONSET_NORM` within
                            `ONSET_STEPS` steps, and by more than in as many steps before: a sign
                            without a twin, passed over in early training, where growth slows down
    capture@spike           once, when a loss is `DIVERGED_NATS` above the lowest of the last 50,
                            or NaN; looks at every step, so it slows a GPU down

*Worst head*: the one whose spectral norm of W_Q has grown most over the steps remembered.

Heads go to captures/step_00001000-L1H0.npz with keys q, k, v, dO, X, W_Q (float32; of the first
sequences of the step's batch), step, layer, head, numerics. The triggered captures also write a
bundle, such as captures/bundle_step_00001000-failure/: weights, batch and configuration of the
step *before* the trouble, of which `replay` computes the same loss again, bit for bit:

    python -m gpt2.capture runs/.../captures/bundle_step_00001000-failure
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import sys
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kernels.numerics import ScopedNumerics

from . import measures
from .files import write_atomically, write_json
from .outcomes import DIVERGED_NATS, DIVERGED_STEPS, HALF_LIFE, ONSET_NORM, ONSET_STEPS
from .probe_registry import ProbeContext

SEQUENCES = 4
SPIKE_HISTORY = 50  # steps whose lowest loss a spike is measured from


@dataclass(frozen=True)
class Place:
    """Which heads (None: the worst one; empty: all) and how many sequences."""

    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    sequences: int = SEQUENCES

    @classmethod
    def parse(cls, text: str, n_layer: int, n_head: int) -> Place:
        """'L1H0+3x2', 'L1', 'worst', ''. Raises ValueError for a head that does not exist."""
        numbers = r"(\d+(?:\+\d+)*)"
        match = re.fullmatch(rf"(?:worst|L{numbers}(?:H{numbers})?)?(?:x(\d+))?", text.strip())
        if not match or match[3] == "0":
            raise ValueError(f"capture place {text!r} is not understood; write L1H0+3x2 or worst")
        layers, heads = (tuple(map(int, g.split("+"))) if g else None for g in match.groups()[:2])
        for name, chosen, count in (("layer", layers, n_layer), ("head", heads, n_head)):
            for number in chosen or ():
                if number >= count:
                    raise ValueError(f"capture {text!r}: {name} {number} does not exist ({count})")
        return cls(layers, heads, int(match[3] or SEQUENCES))

    def list(self, n_head: int) -> list[tuple[int, int]] | None:
        if self.layers is None:
            return None
        return [(la, h) for la in self.layers for h in self.heads or range(n_head)]


@dataclass
class Snapshot:
    """State before the update of `step`, on the CPU."""

    step: int
    weights: dict[str, Tensor]
    x: Tensor
    y: Tensor
    norms: Tensor  # [L, H]
    loss: float | None = None


@dataclass
class Capture:
    """One `capture` entry of a run's probes; called by `gpt2.probes.Probes`."""

    spec: object
    config: object
    run_dir: Path | None
    place: Place = field(init=False)
    ring: deque = field(init=False)
    norms: deque = field(init=False)
    losses: deque = field(init=False)
    done: bool = field(default=False, init=False)

    def __post_init__(self):
        self.place = Place.parse(self.spec.rest, self.config.n_layer, self.config.n_head)
        interval = 1 if self.trigger == "spike" else self.config.probe_interval
        before = 2 if self.trigger == "spike" else DIVERGED_STEPS + 3 * HALF_LIFE
        self.ring = deque(maxlen=2 + math.ceil(before / interval))
        self.norms = deque(maxlen=2 + math.ceil(2 * ONSET_STEPS / interval))
        self.losses = deque(maxlen=SPIKE_HISTORY)
        if self.run_dir is not None and self.trigger in ("spike", "onset"):
            self.done = any(self.folder.glob(f"bundle_step_*-{self.trigger}"))

    @property
    def trigger(self) -> str | None:
        return self.spec.trigger

    @property
    def folder(self) -> Path:
        return Path(self.run_dir) / "captures"

    def due(self, step: int) -> bool:
        if self.trigger is None:
            return self.spec.due(step, self.config.probe_interval)
        if self.done:
            return False
        return self.trigger == "spike" or step % self.config.probe_interval == 0

    def before_update(self, ctx: ProbeContext, row: dict) -> None:
        if not self.due(ctx.step):
            return
        norms = measures.spectral_norms(ctx.query_weights())
        self.norms.append((ctx.step, norms))
        if self.trigger is None:
            write_heads(ctx, self._heads(norms), self.place.sequences, self.folder)
            return
        weights = {n: p.detach().cpu().clone() for n, p in ctx.model.named_parameters()}
        self.ring.append(Snapshot(ctx.step, weights, ctx.x.cpu(), ctx.y.cpu(), norms))

    def after_update(self, ctx: ProbeContext) -> None:
        if not self.ring or self.ring[-1].step != ctx.step or "train_loss" not in ctx.scratch:
            return
        self.ring[-1].loss = float(ctx.scratch["train_loss"])
        if self.trigger == "onset" and self._grown():
            self._keep(ctx, self.ring[-1])
        if self.trigger == "spike" and self._spiked(self.ring[-1].loss):
            for snapshot in list(self.ring)[-2:]:  # the step that broke it, and what it broke
                self._keep(ctx, snapshot)

    def on_end(self, ctx: ProbeContext, status: str, step: int | None) -> None:
        """Keep the last remembered state from before the trouble began."""
        if self.trigger != "failure" or not self.ring:
            return
        began = (
            ctx.step if step is None else step - (DIVERGED_STEPS if status == "diverged" else 1)
        )
        sound = [s for s in self.ring if s.step <= began and s.loss is not None]
        sound = [s for s in sound if math.isfinite(s.loss)]
        self._keep(ctx, sound[-1] if sound else self.ring[0])

    def _grown(self) -> bool:
        step, now = self.norms[-1]
        old, older = (
            [norms for s, norms in self.norms if s <= step - lag][-1:]
            for lag in (ONSET_STEPS, 2 * ONSET_STEPS)
        )
        if not older:
            return False
        growth, before = now / old[0], old[0] / older[0]
        return bool(((growth > ONSET_NORM) & (growth > before)).any())

    def _spiked(self, loss: float) -> bool:
        lowest = min(self.losses, default=math.inf)
        self.losses.append(loss)
        return not loss <= lowest + DIVERGED_NATS

    def _heads(self, norms: Tensor) -> list[tuple[int, int]]:
        chosen = self.place.list(self.config.n_head)
        if chosen is not None:
            return chosen
        growth = norms / self.norms[0][1] if len(self.norms) > 1 else norms
        return [divmod(int(growth.nan_to_num(-1).argmax()), norms.shape[1])]

    def _keep(self, ctx: ProbeContext, snapshot: Snapshot) -> None:
        """Write bundle and heads of a remembered step."""
        name = f"bundle_step_{snapshot.step:08d}-{self.trigger}"
        write_bundle(self.folder / name, ctx, snapshot)
        self.done = True
        heads = self._heads(self.norms[-1][1])
        with _weights_of(ctx, snapshot) as then:
            write_heads(then, heads, self.place.sequences, self.folder)


class _weights_of:
    """The context as it was at a snapshot; the model's own weights come back at the end."""

    def __init__(self, ctx: ProbeContext, snapshot: Snapshot):
        self.ctx, self.snapshot = ctx, snapshot

    def __enter__(self) -> ProbeContext:
        self.own = {n: p.detach().clone() for n, p in self.ctx.model.named_parameters()}
        _copy_into(self.ctx.model, self.snapshot.weights)
        x, y = (t.to(self.ctx.x.device) for t in (self.snapshot.x, self.snapshot.y))
        return dataclasses.replace(self.ctx, step=self.snapshot.step, x=x, y=y, scratch={})

    def __exit__(self, *_) -> None:
        _copy_into(self.ctx.model, self.own)


@torch.no_grad()
def _copy_into(model, weights: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(weights[name])


def write_heads(ctx: ProbeContext, heads, sequences: int, folder: Path) -> list[Path]:
    """One .npz per (layer, head) of the training batch of `ctx.step`; returns the paths.

    dO is of the mean loss over the sequences looked at. k and v are those that the head reads.
    """
    taps, douts, _ = ctx.training_taps()
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for layer, head in heads:
        tap, module = taps[layer], ctx.model.attention_layers[layer]
        kv = head // (module.n_head // module.n_kv_head)
        arrays = dict(
            q=tap.q[:sequences, head],
            k=tap.k[:sequences, kv],
            v=tap.v[:sequences, kv],
            dO=douts[layer][:sequences, head],
            X=tap.x[:sequences],
            W_Q=module.w_q()[head],
        )
        arrays = {n: t.detach().float().cpu().numpy() for n, t in arrays.items()}
        arrays |= dict(step=ctx.step, layer=layer, head=head)
        arrays["numerics"] = head_numerics(ctx.config.attention, layer, head, module.n_head)
        path = folder / f"step_{ctx.step:08d}-L{layer}H{head}.npz"
        write_atomically(path, lambda f, a=arrays: np.savez_compressed(f, **a))
        paths.append(path)
    return paths


def head_numerics(attention: str, layer: int, head: int, n_head: int) -> str:
    """The JSON of one head's Numerics, or 'sdpa'."""
    if attention == "sdpa":
        return attention
    return ScopedNumerics.parse(attention).for_layer(layer, n_head)[head].to_json()


# -- bundles --------------------------------------------------------------------------------------


def write_bundle(path: Path, ctx: ProbeContext, snapshot: Snapshot) -> None:
    """Weights, whole batch, configuration and loss of a step, as plain files in a folder."""
    from safetensors.torch import save_file

    starts = ctx.corpus.batch_index(ctx.config).starts(snapshot.step)
    x, y = ctx.corpus.batch("train", starts, ctx.config.block_size)
    path.mkdir(parents=True, exist_ok=True)
    save_file(snapshot.weights, path / "weights.safetensors")
    np.savez_compressed(path / "batch.npz", x=x.numpy(), y=y.numpy(), starts=starts)
    told = {
        "step": snapshot.step,
        "train_loss": snapshot.loss if _finite(snapshot.loss) else None,
        "vocab_size": ctx.model.vocab_size,
        "corpus": ctx.corpus.sha256,
        "device": ctx.x.device.type,
        "config": ctx.config.to_dict(),
    }
    write_json(path / "bundle.json", told)  # last: a bundle with this file is whole


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


@dataclass(frozen=True)
class Replay:
    """The loss that the run recorded for a step (None if it was not finite) and a fresh one."""

    step: int
    recorded: float | None
    replayed: float

    @property
    def identical(self) -> bool:
        if self.recorded is None:
            return not math.isfinite(self.replayed)
        return self.recorded == self.replayed


def replay(path: str | Path) -> Replay:
    """Compute a bundle's loss again, on the device type that it comes from where there is one.

    Raises ValueError for a folder that is no bundle.
    """
    from safetensors.torch import load_file

    from .model import GPT
    from .schema import RunConfig

    path = Path(path)
    if not (path / "bundle.json").is_file():
        raise ValueError(
            f"{path} is no bundle: it has no bundle.json; give a bundle_step_* folder"
        )
    told = json.loads((path / "bundle.json").read_text(encoding="utf-8"))
    config = RunConfig.from_dict(told["config"])
    model = GPT(config, told["vocab_size"]).to(config.device_type())
    _copy_into(model, load_file(path / "weights.safetensors"))
    with np.load(path / "batch.npz") as batch:
        x, y = (torch.from_numpy(batch[n]).to(model.device) for n in ("x", "y"))
    return Replay(told["step"], told["train_loss"], batch_loss(model, config, told["step"], x, y))


def batch_loss(model, config, step: int, x: Tensor, y: Tensor) -> float:
    """Training loss of a whole batch as the loop of one process computes it, draws included."""
    from .step import DTYPES, mix

    micro, _ = config.accumulation(1)
    dtype, total = DTYPES.get(config.dtype), torch.zeros((), device=x.device)
    model.train()
    for first in range(0, len(x), micro):
        seed = mix(config.init_seed, config.order_seed, step, first)
        with torch.random.fork_rng(), torch.autocast(x.device.type, dtype, dtype is not None):
            torch.manual_seed(mix(config.init_seed, step, first))
            rows = slice(first, first + micro)
            _, loss = model(x[rows], y[rows], denominator=config.tokens_per_step, seed=seed)
        total += loss.detach()
    return float(total)


def main(argv: list[str] | None = None) -> int:
    """Replay bundles; exit code 0 if every loss came out the same, 1 if not, 2 for bad input."""
    parser = argparse.ArgumentParser(prog="python -m gpt2.capture", description="Replay bundles.")
    parser.add_argument("bundle", nargs="+", help="a captures/bundle_step_* folder of a run")
    same = True
    for path in parser.parse_args(argv).bundle:
        try:
            found = replay(path)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        same &= found.identical
        words = "the same bits" if found.identical else "NOT the same"
        print(f"step {found.step}: recorded {found.recorded}, replayed {found.replayed}: {words}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
