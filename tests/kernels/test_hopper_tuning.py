"""What the timing of settings for the Hopper forward concludes from its times."""

import pytest
import torch

from kernels import hopper_attention, hopper_tuning, parse_numerics
from kernels.hopper_plans import PLANS, Plan


def times_where(fastest):
    """Every plan takes 2 ms, but 1 ms where fastest(case, plan, length)."""
    return {
        case: {
            (plan, n): 1.0 if fastest(case, plan, n) else 2.0
            for plan in [*hopper_tuning.candidates(case[0], case[3]), hopper_tuning.GENERAL]
            for n in hopper_tuning.LENGTHS
        }
        for case in hopper_tuning.CASES
    }


def test_cases_are_of_their_kind_and_cover_every_plan():
    for kind, text, probe, *_ in hopper_tuning.CASES:
        assert hopper_attention.kind_of(parse_numerics(text), probe) == kind
    assert {(case[0], *case[3:]) for case in hopper_tuning.CASES} == set(PLANS)
    for (kind, head_dim, _), plan in PLANS.items():
        assert plan in hopper_tuning.candidates(kind, head_dim)


def test_short_rows_do_not_decide_and_cases_of_a_kind_decide_together():
    early, plain = Plan(early=True), Plan()

    def fastest(case, plan, length):
        if case[0] == "plain" and case[3:] == (64, True):
            return plan == (early if length >= hopper_tuning.JUDGED else plain)
        if case[0] == "row":  # two cases, which disagree at one length
            return plan == plain if case[1] == "paper" or length > 1024 else plan != plain
        return False

    found = hopper_tuning.best_plans(times_where(fastest))
    assert found["plain", 64, True] == early
    assert found["row", 64, True] == plain


def test_the_table_of_plans_is_python_and_the_choice_is_marked():
    times = times_where(lambda case, plan, length: plan == Plan())
    found = hopper_tuning.best_plans(times)
    space = {"Plan": Plan}
    exec(hopper_tuning.source(found), space)
    assert space["PLANS"] == found
    case = hopper_tuning.CASES[0]
    lines = hopper_tuning.table(case, times, found["plain", 64, True]).splitlines()
    assert [line for line in lines if "*" in line] == [
        line for line in lines if line.startswith("2 stages ")
    ]
    rate = hopper_tuning.shape_of(case, 256).flops * 1e-9
    assert f"{rate:.1f}" in lines[2] and f"{rate / 2:.1f}" in lines[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says that there is no GPU")
def test_without_a_hopper_gpu_it_says_so_in_one_sentence(capsys):
    with pytest.raises(SystemExit) as ended:
        hopper_tuning.main([])
    assert ended.value.code == 2
    assert "no Hopper GPU here" in capsys.readouterr().err.splitlines()[-1]
