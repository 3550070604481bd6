"""Fine-tuning: plain as by hand, other methods and their limits, kills, what transformers loads."""

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import rows
import tiny
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import moiety
from moiety.adapt.classifier import Classifier, parameter_groups
from moiety.adapt.encoders import Encoder
from moiety.adapt.finetune import finetune
from moiety.adapt.labelled import read_labelled
from moiety.adapt.recipe import Diverged
from moiety.adapt.scores import scores
from moiety.adapt.tuning import LABELS, TuneRecipe, Tuning
from moiety.data import load_problem


@dataclass
class Labelled:
    rows: object
    labels: torch.Tensor

    def __len__(self):
        return len(self.rows)

    def take(self, rows):
        if isinstance(self.rows, torch.Tensor):
            return self.rows[rows]
        return [self.rows[i] for i in rows.tolist()]


def sentences(count=24, seed=0):
    """Texts in which the second word decides the class."""
    rows = tiny.texts(count, seed=seed)
    return Labelled(rows, torch.tensor([int(text.split()[1][1:]) % 3 for text in rows]))


def pictures(count=24, seed=0):
    """Images whose class is how bright they are."""
    rows, labels = tiny.pictures(count, seed=seed), torch.arange(count) % 2
    rows = (rows.float() * (0.4 + 0.6 * labels.view(-1, 1, 1, 1))).to(torch.uint8)
    return Labelled(rows, labels)


def text_encoder(family="roberta"):
    torch.manual_seed(0)
    return Encoder.load(tiny.FAMILIES[family](), processor=tiny.tokenizer())


def image_encoder():
    torch.manual_seed(0)
    return Encoder.load(tiny.vit_mae())


def tune(encoder=None, data=None, **words):
    words = {"steps": 6, "batch": 5, "lr": 5e-3, **words}
    data = sentences() if data is None else data
    return finetune(encoder or text_encoder(), data, **words)


def weights(tuned):
    return torch.cat([p.detach().flatten() for p in tuned.classifier.model.parameters()])


# -- plain fine-tuning -----------------------------------------------------------------------------


