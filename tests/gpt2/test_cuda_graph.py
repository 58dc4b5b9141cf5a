"""CUDA graphs: when a step may be one, the trainer around it, and equal bits on a GPU."""

import pytest
import torch
from test_resume import assert_same
from trainer_helpers import tiny, write_corpus

from gpt2 import cuda_graph, step
from gpt2.bench import SyntheticCorpus
from gpt2.cuda_graph import graph_obstacle
from gpt2.distributed import Group
from gpt2.loop import Trainer
from gpt2.runs import RunStore
from gpt2.train import train
from kernels import hopper_attention, triton_attention
from kernels.formats import FP64

CUDA = torch.device("cuda")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("graphs")
    return write_corpus(folder / "text", files=60), folder


# -- decisions ------------------------------------------------------------------------------------


@pytest.fixture
def with_triton(monkeypatch):
    """Answers of `resolve_backend` as on a GPU: Triton, but for fp64."""

    def resolve(numerics, device, **_):
        wide = numerics.compute == FP64
        return ("emulated", "fp64 is the emulator's") if wide else ("triton", "a CUDA device")

    monkeypatch.setattr(cuda_graph, "resolve_backend", resolve)


@pytest.mark.parametrize(
    "changes, word",
    [
        (dict(dtype="float16"), "dtype=float16"),
        (dict(dropout=0.1), "dropout=0.1"),
        (dict(attention="exact,compute=fp64"), "layer 0 runs in the emulator: fp64 is"),
        (dict(attention="paper; L1H0 -> exact,compute=fp64"), "layer 1 runs in the emulator"),
    ],
)
def test_what_the_host_decides_is_an_obstacle(with_triton, changes, word):
    assert word in graph_obstacle(tiny("files:unused", **changes), CUDA)


def test_a_device_that_is_no_gpu_and_several_processes_are_obstacles(with_triton):
    config = tiny("files:unused", attention="flash")
    assert "this is cpu" in graph_obstacle(config, torch.device("cpu"))
    assert "2 processes" in graph_obstacle(config, CUDA, world=2)


@pytest.mark.parametrize(
    "attention",
    ["sdpa", "flash", "paper; L1H0 -> paper,output=bf16:stochastic", "paper,delta_error=shuffled"],
)
@pytest.mark.parametrize("changes", [{}, dict(dtype="bfloat16", optimizer="muon", qk_clip=50.0)])
def test_nothing_else_is_an_obstacle(with_triton, attention, changes):
    config = tiny("files:unused", attention=attention, **changes)
    assert graph_obstacle(config, CUDA) is None


def test_on_is_refused_with_the_reason_and_auto_goes_on(tmp_path):
    corpus = SyntheticCorpus(64, n=4096)
    with pytest.raises(
        ValueError, match="cuda_graph=on cannot .* this is cpu; use cuda_graph=aut"
    ):
        Trainer(
            tiny("files:unused", cuda_graph="on"), corpus, torch.device("cpu"), Group(), tmp_path
        )
    t = Trainer(tiny("files:unused"), corpus, torch.device("cpu"), Group(), tmp_path)
    assert not t.graph_wanted and "this is cpu" in t.graph_obstacle


def test_graphs_are_no_part_of_a_run_s_identity():
    config = tiny("files:unused")
    assert config.at(cuda_graph="off").identity() == config.identity()
    assert config.at(compile="off").identity() != config.identity()


# -- the trainer around a graph -------------------------------------------------------------------


class Replayed:
    """Stands for `StepGraph` where there is no GPU: same buffers, the work called instead."""

    def __init__(self, work, warm_up, x, y, seed, draws):
        self.x, self.y, self.work = x.clone(), y.clone(), work
        self.seed = torch.full((), seed) if draws else seed
        self.replays = 0
        warm_up(self.x, self.y, self.seed)

    def __call__(self, x, y, seed):
        self.x.copy_(x)
        self.y.copy_(y)
        if isinstance(self.seed, torch.Tensor):
            self.seed.fill_(seed)
        self.replays += 1
        return self.work(self.x, self.y, self.seed)


@pytest.fixture
def replayed(monkeypatch):
    """Graphs that run on a CPU; returns all that were made."""
    made = []

    def make(*args):
        made.append(Replayed(*args))
        return made[-1]

    monkeypatch.setattr(step, "StepGraph", make)
    monkeypatch.setattr(step, "graph_obstacle", lambda *_: None)
    return made


