"""The figures of phase 5: same data, same bytes; words that say what is drawn; no raw math text."""

import numpy as np
import pytest

from labkit.lab import figures_scale

PROGRAMS = [
    {"name": "decode", "arguments": 3e9, "temporaries": 2e9, "outputs": 1e9, "limit": 4 * 2**30},
    {"name": "<b>", "arguments": 1, "temporaries": 1, "outputs": 1, "limit": 2**30},
]
MOVED = [{"name": "train", "kind": "all-gather", "moves": "weights", "bytes": 2**21}, {"name": "train", "kind": "none", "moves": "x", "bytes": 0}]
BOUNDS = [{"name": "prefill", "compute": 0.1, "memory": 0.02, "network": 0.03}]
KL = np.array([1e-5, 3.9e-4, 2e-4, 2e-4])
DRAWN = {
    "mesh": (lambda: figures_scale.mesh({"data": 1, "fsdp": 2, "tensor": 2, "expert": 2}, [0] * 4 + [1] * 4), "8 devices in 4 rows of 2."),
    "memory": (lambda: figures_scale.memory(PROGRAMS), "1 of 2 programs fit into the chip's memory."),
    "collectives": (lambda: figures_scale.collectives(MOVED), "1 kinds of collectives; the largest moves 2.00 MiB."),
    "roofline": (lambda: figures_scale.roofline(BOUNDS), "1 programs; the longest bar of each is what bounds it."),
    "loss": (lambda: figures_scale.loss_curve([3.5, 2.0]), "Loss from 3.500 to 2.000 in 2 steps."),
    "routing": (lambda: figures_scale.routing([0.9, 1.0], KL, KL / 10), "Lowest agreement 90.0%; mean KL 2e-4 free and 2e-5 with the reference's choices."),
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_figure_says_what_it_shows_and_is_the_same_again(name, tmp_path):
    draw, says = DRAWN[name]
    first, second = (draw().write(tmp_path / str(i), name) for i in (1, 2))
    assert first.alt == says
    assert (tmp_path / "1" / first.file).read_bytes() == (tmp_path / "2" / second.file).read_bytes()


def test_ticks_of_a_log_axis_are_words():
    drawing = figures_scale.routing([1.0], KL, KL)
    drawing.figure.canvas.draw()
    labels = [tick.get_text() for tick in drawing.figure.axes[1].get_yticklabels()]
    assert "10⁻⁴" in labels and not any("$" in label for label in labels)


def test_one_device_and_nothing_that_moves_can_be_drawn():
    assert figures_scale.mesh({"data": 1, "fsdp": 1, "tensor": 1, "expert": 1}).alt == "1 devices in 1 rows of 1."
    assert figures_scale.collectives([]).alt.startswith("0 kinds")
