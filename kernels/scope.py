"""Which layers and heads of a model follow which Numerics, as one value with a text form."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .numerics import Numerics, parse_numerics


@dataclass(frozen=True)
class Override:
    """Numerics for some layers and heads, counted from 0; None means all."""

    numerics: Numerics
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None


@dataclass(frozen=True)
class ScopedNumerics:
    """A base and overrides by layer and head; a later override wins."""

    base: Numerics
    overrides: tuple[Override, ...] = ()

    def for_layer(self, layer: int, n_head: int) -> tuple[Numerics, ...]:
        """One Numerics per head of a layer. Raises ValueError for a head the layer lacks."""
        heads = [self.base] * n_head
        for over in self.overrides:
            if over.layers is not None and layer not in over.layers:
                continue
            for head in range(n_head) if over.heads is None else over.heads:
                if not 0 <= head < n_head:
                    raise ValueError(f"head {head} does not exist; layer {layer} has {n_head}")
                heads[head] = over.numerics
        return tuple(heads)

    def check(self, n_layer: int, n_head: int) -> None:
        """Raise ValueError if an override names a layer or head that the model lacks."""
        for over in self.overrides:
            for layer in over.layers or ():
                if not 0 <= layer < n_layer:
                    raise ValueError(f"layer {layer} does not exist; the model has {n_layer}")
        for layer in range(n_layer):
            self.for_layer(layer, n_head)

    @classmethod
    def parse(cls, text: str | Numerics | ScopedNumerics) -> ScopedNumerics:
        """'paper; L1 -> exact; L1H0+3 -> paper,delta=dP_P; H2 -> exact', counted from 0."""
        if isinstance(text, ScopedNumerics):
            return text
        if isinstance(text, Numerics):
            return cls(text)
        base, *rest = text.split(";")
        overrides = []
        for part in rest:
            where, arrow, what = part.partition("->")
            number = r"(\d+(?:\+\d+)*)"
            match = re.fullmatch(rf"(?:L{number})?(?:H{number})?", where.strip())
            if not arrow or not match or not where.strip():
                raise ValueError(
                    f"scope {part.strip()!r} is not understood; write it as 'L1H0+3 -> exact', "
                    "layers and heads counted from 0"
                )
            layers, heads = (
                tuple(int(n) for n in g.split("+")) if g else None for g in match.groups()
            )
            overrides.append(Override(parse_numerics(what), layers, heads))
        return cls(parse_numerics(base), tuple(overrides))

    def __str__(self) -> str:
        def where(o: Override) -> str:
            text = "" if o.layers is None else "L" + "+".join(map(str, o.layers))
            return text + ("" if o.heads is None else "H" + "+".join(map(str, o.heads)))

        return "; ".join(
            [str(self.base)] + [f"{where(o)} -> {o.numerics}" for o in self.overrides]
        )
