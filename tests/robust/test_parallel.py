"""Two gloo processes give the result of one; an error in one ends both; parts are joined."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from moiety import MoE
from moiety.robust import audit
from moiety.robust.parallel import join, my_rows, together
from moiety.robust.routes import Use
from ranks import of_two


class Net(nn.Module):
    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(4, 8, bias=False)
        self.moe = MoE("top-k", dim=8, hidden=8, experts=3, k=1, **options)
        self.head = nn.Linear(8, 3, bias=False)

    def forward(self, x):
        h = 3 * self.inner(x.view(len(x), 4, 4) - 0.5)
        return self.head((h + 3 * self.moe(h)).mean(1))


CASES = {
    "each alone": ({}, {}),
    "groups": ({"capacity_factor": 1.0}, {"group": 2}),
}


def audited(case):
    options, words = CASES[case]
    draw = torch.Generator().manual_seed(0)
    model = Net(**options).double().eval()
    x = torch.rand(7, 16, generator=draw, dtype=torch.float64)
    y = model(x).argmax(-1)  # right when clean, so that there is something to lose
    attacks = ["apgd", "apgd + router-margin", "random-search"]
    given = {"steps": 6, "masking": 5, "lipschitz": 2, "progress": False}
    return audit(model, (x, y), [0, 0.05, 0.2], attacks, **given, **words).result


def fails_in_the_second():
    def work():
        if dist.get_rank() == 1:
            raise ValueError("the second is ill")
        return 1

    try:
        together(work)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def work(rank, results):
    for case in CASES:
        results[rank, case] = audited(case)
    results[rank, "error"] = fails_in_the_second()
    results[rank, "rows"] = [list(my_rows(7)), list(my_rows(7, group=2))]


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    return of_two(work, tmp_path_factory.mktemp("gloo"))


def settled(result):
    """Without what depends on the moment."""
    left_out = {"when", "machine"}
    kept = {key: value for key, value in result.items() if key not in left_out}
    for attack in kept["attacks"].values():
        attack.pop("seconds", None)
    return kept


def same(a, b, where=""):
    """Equal, and numbers equal to rounding."""
    if isinstance(a, dict):
        assert a.keys() == b.keys(), where
        for key in a:
            same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, list):
        assert len(a) == len(b), where
        for i, (one, other) in enumerate(zip(a, b)):
            same(one, other, f"{where}[{i}]")
    elif isinstance(a, float):
        assert a == pytest.approx(b, abs=1e-9), where
    else:
        assert a == b, where


@pytest.mark.parametrize("case", CASES)
def test_two_processes_give_the_result_of_one(case, both):
    alone = settled(audited(case))
    assert alone["attacks"]["apgd"]["error"][-1] > alone["clean"]["error"]
    assert alone["attribution"]["routes"][-1] != 0
    for rank in range(2):
        same(settled(both[rank, case]), alone)


def test_an_error_in_one_process_ends_both(both):
    assert both[0, "error"].startswith("RuntimeError: process 1 failed")
    assert "the second is ill" in both[0, "error"]
    assert both[1, "error"] == "ValueError: the second is ill"


def test_groups_stay_whole(both):
    assert [both[rank, "rows"][0] for rank in range(2)] == [[0, 1, 2], [3, 4, 5, 6]]
    assert [both[rank, "rows"][1] for rank in range(2)] == [[0, 1, 2, 3], [4, 5, 6]]


def test_alone_there_is_nobody_to_ask():
    assert together(lambda: 3) == [3]
    assert list(my_rows(5, group=2)) == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="no example to audit"):
        my_rows(0)


def test_more_processes_than_examples(monkeypatch):
    monkeypatch.setattr("moiety.robust.parallel.here", lambda: (0, 4))
    with pytest.raises(ValueError, match="4 processes cannot share 2 groups of 3 examples"):
        my_rows(5, group=3)


def test_parts_are_joined():
    @dataclass
    class Part:
        values: Tensor
        use: Use
        seconds: float
        by_eps: list[Tensor]
        found: dict[str, int] | None

    one = Part(torch.tensor([1, 2]), Use(torch.tensor([1, 0]), 1, 2), 3.0, [torch.ones(1)], None)
    two = Part(torch.tensor([3]), Use(torch.tensor([2, 2]), 0, 4), 5.0, [torch.zeros(2)], {"a": 1})
    got = join([one, two])
    assert got.values.tolist() == [1, 2, 3]
    assert (got.use.load_E.tolist(), got.use.dropped, got.use.asked) == ([3, 2], 1, 6)
    assert got.seconds == 5.0
    assert got.by_eps[0].tolist() == [1.0, 0.0, 0.0]
    assert got.found == {"a": 1}