def test_plain_is_what_a_bare_loop_does_bit_for_bit():
    encoder, data = text_encoder(), sentences()
    tuned = tune(encoder, data, warmup=0.5, weight_decay=0.1)
    classifier = Classifier.build(encoder, 3, seed=0)
    model, recipe = classifier.model.train(), tuned.recipe
    spared = [p for p in model.parameters() if p.dim() < 2]
    decayed = [p for p in model.parameters() if p.dim() > 1]
    groups = [{"params": decayed}, {"params": spared, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, weight_decay=0.1, fused=True)
    course = Tuning(classifier, data, data.labels, recipe, seed=0)  # for its lots alone
    rates = []
    for step in range(6):
        rows = course.rows_of(step)
        torch.manual_seed(course.lot(12, step))  # dropout
        batch = encoder.batch(data.take(rows))
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        optimizer.zero_grad()
        F.cross_entropy(logits, data.labels[rows]).backward()
        torch.nn.utils.clip_grad_norm_(list(model.parameters()), 1.0)
        rates.append([1 / 3, 2 / 3, 1, 1, 2 / 3, 1 / 3][step] * 5e-3)
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(step)
        optimizer.step()
    assert torch.equal(
        weights(tuned), torch.cat([p.detach().flatten() for p in model.parameters()])
    )
    assert [recipe.rate(step) for step in range(6)] == pytest.approx(rates)


def test_it_learns_and_says_how_well_and_how_far():
    encoder = image_encoder()
    before = encoder.weights_key()
    tuned = tune(encoder, pictures(), steps=40, validation=pictures(8, seed=1), checks=4)
    assert tuned.scores["train"]["accuracy"] == 1 and tuned.scores["validation"]["accuracy"] == 1
    assert [line["step"] for line in tuned.history] == [10, 20, 30, 40]
    assert tuned.history[0]["loss"] > tuned.history[-1]["loss"]
    assert tuned.history[-1]["validation"] == tuned.scores["validation"]
    assert tuned.history[-1]["loss"] != tuned.scores["validation"]["loss"]  # it is of the training
    assert tuned.gap is None and not tuned.classifier.model.training
    assert encoder.weights_key() == before  # the encoder itself is not touched
    prefix = tuned.classifier.model.base_model_prefix
    moved = tuned.classifier.model.get_submodule(prefix).state_dict()
    squares = [
        (moved[n] - t).double().square().sum() for n, t in encoder.trunk.state_dict().items()
    ]
    assert tuned.distance == pytest.approx(float(sum(squares)) ** 0.5) and tuned.distance > 0.1


def test_the_same_seed_gives_the_same_bits_and_every_option_matters():
    encoder = text_encoder()
    state = torch.get_rng_state()
    one, again = tune(encoder), tune(encoder)
    assert torch.equal(weights(one), weights(again)) and one.scores == again.scores
    assert torch.equal(torch.get_rng_state(), state)
    changes = [{"seed": 1}, {"lr": 1e-3}, {"batch": 4}, {"steps": 7}, {"weight_decay": 0.5}]
    changes += [{"warmup": 0.5}, {"dropout": 0.5}, {"precision": "bfloat16"}]
    for change in changes:
        assert not torch.equal(weights(tune(**change))[:500], weights(one)[:500]), change
    assert tune(steps=None, epochs=3).recipe.steps == 3 * (24 // 5)
    assert tune(classes=["a", "b", "c", "d"]).classifier.model.config.id2label[3] == "d"


def test_the_head_of_images_is_on_the_class_token_of_the_unmasked_image():
    encoder, data = image_encoder(), pictures()
    classifier = Classifier.build(encoder, 2)
    classifier.model.eval()
    encoder.model.eval()
    batch, head = encoder.batch(data.rows), classifier.model.classifier
    made = F.linear(encoder.represent(batch).cls, head.weight, head.bias)
    assert torch.allclose(classifier.logits(batch), made, atol=1e-6)


# -- other methods ---------------------------------------------------------------------------------

LIMITS = {
    "recadam": {"t0": -math.inf},
    "mars": {"radius": math.inf},
    "r3f": {"weight": 0.0},
}


@pytest.mark.parametrize("kind", ["text", "image"])
def test_the_limits_of_all_methods_are_plain_fine_tuning_bit_for_bit(kind):
    given = (text_encoder(), sentences()) if kind == "text" else (image_encoder(), pictures())
    plain = weights(tune(*given))
    for method, limit in LIMITS.items():
        assert torch.equal(weights(tune(*given, method=method, options=limit)), plain), method


@pytest.mark.parametrize(
    ("method", "one", "other"),
    [
        ("recadam", {}, {"t0": 4.0}),
        ("recadam", {"strength": 10.0}, {"strength": 100.0}),
        ("recadam", {"k": 0.1}, {"k": 2.0}),
        ("mars", {"radius": 0.1}, {"radius": 0.01}),
        ("r3f", {"weight": 5.0, "noise": 0.5}, {"weight": 1.0, "noise": 0.5}),
        ("r3f", {"noise": 0.5}, {"noise": 0.05}),
    ],
)
def test_methods_differ_from_plain_and_their_options_matter(method, one, other):
    found = [weights(tune(method=method, options=options)) for options in (one, other)]
    assert not torch.equal(*found)
    plain = weights(tune())
    assert not any(torch.equal(plain, each) for each in found)


def test_recadam_and_mars_stay_nearer_and_leave_the_fresh_head_free():
    plain, near = tune(), tune(method="mars", options={"radius": 0.01})
    recalled = tune(method="recadam", options={"t0": 100.0})
    assert near.distance < plain.distance / 2 and recalled.distance < plain.distance / 2
    encoder = text_encoder()
    fresh = Classifier.build(encoder, 3, seed=0)
    for tuned in (near, recalled):
        start = dict(fresh.model.named_parameters())
        for name, p in tuned.classifier.model.named_parameters():
            moved = float(
                (p - start[name]).detach().abs().flatten(1 if p.dim() > 1 else 0).sum(-1).max()
            )
            if name in tuned.classifier.fresh and p.dim() > 1:
                assert moved > 0.05, name
            elif tuned is near and p.dim() > 1:
                assert moved <= 0.01 + 1e-6, name


# -- the test split --------------------------------------------------------------------------------


def test_the_test_split_is_read_once_and_after_everything_else(tmp_path):
    out, read = tmp_path / "out", []

    def test():
        read.append((out / "history.jsonl").read_text().count("\n"))
        return sentences(9, seed=5)

    words = {"validation": sentences(6, seed=1), "checks": 3, "out": out, "save_every": 0.0}
    tuned = tune(test=test, **words)
    assert read == [3]  # all checks were over
    assert tuned.gap == tuned.scores["test"]["loss"] - tuned.scores["train"]["loss"]
    again = tune(test=test, **words)
    assert len(read) == 1 and again.scores == tuned.scores and again.sample == tuned.sample
    assert torch.equal(weights(again), weights(tuned))


def test_a_test_split_that_is_given_later_is_scored_then(tmp_path):
    assert "test" not in tune(out=tmp_path).scores
    later, data = tune(out=tmp_path, test=sentences(seed=5)), []
    assert later.scores["test"] == tune(test=sentences(seed=5)).scores["test"]
    kept = tune(out=tmp_path, test=lambda: data.append("read"))
    assert kept.scores == later.scores and not data
    assert json.loads((tmp_path / "result.json").read_text())["scores"] == later.scores


def test_a_planted_test_file_that_raises_is_not_opened_before_the_end(tmp_path):
    def planted():
        raise RuntimeError("read too early")

    with pytest.raises(RuntimeError, match="read too early"):
        tune(test=planted, out=tmp_path, checks=2)
    assert len((tmp_path / "history.jsonl").read_text().splitlines()) == 2
    assert tune(out=tmp_path, checks=2).scores.keys() == {"train"}  # never asked for: never read


def test_a_path_or_what_is_read_from_it_brings_its_splits(tmp_path):
    for name, count, seed in (("train", 20, 0), ("dev", 8, 1), ("test", 6, 2)):
        found = sentences(count, seed=seed)
        lines = (
            json.dumps({"text": text, "label": f"c{label}"})
            for text, label in zip(found.rows, found.labels.tolist())
        )
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    encoder = text_encoder()
    tuned = tune(encoder, tmp_path)
    assert tuned.scores.keys() == {"train", "validation", "test"}
    assert tuned.classifier.model.config.id2label == {0: "c0", 1: "c1", 2: "c2"}
    data = read_labelled(tmp_path, encoder)
    one = tune(encoder, data.train, validation=data.validation, test=data.test)
    assert one.scores == tuned.scores and data.opened
    other = tune(encoder, data, test=sentences(5, seed=9), validation=sentences(5, seed=8))
    assert other.scores["train"] == tuned.scores["train"]
    assert all(other.scores[name] != tuned.scores[name] for name in ("validation", "test"))


def test_a_problem_is_read_and_what_is_none_of_these_is_refused(tmp_path):
    rows = [f"{text},c{i % 3}" for i, text in enumerate(tiny.texts(60))]
    (tmp_path / "all.csv").write_text("\n".join(["text,label", *rows]))
    problem = load_problem(tmp_path / "all.csv")
    assert tune(text_encoder(), problem).scores.keys() >= {"train", "validation", "test"}
    for name in ("validation", "test"):
        with pytest.raises(
            ValueError, match=f"^{name} must be rows, such as those of read_labelled, not"
        ):
            tune(**{name: tmp_path / "all.csv"})
    with pytest.raises(ValueError, match="an Encoder has its processor: leave processor out"):
        tune(processor=tiny.tokenizer())


def test_a_test_split_that_was_read_is_refused_before_the_training(tmp_path, monkeypatch):
    rows = [f"{text},c{i % 3}" for i, text in enumerate(tiny.texts(60))]
    (tmp_path / "all.csv").write_text("\n".join(["text,label", *rows]))
    encoder = text_encoder()
    data = read_labelled(tmp_path / "all.csv", encoder)
    first = tune(encoder, data, out=tmp_path / "out")
    assert tune(encoder, data, out=tmp_path / "out").scores == first.scores  # it is all there
    monkeypatch.setattr(Tuning, "run", None)
    for words in ({"data": data}, {"data": data.train, "test": data.test}):
        with pytest.raises(ValueError, match="read once only: for another fine-tuning give data"):
            tune(encoder, **words)


def test_what_is_in_both_splits_is_told_apart(tmp_path):
    """Four of ten texts of the test are also trained on, but for those that are held out."""
    texts = tiny.texts(40)
    for name, some in (("train", texts[:34]), ("test", texts[30:])):
        lines = [f"{text},c{i % 2}" for i, text in enumerate(some)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["text,label", *lines]))
    encoder = text_encoder()
    data = read_labelled(tmp_path, encoder, seed=3)
    trained = data.train.take(range(len(data.train)))
    both = set(texts[30:34]) & {encoder.processor.decode(row[1:-1]) for row in trained}
    found = tune(encoder, data).scores
    assert found["test"]["repeated"] == len(both) > 0
    fewer = read_labelled(tmp_path, encoder, seed=3)
    new = fewer.test().part([i for i in range(10) if texts[30 + i] not in both])
    alone = tune(encoder, fewer.train, validation=fewer.validation, test=new).scores
    assert alone["test"] == found["test_new"] and "repeated" not in alone["test"]
    assert "test_new" not in alone
    same = tune(encoder, data.train, test=data.train).scores
    assert same["test"]["repeated"] == len(data.train) and "test_new" not in same


@pytest.mark.parametrize("lr", [1e6, 1e30])
def test_weights_that_the_last_step_broke_are_told_before_a_test_is_read(lr):
    heard = []
    words = {"steps": 1, "lr": lr, "test": lambda: heard.append(1)}
    with pytest.raises(Diverged, match=r"no longer a number before step 1: lower the learning rat"):
        tune(**words)
    assert not heard


def test_biases_norms_class_tokens_and_places_do_not_decay():
    classifier = Classifier.build(image_encoder(), 2)
    names = {id(p): name for name, p in classifier.model.named_parameters()}
    spared, decayed = set(), set()
    for group in parameter_groups(classifier, 0.1):
        (decayed if group["weight_decay"] else spared).update(names[id(p)] for p in group["params"])
    assert {"vit.embeddings.cls_token", "classifier.bias"} <= spared
    assert "classifier.weight" in decayed and not any("norm" in name for name in decayed)


def test_one_table_is_split_by_the_seed(tmp_path):
    found = sentences(60)
    rows = zip(found.rows, found.labels.tolist())
    (tmp_path / "all.jsonl").write_text(
        "\n".join(json.dumps({"text": text, "label": f"c{label}"}) for text, label in rows)
    )
    encoder = text_encoder()
    data = read_labelled(tmp_path / "all.jsonl", encoder, seed=1)  # as a probe sees it
    told = tune(encoder, data, seed=1).scores
    assert tune(encoder, tmp_path / "all.jsonl", seed=1).scores == told
    assert tune(encoder, read_labelled(tmp_path / "all.jsonl", encoder), seed=1).scores != told


def test_tensors_are_read_as_they_are_elsewhere():
    images = TensorDataset(tiny.pictures(24), torch.arange(24) % 2)
    encoder = Encoder.load(tiny.vit_mae())
    others = TensorDataset(tiny.pictures(8, seed=1), torch.arange(8) % 2)
    for data in (images, {"train": images, "test": others}):
        tuned = tune(encoder, data)
        assert len(tuned.scores) == 2 + isinstance(data, dict)
        assert tuned.classifier.model.config.id2label == {0: "0", 1: "1"}


# -- kills -----------------------------------------------------------------------------------------


def files(folder):
    apart = (".lease.lock", "seconds.json")
    names = (f for f in sorted(folder.rglob("*")) if f.is_file() and f.name not in apart)
    return {str(f.relative_to(folder)): f.read_bytes() for f in names}


@pytest.mark.parametrize(
    "method",
    ["plain", "recadam", *(pytest.param(m, marks=pytest.mark.slow) for m in ("mars", "r3f"))],
)
def test_killed_at_every_write_it_ends_in_the_same_files(method, tmp_path):
    options = {"mars": {"radius": 0.02}, "r3f": {"noise": 0.3}}.get(method, {})
    encoder, data = text_encoder(), sentences(10)
    words = {"method": method, "options": options, "save_every": 0.0, "checks": 2, "steps": 3}
    words |= {"validation": sentences(4, seed=1), "test": lambda: sentences(5, seed=2)}

    def life(folder, write, move=99):
        """One process that dies at its write, or its move of a saved file, of that number."""
        child = os.fork()
        if child == 0:  # no import, no clean-up: what a kill leaves is all there is
            os.environ["MOIETY_FAULT"] = f"write:{write}"
            moves, replace = iter(range(1, 100)), Path.replace
            Path.replace = lambda *paths: (
                os.kill(os.getpid(), signal.SIGKILL) if next(moves) == move else replace(*paths)
            )
            tune(encoder, data, out=folder, **words)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    told = tune(encoder, data, out=whole, **words)
    # History; three states, each after the step of the one before; the classifier; its seconds,
    # its result, and the final state.
    lives = [(2, 99), (4, 99), (4, 99), (4, 99), (99, 2), (4, 99), (5, 99), (6, 99)]
    assert all(life(killed, *place) for place in lives)
    assert (killed / "result.json").exists() and not (killed / "final.safetensors").exists()
    tune(encoder, data, out=killed, **words)
    assert files(killed) == files(whole)
    assert json.loads((whole / "result.json").read_text())["scores"] == told.scores


def test_a_folder_of_another_fine_tuning_is_refused(tmp_path):
    tune(out=tmp_path / "a")
    for change in ({"lr": 1e-3}, {"seed": 1}, {"data": sentences(23)}):
        with pytest.raises(ValueError, match="holds another fine-tuning; choose another folder"):
            tune(out=tmp_path / "a", **change)


# -- what transformers loads -----------------------------------------------------------------------


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_family_starts_from_the_bits_of_its_encoder_with_a_fresh_head(family):
    encoder = text_encoder(family)
    classifier, other = (Classifier.build(encoder, 3, seed=seed) for seed in (0, 1))
    assert classifier.distance(encoder) == 0 and len(classifier.fresh) >= 3
    assert any("classifier" in name for name in classifier.fresh)
    trunk = classifier.model.base_model.state_dict()
    assert all(torch.equal(trunk[n], t) for n, t in encoder.trunk.state_dict().items())
    drawn = [dict(c.model.named_parameters()) for c in (classifier, other)]
    heads = [name for name in classifier.fresh if name.endswith("weight") and "norm" not in name]
    assert not any(torch.equal(drawn[0][name], drawn[1][name]) for name in heads)
    tuned = finetune(encoder, sentences(8), steps=1, batch=8)
    assert tuned.logits(sentences(8)).shape == (8, 3) and tuned.distance > 0


FRESH = """
import json, sys, torch, transformers
for kind in ("text", "image"):
    folder = sys.argv[1] + "/" + kind
    told = json.load(open(folder + "/result.json"))["sample"]
    given = json.load(open(folder + "/given.json"))
    if kind == "text":
        tokens = transformers.AutoTokenizer.from_pretrained(folder + "/classifier")
        door = transformers.AutoModelForSequenceClassification
        inputs = tokens(given, padding=True, return_tensors="pt")
    else:
        door = transformers.AutoModelForImageClassification
        inputs = {"pixel_values": torch.tensor(given)}
    made = door.from_pretrained(folder + "/classifier")(**inputs).logits
    assert (made - torch.tensor(told)).abs().max() < 1e-5, kind
    assert torch.tensor(told).std() > 1e-3, kind
assert "moiety" not in sys.modules
"""


def test_a_fresh_python_with_transformers_alone_gives_the_told_logits(tmp_path):
    encoder, data = text_encoder(), sentences()
    tune(encoder, data, out=tmp_path / "text")
    (tmp_path / "text" / "given.json").write_text(json.dumps(data.rows[:8]))
    encoder, data = image_encoder(), pictures()
    tune(encoder, data, out=tmp_path / "image")
    pixels = encoder.batch(data.rows[:8])["pixel_values"].tolist()
    (tmp_path / "image" / "given.json").write_text(json.dumps(pixels))
    words = [sys.executable, "-c", FRESH, str(tmp_path)]
    alone = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    run = subprocess.run(words, capture_output=True, text=True, env=alone, cwd=tmp_path)
    assert run.returncode == 0, run.stderr


# -- encoders with experts -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["text", "image"])
def test_an_upcycled_encoder_keeps_its_experts(kind, tmp_path):
    torch.manual_seed(0)
    encoder = rows.upcycled(kind)  # also the decoder of images, which a classifier has not
    data = sentences() if kind == "text" else pictures()
    classifier = Classifier.build(encoder, 3)
    mixed = [part for part in classifier.model.modules() if isinstance(part, moiety.MoE)]
    assert len(mixed) == 2 and classifier.distance(encoder) == 0
    for one in (encoder.model, classifier.model):
        one.eval()
    if kind == "image":
        batch, head = encoder.batch(data.rows), classifier.model.classifier
        made = F.linear(encoder.represent(batch).cls, head.weight, head.bias)
        assert torch.allclose(classifier.logits(batch), made, atol=1e-6)
    tuned = tune(encoder, data, out=tmp_path, method="mars", options={"radius": 0.05})
    loaded = moiety.load(tmp_path / "classifier").eval()
    inputs = classifier.inputs(encoder.batch(data.take(torch.arange(8))))
    assert torch.allclose(loaded(**inputs).logits, torch.tensor(tuned.sample), atol=1e-5)


def test_the_balance_losses_of_experts_are_trained_once():
    found = []
    for balance in (0.0, 10.0):
        torch.manual_seed(0)
        encoder, data = rows.upcycled("text", balance=balance), sentences()
        classifier = Classifier.build(encoder, 3)
        recipe = TuneRecipe(steps=1, batch=5, lr=1e-3, method="r3f", options={"weight": 1e-9})
        course = Tuning(classifier, data, data.labels, recipe, seed=0)
        classifier.model.eval()  # no dropout
        inputs = classifier.inputs(encoder.batch(data.take(torch.arange(5))))
        noise = course.r3f.draw(classifier.model, inputs, torch.Generator())
        noisy = {"noise": noise, "weight": torch.tensor(course.r3f.weight)}
        loss, _ = course.loss({**inputs, LABELS: data.labels[:5], **noisy})
        found.append(float(loss.detach()))
        with moiety.watch(classifier.model) as routes:
            classifier.model(**inputs)
            terms = float(routes.loss().detach())
    assert found[1] - found[0] == pytest.approx(terms, rel=1e-4) and terms > 1


# -- scores and bad input --------------------------------------------------------------------------


def test_scores_by_hand():
    answers = torch.tensor([0, 0, 1, 1, 2, 0])
    labels = torch.tensor([0, 1, 1, 1, 0, 0])
    found = scores(F.one_hot(answers, 4).double(), labels)
    # Class 0: 2 right, 3 said, 3 there: 2/3. Class 1: 2 of 2 and 3: 4/5. Class 2: only said.
    assert found["macro_f1"] == pytest.approx((2 / 3 + 4 / 5 + 0) / 3)
    assert found["accuracy"] == found["micro_f1"] == pytest.approx(4 / 6)
    assert found["loss"] == pytest.approx(math.log(math.e + 3) - 4 / 6)
    assert found["largest_class"] == 3 / 6
    with pytest.raises(ValueError, match="no examples"):
        scores(torch.zeros(0, 2), torch.zeros(0, dtype=torch.long))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"method": "adam"}, "method must be one of plain, recadam, mars, r3f, got 'adam'"),
        ({"method": "mars", "options": {"k": 1}}, "mars has no option 'k'; its options: radius"),
        ({"options": {"radius": 1}}, "plain has no option 'radius'; its options: none"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"batch": 0}, "batch must be at least 1"),
        ({"lr": 0.0}, "lr must be a positive number"),
        ({"warmup": 1.0}, "warmup is a share"),
        ({"weight_decay": -1.0}, "weight_decay must be 0 or more, got -1"),
        ({"checks": 0}, "checks must be at least 1"),
        ({"precision": "half"}, "precision is"),
        ({"classes": 2}, "the training labels must be from 0 to 1, got 2"),
        ({"classes": 1}, "training labels must be from 0 to 0"),
        ({"data": Labelled(["w1 w2"], torch.tensor([0]))}, "at least two classes, got 1"),
        ({"data": Labelled(["w1 w2"], torch.tensor([-1]))}, "must be from 0, got -1"),
        ({"data": Labelled(["w1 w2"], torch.tensor([0.5]))}, "one whole number for each of 1"),
        ({"data": Labelled(["w1 w2"], None)}, "the training examples have no labels"),
        ({"data": Labelled([], torch.tensor([0])[:0])}, "there are no training examples"),
        ({"validation": Labelled(["w1 w2"], torch.tensor([7]))}, "validation labels must be from"),
        ({"encoder": "modernbert", "dropout": 0.1}, "has no dropout to set"),
    ],
)
def test_bad_input_is_refused_in_one_sentence(words, said):
    if "encoder" in words:
        words = {**words, "encoder": text_encoder(words["encoder"])}
    with pytest.raises(ValueError, match=said):
        tune(**words)


def test_a_loss_that_is_no_number_says_so():
    with pytest.raises(ValueError, match="lower the learning rate"):
        tune(lr=1e30)


def test_defaults_are_those_of_the_digest():
    recipe = TuneRecipe(steps=400, batch=4, lr=1e-4, method="recadam")
    assert [recipe.option(name) for name in ("k", "t0", "strength")] == [0.1, 100, 5000]
    fast = TuneRecipe(steps=400, batch=4, lr=1e-3, method="recadam")
    assert fast.option("strength") == 1000  # where 5000 would jump past the initial weights
    assert tune(lr=None, batch=None, steps=1).recipe.lr == 2e-5
    found = tune(image_encoder(), pictures(40), lr=None, batch=None, steps=1).recipe
    assert (found.lr, found.batch, found.weight_decay) == (1e-4, 32, 0.01)
