"""Runs over a stream: killed and resumed, versions and cards, who sees the test set, bad input."""

import gzip
import os
import threading
from pathlib import Path

import pytest
import torch

from moiety import io
from moiety.anytime.backbones import MLP, TreeMLP
from moiety.anytime.data import Examples
from moiety.anytime.fitting import Training
from moiety.anytime.learners import learner
from moiety.anytime.ledger import read_ledger, timeless
from moiety.anytime.phases import Memory, Records, fingerprint
from moiety.anytime.policies import read_replay
from moiety.anytime.run import run_stream
from moiety.anytime.stream import Folder, Stream, cut
from moiety.anytime.versions import read_current
from moiety.train.state import read_state, state_bytes


def examples(rows, seed=0):
    """Three classes, each with a coordinate of its own."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(3, (rows,), generator=draw)
    x = torch.randn(rows, 4, generator=draw)
    x[torch.arange(rows), y] += 3
    return Examples(x, y)


TEST = examples(50, seed=1)


def single(name="single", **options):
    words = {"epochs": 2, "batch": 16, "save_every": 0.0, **options}
    kind = TreeMLP if name == "growing-moe" else MLP
    return learner(name, lambda seed: kind(6, inputs=4, classes=3), training=Training(**words))


def stream(batches=5, rows=20, **words):
    return cut(examples(batches * rows), batches, **words)


def weights(out):
    return (Path(out) / "current" / "state.safetensors").read_bytes()


# -- stopped within a phase ------------------------------------------------------------------------


class Stop(Exception):
    """A death that leaves the process alive."""


@pytest.mark.parametrize(
    "name", ["single", "ensemble", "mixture", "growing-ensemble", "growing-moe"]
)
def test_a_run_that_stops_within_a_phase_goes_on_to_the_same_bits(tmp_path, name):
    def stop(phase, share):
        if (phase, share > 0.4) == (2, True):
            raise Stop

    words = {"wait": 2, "replay": "reservoir:10", "test": TEST}
    whole = run_stream(stream(), single(name), out=tmp_path / "whole", **words)
    with pytest.raises(Stop):
        run_stream(stream(), single(name), out=tmp_path / "parts", tick=stop, **words)
    assert (tmp_path / "parts" / "phase.safetensors").exists()
    parts = run_stream(stream(), single(name), out=tmp_path / "parts", **words)
    assert timeless(parts.lines) == timeless(whole.lines)
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")
    assert not (tmp_path / "parts" / "phase.safetensors").exists()


def test_a_run_that_is_over_changes_nothing_when_it_is_started_again(tmp_path):
    first = run_stream(stream(), single(), out=tmp_path, test=TEST)
    before = weights(tmp_path), read_ledger(tmp_path / "ledger.jsonl")
    again = run_stream(stream(), single(), out=tmp_path, test=TEST)
    assert again.lines == first.lines
    assert (weights(tmp_path), read_ledger(tmp_path / "ledger.jsonl")) == before
    assert again.learner.predict(TEST.x).equal(first.learner.predict(TEST.x))


# -- versions --------------------------------------------------------------------------------------


def test_current_is_the_newest_of_three_versions_with_a_card(tmp_path):
    result = run_stream(stream(), single(), out=tmp_path, test=TEST)
    assert os.readlink(tmp_path / "current") == "versions/0005"
    assert sorted(os.listdir(tmp_path / "versions")) == ["0003", "0004", "0005"]
    state, card, _ = read_current(tmp_path)
    other = single()
    other.load(state)
    assert other.predict(TEST.x).equal(result.learner.predict(TEST.x))
    assert (card["t"], card["phase"], card["mega_batches"], card["rows"]) == (5, 5, 5, 100)
    assert card["data"]["numbers"] == [5]
    assert card["validation"] == result.lines[-1]["validation"]
    assert card["flops"]["train"] == result.summary.comp


def test_without_a_version_a_reader_is_told_so(tmp_path):
    with pytest.raises(ValueError, match="holds no version yet"):
        read_current(tmp_path)


def test_a_state_comes_back_as_it_went(tmp_path):
    shared = torch.arange(3.0)
    state = {"a": [shared, shared], "b": {0: (1, None, True)}, "c": float("inf"), "d": "text"}
    (tmp_path / "s").write_bytes(state_bytes(state))
    back = read_state(tmp_path / "s")
    assert back["a"][1].equal(shared)
    assert {**back, "a": None} == {**state, "a": None}
    with pytest.raises(ValueError, match="cannot hold"):
        state_bytes({"a": object()})
    (tmp_path / "s").write_bytes(b"damaged")
    with pytest.raises(ValueError, match="damaged"):
        read_state(tmp_path / "s")


# -- who sees what ---------------------------------------------------------------------------------


def test_without_a_test_set_each_arrival_is_scored_before_it_is_trained_on(tmp_path):
    data = stream()
    lines = run_stream(data, single(), out=tmp_path / "all").lines
    assert lines[0]["error"] == pytest.approx(2 / 3)  # chance
    # The model after 2 mega-batches, on the third.
    short = run_stream(Known(data, 2), single(), out=tmp_path / "two").learner
    third = Examples.join([data[3].train, data[3].validation])
    assert lines[2]["error"] == short.measure(third)["error"]


def test_the_test_set_decides_nothing(tmp_path):
    for name, test in (("a", TEST), ("b", Examples(TEST.x + 9, 2 - TEST.y)), ("c", None)):
        run_stream(stream(), single(), out=tmp_path / name, wait="plateau:0.01", test=test)
    assert weights(tmp_path / "a") == weights(tmp_path / "b") == weights(tmp_path / "c")
    errors = [
        [line["error"] for line in read_ledger(tmp_path / name / "ledger.jsonl")] for name in "abc"
    ]
    assert errors[0] != errors[1] != errors[2]


def test_tokens_are_scored_by_perplexity(tmp_path):
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(7, (40, 5), generator=draw)
    data = Examples(x, (x + 1) % 7)  # the next token follows from this one

    def made():
        return learner("single", lambda seed: torch.nn.Embedding(7, 7), training=Training(epochs=9))

    whole = cut(data, 3)
    lines = run_stream(whole, made(), out=tmp_path / "all", wait=2).lines
    assert "error" not in lines[0]
    assert [line["perplexity"] for line in lines[:2]] == [7.0, 7.0]  # chance
    short = run_stream(Known(whole, 2), made(), out=tmp_path / "two", wait=2).learner
    third = Examples.join([whole[3].train, whole[3].validation])
    p = short.predict(third.x).gather(-1, third.y[..., None])
    assert lines[2]["perplexity"] == pytest.approx(float((-p.log().mean()).exp()), rel=1e-5)


# -- waiting, replay, following -------------------------------------------------------------------


class Known(Stream):
    """The first mega-batches of another stream, without an end; each look finds one more."""

    classes = 0

    def __init__(self, whole, known, more=0):
        super().__init__(seed=whole.seed, validation=whole.validation)
        self.whole, self.count, self.last = whole, known, known + more
        self.classes = whole.classes

    def known(self):
        return self.count

    def rows(self, number):
        return self.whole.rows(number)

    def poll(self):
        self.count = min(self.count + 1, self.last)
        return []

    def _arrived(self, number):
        return self.whole._arrived(number)


def test_a_stream_without_an_end_lets_the_last_ones_wait_until_more_arrive(tmp_path):
    data = stream(7)
    result = run_stream(Known(data, 5), single(), out=tmp_path / "a", wait=3)
    assert result.waiting == [4, 5]
    assert [line["phase"] for line in result.lines] == [0, 0, 1, 1, 1]
    later = run_stream(Known(data, 7), single(), out=tmp_path / "a", wait=3)
    assert later.waiting == [7]
    run_stream(Known(data, 7), single(), out=tmp_path / "b", wait=3)
    assert weights(tmp_path / "a") == weights(tmp_path / "b")


def test_following_looks_again_until_the_stream_ends(tmp_path):
    growing = Known(stream(4), 1, more=3)
    growing.batches = 4
    result = run_stream(growing, single(), out=tmp_path, wait=3, follow=True, pause=0)
    assert [line["phase"] for line in result.lines] == [0, 0, 1, 2]
    assert result.waiting == []


@pytest.mark.parametrize("wait", [1, 2, 3, 5])
def test_the_phases_are_the_stream_nothing_lost_and_nothing_twice(tmp_path, wait):
    run_stream(stream(), single(), out=tmp_path, wait=wait)
    used = [n for record in Records(tmp_path / "phases.jsonl").lines for n in record["numbers"]]
    assert used == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("replay", "rows"),
    [
        ("none", [[18, 2], [18, 2], [18, 2]]),
        ("1", [[18, 2], [36, 4], [54, 6]]),  # 0.9 N w more each phase
        ("0.5", [[18, 2], [27, 3], [32, 4]]),  # halves of 18, 2; of 27, 3: rounded to even
        ("reservoir:5", [[18, 2], [23, 4], [23, 6]]),
    ],
)
def test_what_a_phase_uses_is_new_and_replayed_rows(tmp_path, replay, rows):
    result = run_stream(stream(3), single(), out=tmp_path, replay=replay)
    records = Records(tmp_path / "phases.jsonl").lines
    assert [record["rows"] for record in records] == rows
    assert sum(records[2]["replayed"].values()) == rows[2][0] - 18
    assert (result.lines[-1]["bytes"]["replay"] == 0) == (replay == "none")


def test_training_and_validation_rows_never_mix():
    data = stream(4)
    memory = Memory(read_replay("0.5"), seed=0)
    for number in range(1, 5):
        train, validation = memory.use(number, [data[number]])
        seen = {tuple(row) for n in range(1, number + 1) for row in data[n].train.x.tolist()}
        held = {tuple(row) for n in range(1, number + 1) for row in data[n].validation.x.tolist()}
        assert {tuple(row) for row in train.x.tolist()} <= seen
        assert {tuple(row) for row in validation.x.tolist()} <= held


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"wait": 2}, "a run with wait = 1, not 2"),
        ({"replay": "0.2"}, "a run with replay = none, not 0.2"),
        ({"seed": 1}, "a run with seed = 0, not 1"),
        ({"test": TEST}, "a run without a test set"),
    ],
)
def test_other_words_cannot_go_on_in_the_same_folder(tmp_path, change, said):
    run_stream(stream(2), single(), out=tmp_path)
    before = weights(tmp_path)
    with pytest.raises(ValueError, match=said):
        run_stream(stream(2), single(), out=tmp_path, **change)
    assert weights(tmp_path) == before


def test_a_phase_that_was_begun_cannot_go_on_with_other_data(tmp_path):
    def stop(phase, share):
        raise Stop

    with pytest.raises(Stop):
        run_stream(stream(2), single(), out=tmp_path, tick=stop)
    other = cut(examples(40, seed=5), 2)
    with pytest.raises(ValueError, match="phase 1 was begun with other data"):
        run_stream(other, single(), out=tmp_path)


def test_a_folder_that_lost_its_versions_is_refused(tmp_path):
    run_stream(stream(2), single(), out=tmp_path)
    os.rename(tmp_path / "versions" / "0002", tmp_path / "gone")
    with pytest.raises(ValueError, match="does not fit together"):
        run_stream(stream(2), single(), out=tmp_path)


def test_a_test_set_that_overlaps_the_stream_is_refused_before_training(tmp_path):
    data = stream(2)
    leaked = Examples.join([TEST, data[2].train])
    with pytest.raises(ValueError, match=r"18 of the 20 rows of mega-batch 2 .* in the test set"):
        run_stream(data, single(), out=tmp_path / "a", test=leaked)
    assert len(read_ledger(tmp_path / "a" / "ledger.jsonl")) == 1
    run_stream(data, single(), out=tmp_path / "b", test=leaked, overlap=0.9)


def test_a_class_that_the_stream_does_not_have_is_refused(tmp_path):
    data = Known(stream(2), 2)
    data.classes = 2
    with pytest.raises(ValueError, match=r"mega-batch 1 .* holds class 2, but the stream has 2"):
        run_stream(data, single(), out=tmp_path)
    assert read_ledger(tmp_path / "ledger.jsonl") == []


def test_a_class_of_the_test_set_that_the_stream_does_not_have_is_refused(tmp_path):
    data = examples(40)
    two = cut(Examples(data.x, data.y.clamp(max=1)), 2)
    with pytest.raises(ValueError, match="the test set holds class 2, but the stream has 2 clas"):
        run_stream(two, single(), out=tmp_path, test=TEST)
    assert not (tmp_path / "run.json").exists()
    fewer = Examples(TEST.x, TEST.y.clamp(max=1))
    assert len(run_stream(two, single(), out=tmp_path, test=fewer).lines) == 2


@pytest.mark.parametrize("before", [[], ["a"]])
def test_a_run_that_waited_for_its_turn_sees_what_another_took(tmp_path, before):
    (tmp_path / "in").mkdir()

    def put(name):
        rows = [f"{seed},{seed % 3}" for seed in range(20)]
        data = gzip.compress("\n".join(rows).encode())
        (tmp_path / "in" / f"{name}.csv.gz").write_bytes(data)

    def read(path):
        rows = gzip.decompress(path.read_bytes()).decode().split("\n")
        values = torch.tensor([[float(word) for word in row.split(",")] for row in rows])
        return Examples(values[:, :1].expand(-1, 4).clone(), values[:, 1].long())

    def folder():
        return Folder(tmp_path / "in", tmp_path / "out" / "journal.jsonl", read)

    read.classes = 3
    for name in before:
        put(name)
        run_stream(folder(), single(), out=tmp_path / "out")
    waited = folder()
    put("b")
    run_stream(folder(), single(), out=tmp_path / "out")
    put("c")
    result = run_stream(waited, single(), out=tmp_path / "out")
    names = [f"{name}.csv.gz" for name in [*before, "b", "c"]]
    assert [line["name"] for line in result.lines] == names
    assert [entry.name for entry in folder().journal] == names


def test_two_runs_cannot_work_in_one_folder(tmp_path):
    with io.lease(tmp_path), pytest.raises(ValueError, match="is in use by"):
        run_stream(stream(2), single(), out=tmp_path)


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    real, calls = os.fsync, []

    def full(handle):
        calls.append(handle)
        if len(calls) == 40:
            raise OSError(28, "No space left on device")
        real(handle)

    whole = run_stream(stream(), single(), out=tmp_path / "whole")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        run_stream(stream(), single(), out=tmp_path / "parts")
    monkeypatch.undo()
    parts = run_stream(stream(), single(), out=tmp_path / "parts")
    assert timeless(parts.lines) == timeless(whole.lines)
    assert weights(tmp_path / "parts") == weights(tmp_path / "whole")


def test_fingerprints_tell_rows_orders_and_kinds_apart():
    one = examples(6)
    assert fingerprint(one) == fingerprint(examples(6))
    assert fingerprint(one) != fingerprint(one.take([1, 0, 2, 3, 4, 5]))
    assert fingerprint(one) != fingerprint(Examples(one.x.double(), one.y))


def test_a_reader_in_another_thread_never_meets_half_a_version(tmp_path):
    over, loads, wrong = threading.Event(), [], []

    def read():
        while not over.is_set():
            try:
                state, card, _ = read_current(tmp_path)
                loads.append(state["phases"])
                if state["phases"] != card["phase"]:
                    wrong.append(card)
            except ValueError as error:
                if "no version yet" not in str(error):
                    wrong.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        run_stream(stream(), single(), out=tmp_path)
    finally:
        over.set()
        reader.join()
    assert not wrong
    assert loads and loads == sorted(loads)
