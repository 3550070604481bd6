"""The trial store: keys that tell trials apart, records that last, what a kill leaves behind."""

import dataclasses
import json
import random
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moiety.lab.store import Store, Trial

# -- keys ------------------------------------------------------------------------------------------

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # Lone surrogates are no text that a file can hold.
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("ab/.é"), inner, max_size=3)
    ),
    max_leaves=6,
)
texts = st.text(st.characters(exclude_categories=["Cs"])) | st.sampled_from(["../x", "a" * 500, ""])
trials = st.builds(
    Trial, texts, texts, st.integers(0, 2**64 - 1), st.dictionaries(texts, values, max_size=3)
)


@given(trials)
@settings(max_examples=100, deadline=None)
def test_a_key_is_a_short_safe_name_and_the_same_after_a_round_trip(trial):
    assert Path(trial.key).name == trial.key and len(trial.key) < 80
    assert set(trial.key) <= set("abcdefghijklmnopqrstuvwxyz0123456789-")
    assert f"-s{trial.seed}-" in trial.key
    again = json.loads(json.dumps(dataclasses.asdict(trial)))
    assert Trial(**again).key == trial.key
    shuffled = dict(reversed(trial.settings.items()))
    assert dataclasses.replace(trial, settings=shuffled).key == trial.key


@given(trials, trials)
@settings(max_examples=100, deadline=None)
def test_trials_that_differ_have_keys_that_differ(one, other):
    text = [json.dumps(dataclasses.asdict(trial), sort_keys=True) for trial in (one, other)]
    assert (one.key == other.key) == (text[0] == text[1])


@pytest.mark.parametrize(
    "change",
    [
        {"study": "t"},
        {"arm": "A"},
        {"arm": "a/"},
        {"seed": 1},
        {"settings": {"lr": 0.2}},
        {"settings": {"lr": 0.1, "k": None}},
        {"settings": {"lr": "0.1"}},
    ],
)
def test_any_change_makes_another_key(change):
    trial = Trial("s", "a", 0, {"lr": 0.1})
    assert dataclasses.replace(trial, **change).key != trial.key


def test_a_trial_keeps_its_own_copy_of_its_settings():
    given_settings = {"layers": (1, 2), "inner": {"k": 2}}
    trial = Trial("s", "a", 0, given_settings)
    key = trial.key
    given_settings["inner"]["k"] = 3
    assert trial.key == key and trial.settings == {"layers": [1, 2], "inner": {"k": 2}}
    assert trial in {trial}


@pytest.mark.parametrize(
    ("seed", "given_settings", "message"),
    [
        (0, {"lr": float("nan")}, r"settings\.lr: nan is not a plain JSON value"),
        (0, {"a": {"b": {1}}}, r"settings\.a\.b: \{1\} is not"),
        (0, {"a": {1: 2}}, "the key 1 must be text"),
        (0, {"a": "\ud800"}, "not plain JSON"),
        (0, [1], "must be a dict"),
        (-1, {}, "seed must be an integer"),
        (True, {}, "seed must be an integer"),
        (0.0, {}, "seed must be an integer"),
    ],
)
def test_what_is_no_trial_is_refused_at_once(seed, given_settings, message):
    with pytest.raises(ValueError, match=message):
        Trial("s", "a", seed, given_settings)


def test_names_are_text():
    with pytest.raises(ValueError, match="must be text"):
        Trial("s", None, 0, {})


# -- records ---------------------------------------------------------------------------------------

ENDED = {"duration": 1.5, "versions": {"torch": "2"}}
ONE, TWO, THREE = (Trial("s", "arm", seed, {"lr": 0.1}) for seed in range(3))


