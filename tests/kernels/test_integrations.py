"""The drop-in for PyTorch's attention and the attention function for transformers."""

import inspect

import pytest
import torch
import torch.nn.functional as F

from kernels import exact
from kernels.integrations import (
    attention_function,
    register_with_transformers,
    scaled_dot_product_attention,
)

EXACT = dict(rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 2, 3)])
def test_drop_in_takes_the_shapes_that_pytorch_takes(lead):
    q, k, v = torch.randn(*lead, 5, 8), torch.randn(*lead, 7, 8), torch.randn(*lead, 7, 4)
    for kwargs in (
        dict(),
        dict(is_causal=True),
        dict(attn_mask=torch.rand(5, 7) < 0.7, scale=0.3),
    ):
        mine = scaled_dot_product_attention(q, k, v, numerics=exact(), **kwargs)
        torch.testing.assert_close(
            mine, F.scaled_dot_product_attention(q, k, v, **kwargs), **EXACT
        )


def test_drop_in_takes_pytorchs_arguments_in_pytorchs_order():
    mine = inspect.signature(scaled_dot_product_attention).parameters
    documented = "query key value attn_mask dropout_p is_causal scale enable_gqa".split()
    assert list(mine)[: len(documented)] == documented


def test_drop_in_grouped_queries_need_the_flag():
    q, k = torch.randn(1, 4, 5, 8), torch.randn(1, 2, 5, 8)
    with pytest.raises(ValueError, match="enable_gqa=True"):
        scaled_dot_product_attention(q, k, k)
    mine = scaled_dot_product_attention(q, k, k, enable_gqa=True, numerics="exact")
    torch.testing.assert_close(
        mine, F.scaled_dot_product_attention(q, k, k, enable_gqa=True), **EXACT
    )


@pytest.mark.parametrize(
    "kwargs, told",
    [
        (dict(dropout_p=0.1), "no dropout"),
        (dict(is_causal=True, attn_mask=torch.ones(5, 5).bool()), "both given"),
    ],
)
def test_drop_in_refuses_what_it_does_not_do(kwargs, told):
    q = torch.randn(1, 1, 5, 8)
    with pytest.raises(ValueError, match=told):
        scaled_dot_product_attention(q, q, q, **kwargs)


def test_transformers_models_run_under_our_numerics():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="sdpa",
    )
    model = transformers.LlamaForCausalLM(config).eval()
    tokens = torch.randint(0, 50, (2, 12))
    padded = torch.ones_like(tokens)
    padded[0, :3] = 0  # left padding

    def logits(name):
        model.set_attn_implementation(name)
        return model(tokens, attention_mask=padded).logits[padded.bool()]

    register_with_transformers("ours-exact", "exact")
    register_with_transformers("ours-paper", "exact; L1H2 -> paper,matched_bits=2")
    reference = logits("sdpa")
    torch.testing.assert_close(logits("ours-exact"), reference, rtol=1e-4, atol=1e-5)
    moved = (logits("ours-paper") - reference).abs().max()
    assert moved > 1e-4  # one coarse head of one layer is felt


def test_a_watcher_sees_every_call_and_changes_nothing():
    q, k = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    module, seen = torch.nn.Identity(), []
    plain, _ = attention_function(module, q, k, k, None, numerics="paper")
    watched, _ = attention_function(
        module, q, k, k, None, numerics="paper", watch=lambda *told: seen.append(told)
    )
    assert torch.equal(plain, watched)
    ((who, query, key, _, probe),) = seen
    assert who is module and query is q and key is k
    assert probe.ties.shape == (1, 4, 6)