STOCHASTIC = "paper,output=bf16:stochastic"
VARIANTS = [
    dict(attention="sdpa"),
    dict(attention="sdpa", micro_batch_size=4),
    dict(attention=STOCHASTIC),
    dict(attention=f"exact; L1H0 -> {STOCHASTIC}", micro_batch_size=4),
    dict(attention="sdpa", optimizer="muon"),
    dict(attention="sdpa", qk_clip=0.5, micro_batch_size=4),
]


def go(place, name, stops=(), device="cpu", **changes):
    """A run of 24 steps with probes, evaluation and checkpoints between, stopped at `stops`."""
    extra = dict(max_steps=24, eval_interval=7, probe_interval=6, checkpoint_interval=5)
    for stop in (*stops, None):
        run = train(
            tiny(place[0], device=device, **extra | changes),
            store=RunStore(place[1] / name),
            cache_dir=place[1] / "data",
            progress=False,
            max_steps=stop,
        )
    return run


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_a_run_by_replays_equals_one_without(place, replayed, changes):
    """Warming up leaves no trace, each step gets its batch and seed, probes see the same state."""
    number = VARIANTS.index(changes)
    plain = go(place, f"off-{number}", cuda_graph="off", **changes)
    assert not replayed
    graphed = go(place, f"auto-{number}", stops=(9,), **changes)
    assert_same(plain, graphed)
    passes = 2 if changes.get("micro_batch_size") else 1
    # Of 9 and 15 steps, the first of each stretch is eager and captures nothing.
    assert [g.replays for g in replayed] == [8 * passes, 14 * passes]


def test_a_graph_is_not_captured_while_a_probe_holds_a_pass(place, replayed, tmp_path):
    config = tiny(place[0], probes="weight_gradient_error@1-3")
    t = Trainer(config, SyntheticCorpus(64, n=4096), torch.device("cpu"), Group(), tmp_path)
    for number in range(6):
        t.update(number)
        assert bool(replayed) == (number >= 4)


def test_where_capturing_fails_training_says_so_and_goes_on(monkeypatch, replayed, tmp_path):
    def broken(work, warm_up, x, y, seed, draws):
        warm_up(x, y, seed)
        try:
            raise RuntimeError("operation not permitted when stream is capturing")
        finally:
            raise ValueError("ending the capture failed, too")

    def trainer(**changes):
        config = tiny("files:unused", **changes)
        corpus = SyntheticCorpus(64, n=4096)
        return Trainer(config, corpus, torch.device("cpu"), Group(), tmp_path)

    plain = trainer(cuda_graph="off")
    monkeypatch.setattr(step, "StepGraph", broken)
    t = trainer()
    t.update(0)
    with pytest.warns(UserWarning, match="cuda_graph is off: RuntimeError: operation not perm"):
        t.update(1)
    t.update(2)
    for number in range(3):
        plain.update(number)
    assert t.graph is None and "not permitted" in t.graph_obstacle
    for (name, a), b in zip(t.model.named_parameters(), plain.model.parameters()):
        assert torch.equal(a, b), name
    strict = trainer(cuda_graph="on")
    strict.update(0)
    with pytest.raises(ValueError, match="ending the capture"):
        strict.update(1)


# -- on a GPU -------------------------------------------------------------------------------------

MODEL = dict(n_embd=128, n_head=2, block_size=128, batch_size=16, dtype="bfloat16")
gpu = pytest.mark.gpu


def stepped(place, steps=30, **changes):
    """A trainer after `steps` updates, and its losses and norms [steps, 2]."""
    config = tiny(place[0], **MODEL | dict(device="cuda", max_steps=100) | changes)
    t = Trainer(config, SyntheticCorpus(1024), CUDA, Group(), place[1])
    t.first_update(0)
    for number in range(1, steps):
        t.update(number)
    return t, torch.tensor([[float(p[1]), float(p[2])] for p in t._pending])


MIXED = f"flash; L1H0 -> {STOCHASTIC}"
CASES = [  # attention, optimiser, micro-batch of 16 sequences, compile
    ("flash", "adamw", 16, "auto"),
    ("flash", "adamw", 8, "off"),
    ("paper", "adamw", 8, "auto"),
    ("paper", "adamw", 16, "off"),
    (STOCHASTIC, "adamw", 16, "auto"),
    (STOCHASTIC, "adamw", 8, "off"),
    (MIXED, "adamw", 16, "off"),
    ("flash", "muon", 16, "off"),
    ("paper", "muon", 8, "auto"),
    ("paper,delta_error=shuffled", "adamw", 16, "off"),
    ("paper,delta_error=dK_alone", "adamw", 8, "auto"),
]


