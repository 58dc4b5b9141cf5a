"""GPT-2 with the options that the study compares, and attention whose numerics are a value.

Parameter names are nanoGPT's (`transformer.h.0.attn.c_attn.weight`), so its checkpoints and, with
transposed matrices, Hugging Face's load by name (`gpt2.checkpoint`). Weights are float32 always;
a lower training precision is autocast's affair, and attention's roundings are `kernels`'.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kernels.attention import Probe, attention
from kernels.layout import split_heads
from kernels.numerics import Numerics, ScopedNumerics
from kernels.packed import packed_attention

from .config import RunConfig
from .loss import softcap, token_loss

INIT_STD = 0.02  # GPT-2; residual projections are divided by sqrt(2 n_layer)


@dataclass
class Tap:
    """Taken along a forward pass to see inside one attention layer; changes no bit of it.

    probe: filled by `kernels.attention`; None to leave it out. keep_grad: retain gradients, so
    that after `backward` `tap.out.grad` is dO. Filled: x [B, T, C] (input of c_attn), q [B, H, T,
    D], k, v [B, Hkv, T, D], out [B, H, T, D], in the dtypes that attention saw.
    """

    probe: Probe | None = field(default_factory=Probe)
    keep_grad: bool = False
    x: Tensor | None = None
    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    out: Tensor | None = None

    def take(self, **tensors: Tensor) -> None:
        for name, tensor in tensors.items():
            if self.keep_grad and tensor.requires_grad:
                tensor.retain_grad()
            setattr(self, name, tensor)


class Norm(nn.Module):
    """LayerNorm over the last axis, eps 1e-5, with an optional bias (GPT-2 has it)."""

    def __init__(self, width: int, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-5)


class Attention(nn.Module):
    """Causal self-attention of one layer. numerics: None = PyTorch's own, else kernels.attention.

    `c_attn.weight` holds the rows [W_Q (H*D), W_K (Hkv*D), W_V (Hkv*D)]. Dropout acts on the
    output only: attention probabilities never leave the kernel.
    """

    def __init__(self, config: RunConfig, layer: int):
        super().__init__()
        self.layer, self.n_head = layer, config.n_head
        self.n_kv_head = config.n_kv_head or config.n_head
        self.head_dim = config.n_embd // config.n_head
        self.backend, self.dropout = config.attention_backend, config.dropout
        self.numerics: Numerics | tuple[Numerics, ...] | None = None
        width, bias = config.n_embd, config.bias
        rows = (self.n_head + 2 * self.n_kv_head) * self.head_dim
        self.c_attn = nn.Linear(width, rows, bias=bias)
        self.c_proj = nn.Linear(self.n_head * self.head_dim, width, bias=bias)
        gated = config.gated_attention
        self.c_gate = nn.Linear(width, self.n_head * self.head_dim, bias=bias) if gated else None
        self.q_gain = nn.Parameter(torch.ones(self.head_dim)) if config.qk_norm else None
        self.k_gain = nn.Parameter(torch.ones(self.head_dim)) if config.qk_norm else None
        self.watch_logits = config.qk_clip > 0
        if self.watch_logits:
            self.register_buffer("max_logit", torch.zeros(self.n_head), persistent=False)

    def w_q(self) -> Tensor:
        """[H, D, C] view of W_Q."""
        rows = self.n_head * self.head_dim
        return self.c_attn.weight[:rows].view(self.n_head, self.head_dim, -1)

    def w_k(self) -> Tensor:
        """[Hkv, D, C] view of W_K."""
        start, rows = self.n_head * self.head_dim, self.n_kv_head * self.head_dim
        return self.c_attn.weight[start : start + rows].view(self.n_kv_head, self.head_dim, -1)

    def forward(self, x: Tensor, seed: int | Tensor = 0, tap: Tap | None = None) -> Tensor:
        """x [B, T, C] -> [B, T, C]."""
        B, T, _ = x.shape
        D = self.head_dim
        qkv = self.c_attn(x)
        q, k, v = split_heads(qkv, self.n_head, self.n_kv_head)
        if self.q_gain is not None:
            q = F.rms_norm(q, (D,), self.q_gain, 1e-6).to(v.dtype)
            k = F.rms_norm(k, (D,), self.k_gain, 1e-6).to(v.dtype)
        if self.watch_logits and self.training:
            self.max_logit.copy_(torch.maximum(self.max_logit, largest_logit(q, k)))
        if self.numerics is not None and self.q_gain is None and tap is None:
            out = self._attend_packed(qkv, seed)
        else:
            out = self._attend(q, k, v, seed, None if tap is None else tap.probe)
        if tap is not None:
            tap.take(x=x, q=q, k=k, v=v, out=out)
        out = out.transpose(1, 2).reshape(B, T, -1)
        if self.c_gate is not None:
            out = out * torch.sigmoid(self.c_gate(x))
        return F.dropout(self.c_proj(out), self.dropout, self.training)

    def _attend_packed(self, qkv, seed) -> Tensor:
        """The same numbers, without the copy that gathers the gradients of q, k and v."""
        choices = dict(numerics=self.numerics, backend=self.backend, seed=seed)
        return packed_attention(qkv, self.n_head, kv_heads=self.n_kv_head, **choices)

    def _attend(self, q, k, v, seed, probe) -> Tensor:
        if self.numerics is None:
            grouped = self.n_kv_head != self.n_head
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return attention(
            q, k, v, numerics=self.numerics, backend=self.backend, probe=probe, seed=seed
        )


@torch.no_grad()
def largest_logit(q: Tensor, k: Tensor, block: int = 128) -> Tensor:
    """Largest visible score of each query head over the batch, fp32 [H]; for QK-clip.

    q [B, H, T, D], k [B, Hkv, T, D]. By blocks of queries, so that no [T, T] matrix is kept.
    """
    B, H, T, D = q.shape
    k = k.repeat_interleave(H // k.shape[1], dim=1)
    best = q.new_full((H,), -torch.inf, dtype=torch.float32)
    key = torch.arange(T, device=q.device)
    for start in range(0, T, block):
        rows = q[:, :, start : start + block]
        stop = start + rows.shape[2]
        scores = (rows @ k[:, :, :stop].transpose(2, 3)).float() / math.sqrt(D)
        hidden = key[None, :stop] > key[start:stop, None]
        best = torch.maximum(best, scores.masked_fill(hidden, -torch.inf).amax(dim=(0, 2, 3)))
    return best


class MLP(nn.Module):
    """C -> 4C -> C with the exact GELU of nanoGPT (OpenAI's code approximates it by tanh)."""

    def __init__(self, config: RunConfig):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = config.dropout

    def forward(self, x: Tensor) -> Tensor:
        x = self.c_proj(F.gelu(self.c_fc(x)))
        return F.dropout(x, self.dropout, self.training)


class Block(nn.Module):
    """Pre-norm transformer block: x + attn(ln_1 x), then x + mlp(ln_2 x)."""

    def __init__(self, config: RunConfig, layer: int):
        super().__init__()
        self.ln_1 = Norm(config.n_embd, config.bias)
        self.attn = Attention(config, layer)
        self.ln_2 = Norm(config.n_embd, config.bias)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, seed: int | Tensor, tap: Tap | None) -> Tensor:
        x = x + self.attn(self.ln_1(x), seed, tap)
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """The language model. vocab_size: rows of the embedding (the corpus's, padded or not).

    Weights are drawn from their own generator seeded with `init_seed`, on the CPU, so that they
    are the same on every device and no other random state moves. Raises ValueError for numerics
    that do not fit the model.
    """

    def __init__(self, config: RunConfig, vocab_size: int):
        super().__init__()
        if config.qk_clip and config.qk_norm:
            raise ValueError(
                "qk_clip rescales W_Q and W_K, which qk_norm then normalises away; use one of them"
            )
        self.config, self.vocab_size = config, vocab_size
        with torch.random.fork_rng(devices=[]):  # PyTorch's own initialisation draws, in vain
            self.transformer = nn.ModuleDict(
                dict(
                    wte=nn.Embedding(vocab_size, config.n_embd),
                    wpe=nn.Embedding(config.block_size, config.n_embd),
                    h=nn.ModuleList(Block(config, i) for i in range(config.n_layer)),
                    ln_f=Norm(config.n_embd, config.bias),
                )
            )
            self.lm_head = nn.Linear(config.n_embd, vocab_size, bias=False)
        if config.tie_embeddings:
            self.lm_head.weight = self.transformer.wte.weight
        self._trunk = self.blocks
        self.set_attention(config.attention)
        self.reset_parameters(config.init_seed)

    @property
    def attention_layers(self) -> list[Attention]:
        return [block.attn for block in self.transformer.h]

    @property
    def device(self) -> torch.device:
        return self.transformer.wte.weight.device

    def set_attention(self, text: str) -> None:
        """Numerics for every layer and head: 'sdpa', or the grammar of `ScopedNumerics.parse`."""
        layers = self.attention_layers
        if text == "sdpa":
            for layer in layers:
                layer.numerics = None
            return
        scoped = ScopedNumerics.parse(text)
        scoped.check(len(layers), self.config.n_head)
        for layer in layers:
            heads = scoped.for_layer(layer.layer, layer.n_head)
            layer.numerics = heads[0] if len(set(heads)) == 1 else heads

    @property
    def stochastic(self) -> bool:
        """Whether attention draws random numbers, so that `seed` matters."""
        every = [a.numerics for a in self.attention_layers if a.numerics is not None]
        flat = [n for x in every for n in (x if isinstance(x, tuple) else (x,))]
        return any(n.stochastic for n in flat)

    def reset_parameters(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        residual = INIT_STD / math.sqrt(2 * self.config.n_layer)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif parameter.dim() == 1:
                nn.init.ones_(parameter)
            else:
                std = residual if name.endswith("c_proj.weight") else INIT_STD
                nn.init.normal_(parameter, 0.0, std, generator=generator)

    def compile_trunk(self, by_block: bool = False, backend: str = "inductor", **options) -> None:
        """Run the blocks through torch.compile while training (taps and evaluation stay eager).

        Fused kernels keep every bf16 rounding that separate ones would make. The embedding stays
        outside: its eager gradient sums in a fixed order on a GPU, a compiled one with atomics
        would not, and a resumed run would differ in the last bits.

        by_block: one block is compiled and stands for all whose attention has the same numerics,
        so that compiling takes no longer in a deep model; nothing is fused across blocks then.
        """
        if backend == "inductor":
            options = {"emulate_precision_casts": True, **options}
        how = dict(dynamic=False, backend=backend, options=options or None)
        if by_block:
            self._block = torch.compile(Block.__call__, **how)
            self._trunk = self._block_by_block
        else:
            self._trunk = torch.compile(self.blocks, **how)

    def _block_by_block(self, x: Tensor, seed: int | Tensor = 0) -> Tensor:
        """`blocks`; seeds are tensors, or 0 where nothing draws: a number would be compiled in."""
        if self.stochastic:
            return self.blocks(x, torch.as_tensor(seed, device=x.device), run=self._block)
        return self.blocks(x, run=lambda block, x, seed, tap: self._block(block, x, 0, tap))

    def eager_trunk(self) -> None:
        self._trunk = self.blocks

    def embed(self, idx: Tensor) -> Tensor:
        """Token ids [B, T] -> [B, T, C]. Raises ValueError for more than block_size tokens."""
        T = idx.shape[1]
        if T > self.config.block_size:
            raise ValueError(f"{T} tokens do not fit block_size={self.config.block_size}")
        x = self.transformer.wte(idx) + self.transformer.wpe.weight[:T]
        return F.dropout(x, self.config.dropout, self.training)

    def blocks(
        self,
        x: Tensor,
        seed: int | Tensor = 0,
        taps: list[Tap | None] | None = None,
        run: Callable[..., Tensor] = Block.__call__,
    ) -> Tensor:
        """Embedded tokens [B, T, C] -> final hidden states [B, T, C].

        run: of a block, its input, seed and tap, gives its output.
        """
        for i, block in enumerate(self.transformer.h):
            x = run(block, x, seed + i, None if taps is None else taps[i])
        return self.transformer.ln_f(x)

    def forward(
        self,
        idx: Tensor,
        targets: Tensor | None = None,
        *,
        denominator: float | Tensor | None = None,
        seed: int | Tensor = 0,
        taps: list[Tap | None] | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """(logits, None) without targets, (None, loss) with them.

        idx, targets: int64 [B, T]; a target of -1 is not counted. The loss is the sum over counted
        targets divided by `denominator` (default: their number), so that micro-batches that share
        one denominator add up to the full batch's loss whatever the split. logits: [B, T, V].
        seed: int or 0-dim int64 tensor; layer i uses seed + i.
        """
        x = self.embed(idx)
        fast = self.training and taps is None
        x = self._trunk(x, seed) if fast else self.blocks(x, seed, taps)
        if targets is None:
            return softcap(self.lm_head(x), self.config.logit_softcap), None
        if denominator is None:
            denominator = (targets != -1).sum()
        loss = token_loss(
            x.flatten(0, 1),
            self.lm_head.weight,
            targets.flatten(),
            cap=self.config.logit_softcap,
            z_loss=self.config.z_loss,
        )
        return None, loss / denominator

    @torch.no_grad()
    def clip_queries_and_keys(self) -> None:
        """QK-clip: heads whose largest logit passed tau get W_Q and W_K scaled down.

        gamma = min(1, tau / max logit); both matrices by sqrt(gamma), or W_Q alone by gamma where
        query heads share a key head. Source: Kimi K2 report, section 2.1. Call after the
        optimiser.
        """
        tau = self.config.qk_clip
        for layer in self.attention_layers:
            gamma = (tau / layer.max_logit.clamp(min=tau)).to(self.device)
            shared = layer.n_kv_head != layer.n_head
            for start, factor in ((0, gamma if shared else gamma.sqrt()),) + (
                () if shared else ((layer.n_head, gamma.sqrt()),)
            ):
                rows = slice(start * layer.head_dim, (start + layer.n_head) * layer.head_dim)
                scale = factor.repeat_interleave(layer.head_dim)
                layer.c_attn.weight[rows] *= scale[:, None]
                if layer.c_attn.bias is not None:
                    layer.c_attn.bias[rows] *= scale
            layer.max_logit.zero_()

    def count_parameters(self, positions: bool = False) -> int:
        """Parameters, shared ones once, without the position table unless asked."""
        total = sum(p.numel() for p in self.parameters())
        return total if positions else total - self.transformer.wpe.weight.numel()
