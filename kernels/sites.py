"""The tools of the emulator: tensors onto a site's grid, seeded draws, plain fp32 arithmetic."""

from __future__ import annotations

import hashlib
import math
from contextlib import contextmanager

import torch
from torch import Tensor

from .formats import FP32, FP64
from .numerics import Numerics, Site
from .rounding import round_to

_LOWEST = -87.25
_TINY = torch.tensor(_LOWEST).exp().item() * 1.000001  # whichever way exp rounds it


class Rounder:
    """Puts tensors on the grids of a Numerics; one random generator per (seed, name)."""

    def __init__(self, numerics: Numerics, seed: int | Tensor, device: torch.device):
        self.numerics, self.seed, self.device = numerics, seed, device
        self.generators: dict[str, torch.Generator] = {}

    def generator(self, name: str, seed: int | None = None) -> torch.Generator:
        """The generator of this name, made from the pass's seed (or another) on first use."""
        if name not in self.generators:
            text = f"{int(self.seed if seed is None else seed)}:{name}"
            number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
            self.generators[name] = torch.Generator(self.device).manual_seed(number)
        return self.generators[name]

    def to_site(self, x: Tensor, site: Site, name: str) -> Tensor:
        if not rounds_at(site):
            return x
        generator = self.generator(name) if site.rounding == "stochastic" else None
        return round_to(x, site.format, site.rounding, generator=generator)

    def __call__(self, x: Tensor, name: str) -> Tensor:
        return self.to_site(x, getattr(self.numerics, name), name)

    def input(self, x: Tensor, name: str) -> Tensor:
        """[B, H, T, D] of any dtype and strides to the carrier and the grid, as [B H, T, D].

        Contiguous: with other strides some libraries sum in another order.
        """
        site = self.numerics.inputs
        wide = x.flatten(0, 1).to(carrier_of(self.numerics)).contiguous()
        return wide if site.format.torch_dtype == x.dtype else self.to_site(wide, site, name)


def rounds_at(site: Site) -> bool:
    """Whether a site does anything: fp32 (or wider) means the carrier, also when that is fp64."""
    return site.format.fraction_bits < FP32.fraction_bits or site.format.exponent_bits < 8


def carrier_of(numerics: Numerics) -> torch.dtype:
    """The dtype that holds everything between the roundings."""
    return torch.float64 if numerics.compute == FP64 else torch.float32


@contextmanager
def plain_arithmetic(device_type: str):
    """No autocast and no TF32 or bf16 matrix products inside, whatever the caller has set."""
    precision = torch.get_float32_matmul_precision()
    if precision != "highest":
        torch.set_float32_matmul_precision("highest")
    try:
        with torch.autocast(device_type, enabled=False):
            yield
    finally:
        if precision != "highest":
            torch.set_float32_matmul_precision(precision)


def exp_in_place(x: Tensor) -> Tensor:
    """exp in place. In fp32 whatever is not above exp(-87.25) = 1.3e-38 becomes 0.

    Below lie fp32's subnormals, which GPU exponentials flush too; on a CPU both they and -inf, the
    hidden keys, cost 15 times as much as an ordinary exponent.
    """
    if x.dtype == torch.float64:
        return x.exp_()
    return torch.threshold_(x.clamp_(min=_LOWEST).exp_(), _TINY, 0.0)


def repeat_heads(x: Tensor, group: int, dim: int = 1) -> Tensor:
    """[B, Hkv, T, D] to [B, Hkv * group, T, D]: one key head serves `group` query heads."""
    return x if group == 1 else x.repeat_interleave(group, dim=dim)


def scaled_product(a: Tensor, b: Tensor, alpha: float, addend: Tensor | None = None) -> Tensor:
    """alpha a b (+ addend), batched.

    One call where alpha is a power of two, which rounds nothing. Else the product is rounded
    before it is scaled, as the kernels do: of the libraries behind one call some scale a first.
    """
    if abs(math.frexp(alpha)[0]) != 0.5:
        product = torch.bmm(a, b).mul_(alpha)
        return product if addend is None else product.add_(addend)
    if addend is None:
        return torch.baddbmm(a.new_empty(1, 1, 1), a, b, beta=0, alpha=alpha)
    return torch.baddbmm(addend, a, b, alpha=alpha)
