"""Our numerics inside other people's models: one line for PyTorch code, one for transformers.

from kernels.integrations import scaled_dot_product_attention  # in place of torch's

register_with_transformers("paper", "paper; L1 -> paper,delta_output=fp32")
model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="paper")
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from .attention import Probe, attention
from .numerics import Numerics, ScopedNumerics

Watch = Callable[[torch.nn.Module, Tensor, Tensor, Tensor, Probe], None]


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    numerics: Numerics | str = "flash",
    backend: str = "auto",
    seed: int | Tensor = 0,
) -> Tensor:
    """F.scaled_dot_product_attention with our numerics: same arguments, shapes and dtypes.

    query [..., H, L, E], key [..., Hkv, S, E], value [..., Hkv, S, Ev] -> [..., H, L, Ev].
    Raises ValueError for dropout (attention here has none), for a mask together with `is_causal`,
    and for different numbers of heads without `enable_gqa`, as PyTorch does.
    """
    if dropout_p:
        raise ValueError(f"dropout_p={dropout_p}: this attention has no dropout; pass 0")
    if is_causal and attn_mask is not None:
        raise ValueError("attn_mask and is_causal are both given; put causality into the mask")
    if query.dim() < 2 or not query.dim() == key.dim() == value.dim():
        raise ValueError("query, key and value need the same number of dimensions, at least 2")
    q, k, v = (_four(x) for x in (query, key, value))
    if q.shape[1] != k.shape[1] and not enable_gqa:
        raise ValueError(f"{q.shape[1]} query and {k.shape[1]} key heads; pass enable_gqa=True")
    mask = None
    if attn_mask is not None:
        mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
        mask = _four(mask)
    out = attention(
        q,
        k,
        v,
        numerics=numerics,
        causal=is_causal,
        scale=scale,
        mask=mask,
        backend=backend,
        seed=seed,
    )
    return out.reshape(*query.shape[:-1], value.shape[-1])


def _four(x: Tensor) -> Tensor:
    """[..., H, T, D] as [B, H, T, D]."""
    while x.dim() < 4:
        x = x.unsqueeze(0)
    return x.flatten(0, -4)


def attention_function(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    *,
    numerics: Numerics | ScopedNumerics | str = "flash",
    backend: str = "auto",
    watch: Watch | None = None,
    **others,
) -> tuple[Tensor, None]:
    """An attention function as transformers' `AttentionInterface` calls it.

    query [B, H, L, D], key and value [B, Hkv, S, D] -> ([B, L, H, D], None). `numerics` may be
    scoped: the layer is `module.layer_idx`. Causality as in transformers' sdpa function: the mask
    where there is one, else causal for more than one query unless `is_causal` or the module says
    no. watch: called with (module, query, key, value, Probe) of every call; changes nothing.
    Raises ValueError for dropout, and for logit soft-capping or attention sinks, which would
    change the function computed.
    """
    if dropout:
        raise ValueError(f"attention dropout={dropout}: this attention has none; set it to 0")
    for name in ("softcap", "s_aux"):
        if others.get(name) is not None:
            raise ValueError(f"this model passes {name}, which this attention does not compute")
    scoped = ScopedNumerics.parse(numerics)
    per_head = scoped.for_layer(getattr(module, "layer_idx", None) or 0, query.shape[1])
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    probe = Probe() if watch is not None else None
    out = attention(
        query,
        key,
        value,
        numerics=per_head,
        causal=bool(is_causal) and attention_mask is None and query.shape[2] > 1,
        scale=scaling,
        mask=attention_mask,
        backend=backend,
        probe=probe,
    )
    if watch is not None:
        watch(module, query, key, value, probe)
    return out.transpose(1, 2).contiguous(), None


def register_with_transformers(
    name: str,
    numerics: Numerics | ScopedNumerics | str,
    backend: str = "auto",
    watch: Watch | None = None,
) -> Callable:
    """Register `attention_function` under `name`; use it as `attn_implementation=name`.

    Masks are made as for transformers' own "sdpa". Returns the function registered. Raises
    ImportError, saying what to install, without transformers >= 4.51.
    """
    try:
        from transformers import AttentionInterface
    except ImportError as error:
        raise ImportError(
            "transformers >= 4.51 is needed for this: pip install 'transformers>=4.51'"
        ) from error
    numerics = ScopedNumerics.parse(numerics)
    function = partial(attention_function, numerics=numerics, backend=backend, watch=watch)
    AttentionInterface.register(name, function)
    try:
        from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
    except ImportError:  # before 4.53 the models make the mask themselves
        return function
    AttentionMaskInterface.register(name, sdpa_mask)
    return function
