"""A comparison as a study: what is asked, each kind of data and of model."""

import json
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from moiety.data.problem import Problem, Split, Target
from moiety.lab.compare import Asked, from_toml, read_asked, write_asked
from moiety.lab.compare import study as study_file
from moiety.lab.compare.asked import default_arms
from moiety.lab.compare.folder import command_line
from moiety.lab.compare.measure import flops, typical
from moiety.lab.compare.models import find_maker
from moiety.lab.compare.study import Comparison
from moiety.lab.compare.task import Task, macro_f1, r_squared
from moiety.lab.executors.base import fixed_threads
from moiety.lab.store import Store, Trial
from moiety.lab.study import Running

TESTS = Path(__file__).parents[1]
CPU = torch.device("cpu")


def made(kind, rows=60):
    """A small problem of one kind, which every model can learn."""
    draw = torch.Generator().manual_seed(0)
    words = {}

    def split(count):
        y = torch.arange(count) % 3
        numbers = torch.randn(count, 4, generator=draw) + y[:, None]
        targets = {"colour": y}
        if kind == "image":
            pixels = torch.randint(0, 60, (count, 1, 8, 8), generator=draw)
            return Split({"images": (pixels + 60 * y.view(-1, 1, 1, 1)).byte()}, targets)
        if kind == "text":
            return Split({}, targets, [f"{'abc'[i]} word{'s' * (n % 4)}" for n, i in enumerate(y)])
        targets = {**targets, "late": (y > 1).long(), "size": y.float() - 1}
        return Split({"numbers": numbers, "categories": y[:, None] + 1}, targets)

    targets = [Target("colour", "classes", ["red", "green", "blue"])]
    if kind == "image":
        words = {"shape": (1, 8, 8), "mean": (0.4,), "std": (0.2,)}
    if kind == "table":
        words = {"numbers": list("abcd"), "categories": ["e"], "cardinalities": [4]}
        targets += [
            Target("late", "classes", ["no", "yes"]),
            Target("size", "number", [], 5.0, 2.0),
        ]
    splits = split(rows), split(rows // 2), split(rows // 2)
    return Problem(f"made {kind}", kind, targets, *splits, notes=["made up"], **words)


@pytest.fixture
def compared(monkeypatch):
    """A comparison on made-up data: `compared("image", model=…)`."""

    def make(kind, **words):
        monkeypatch.setattr(study_file, "load_problem", lambda *_, **__: made(kind))
        return Comparison.of(Asked(data=kind, **words))

    return make


def run(comparison, arm, folder, *, examples=320, seed=0):
    settings = {**comparison.settings, **comparison.arms[arm], "examples": examples}
    trial, store = Trial("s", arm, seed, settings), Store(folder)
    ticks = []
    running = Running(trial, CPU, store.curve(trial), store.checkpoint(trial), ticks.append)
    return comparison.run(running), running, ticks


# -- a trial ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["image", "table", "text"])
@pytest.mark.parametrize("arm", ["dense", "switch"])
def test_a_trial_of_each_kind(compared, kind, arm, tmp_path):
    comparison = compared(kind, batch=16, lr=5e-3)
    metrics, running, ticks = run(comparison, arm, tmp_path)
    assert list(metrics) == list(comparison.study().metrics)
    assert metrics[comparison.task.main] > 0.6
    assert running.extra["flops"] > 0 and running.extra["memory"] > 4 * running.extra["parameters"]
    loads = running.extra["loads"]
    assert (not loads) == (arm == "dense")
    assert all(sum(shares) == pytest.approx(1, abs=1e-4) for shares in loads.values())
    assert ticks[-1] == 1.0 and ticks == sorted(ticks)
    rows = running.curve.rows()
    assert rows[-1]["step"] == 20 and "validation" in rows[-1]


def test_several_targets_are_measured_together_and_apart(compared, tmp_path):
    comparison = compared("table", batch=16)
    metrics, _, _ = run(comparison, "dense", tmp_path)
    parts = [metrics[name] for name in ("accuracy of colour", "accuracy of late", "r2 of size")]
    assert metrics["score"] == pytest.approx(sum(parts) / 3)
    kinds = comparison.study().metrics
    assert kinds["rmse of size"].better == "lower"
    assert kinds["validation score"].split == "validation"
    assert next(iter(kinds)) == "score"


def test_a_seed_repeats_itself_and_another_does_not(compared, tmp_path):
    comparison = compared("image", batch=16)
    curves = [
        run(comparison, "top-k", tmp_path / str(i), seed=seed)[1].curve.rows()
        for i, seed in enumerate((1, 1, 2))
    ]
    assert curves[0] == curves[1] != curves[2]


def test_the_test_data_decide_nothing(compared, tmp_path):
    """Other answers in the test data: the same training, the same checks."""
    comparison = compared("image", batch=16)
    _, one, _ = run(comparison, "dense", tmp_path / "a")
    test = comparison.task.splits["test"]
    test.targets["colour"] = 2 - test.targets["colour"]
    _, two, _ = run(comparison, "dense", tmp_path / "b")
    assert one.curve.rows() == two.curve.rows()


SCRIPT = """
import sys
sys.path[:0] = [{tests!r}]
from lab import test_compare as t
from moiety.lab.compare import study as s
s.load_problem, s.SAVE_EVERY = (lambda *_, **__: t.made("image")), 0.0
c = t.Comparison.of(t.Asked(data="image", batch=16))
t.torch.set_num_threads(1)
t.run(c, "perturbed-cosine", {folder!r}, examples=960)
"""


@pytest.fixture
def _one_thread():
    with fixed_threads(1):  # as in the process that is killed: sums depend on it
        yield


@pytest.mark.usefixtures("_one_thread")
def test_a_killed_trial_ends_in_the_same_bits(compared, tmp_path):
    comparison = compared("image", batch=16)
    arm, count = "perturbed-cosine", 960
    whole, one, every = run(comparison, arm, tmp_path / "whole", examples=count)
    script = SCRIPT.format(tests=str(TESTS), folder=str(tmp_path / "killed"))
    child = subprocess.Popen([sys.executable, "-c", script])
    store, deadline = Store(tmp_path / "killed"), time.monotonic() + 300
    checkpoint = store.checkpoint(one.trial)
    while not checkpoint.previous.exists() and child.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL, "it had ended before it could be killed"
    assert 0 < checkpoint.load()["step"] < 60
    again, two, ticks = run(comparison, arm, tmp_path / "killed", examples=count)
    assert len(ticks) < len(every)  # it went on from there
    assert again == whole and two.curve.rows() == one.curve.rows()
    assert two.extra == one.extra


# -- cost ------------------------------------------------------------------------------------------


def test_speed_is_that_of_training(compared, monkeypatch):
    monkeypatch.setattr(study_file, "TIMED", 0.05)
    comparison = compared("text")
    speeds = [
        comparison.speed({**comparison.settings, **comparison.arms[arm]}, CPU)
        for arm in ("dense", "top-k")
    ]
    for speed in speeds:
        assert 1e-6 < speed.seconds < 0.1 and speed.start > 0
    assert speeds[1].flops == pytest.approx(speeds[0].flops, rel=0.05)  # padding counts for nobody


def test_flops_of_texts_are_those_of_the_mean_length(compared):
    comparison = compared("text")
    rows = typical(comparison.task)
    mask = comparison.task.splits["validation"].inputs["attention_mask"]
    assert abs(float(mask[rows[0]].sum()) - float(mask.sum(1).double().mean())) < 1
    model = comparison.build({**comparison.settings, **comparison.arms["top-k"]}, 0, CPU)
    assert flops(model, comparison.task) > 0
    assert {m.backend for m in model.modules() if hasattr(m, "backend")} == {"auto"}


# -- measures by hand ------------------------------------------------------------------------------


def test_macro_f1_by_hand():
    # class 0: 2 hits, said 3, there 2: 4/5; class 1: 1, 1, 2: 2/3; class 3 is said once: 0
    chosen, truth = torch.tensor([0, 0, 0, 1, 3]), torch.tensor([0, 0, 1, 1, 0])
    # class 0 is there three times: 2 hits, said 3: 4/6
    assert macro_f1(chosen, truth) == pytest.approx((4 / 6 + 2 / 3 + 0) / 3)


def test_r_squared_by_hand():
    truth = torch.tensor([1.0, 2.0, 3.0])
    assert r_squared(truth, truth) == 1
    assert r_squared(torch.full((3,), 2.0), truth) == 0
    assert r_squared(torch.tensor([1.0, 2.0, 5.0]), truth) == pytest.approx(1 - 4 / 2)


def test_losses_add_up_over_targets():
    task = Task.of(made("table"), None)
    logits = torch.zeros(60, 6)
    loss = task.loss(logits, "train", slice(None))
    square = (task.splits["train"].targets["size"] ** 2).mean()
    expected = torch.tensor(3.0).log() + torch.tensor(2.0).log() + square
    assert float(loss) == pytest.approx(float(expected))


@pytest.fixture
def moiety_options():
    """The options that `moiety compare routers` has."""
    import typer

    from moiety.cli.compare import command

    routers = typer.main.get_command(command).commands["routers"]
    return {option for parameter in routers.params for option in parameter.opts}


# -- what is asked ---------------------------------------------------------------------------------


def test_what_was_asked_comes_back_from_its_file(tmp_path):
    arms = {"dense": {"router": "dense"}, "top 4 \u00e9": {"router": "top-k", "k": 4}}
    arms["c"] = {"router": "top-k", "balance": {"switch": 0.1}}
    asked = Asked(data='a "b" \\c.csv', targets=["x", "y\tz"], lr=1e-3, margin=0.02, arms=arms)
    write_asked(tmp_path / "study.toml", asked, ["a heading", ""])
    assert read_asked(tmp_path / "study.toml") == asked
    before = (tmp_path / "study.toml").stat().st_mtime_ns
    write_asked(tmp_path / "study.toml", asked)  # says the same: not written again
    assert (tmp_path / "study.toml").stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("data = ", "is no TOML file"),
        ("seeds = 5", "names no data"),
        ('data = "digits"\nbugdet = 60', "no key 'bugdet'; did you mean budget"),
        ('data = "digits"\nseeds = "five"', "seeds must be a whole number, got 'five'"),
        ('data = "digits"\ntargets = "x"', "targets must be a list of text"),
        ('data = "digits"\nkeep_leaks = 1', "keep_leaks must be true or false"),
        ('data = "digits"\nseeds = 1', "seeds must be at least 2"),
        ('data = "digits"\nbudget = -5', "budget must be positive"),
        ('data = "digits"\nmargin = 0', "margin must be positive"),
        ('data = "digits"\nk = 9', "k is 9, but there are only 8 experts"),
        ('data = "digits"\nequal = "steps"', "equal must be one of flops"),
        ('data = "digits"\ninit = "magic"', "init must be one of copy"),
        ('data = "digits"\n[arms.a]\nk = 2', "the arm 'a' must name its router"),
        ('data = "digits"\n[arms.a]\nrouter = "topk"', "did you mean top-k"),
        (
            'data = "digits"\n[arms.a]\nrouter = "top-k"\nkk = 2',
            "top-k has no option 'kk'; did you",
        ),
        ('data = "digits"\n[arms.a]\nrouter = "dense"\nk = 2', "dense has no option 'k'"),
        ('data = "digits"\narms = {}', "at least one router"),
    ],
)
def test_a_wrong_file_says_in_one_sentence_what_to_change(tmp_path, text, said):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ValueError) as raised:
        from_toml(path)
    assert said in str(raised.value) and str(path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_the_command_repeats_what_was_asked(moiety_options):
    asked = Asked(
        data="a b.csv",
        targets=["x", "y"],
        keep_leaks=True,
        max_examples=50,
        split_seed=3,
        budget=90.0,
        lr=0.01,
        arms=default_arms(["top-k"]),
    )
    said = command_line(asked, Path("out"), "cpu", 2)
    assert said.startswith("moiety compare routers --data 'a b.csv' --target x,y ")
    assert "--seed 3 " in said and "--keep-leaks --lr 0.01 --budget 90s --router top-k" in said
    assert {word for word in shlex.split(said) if word.startswith("--")} <= moiety_options


def test_options_of_an_arm_reach_its_layers(compared):
    arms = {"dense": {"router": "dense"}, "top-4": {"router": "top-k", "k": 4}}
    comparison = compared("image", arms=arms)
    model = comparison.build({**comparison.settings, **comparison.arms["top-4"]}, 0, CPU)
    assert {m.k for m in model.modules() if hasattr(m, "per_expert") and hasattr(m, "k")} == {4}
    (claim,) = comparison.study().claims
    assert (claim.a, claim.b, claim.margin, claim.tier) == ("top-4", "dense", 0.01, "our own")


def test_other_data_or_settings_make_other_trials(compared):
    one = compared("image").settings
    assert compared("image", lr=0.1).settings != one
    assert compared("image").settings == one
    changed = compared("image")
    changed.problem.test.inputs["images"][0, 0, 0, 0] += 1
    assert changed.settings["data"] != one["data"]


def test_what_is_known_of_data_and_training_is_among_the_notes(compared):
    study = compared("image").study()
    assert study.question.endswith(" best?")
    said = "\n".join(study.notes)
    assert "made up" in said and "learning rate 0.003" in said and "vit-tiny" in said


def test_a_preset_for_other_data_names_the_right_one(compared):
    with pytest.raises(ValueError, match=r"vit-tiny is for images.*take the model mlp"):
        compared("table", model="vit-tiny")


def test_tuning_searches_the_learning_rate_around_the_usual_one(compared):
    search = compared("image", tune=3).study().search
    assert search.count("small") == 3 and search.metric == "validation accuracy"
    assert search.space["lr"].at(0.5) == pytest.approx(0.003)
    assert compared("image").study().search is None


# -- models of Hugging Face ------------------------------------------------------------------------


@pytest.fixture
def bert(tmp_path):
    """A folder with a tiny BERT and its tokenizer."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abc", "word", "words", "##s"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(vocab=str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"vocab_size": 11, "intermediate_size": 32}
    BertModel(BertConfig(**sizes, initializer_range=0.3)).save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.fixture
def vit(tmp_path):
    """A folder with a tiny ViT for coloured images of 16 pixels."""
    from transformers import ViTConfig, ViTModel

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = ViTConfig(image_size=16, patch_size=8, intermediate_size=32, **sizes)
    ViTModel(config).save_pretrained(tmp_path)
    reader = {"image_processor_type": "ViTImageProcessor", "size": {"height": 16, "width": 16}}
    reader |= {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.25, 0.5]}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(reader))
    return str(tmp_path)


def test_a_text_model_is_upcycled_and_fine_tuned(compared, bert, tmp_path):
    comparison = compared("text", model=bert, lr=3e-3)
    for arm in ("dense", "top-k"):
        _, running, _ = run(comparison, arm, tmp_path, examples=480)
        losses = [row["loss"] for row in running.curve.rows()]
        assert losses[-1] < 0.9 * losses[0], arm
        assert len(running.extra["loads"]) == (0 if arm == "dense" else 2)
    assert comparison.settings["init"] == "copy"
    ids = comparison.task.splits["train"].inputs["input_ids"]
    assert ids[0].tolist()[:3] == [2, 5, 8]  # [CLS] a word: its own tokenizer


def test_upcycled_arms_start_from_the_same_function(compared, bert):
    comparison = compared("text", model=bert)
    answers = [
        comparison.task.answers(
            comparison.build({**comparison.settings, **comparison.arms[arm]}, 3, CPU).eval(), "test"
        )
        for arm in ("dense", "top-k")
    ]
    torch.testing.assert_close(answers[0], answers[1], rtol=1e-4, atol=1e-5)


def test_an_image_model_gets_its_size_and_normalisation(compared, vit, tmp_path):
    comparison = compared("image", model=vit, lr=3e-3)
    model = comparison.build({**comparison.settings, **comparison.arms["top-k"]}, 0, CPU)
    seen = []
    model.model.register_forward_pre_hook(lambda _, __, kw: seen.append(kw), with_kwargs=True)
    comparison.task.answer(model, "test", slice(0, 4))
    pixels = seen[0]["pixel_values"]
    assert pixels.shape == (4, 3, 16, 16)
    grey = pixels * torch.tensor([0.5, 0.25, 0.5]).view(3, 1, 1)
    grey = grey + torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1)
    torch.testing.assert_close(grey[:, 0], grey[:, 2])  # one channel shown as three
    assert float(grey.min()) >= 0 and float(grey.max()) <= 1
    metrics, _, _ = run(comparison, "top-k", tmp_path, examples=160)
    assert 0 <= metrics["accuracy"] <= 1


def test_a_model_that_cannot_be_had_or_does_not_fit(bert, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=r"reads no tables.*mlp"):
        find_maker(bert, made("table"))
    with pytest.raises(ValueError, match="there is no folder"):
        find_maker("./nowhere", made("text"))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ValueError, match=r"no config.json"):
        find_maker(str(empty), made("text"))
    for file in tmp_path.glob("*token*"):
        file.unlink()
    (tmp_path / "vocab.txt").unlink()
    with pytest.raises(ValueError, match="has no tokenizer"):
        find_maker(bert, made("text"))
