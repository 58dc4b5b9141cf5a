"""The model: shapes, initialisation, options, taps, and the loss head against plain autograd."""

import math

import pytest
import torch
import torch.nn.functional as F
from trainer_helpers import tiny

from gpt2 import loss as loss_head
from gpt2.hardware import flops_per_token
from gpt2.model import GPT, Tap, largest_logit

V = 65


def model(**changes) -> GPT:
    return GPT(tiny("files:unused", **changes), V)


def batch(n=3, T=16):
    return torch.randint(0, V, (n, T)), torch.randint(0, V, (n, T))


def test_untrained_loss_is_that_of_a_uniform_guess():
    x, y = batch(16)
    _, loss = model()(x, y)
    assert abs(loss.item() - math.log(V)) < 0.05


def test_logits_and_loss_agree():
    m, (x, y) = model().eval(), batch()
    logits, none = m(x)
    assert none is None and logits.shape == (3, 16, V)
    torch.testing.assert_close(
        m(x, y)[1], F.cross_entropy(logits.flatten(0, 1), y.flatten()), atol=1e-6, rtol=0
    )


def test_no_position_sees_the_future():
    m, (x, _) = model(attention="exact").eval(), batch()
    changed = x.clone()
    changed[:, 9:] = 0
    torch.testing.assert_close(m(x)[0][:, :9], m(changed)[0][:, :9])


def test_initial_weights_depend_on_init_seed_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    a = model()
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(2)
    b, c = model(), model(init_seed=1)
    pairs = list(zip(a.parameters(), b.parameters(), c.parameters()))
    assert all(torch.equal(x, y) for x, y, _ in pairs)
    assert any(not torch.equal(x, z) for x, _, z in pairs)


def test_residual_projections_start_smaller():
    m = model(n_embd=64, n_layer=4)
    block = m.transformer.h[0]
    assert abs(block.attn.c_attn.weight.std().item() - 0.02) < 1e-3
    assert abs(block.mlp.c_proj.weight.std().item() - 0.02 / math.sqrt(8)) < 1e-3


@pytest.mark.parametrize(
    "options",
    [
        dict(bias=True),
        dict(tie_embeddings=False),
        dict(qk_norm=True),
        dict(gated_attention=True),
        dict(n_kv_head=1),
        dict(logit_softcap=5.0),
        dict(z_loss=1e-2),
        dict(attention="paper; L1H0 -> exact"),
        dict(dropout=0.2),
    ],
    ids=str,
)
def test_every_option_reaches_every_parameter(options):
    m, (x, y) = model(**options), batch()
    m(x, y)[1].backward()
    for name, p in m.named_parameters():
        assert p.grad is not None and p.grad.abs().sum() > 0, name


def test_softcap_bounds_the_logits():
    m = model(logit_softcap=0.01)
    assert m(batch()[0])[0].abs().max() <= 0.01


def test_z_loss_adds_the_square_of_log_z():
    m, (x, y) = model(z_loss=0.5).eval(), batch()
    lse = m(x)[0].logsumexp(-1)
    plain = F.cross_entropy(m(x)[0].flatten(0, 1), y.flatten())
    torch.testing.assert_close(m(x, y)[1], plain + 0.5 * lse.square().mean())


def test_qk_norm_makes_scores_independent_of_the_size_of_w_q():
    m, (x, _) = model(qk_norm=True, attention="exact").eval(), batch()
    before = m(x)[0]
    with torch.no_grad():
        for layer in m.attention_layers:
            layer.w_q().mul_(50.0)
    torch.testing.assert_close(m(x)[0], before, atol=1e-3, rtol=1e-3)


def test_qk_clip_brings_the_largest_logit_down_to_tau():
    m, (x, _) = model(qk_clip=2.0, attention="exact", bias=True), batch()
    with torch.no_grad():
        for layer in m.attention_layers:
            layer.c_attn.weight[:32].mul_(60.0)
            layer.c_attn.bias[:32].normal_()
    m(x)
    first = m.attention_layers[0].max_logit.clone()
    assert first.max() > 2.0
    m.clip_queries_and_keys()
    m(x)
    after = m.attention_layers[0].max_logit
    torch.testing.assert_close(after, first.clamp(max=2.0), atol=1e-4, rtol=1e-4)


def test_qk_clip_and_qk_norm_exclude_each_other():
    with pytest.raises(ValueError, match="use one of them"):
        model(qk_clip=1.0, qk_norm=True)


def test_largest_logit_is_that_of_the_full_score_matrix():
    q, k = torch.randn(2, 4, 300, 8), torch.randn(2, 2, 300, 8)
    scores = (q @ k.repeat_interleave(2, 1).transpose(2, 3)) / math.sqrt(8)
    scores = scores.masked_fill(torch.ones(300, 300).triu(1).bool(), -math.inf)
    torch.testing.assert_close(largest_logit(q, k), scores.amax((0, 2, 3)))


def test_sdpa_and_exact_numerics_are_the_same_function():
    a, b, (x, y) = model(attention="sdpa"), model(attention="exact"), batch()
    losses = [m(x, y)[1] for m in (a, b)]
    torch.testing.assert_close(losses[0], losses[1], atol=1e-6, rtol=0)


