"""Archived records drawn as runs are."""

import numpy as np

from book.record_figures import record_panels
from book.records import record_metrics
from gpt2.outcomes import Outcome


def _record(label, steps, losses):
    return {
        "label": label,
        "outcome": Outcome("stable", last_step=steps[-1]).to_dict(),
        "curves": {
            "train_loss": {"step": steps, "value": losses},
            "spectral_norm_q": {"step": steps[::2], "value": [1.0, None][: len(steps[::2])]},
        },
    }


def test_curves_of_different_steps_become_columns():
    metrics = record_metrics(_record("a", [0, 10, 20], [3.0, 2.0, 1.5]))
    assert metrics["step"].tolist() == [0, 10, 20]
    assert metrics["smoothed_train_loss"].tolist() == [3.0, 2.0, 1.5]
    assert metrics["spectral_norm_q"][0] == 1.0
    assert np.isnan(metrics["spectral_norm_q"][1:]).all()


def test_panels_hold_one_line_per_record():
    rows = [_record("a", [0, 10, 20], [3.0, 2.0, 1.5]), _record("b", [0, 10], [3.0, 2.5])]
    figure = record_panels(rows, ["train_loss"])
    lines = {line.get_label(): line.get_ydata() for line in figure.axes[0].lines}
    assert lines["a"][-1] == 1.5 and lines["b"][-1] == 2.5
