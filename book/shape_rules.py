"""The rules for shapes, masks and dtypes, each with a small trial; a model of somebody else."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels import oracle
from kernels.attention import Probe, attention
from kernels.integrations import register_with_transformers

from .backend_support import distances


def _given(q: Sequence[int], k: Sequence[int] | None = None, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    draw = lambda size: torch.randn(*size, generator=generator).to(dtype).requires_grad_()  # noqa: E731
    return draw(q), draw(k or q), draw(k or q)


def tried() -> list[list[str]]:
    """Rule and what came out when it was tried just now."""
    return [
        ["Causal: query i sees keys j <= i, aligned top left", _alignment()],
        ["A row that sees no key: O = 0, lse = -inf, no ties, zero gradients", _masked_row()],
        ["An additive mask hides where it is -inf or below half the lowest number", _lowest()],
        ["Zero lengths: empty or zero, nothing is launched", _zero_lengths()],
        ["Query heads are a multiple of key heads", _grouped()],
        ["D is anything; the scale is 1/sqrt(D) of the true D", _any_dimension()],
        ["q and k are cast to v's dtype; gradients keep their input's dtype", _dtypes()],
        ["Under autocast all three are cast to its dtype", _autocast()],
    ]


def _alignment() -> str:
    q, k, v = _given((1, 1, 2, 8), (1, 1, 5, 8))
    out = attention(q, k, v, numerics="exact")
    dv = torch.autograd.grad(out.sum(), v)[0][0, 0].abs().sum(-1)
    return f"2 queries, 5 keys: out[0] equals v[0] {torch.equal(out[0, 0, 0], v[0, 0, 0])}; " + (
        f"keys that get a gradient: {(dv > 0).nonzero().flatten().tolist()}"
    )


def _masked_row() -> str:
    q, k, v = _given((1, 1, 3, 8))
    mask, probe = torch.tensor([[True], [False], [True]]), Probe()
    out = attention(q, k, v, numerics="paper", causal=False, mask=mask, probe=probe)
    dq = torch.autograd.grad(out.sum(), q)[0]
    row = [out[0, 0, 1].abs().max(), probe.lse[0, 0, 1], probe.ties[0, 0, 1], dq[0, 0, 1].norm()]
    return "O {:g}, lse {:g}, ties {:g}, |dQ| {:g}".format(*(x.item() for x in row))


def _lowest() -> str:
    q, k, v = _given((1, 1, 3, 8))
    hidden = torch.tensor([False, False, True])
    outs = []
    for mask in (~hidden, *(torch.zeros(3).masked_fill(hidden, torch.finfo(torch.float32).min) * n
                            for n in (1, 2))):  # fmt: skip
        outs.append(attention(q, k, v, numerics="exact", causal=False, mask=mask))
    same = [torch.equal(x, outs[0]) for x in outs[1:]]
    return f"the lowest number, and twice it, equal the boolean mask: {same}"


def _zero_lengths() -> str:
    told = []
    for q, k in (((1, 2, 0, 8), (1, 2, 3, 8)), ((1, 2, 3, 8), (1, 2, 0, 8)), ((0, 2, 3, 8),) * 2):
        out = attention(*_given(q, k), numerics="flash")
        told.append(f"q {list(q)}, k {list(k)}: out {list(out.shape)}, sum {out.sum():g}")
    return "; ".join(told)


def _grouped() -> str:
    q, k, v = _given((1, 4, 3, 8), (1, 2, 3, 8))
    told = list(attention(q, k, v, numerics="flash").shape)
    try:
        attention(q[:, :3], k, v)
    except ValueError as error:
        return f"4 and 2: out {told}; 3 and 2: {error}"
    raise AssertionError("3 query heads over 2 key heads were accepted")


def _any_dimension() -> str:
    off = {}
    for D in (1, 40, 63, 256):
        q, k, v = _given((1, 2, 9, D))
        truth = oracle.attention_forward(q, k, v, scale=D**-0.5)[0]
        off[D] = (attention(q, k, v, numerics="exact").double() - truth).abs().max().item()
    return "largest error against float64: " + ", ".join(f"D={d}: {e:.0e}" for d, e in off.items())


def _dtypes() -> str:
    q, k, v = (
        x.detach().to(d).requires_grad_()
        for x, d in zip(_given((1, 1, 3, 8)), (torch.float32, torch.float16, torch.bfloat16))
    )
    return _told_dtypes(attention(q, k, v), q, k, v)


def _autocast() -> str:
    q, k, v = _given((1, 1, 3, 8))
    with torch.autocast("cpu", torch.bfloat16):
        return _told_dtypes(attention(q, k, v), q, k, v)


def _told_dtypes(out: Tensor, *inputs: Tensor) -> str:
    grads = torch.autograd.grad(out.sum(), inputs)
    names = [", ".join(str(x.dtype)[6:] for x in xs) for xs in (inputs, (out,), grads)]
    return "inputs {}: output {}, gradients {}".format(*names)


def transformers_demonstration(numerics: str) -> str:
    """A small Llama with random weights under PyTorch's attention and under ours: what moved."""
    try:
        import transformers
    except ImportError:
        return "transformers is not installed here: pip install 'transformers>=4.51' to try it."
    torch.manual_seed(0)
    sizes = dict(hidden_size=32, intermediate_size=32, num_hidden_layers=2, vocab_size=50)
    config = transformers.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)
    model = transformers.LlamaForCausalLM(config).eval()
    tokens = torch.randint(0, 50, (1, 24))
    logits = {}
    for name, text in (("sdpa", None), ("ours-exact", "exact"), ("ours", numerics)):
        if text:
            register_with_transformers(name, text)
        model.set_attn_implementation(name)
        logits[name] = model(tokens).logits.detach()
    moved = {n: distances([x], [logits["sdpa"]])[0] for n, x in logits.items() if n != "sdpa"}
    return (
        "A Llama of 2 layers: logits under `exact` differ from PyTorch's by "
        f"{moved['ours-exact']:.1e} of their size, under `{numerics}` by {moved['ours']:.1e}."
    )
