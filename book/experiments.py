"""The experiments of the book as data: which arms, which seeds, what is asked.

Chapters run a few arms of them live; `book.evidence` runs all of them and archives the numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpt2.config import RunConfig, make_config


@dataclass(frozen=True)
class Arm:
    """One line of an experiment: a name, what attention does, and anything else that differs.

    at: None starts from scratch; a step forks from the experiment's `parent` arm there.
    """

    name: str
    attention: str
    label: str
    changes: tuple[tuple[str, object], ...] = ()
    at: int | None = None

    def config(self, experiment: Experiment, seed: int, preset: str | None = None) -> RunConfig:
        told = dict(experiment.base) | {"attention": self.attention} | dict(self.changes)
        told |= {"init_seed": seed, "order_seed": seed}
        return make_config(preset or experiment.preset, told)


@dataclass(frozen=True)
class Experiment:
    """Paired arms: for one seed all arms see the same batches from the same weights.

    failing: the arm that is expected to fail; "healthy" means 1.5 times its steps without a sign.
    twin: the arm whose running maxima define onset. parent: the arm that forks start from.
    """

    name: str
    question: str
    chapter: int
    arms: tuple[Arm, ...]
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    preset: str = "cpu"
    base: tuple[tuple[str, object], ...] = ()
    failing: str | None = None
    twin: str | None = None
    parent: str | None = None

    def arm(self, name: str) -> Arm:
        for arm in self.arms:
            if arm.name == name:
                return arm
        raise ValueError(f"experiment {self.name} has no arm {name!r}; it has {self.arm_names}")

    @property
    def arm_names(self) -> list[str]:
        return [arm.name for arm in self.arms]


LOW = "exact,output_bits=2"

FAILURE = Experiment(
    name="failure",
    question="Does low precision in O_bar and O fail where its two twins do not?",
    chapter=1,
    base=(("max_steps", 4_500),),
    failing="low",
    twin="fp32",
    arms=(
        Arm("low", LOW, "low precision"),
        Arm("delta_fp32", f"{LOW},delta_output=fp32", "delta from an fp32 O"),
        Arm("fp32", "exact", "attention in fp32"),
    ),
)


# The matched dial cuts what the forward pass stores. The backward's operands stay in fp32: cut to
# two bits they are noise of their own, which hides the question.
FP32_BACKWARD = "backward_probabilities=fp32,grad_scores=fp32,gradients=fp32"


def _dial(name: str, numerics: str, bits: tuple[int, ...]) -> tuple[Arm, ...]:
    return tuple(Arm(f"{name}{b}", numerics.format(b), f"{name} dial, {b} bits") for b in bits)


DIALS = Experiment(
    name="dials",
    question="How does the time to failure depend on the fraction bits, by either dial?",
    chapter=1,
    base=(("max_steps", 8_000),),
    seeds=(0, 1, 2),
    arms=_dial("output", "exact,output_bits={}", (1, 2, 3, 4))
    + _dial("matched", "paper,matched_bits={}," + FP32_BACKWARD, (1, 2, 3, 4)),
)

EXPERIMENTS: dict[str, Experiment] = {e.name: e for e in (FAILURE, DIALS)}
