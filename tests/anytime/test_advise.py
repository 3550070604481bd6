"""Advice on a stream: planted streams, what trials are made of, and how often it is wrong."""

import math
import re

import numpy as np
import pytest
import torch
from learning import METER

from moiety import cli
from moiety.anytime.advise import Trial, Trials, advise, waits_up_to
from moiety.anytime.backbones import MLP
from moiety.anytime.data import Examples
from moiety.anytime.fitting import Training
from moiety.anytime.journal import Journal
from moiety.anytime.learners import learner
from moiety.anytime.stream import Stream, cut
from moiety.lab.advice import Difference, _choose_growth, _choose_wait, recommend

QUICK = Training(method="adam", lr=0.1, epochs=8, batch=64, score="loss", min_gain=0)
CENTRES = torch.tensor([[4.0, 0], [-4, 0], [0, 4], [0, -4]])


class Given(Stream):
    """Mega-batches as they are given, without an end."""

    def __init__(self, parts):
        super().__init__()
        self.parts, self.classes = parts, 4

    def known(self):
        return len(self.parts)

    def rows(self, number):
        return len(self.parts[number - 1])

    def _arrived(self, number):
        return f"part {number}", self.parts[number - 1]


def clusters(rows, seed, classes=(0, 1, 2, 3)):
    """Points around the centres of classes, which any model learns at once."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.tensor(classes)[torch.randint(len(classes), (rows,), generator=draw)]
    return Examples(CENTRES[y] + torch.randn(rows, 2, generator=draw) / 3, y)


def noise(rows, seed):
    """Classes that nothing tells."""
    draw = torch.Generator().manual_seed(seed)
    return Examples(torch.randn(rows, 2, generator=draw), torch.randint(4, (rows,), generator=draw))


def makers(*names):
    def maker(name):
        words = {"training": QUICK, "meter": METER}
        return lambda seed: learner(
            name, lambda _: MLP(16, inputs=2, classes=4), seed=seed, **words
        )

    return {name: maker(name) for name in names or ("single", "growing-ensemble")}


# -- three planted streams -------------------------------------------------------------------------


def test_waiting_is_recommended_where_it_is_clearly_better():
    """Two classes one day, the other two the next: trained at once, a model forgets half."""
    parts = [clusters(48, t, ((0, 1), (2, 3))[t % 2]) for t in range(8)]
    said = recommend(advise(Given(parts), makers("single")))
    assert said.wait == 2
    assert "Waiting: wait for 2 mega-batches: better than training at once" in str(said)
    assert said.differences[0].interval[0] > 0.3
    assert said.grow is None and "Growing" not in str(said)


def test_training_at_once_is_recommended_where_it_is_clearly_better():
    """Easy data and an end in sight: whoever waits answers by chance meanwhile."""
    said = recommend(advise(cut(clusters(8 * 40, 0), 8), makers("single")))
    assert said.wait == 1
    assert "Waiting: train at once: every longer wait is worse" in str(said)
    # 0.75 by chance at t = 1 … w, since each arrival is scored before it is trained on.
    assert said.errors == pytest.approx({(w, "single"): 0.75 * w / 8 for w in (1, 2, 4)}, abs=0.05)


@pytest.mark.parametrize(("make", "word"), [(noise, "undecided"), (clusters, "no recommendation")])
def test_nothing_is_recommended_where_there_is_no_difference(make, word):
    """Nothing to learn; or all is learned by any wait, in a stream without an end."""
    said = recommend(advise(Given([make(40, t) for t in range(6)]), makers()), margin=0.05)
    assert (said.wait, said.grow) == (None, None)
    assert f"Waiting: {word}" in str(said)
    assert f"Growing: {word}" in str(said)


# -- how often it is wrong -------------------------------------------------------------------------


def planted(seed, shift=0.0, spread=0.02, rows=60, seeds=5, horizon=None):
    """Trials without training: waits 1, 2 and 4 that share each row's difficulty.

    The wait 2 is wrong more often by `shift`; seeds differ by `spread`.
    """
    draw = torch.Generator().manual_seed(seed)
    arms, trials = [(1, "a"), (2, "a"), (4, "a"), (1, "b"), (2, "b")], []
    hard = {arm: 0.3 + 0.4 * (torch.rand(8 * rows, generator=draw) - 0.5) for arm in arms}
    for s in range(seeds):
        for arm in arms:
            rate = hard[arm] + spread * torch.randn((), generator=draw)
            rate = rate + (shift if arm == (2, "a") else 0.0)
            wrong = (torch.rand(8 * rows, generator=draw) < rate).double()
            trials.append(Trial(*arm, s, wrong, 1.0, 1.0))
    return Trials(arms, [rows] * 8, "error", horizon, seeds, 100.0, trials, 1.0)


def test_equal_arms_are_hardly_ever_told_apart():
    """Also where every arm has rows of its own that it finds hard, which seeds alone do not see."""
    said = [recommend(planted(s), margin=1e-3) for s in range(100)]
    assert sum(each.wait is not None or each.grow is not None for each in said) <= 5


def test_intervals_hold_the_truth_together():
    held = 0
    for s in range(100):
        found = recommend(planted(s, shift=0.1)).differences
        truth = [0.1 * ((e.b == (2, "a")) - (e.a == (2, "a"))) * -1 for e in found]
        held += all(e.interval[0] <= d <= e.interval[1] for e, d in zip(found, truth))
    assert held >= 90


def test_a_large_difference_is_found_and_a_beaten_wait_is_named():
    said = recommend(planted(0, shift=0.3, rows=300))
    assert said.wait is None  # 1 and 4 are alike
    assert "(worse: 2)" in said.wait_reason


def differ(a, b, low, high):
    return Difference(a, b, (low + high) / 2, (low, high), margin=0.01, of_rows=0.5)


def test_what_is_better_than_the_better_one_is_better():
    """All intervals hold together; the widest may leave open what the others settle."""
    one, two, four = arms = [(wait, "single") for wait in (1, 2, 4)]
    steps = [differ(one, two, 0.011, 0.03), differ(two, four, 0.011, 0.03)]
    wait, reason = _choose_wait([*steps, differ(one, four, 0.005, 0.06)], arms)
    assert (wait, "better than training at once" in reason) == (4, True)


def test_growing_that_helps_at_one_wait_and_harms_at_another_is_said_so():
    found = [
        differ((1, "single"), (1, "grows"), 0.02, 0.05),
        differ((2, "single"), (2, "grows"), -0.05, -0.02),
    ]
    grow, reason = _choose_growth(found, None)
    assert (grow, reason) == (None, "it depends on the wait: grows is better at 1, worse at 2")


def test_one_wait_is_no_waits():
    found = [differ((1, "single"), (1, "grows"), -0.02, 0.05)]
    assert "not growing at a wait of 1;" in _choose_growth(found, None)[1]


@pytest.mark.parametrize(
    ("spent", "budget"),
    [(1.0, "20s"), (9.0, "2m"), (240.0, "50m"), (288.0, "1h"), (400.0, "1h24m")],
)
def test_a_budget_that_ends_too_early_says_which_one_would_do(spent, budget):
    """Two of 5 · 5 trials took so long."""
    early = {"trials": [], "spent": spent, "ended": 2, "budget": spent}
    reason = recommend(Trials(**{**vars(planted(0)), **early})).wait_reason
    assert f"the same command with --budget {budget}, about what 5 seeds take, goes on" in reason


def test_growing_is_recommended_at_the_recommended_wait():
    trials = planted(0, rows=300)
    better = {(1, "a"): 0.6, (2, "a"): 0.9, (4, "a"): 0.9, (1, "b"): 0.3, (2, "b"): 0.9}
    changed = [
        Trial(t.wait, t.learner, t.seed, t.scores * 0 + better[t.arm] + 0.001 * t.seed, 1.0, 1.0)
        for t in trials.trials
    ]
    said = recommend(Trials(**{**vars(trials), "trials": changed}))
    assert (said.wait, said.grow) == (1, True)
    worse = [Trial(**{**vars(t), "scores": t.scores + 0.5 * (t.learner == "b")}) for t in changed]
    said = recommend(Trials(**{**vars(trials), "trials": worse}))
    assert (said.wait, said.grow) == (1, False)


def test_rows_without_a_difference_prove_no_more_than_their_number():
    """The rule of three: 0 of 8 · 60 / 2 rows may still be 2 % of all."""
    trials = planted(0)
    same = [Trial(**{**vars(t), "scores": t.scores * 0}) for t in trials.trials]
    trials = Trials(**{**vars(trials), "trials": same})
    said = recommend(trials, margin=0.01)
    assert {each.word for each in said.differences} == {"undecided"}
    assert said.differences[0].interval[1] == pytest.approx(math.log(2 / 0.01) / 240)
    assert "more mega-batches or rows would tell more" in said.wait_reason
    assert {each.word for each in recommend(trials, margin=0.03).differences} == {"negligible"}


# -- trials ----------------------------------------------------------------------------------------


def test_waits_go_up_to_half_of_what_is_there():
    assert {m: waits_up_to(m) for m in (4, 6, 8, 10)} == {
        4: [1, 2],
        6: [1, 2, 3],
        8: [1, 2, 4],
        10: [1, 2, 4, 5],
    }


def test_rows_weigh_what_their_time_does():
    free, ended = (planted(0, rows=2, horizon=h) for h in (None, 20))
    assert free.weights().tolist() == [0.0] * 8 + [1 / 8] * 8
    assert ended.weights()[:8].tolist() == pytest.approx([1 / 40] * 8)
    assert float(ended.weights().sum()) == pytest.approx(1)


def test_a_growing_learner_is_tried_where_it_grows_in_time(tmp_path):
    trials = advise(Given([noise(20, t) for t in range(4)]), makers(), out=tmp_path)
    assert trials.arms == [(1, "single"), (2, "single"), (1, "growing-ensemble")]
    assert trials.done == [0, 1, 2, 3, 4]
    once = trials.of((1, "single"))
    assert len({tuple(t.scores.tolist()) for t in once}) > 1  # seeds differ
    assert once[0].scores[:20].tolist() == [0.75] * 20


def test_trials_are_kept_and_a_budget_stops_between_them(tmp_path, monkeypatch):
    stream, seen = Given([clusters(20, t) for t in range(4)]), []
    few = advise(stream, makers(), out=tmp_path, budget=1e-9)  # the first trial always runs
    assert (few.done, few.trials, few.spent > 0) == ([], [], True)
    said = recommend(few)
    assert (said.wait, said.grow) == (None, None)
    assert "0 of at least 5 seeds were finished within the budget" in str(said)
    assert few.ended == 1 and "--budget 10s" in str(said)
    whole = advise(stream, makers(), out=tmp_path, on_trial=lambda t, *_: seen.append(t))
    assert len(seen) == 15
    monkeypatch.setattr("moiety.anytime.base.Learner.train", lambda *_: pytest.fail("trained"))
    again = advise(stream, makers(), out=tmp_path, budget=1e-9)
    assert recommend(again).plain()["arms"] == recommend(whole).plain()["arms"]
    assert again.spent == whole.spent


def test_what_decides_a_trial_is_part_of_its_name(tmp_path):
    parts = [clusters(20, t) for t in range(5)]
    advise(Given(parts[:4]), makers("single"), out=tmp_path)
    count = len(list((tmp_path / "trials").iterdir()))
    for words in ({"first": 5}, {"first": 4, "replay": "0.5"}):
        advise(Given(parts), makers("single"), out=tmp_path, **words)
    assert len(list((tmp_path / "trials").iterdir())) == 3 * count == 30


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"seeds": 4}, "at least 5 seeds, got 4"),
        ({"first": 9}, "4 have arrived; first must lie between, got 9"),
        ({"first": 2}, "advice takes 4 mega-batches or more"),
    ],
)
def test_too_little_is_said(words, said):
    with pytest.raises(ValueError, match=said):
        advise(Given([clusters(20, t) for t in range(4)]), makers("single"), **words)


def test_text_is_scored_by_its_loss():
    tokens = torch.arange(64).remainder(7).view(4, 16)
    parts = [Examples(tokens[:, :-1], tokens[:, 1:]) for _ in range(4)]
    stream = Given(parts)
    stream.classes = 7
    make = {"single": lambda seed: learner("single", lambda _: torch.nn.Embedding(7, 7), seed=seed,
                                           training=QUICK, meter=METER)}  # fmt: skip
    trials = advise(stream, make)
    assert trials.metric == "loss"
    assert float(trials.trials[0].scores[0]) == pytest.approx(math.log(7))
    assert float(trials.trials[0].scores[-1]) < math.log(7)
    assert "Differences in loss" in str(recommend(trials))


@pytest.mark.parametrize(
    "word", [("--first", 4), ("--seeds", 5), ("--budget", "5m"), ("--margin", 1)]
)
def test_what_only_advice_takes_is_refused_without_it(capsys, tmp_path, word):
    code, _, err = run(capsys, "--stream", "digits", "--batches", 4, "--out", tmp_path, *word)
    assert (code, f"{word[0]} goes with --advise" in err) == (2, True), err


# -- the command -----------------------------------------------------------------------------------


def run(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        cli.main(["anytime", *map(str, words)])
    return ended.value.code, *capsys.readouterr()


def put(inbox, t):
    data = clusters(30, t)
    np.savez(inbox / f"{t}.npz", x=data.x.numpy(), y=data.y.numpy())


def test_mega_batches_are_tried_in_the_order_in_which_the_run_took_them(capsys, tmp_path):
    inbox, out = tmp_path / "inbox", tmp_path / "out"
    inbox.mkdir()
    asked = ("--stream", inbox, "--out", out, "--width", 8, "--epochs", 1)
    for t in (3, 0, 1, 2):
        put(inbox, t)
        if t in (3, 0):
            assert run(capsys, *asked)[0] == 0
    assert run(capsys, *asked, "--advise")[0] == 0
    names = [entry.name for entry in Journal(out / "advice" / "journal.jsonl")]
    assert names == ["3.npz", "0.npz", "1.npz", "2.npz"]
    assert len(Journal(out / "journal.jsonl")) == 2


def test_the_command_advises_and_never_reads_the_test_set(capsys, tmp_path):
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    for t in range(4):
        put(inbox, t)
    test = tmp_path / "test.npz"
    test.write_bytes(b"nobody reads this")
    asked = ("--stream", inbox, "--out", tmp_path / "out", "--width", 8, "--epochs", 4)
    asked += ("--method", "adam", "--test", test, "--advise", "--learner", "growing-moe")
    code, said, err = run(capsys, *asked)
    assert code == 0, err
    assert re.search(
        r"Tried on mega-batches 1 to 4 \(120 rows\) with 5 seeds in .* of 10 min", said
    )
    assert "wait 1: single − growing-moe" in said and "Waiting: " in said and "Growing: " in said
    assert (tmp_path / "out" / "advice" / "advice.json").exists()
    assert not (tmp_path / "out" / "run.json").exists()
    assert not (tmp_path / "out" / "journal.jsonl").exists()  # the run itself has not begun


@pytest.mark.parametrize(
    ("words", "said"),
    [(("--budget", "soon"), "a time is written like"), (("--seeds", 3), "at least 5 seeds"),
     (("--margin", 0), "effect that matters must be positive"),
     (("--option", "colour=1"), "has no option"),
     (("--learner", "growing-moe", "--option", "evry=2"), "has no option")],
)  # fmt: skip
def test_a_mistake_is_one_sentence_before_anything_is_tried(capsys, tmp_path, words, said):
    asked = ("--stream", "digits", "--batches", 8, "--out", tmp_path, "--advise", *words)
    code, _, err = run(capsys, *asked)
    assert (code, said in err, err.count("\n")) == (2, True, 1), err
