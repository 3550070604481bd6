"""What is said of arms whose answers are planted."""

import pytest
import torch

from moiety.adapt.scores import scores
from moiety.lab.adapting import judge

ARMS = ("fine-tune", "further", "self-distill")


def answers(labels, *rates, seeds=5, shared=True):
    """Answers of each arm that are right at a rate; `shared`: on the same examples for all arms."""
    draw = torch.Generator().manual_seed(0)
    lots = torch.rand(len(labels), generator=draw)
    found = {}
    for arm, rate in zip(ARMS, rates):
        own = lots if shared else torch.rand(len(labels), generator=draw)
        noise = 0.02 * torch.randn(seeds, len(labels), generator=draw)
        found[arm] = torch.where(own + noise < rate, labels, 1 - labels)
    return found


def labels(count):
    return torch.arange(count) % 2


def test_an_arm_that_is_clearly_better_is_named():
    said = judge(answers(labels(2000), 0.6, 0.7, 0.8), labels(2000), metric="accuracy", margin=0.01)
    assert said.best == "self-distill"
    assert [each.word for each in said.differences] == ["holds", "holds", "holds"]
    assert said.means["further"] == pytest.approx(0.7, abs=0.03)
    assert said.differences[1].effect == pytest.approx(0.2, abs=0.03)


def test_arms_that_are_all_below_the_commonest_class_get_no_verdict():
    """However clearly one of them is ahead of the others, and whatever is rounded."""
    truth = (torch.arange(300) < 90).long()
    said = judge(answers(truth, 0.2, 0.4, 0.6), truth, metric="accuracy", margin=0.01)
    assert said.best is None and "commonest class" in said.reason and said.floor == 0.7
    assert {each.word for each in said.differences} == {"undecided"}
    for count in range(5, 60):
        truth = (torch.arange(count) % 3 == 0).long()
        common = torch.zeros(6, count, dtype=torch.long)  # whose mean may be rounded up
        found = {"fine-tune": common, "further": 1 - truth.expand(6, -1), "self-distill": common}
        assert "commonest" in judge(found, truth, metric="accuracy", margin=0.01).reason


def test_a_reason_for_no_verdict_may_be_given():
    found = answers(labels(2000), 0.6, 0.7, 0.8)
    said = judge(found, labels(2000), metric="accuracy", margin=0.01, silent="all leaked")
    assert (said.best, said.reason) == (None, "all leaked")
    assert {each.word for each in said.differences} == {"undecided"}


def test_an_arm_that_is_worse_is_told_by_the_reverse():
    said = judge(answers(labels(2000), 0.8, 0.6, 0.7), labels(2000), metric="accuracy", margin=0.01)
    assert said.best == "fine-tune"
    assert [each.word for each in said.differences] == ["reversed", "reversed", "holds"]


def test_few_scored_examples_decide_nothing_however_alike_the_seeds_are():
    """Five seeds that agree on 40 examples say little of the next 40."""
    found = answers(labels(40), 0.6, 0.7, 0.75, shared=False)
    found = {arm: answered[:1].expand(5, -1) for arm, answered in found.items()}
    said = judge(found, labels(40), metric="accuracy", margin=0.01)
    assert said.best is None and said.reason.startswith("undecided between fine-tune, further and")
    assert said.reason.endswith("more scored examples would tell more")
    assert all(each.of_examples == 1 for each in said.differences)


def test_no_two_scores_differ_by_more_than_all():
    said = judge(answers(labels(2), 0.2, 0.5, 0.9), labels(2), metric="accuracy", margin=0.01)
    assert [each.interval for each in said.differences] == [(-1.0, 1.0)] * 3


def test_arms_that_answer_alike_differ_by_less_than_the_margin_only_on_many_examples():
    same = {arm: labels(4000).expand(5, -1) for arm in ARMS}
    said = judge(same, labels(4000), metric="accuracy", margin=0.01)
    assert said.best is None and said.reason.startswith("no difference that matters")
    same = {arm: labels(100).expand(5, -1) for arm in ARMS}
    assert judge(same, labels(100), metric="accuracy", margin=0.01).reason.startswith("undecided")