def test_a_record_tells_all_of_a_trial(tmp_path):
    path = Store(tmp_path).finish(ONE, {"accuracy": 0.5, "auc": None}, extra={"n": 3}, **ENDED)
    assert path == tmp_path / "trials" / f"{ONE.key}.json"
    assert Store(tmp_path).finished() == {
        ONE.key: {
            "status": "done",
            "study": "s",
            "arm": "arm",
            "seed": 0,
            "settings": {"lr": 0.1},
            "metrics": {"accuracy": 0.5, "auc": None},
            "duration": 1.5,
            "versions": {"torch": "2"},
            "extra": {"n": 3},
        }
    }


def test_pending_are_those_not_done_and_failed_ones_are_tried_again_unless_told(tmp_path):
    store = Store(tmp_path)
    assert store.pending([THREE, ONE, TWO]) == [THREE, ONE, TWO]
    store.finish(ONE, {}, **ENDED)
    store.fail(TWO, "Traceback: no", **ENDED)
    assert store.pending([THREE, ONE, TWO]) == [THREE, TWO]
    assert store.pending([THREE, ONE, TWO], retry=False) == [THREE]
    assert list(store.finished()) == [ONE.key]
    assert store.failed()[TWO.key]["extra"]["traceback"] == "Traceback: no"
    store.finish(TWO, {}, **ENDED)
    assert store.failed() == {} and list(store.finished()) == [ONE.key, TWO.key]
    changed = dataclasses.replace(ONE, settings={"lr": 0.2})
    assert store.pending([changed]) == [changed]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), True, "0.5", torch.tensor(0.5)])
def test_a_metric_that_is_no_finite_number_is_refused_before_any_write(tmp_path, value):
    with pytest.raises(ValueError, match=r"Metric 'loss' of arm-s0-.*finite"):
        Store(tmp_path).finish(ONE, {"loss": value}, **ENDED)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["cut", "no object", "other settings", "status", "metrics"])
def test_a_damaged_record_is_named(tmp_path, damage):
    path = Store(tmp_path).finish(ONE, {"loss": 0.5}, **ENDED)
    text = path.read_text()
    new = {
        "cut": text[:50],
        "no object": "[]",
        "other settings": text.replace("0.1", "0.2"),
        "status": text.replace("done", "?"),
        "metrics": text.replace('"metrics"', '"m"'),
    }
    path.write_text(new[damage])
    with pytest.raises(ValueError, match=path.name) as caught:
        Store(tmp_path).pending([ONE])
    assert "\n" not in str(caught.value)


def test_what_a_kill_left_behind_is_swept(tmp_path):
    store = Store(tmp_path)
    store.curve(ONE).append(1)
    for name in (f"trials/.{ONE.key}.json.0a.tmp", f"curves/.{ONE.key}.jsonl.0a.tmp"):
        (tmp_path / "trials").mkdir(exist_ok=True)
        (tmp_path / name).touch()
    other = tmp_path / "trials" / f".{TWO.key}.json.0a.tmp"
    other.touch()
    store.finish(ONE, {}, **ENDED)
    assert list(tmp_path.rglob(".*")) == [other]
    for trial in (ONE, TWO):  # killed after the record of ONE, before its checkpoint was removed
        store.checkpoint(trial).save({})
    store.pending([ONE, TWO])
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [TWO.key]


# -- curves ----------------------------------------------------------------------------------------


def test_a_curve_grows_is_rewound_and_grows_again(tmp_path):
    curve = Store(tmp_path).curve(ONE)
    assert curve.rows() == []
    curve.rewind(-1)
    for step in range(4):
        curve.append(step, loss=step / 3, gate=None)
    whole = curve.path.read_bytes()
    curve.rewind(1)
    assert [row["step"] for row in curve.rows()] == [0, 1]
    for step in (2, 3):
        curve.append(step, loss=step / 3, gate=None)
    assert curve.path.read_bytes() == whole
    assert curve.rows()[2] == {"step": 2, "loss": 2 / 3, "gate": None}
    curve.rewind(-1)
    assert curve.rows() == []


