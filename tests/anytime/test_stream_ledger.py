"""The ledger: sums worked out by hand, lines that survive, and what is refused."""

import json
import math

import pytest
import torch

from moiety.anytime.base import Report
from moiety.anytime.data import Examples
from moiety.anytime.ledger import Ledger, chance, read_ledger, score, summary, timeless
from moiety.anytime.run import run_stream
from moiety.anytime.stream import cut

ERRORS = [0.5, 0.4, 0.3, 0.2, 0.1]  # after phases 1, 2, …


class Scripted:
    """Errs as it is told; has 5 parameters, then 10 for each phase; a training row costs 30."""

    name = "scripted"
    seed = 0

    def __init__(self):
        self.phases = 0

    def words(self):
        return {"learner": self.name}

    def train(self, phase):
        self.phases += 1
        rows = len(phase.train)
        flops = {"train": 30.0 * rows, "forward": 10.0 * rows, "validation": 7.0, "growth": 2.0}
        return Report(steps=1, examples=rows, validation=0.5, growth=None, flops=flops)

    def measure(self, data):
        return {"error": ERRORS[self.phases - 1], "loss": 1.0}

    def parameters(self):
        return 10 * self.phases or 5

    def inference_flops(self, x):
        return 10.0 * len(x)

    def bytes(self):
        return {"model": 1, "optimizer": 2}

    def state(self):
        return {"phases": self.phases}

    def load(self, state):
        self.phases = state["phases"]


def stream(batches=5):
    """Mega-batches of 10 rows, 9 of them for training, and 4 classes."""
    data = Examples(torch.randn(10 * batches, 2), torch.arange(10 * batches) % 4)
    return cut(data, batches)


@pytest.mark.parametrize(
    ("wait", "errors", "parameters", "trained_rows"),
    [
        # B = 5 and chance 3/4. By hand, in force at t = 1 … 5:
        (1, [0.5, 0.4, 0.3, 0.2, 0.1], [10, 20, 30, 40, 50], [9, 9, 9, 9, 9]),
        (2, [0.75, 0.5, 0.5, 0.4, 0.3], [5, 10, 10, 20, 30], [0, 18, 0, 18, 9]),
        (5, [0.75, 0.75, 0.75, 0.75, 0.5], [5, 5, 5, 5, 10], [0, 0, 0, 0, 45]),
    ],
)
def test_cer_mem_and_comp_are_those_worked_out_by_hand(
    tmp_path, wait, errors, parameters, trained_rows
):
    test = Examples(torch.randn(3, 2), torch.zeros(3, dtype=torch.long))
    result = run_stream(stream(), Scripted(), out=tmp_path, wait=wait, test=test)
    assert [line["error"] for line in result.lines] == errors
    assert [line["parameters"] for line in result.lines] == parameters
    assert [line["flops"]["train"] for line in result.lines] == [30.0 * n for n in trained_rows]
    phases = sum(n > 0 for n in trained_rows)
    found = result.summary
    assert found.batches == 5
    assert found.cer == pytest.approx({1: 1.5, 2: 2.45, 5: 3.5}[wait])
    assert found.average == pytest.approx(found.cer / 5)
    assert found.final == errors[-1]
    assert found.mem == {1: 150, 2: 75, 5: 30}[wait]
    assert (found.comp, found.comp_forward) == (45 * 30, 45 * 10)
    assert (found.comp_validation, found.comp_growth) == (7 * phases, 2 * phases)


def test_the_closed_form_of_the_digest_holds_where_w_divides_b(tmp_path):
    test = Examples(torch.randn(3, 2), torch.zeros(3, dtype=torch.long))
    found = run_stream(stream(6), Scripted(), out=tmp_path, wait=2, test=test).summary
    w, e = 2, [0.75, *ERRORS[:3]]
    assert found.cer == pytest.approx((w - 1) * e[0] + w * sum(e[1:3]) + e[3])


def test_chance_and_perplexity():
    assert (chance(4, "error"), chance(4, "perplexity")) == (0.75, 4.0)
    assert score({"error": 0.2, "loss": math.log(8)}, "error") == 0.2
    assert score({"error": 0.2, "loss": math.log(8)}, "perplexity") == pytest.approx(8)
    assert math.isfinite(score({"error": 1.0, "loss": 1e9}, "perplexity"))


def line(t, **others):
    flops = dict.fromkeys(("train", "forward", "validation", "growth"), 1.0)
    words = {"error": 0.5, "parameters": 3, "flops": flops, "seconds": {"train": 0.5}}
    return {"t": t, **words, **others}


def test_lines_are_there_after_each_append_and_half_a_line_is_not(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.append(line(1))
    ledger.append(line(2))
    with open(ledger.path, "a") as file:
        file.write('{"t": 3, "err')
    again = Ledger(ledger.path)
    assert [one["t"] for one in again.lines] == [1, 2]
    again.append(line(3))
    assert [one["t"] for one in read_ledger(ledger.path)] == [1, 2, 3]


def test_a_line_of_another_time_is_refused(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    with pytest.raises(ValueError, match="t = 1 is next, not 2"):
        ledger.append(line(2))
    ledger.path.write_text(json.dumps(line(2)) + "\n")
    with pytest.raises(ValueError, match="line 1 is not that of t = 1"):
        read_ledger(ledger.path)
    ledger.path.write_text("{]\n")
    with pytest.raises(ValueError, match="line 1 is not JSON"):
        read_ledger(ledger.path)


def test_sums_of_a_ledger_of_perplexities():
    lines = [{**line(t), "perplexity": p} for t, p in ((1, 20.0), (2, 10.0))]
    for one in lines:
        del one["error"]
    found = summary(lines)
    assert (found.metric, found.cer, found.average, found.final) == ("perplexity", 30.0, 15.0, 10.0)


def test_an_empty_ledger_has_no_sums():
    with pytest.raises(ValueError, match="nothing has arrived"):
        summary([])


def test_only_wall_time_is_left_out_for_a_comparison():
    (found,) = timeless([line(1)])
    assert found.keys() == line(1).keys() - {"seconds"}