def test_classifiers_that_answer_one_class_alone_are_recognised():
    collapsed = {arm: torch.zeros(5, 100, dtype=torch.long) for arm in ARMS}
    said = judge(collapsed, labels(100), metric="accuracy", margin=0.01)
    assert said.best is None and "gives all examples the same class" in said.reason
    assert {each.word for each in said.differences} == {"undecided"}  # and not "alike"
    assert {each["word"] for each in said.plain()["differences"]} == {"undecided"}
    collapsed["further"] = labels(100).expand(5, -1)
    assert "same class" not in judge(collapsed, labels(100), metric="accuracy", margin=0.01).reason


@pytest.mark.parametrize("metric", ["accuracy", "macro_f1"])
def test_arms_below_the_commonest_class_are_told_to_be_tuned(metric):
    true = (torch.arange(900) % 10 < 7).long()  # 70 % are of class 1
    constant = torch.nn.functional.one_hot(torch.ones(900, dtype=torch.long), 2)
    floor = scores(constant, true)[metric]
    draw = torch.Generator().manual_seed(0)
    for best, wanted in (
        (floor - 0.05, "change --epochs or --tune-lr"),
        (0.8, "undecided between"),
    ):
        found = {}
        for arm in ARMS:
            right = torch.rand(5, 900, generator=draw) < best
            found[arm] = torch.where(right, true, 1 - true)
        said = judge(found, true, metric=metric, margin=0.001)
        assert said.floor == pytest.approx(floor) and said.best is None
        assert wanted in said.reason


def test_one_arm_may_be_ruled_out_while_the_others_are_undecided():
    said = judge(answers(labels(600), 0.5, 0.8, 0.81), labels(600), metric="accuracy", margin=0.01)
    assert said.best is None
    assert "undecided between further and self-distill; fine-tune is worse" in said.reason


@pytest.mark.parametrize("metric", ["accuracy", "macro_f1"])
def test_the_mean_is_that_of_the_scores(metric):
    draw = torch.Generator().manual_seed(1)
    true = torch.randint(4, (50,), generator=draw)
    found = {arm: torch.randint(5, (5, 50), generator=draw) for arm in ARMS}
    said = judge(found, true, metric=metric, margin=0.01)
    for arm, answered in found.items():
        each = [scores(torch.nn.functional.one_hot(a, 5), true)[metric] for a in answered]
        assert said.means[arm] == pytest.approx(sum(each) / 5)


def test_intervals_cover_the_truth_as_often_as_they_say():
    """New examples and seeds each time; most of an answer is the example's, and not the seed's."""
    covered, tries, truth = 0, 100, (0.1, 0.1, 0.0)
    for number in range(tries):
        draw = torch.Generator().manual_seed(number)
        found = {}
        for arm, rate in zip(ARMS, (0.6, 0.7, 0.7)):
            of_example, of_seed = (torch.rand(n, 120, generator=draw) for n in (1, 5))
            lots = torch.where(torch.rand(5, 120, generator=draw) < 0.8, of_example, of_seed)
            found[arm] = torch.where(lots < rate, labels(120), 1 - labels(120))
        said = judge(found, labels(120), metric="accuracy", margin=0.01)
        ends = [each.interval for each in said.differences]
        covered += all(low <= true <= high for (low, high), true in zip(ends, truth))
    assert covered / tries >= 0.9


def test_what_cannot_be_judged_is_refused():
    found = answers(labels(10), 0.5, 0.5, 0.5)
    with pytest.raises(ValueError, match="metric must be one of accuracy, macro_f1"):
        judge(found, labels(10), metric="loss", margin=0.01)
    with pytest.raises(ValueError, match="must be positive"):
        judge(found, labels(10), metric="accuracy", margin=0)