def test_a_torn_line_is_no_row_and_the_next_row_takes_its_place(tmp_path):
    store = Store(tmp_path)
    store.curve(ONE).append(1, loss=0.5)
    with open(store.curve(ONE).path, "a") as file:
        file.write('{"step": 2, "lo')
    assert [row["step"] for row in store.curve(ONE).rows()] == [1]
    store.curve(ONE).append(2, loss=0.25)
    assert [row["loss"] for row in store.curve(ONE).rows()] == [0.5, 0.25]


@pytest.mark.parametrize("step", [3, 2, 1.5, "4"])
def test_steps_only_grow(tmp_path, step):
    Store(tmp_path).curve(ONE).append(3)
    with pytest.raises(ValueError, match="does not come after step 3"):
        Store(tmp_path).curve(ONE).append(step)


def test_a_curve_refuses_nan_and_names_damage(tmp_path):
    curve = Store(tmp_path).curve(ONE)
    with pytest.raises(ValueError, match="'loss' is nan at step 1"):
        curve.append(1, loss=float("nan"))
    assert not curve.path.exists()
    curve.append(1)
    for line in ("{", "[]", "{}", '{"step": "2"}', "3"):
        curve.path.write_text(f"{line}\n")
        with pytest.raises(ValueError, match=r"jsonl is damaged"):
            curve.rows()


# -- checkpoints -----------------------------------------------------------------------------------


def test_a_checkpoint_gives_back_models_optimizers_and_generators_bit_for_bit(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    shared = torch.arange(6.0).view(2, 3)
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "random": random.getstate(),
        "torch": torch.get_rng_state(),
        "best": float("inf"),
        "shared": [shared, shared.t(), shared.bfloat16()],
        "rest": {"none": None, "flag": True, "tensor": "no tensor", "float": {"dict": []}},
    }
    checkpoint = Store(tmp_path).checkpoint(ONE)
    assert checkpoint.load() is None
    checkpoint.save(state)
    loaded = checkpoint.load()
    for name in ("rest", "random"):  # text, and tuples that stay tuples
        assert loaded.pop(name) == state.pop(name)
    torch.testing.assert_close(loaded, state, rtol=0, atol=0)
    optimizer.load_state_dict(loaded["optimizer"])


def test_two_generations_are_kept_and_the_newest_whole_one_is_loaded(tmp_path):
    checkpoint = Store(tmp_path).checkpoint(ONE)
    for step in range(3):
        checkpoint.save({"step": step, "x": torch.ones(step)})
    assert len(list(checkpoint.folder.iterdir())) == 2
    assert checkpoint.load()["step"] == 2
    checkpoint.latest.write_bytes(checkpoint.latest.read_bytes()[:-2])
    assert checkpoint.load()["step"] == 1
    checkpoint.save({"step": 4})
    checkpoint.latest.write_bytes(b"")
    assert checkpoint.load()["step"] == 1  # the damaged one did not take its place
    checkpoint.latest.write_bytes(b"")
    with pytest.raises(ValueError, match="holds no whole checkpoint"):
        checkpoint.load()
    checkpoint.remove()
    assert checkpoint.load() is None


def test_a_state_that_cannot_be_saved_leaves_the_old_one(tmp_path):
    checkpoint = Store(tmp_path).checkpoint(ONE)
    checkpoint.save({"step": 1})
    with pytest.raises(ValueError, match="cannot hold <object"):
        checkpoint.save({"step": 2, "thing": object()})
    assert checkpoint.load() == {"step": 1}


def test_the_checkpoint_goes_when_the_trial_is_done_and_stays_when_it_failed(tmp_path):
    store = Store(tmp_path)
    store.checkpoint(ONE).save({"step": 1})
    store.fail(ONE, "Traceback", **ENDED)
    assert store.checkpoint(ONE).load() == {"step": 1}
    store.finish(ONE, {}, **ENDED)
    assert store.checkpoint(ONE).load() is None
