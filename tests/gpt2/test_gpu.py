"""What only a GPU can show: compiled training, exact resume and bounded memory there."""

import pytest
import torch
from trainer_helpers import tiny, write_corpus

from gpt2.data import load_corpus
from gpt2.distributed import Group
from gpt2.loop import Trainer
from gpt2.loss import token_loss
from gpt2.runs import RunStore
from gpt2.train import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MODEL = dict(device="cuda", n_embd=128, n_head=2, block_size=128, batch_size=16, dtype="bfloat16")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    return write_corpus(folder / "text", files=60), folder


def losses(place, steps=4, **changes):
    config = tiny(place[0], **MODEL, **changes)
    corpus = load_corpus(config, place[1] / "data", progress=False)
    t = Trainer(config, corpus, torch.device("cuda"), Group(), place[1])
    t.first_update(0)
    for step in range(1, steps):
        t.update(step)
    return [p[1].item() for p in t._pending], t


@pytest.mark.parametrize(
    "attention, how",
    [("flash", "on"), ("paper", "on"), ("sdpa", "on"), ("paper", "blocks"), ("sdpa", "blocks")],
)
def test_compiled_and_eager_losses_agree(place, attention, how):
    compiled, t = losses(place, attention=attention, compile=how)
    eager, _ = losses(place, attention=attention, compile="off")
    assert t.compiled
    assert max(abs(a - b) for a, b in zip(compiled, eager)) < 1e-3


@pytest.mark.parametrize("attention", ["flash", "paper"])
def test_a_resumed_run_equals_an_uninterrupted_one(place, attention):
    from test_resume import assert_same

    options = MODEL | dict(max_steps=24, eval_interval=7, micro_batch_size=8, attention=attention)
    config = tiny(place[0], **options)

    def go(name, stop_at=None):
        return train(
            config,
            store=RunStore(place[1] / f"{name}-{attention}"),
            cache_dir=place[1] / "data",
            progress=False,
            max_steps=stop_at,
        )

    whole = go("whole")
    go("parts", 9)
    assert_same(whole, go("parts"))


def test_muon_and_dropout_train_on_a_gpu(place):
    for changes in (dict(optimizer="muon"), dict(dropout=0.1)):
        found, _ = losses(place, steps=12, attention="flash", compile="off", **changes)
        assert found[-1] < found[0]


def test_the_loss_head_never_holds_all_logits():
    x = torch.randn(32768, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(50304, 256, device="cuda", requires_grad=True)
    y = torch.randint(0, 50304, (32768,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    token_loss(x, w, y).backward()
    assert torch.cuda.max_memory_allocated() - before < 3 * 2**30  # all logits in fp32: 6.6 GB