def test_set_attention_changes_single_heads_and_refuses_missing_ones():
    m = model(attention="exact")
    m.set_attention("exact; L1H0 -> exact,output=bf16")
    assert isinstance(m.attention_layers[1].numerics, tuple)
    assert not isinstance(m.attention_layers[0].numerics, tuple)
    with pytest.raises(ValueError, match="layer 7 does not exist"):
        m.set_attention("exact; L7 -> paper")


def test_taps_see_everything_and_change_nothing():
    m, (x, y) = model(attention="paper"), batch()
    taps = [None, Tap(keep_grad=True)]
    plain, tapped = m(x, y)[1], m(x, y, taps=taps)[1]
    assert torch.equal(plain, tapped)
    tapped.backward()
    tap = taps[1]
    assert tap.x.shape == (3, 16, 16) and tap.q.shape == tap.out.shape == (3, 2, 16, 8)
    assert tap.out.grad.abs().sum() > 0 and tap.probe.ties.shape == (3, 2, 16)


@pytest.mark.parametrize("options", [{}, dict(n_kv_head=1), dict(qk_clip=0.5)], ids=str)
def test_a_pass_with_taps_has_the_gradients_of_one_without(options):
    """A tap keeps q, k and v; without one attention takes them from the projection."""
    m, (x, y) = model(attention="paper", **options), batch()
    gradients = []
    for taps in (None, [Tap(keep_grad=True), None]):
        m.zero_grad()
        m(x, y, taps=taps)[1].backward()
        gradients.append([p.grad.clone() for p in m.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients))


def copies(graph) -> list[str]:
    """What a graph gathers from parts, or copies into another order of heads and tokens."""
    names = []
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default):
        names += ["clone"] if node.meta["val"].dim() == 4 else []
    return names + ["cat" for _ in graph.find_nodes(op="call_function", target=CAT)]


CAT = torch.ops.aten.cat.default


@pytest.mark.parametrize(
    "attention, kv_heads, gathered", [("paper", 2, 0), ("paper", 1, 0), ("sdpa", 2, 2)]
)
def test_nothing_is_copied_around_attention(attention, kv_heads, gathered):
    """PyTorch's attention leaves one copy in each layer: of dQ, dK and dV into one gradient."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    torch._dynamo.reset()
    graphs = []

    def keep(module, _):
        graphs.append(module.graph)
        return make_boxed_func(module.forward)

    m = model(attention=attention, n_kv_head=kv_heads)
    m.compile_trunk(backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    m(*batch())[1].backward()
    forward, backward = graphs
    assert copies(forward) == [] and copies(backward) == ["cat"] * gathered


def test_too_many_tokens_are_refused():
    with pytest.raises(ValueError, match="17 tokens do not fit block_size=16"):
        model()(torch.zeros(1, 17, dtype=torch.int64))


def test_gpt2_small_counts_as_published():
    with torch.device("meta"):
        m = GPT(tiny("files:unused", n_embd=768, n_head=12, n_layer=12, block_size=1024), 50257)
    n = m.count_parameters()
    assert m.count_parameters(positions=True) - n == 1024 * 768
    assert abs(n - 123.6e6) < 0.1e6
    assert abs(flops_per_token(n, 12, 12, 64, 1024) / 8.55e8 - 1) < 1e-3


# -- the chunked loss head ------------------------------------------------------------------------


@pytest.mark.parametrize("cap,z", [(0.0, 0.0), (3.0, 0.0), (0.0, 1e-2), (3.0, 1e-2)])
@pytest.mark.parametrize("budget", [V * 7, V * 1000])
def test_chunked_loss_equals_plain_autograd(monkeypatch, cap, z, budget):
    targets = torch.randint(0, V, (50,))
    targets[::7] = -1
    results = []
    for dense in (10**9, 0):
        monkeypatch.setattr(loss_head, "DENSE", dense)
        monkeypatch.setattr(loss_head, "BUDGET", budget)
        torch.manual_seed(3)
        x = torch.randn(50, 8, requires_grad=True)
        w = torch.randn(V, 8, requires_grad=True)
        total = loss_head.token_loss(x, w, targets, cap=cap, z_loss=z)
        (3 * total / 50).backward()
        results.append((total.detach(), x.grad, w.grad))
    for a, b in zip(*results):
        torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-5)


def test_chunks_fit_the_budget_and_cover_all_rows():
    for rows, vocab, budget in ((32768, 50304, 2**28), (1000, 65, 65 * 7), (5, 100, 10)):
        size = loss_head.chunk_rows(rows, vocab, budget)
        assert size >= 1 and (size == 1 or size * vocab <= budget)


@pytest.mark.parametrize(
    "attention, graphs",
    [
        ("paper", 1),
        ("sdpa", 1),
        ("paper; L1 -> exact", 2),
        ("paper,output=bf16:stochastic", 1),
    ],
)
def test_one_compiled_block_stands_for_all_with_the_same_numerics(attention, graphs):
    from torch._dynamo.testing import CompileCounter

    torch._dynamo.reset()
    eager = model(attention=attention, n_layer=3)
    by_block = model(attention=attention, n_layer=3)
    counter = CompileCounter()
    by_block.compile_trunk(by_block=True, backend=counter)
    results = []
    for m in (eager, by_block):
        torch.manual_seed(0)
        for seed in (5, 9):  # another step, with another seed, compiles nothing
            _, loss = m(*batch(), seed=seed)
            loss.backward()
        results.append([loss.detach(), *(p.grad for p in m.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results))
    assert counter.frame_count == graphs
