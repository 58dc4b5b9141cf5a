"""Which program computes which block: every block once, the long ones early, the work even."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")
from kernels import hopper_attention
from kernels import hopper_schedule as hs

OVERHEAD = 1  # of a block, in tiles of 128 keys: about what an H200 shows


def blocks_of_ticket(ticket, programs, plan, blocks):
    head, i, half, count = hs.place.fn(ticket, programs, plan, blocks)
    return [(head, hs.block_of.fn(i, half + n, blocks)) for n in range(count)]


def tickets(heads, blocks, programs):
    """The blocks of each ticket, in the order in which they are drawn."""
    plan = hs.schedule(heads, blocks, programs)
    return [
        blocks_of_ticket(t, programs, plan, blocks)
        for t in range(hs.tickets_of.fn(programs, plan))
    ]


@settings(deadline=None, max_examples=300)
@given(heads=st.integers(1, 60), blocks=st.integers(1, 20), programs=st.integers(1, 40))
def test_every_block_is_drawn_once(heads, blocks, programs):
    programs = min(programs, heads * blocks)  # as a launch has
    drawn = [b for found in tickets(heads, blocks, programs) for b in found]
    assert sorted(drawn) == [(h, b) for h in range(heads) for b in range(blocks)]


@settings(deadline=None, max_examples=100)
@given(heads=st.integers(1, 60), blocks=st.integers(1, 20), programs=st.integers(1, 40))
def test_pairs_come_first_and_are_equally_long_then_blocks_by_length(heads, blocks, programs):
    plan = hs.schedule(heads, blocks, programs)
    found = tickets(heads, blocks, programs)
    pairs = plan[1] * programs
    for pair in found[:pairs]:
        assert len({h for h, _ in pair}) == 1
        assert sum(b + 1 for _, b in pair) in (blocks + 1, (blocks + 1) // 2)
    singles = [b for ticket in found[pairs:] for _, b in ticket]
    assert all(len(ticket) <= 1 for ticket in found[pairs:])
    assert singles == sorted(singles, reverse=True)


@pytest.mark.parametrize("heads, blocks", [(768, 4), (384, 8), (192, 16), (24, 128)])
def test_programs_end_together(heads, blocks):
    """On a model of 132 equally fast programs; by pairs alone the last end 3 % after the mean."""
    ends = [0] * 132
    for ticket in tickets(heads, blocks, 132):
        first = min(range(132), key=ends.__getitem__)
        ends[first] += sum(b + 1 + OVERHEAD for _, b in ticket)
    assert max(ends) < 1.02 * sum(ends) / len(ends)


@settings(deadline=None, max_examples=100)
@given(heads=st.integers(1, 60), blocks=st.integers(1, 20), most=st.integers(1, 40),
       draw=st.randoms(use_true_random=False))  # fmt: skip
def test_a_launch_leaves_the_counter_at_zero(heads, blocks, most, draw):
    """Whoever draws when: every ticket is somebody's, and the counter has wrapped round once."""
    (programs,), plan = hopper_attention.launch_plan(blocks * 128, heads, most)
    tickets, counter, wraps = hs.tickets_of.fn(programs, plan), 0, 0
    held, computed = dict(enumerate(range(programs))), []
    while running := [p for p, ticket in held.items() if ticket < tickets]:
        program = draw.choice(running)
        computed.append(held[program])
        held[program] = programs + counter
        counter = 0 if counter == tickets - 1 else counter + 1  # as `atom.inc` does
        wraps += counter == 0
    assert sorted(computed) == list(range(tickets))
    assert counter == 0 and wraps == 1


def test_a_launch_has_no_idle_program():
    (programs,), plan = hopper_attention.launch_plan(1000, 3, 132)
    assert programs == 24 and hs.tickets_of.fn(programs, plan) == 24
    (programs,), _ = hopper_attention.launch_plan(1024, 384, 132)
    assert programs == 132