@gpu
@pytest.mark.parametrize("attention, optimizer, micro, compiled", CASES)
def test_thirty_steps_by_a_graph_move_no_bit(place, attention, optimizer, micro, compiled):
    options = dict(attention=attention, optimizer=optimizer, micro_batch_size=micro)
    plain, expected = stepped(place, cuda_graph="off", compile=compiled, **options)
    t, found = stepped(place, cuda_graph="on", compile=compiled, **options)
    assert plain.graph is None and t.graph.replays == 29 * (16 // micro)
    assert torch.equal(found, expected)
    for (name, a), b in zip(t.model.named_parameters(), plain.model.parameters()):
        assert torch.equal(a, b), name
    left, right = t.optimizers.state_tensors(), plain.optimizers.state_tensors()
    assert all(torch.equal(left[name], right[name]) for name in left)


@gpu
@pytest.mark.parametrize("micro, compiled", [(8, "on"), (8, "off"), (4, "on")])
def test_the_kernels_for_hopper_gpus_move_no_bit_of_a_run(place, micro, compiled, monkeypatch):
    """Heads and context of GPT-2, captured, beside the general kernel launched step by step."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    options = dict(attention="flash", block_size=1024, batch_size=8, micro_batch_size=micro)
    launches, launch = [], hopper_attention.forward
    monkeypatch.setattr(
        hopper_attention, "forward", lambda *x, **y: launches.append(1) or launch(*x, **y)
    )
    t, found = stepped(place, 10, cuda_graph="on", compile=compiled, **options)
    served = len(launches)
    assert served > 0 and t.graph.replays == 9 * (8 // micro)
    monkeypatch.setattr(triton_attention, "_refused_by_hopper", lambda *x: "not in this run")
    monkeypatch.setattr(triton_attention, "backward_kernel_name", lambda *x, **y: "general")
    plain, expected = stepped(place, 10, cuda_graph="off", compile=compiled, **options)
    assert len(launches) == served
    assert torch.equal(found, expected)
    for (name, a), b in zip(t.model.named_parameters(), plain.model.parameters()):
        assert torch.equal(a, b), name


@gpu
def test_a_graph_draws_anew_in_every_step(place):
    t, _ = stepped(place, 3, attention=STOCHASTIC, cuda_graph="on", compile="off")
    x, y = t.feed.batch(3)
    t.optimizers.set_rate(0.0)  # the weights stay, so that only the seed tells the losses apart
    first, again, other = (float(t.graph(x, y, seed)[0]) for seed in (5, 5, 6))
    assert first == again != other


@gpu
@pytest.mark.parametrize(
    "attention, micro, compiled",
    [("flash", 16, "auto"), ("flash", 8, "off"), ("paper", 8, "off"), (STOCHASTIC, 16, "off")],
)
def test_runs_with_probes_evaluation_and_resume_are_equal(place, attention, micro, compiled):
    dear = "delta_error@5,weight_gradient_error@5,update@5,update_error@5"
    probes = f"spectral_norm_q,tie_rate,{dear}"
    options = dict(attention=attention, micro_batch_size=micro, probes=probes)
    options |= MODEL | dict(compile=compiled)
    name = f"{attention}-{micro}".replace(":", "")
    plain = go(place, f"plain-{name}", device="cuda", cuda_graph="off", **options)
    whole = go(place, f"whole-{name}", device="cuda", cuda_graph="on", **options)
    parts = go(place, f"parts-{name}", stops=(9, 17), device="cuda", cuda_graph="on", **options)
    assert_same(plain, whole)
    assert_same(plain, parts)


@gpu
def test_the_fp32_shape_of_the_cpu_preset_is_captured_too(place):
    options = dict(dtype="float32", attention="exact,output_bits=2", n_embd=64, block_size=64)
    _, expected = stepped(place, cuda_graph="off", **options)
    _, found = stepped(place, cuda_graph="on", **options)
    assert torch.equal(found, expected)


@gpu
def test_a_capture_that_breaks_on_the_gpu_leaves_training_unharmed(place, monkeypatch):
    """Last, because PyTorch may not forget a broken capture's memory pool."""

    def broken(work, *rest):
        return cuda_graph.StepGraph(lambda *batch: work(*batch).sum().item(), *rest)

    options = dict(steps=6, attention="flash", compile="off")
    _, expected = stepped(place, cuda_graph="off", **options)
    monkeypatch.setattr(step, "StepGraph", broken)
    with pytest.warns(UserWarning, match="cuda_graph is off"):
        t, found = stepped(place, **options)
    assert t.graph is None and torch.equal(found, expected)
