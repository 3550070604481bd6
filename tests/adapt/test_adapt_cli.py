"""`moiety adapt`: models that transformers alone loads, a plan that is kept, a comparison."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import asking
import numpy as np
import pytest
import tiny
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file

import moiety
from moiety import cli
from moiety.adapt import command, encoders, stage, tuning
from moiety.adapt.asked import Asked
from moiety.adapt.command import begin, used
from moiety.adapt.costing import costs
from moiety.adapt.folder import check_out
from moiety.adapt.labelled import Labelled
from moiety.cli.adapt.asked import read_bytes
from moiety.cli.adapt.telling import Bar
from moiety.hf.loading import load_image_processor
from moiety.train.state import read_state

SHORT = ("--steps", 3, "--batch", 15, "--checks", 2, "--lr", 1e-3)
TUNED = ("--epochs", 1, "--tune-batch", 8)


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Models and data that nobody changes."""
    folder = tmp_path_factory.mktemp("given")
    asking.roberta(folder / "roberta")
    asking.roberta(folder / "headless", trunk=True)
    mixture = encoders.Encoder.load(folder / "roberta")
    mixture.model = moiety.upcycle(mixture.model, experts=2, router="top-k", k=1)
    mixture.save(folder / "mixture")
    asking.vit_mae(folder / "mae")
    asking.texts(folder / "texts.txt")
    asking.tables(folder / "labelled")
    asking.images(folder / "images")
    for name, count in (("train/a", 6), ("train/b", 6), ("test/a", 3), ("test/b", 3)):
        asking.images(folder / "photos" / name, count=count)
    return folder


@pytest.fixture
def adapt(given, capsys):
    """Run `moiety adapt` on files of `given`; return what it said."""

    def run(*words, code=0):
        ended = asking.run(*(given / w if (given / str(w)).exists() else w for w in words))
        said = capsys.readouterr()
        assert ended == code, said
        return said.out + said.err

    return run


TEXT = ("--model", "roberta", "--unlabelled", "texts.txt", *SHORT)

# A fresh Python that has never heard of us.
ALONE = """
import sys
from safetensors.torch import load_file
import transformers as T
T.logging.set_verbosity_error()
for out, doors in zip(sys.argv[1:], [
    (T.AutoModelForMaskedLM, T.AutoModelForSequenceClassification),
    (T.ViTMAEForPreTraining, T.ViTForImageClassification),
]):
    told = load_file(f"{out}/check.safetensors")
    read = {n: t for n, t in told.items() if n not in ("adapted", "classifier")}
    for name, door in zip(("adapted", "classifier"), doors):
        model = door.from_pretrained(f"{out}/{name}").eval()
        words = {n: t for n, t in read.items() if n != "noise" or name == "adapted"}
        logits = model(**words).logits[:, : told[name].shape[1]]
        assert (logits - told[name]).abs().max() <= 1e-5, (out, name)
        if "input_ids" in told:
            tokenizer = T.AutoTokenizer.from_pretrained(f"{out}/{name}")
            assert tokenizer.mask_token == "<mask>"
    print(model.config.id2label)
assert not any(name.startswith("moiety") for name in sys.modules)
"""


# Another, that knows us.
WITH_US = """
import sys
import moiety
from safetensors.torch import load_file
told = load_file(f"{sys.argv[1]}/check.safetensors")
for name in ("adapted", "classifier"):
    model = moiety.load(f"{sys.argv[1]}/{name}").eval()
    logits = model(told["input_ids"], attention_mask=told["attention_mask"]).logits
    assert (logits[:, : told[name].shape[1]] - told[name]).abs().max() <= 1e-5, name
"""


def test_transformers_alone_loads_what_was_saved_and_gives_the_logged_logits(adapt, tmp_path):
    words = ("--labelled", "labelled", *TUNED, "--source", "texts.txt")
    said = adapt(*TEXT, *words, "--out", tmp_path / "text")
    assert re.search(r"Classifier, test: accuracy [\d.]+%", said)
    assert str(tmp_path / "text" / "classifier") in said
    picture = ("--model", "mae", "--unlabelled", "images", *SHORT)
    adapt(*picture, "--labelled", "photos", *TUNED, "--out", tmp_path / "image")
    folders = [str(tmp_path / name) for name in ("text", "image")]
    ran = subprocess.run(
        [sys.executable, "-c", ALONE, *folders], capture_output=True, text=True, env={"PATH": ""}
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["{0: 'cat', 1: 'dog'}", "{0: 'a', 1: 'b'}"]
    result = json.loads((tmp_path / "text" / "result.json").read_text())
    assert list(result["stages"]) == ["further", "round-1"]
    assert result["used"] == {"match": "hidden", "length": 23, "tune_lr": 2e-5}  # not asked for
    assert {"target", "source", "distance", "score"} <= result["stages"]["round-1"]["history"][
        0
    ].keys()
    assert result["tuned"]["scores"].keys() == {"train", "validation", "test"}


def test_pictures_are_prepared_by_what_was_saved(adapt, given, tmp_path):
    words = ("--model", "mae", "--unlabelled", "images", *SHORT, "--labelled", "photos", *TUNED)
    adapt(*words, "--out", tmp_path / "out")
    picture = Image.open(given / "images" / "3.png")
    asked = encoders.Encoder.load(given / "mae")  # which brought no processor
    want = asked.batch(torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None])["pixel_values"]
    for name in ("adapted", "classifier"):
        processor = load_image_processor(str(tmp_path / "out" / name))
        got = processor(images=picture, return_tensors="pt")["pixel_values"]
        torch.testing.assert_close(got, want)


def test_one_table_or_folder_for_both_is_split_before_it_is_trained_on(adapt, given, tmp_path):
    draw = random.Random(1)
    lines = [f"{asking.line(draw, i % 2)} w{i % 40},{'ab'[i % 2]}" for i in range(200)]
    (tmp_path / "all.csv").write_text("\n".join(["text,label", *lines]))
    for name in "ab":
        asking.images(tmp_path / "by-class" / name, count=40, seed=ord(name))
    for model, data in (("roberta", "all.csv"), ("mae", "by-class")):
        path = str(tmp_path / data)
        asked = Asked(model=str(given / model), unlabelled=path, labelled=path)
        opened = begin(asked, None)
        assert "training split alone" in opened.corpus.notes[0]
        read = [opened.corpus.train, opened.corpus.held]
        seen = {bytes(np.asarray(x)) for rows in read for x in rows.take(range(len(rows)))}
        test = opened.labelled.test()
        assert len(test) > 5
        hidden = [bytes(np.asarray(x)) for x in test.take(range(len(test)))]
        assert not seen.intersection(hidden), data


def test_of_one_table_the_rows_without_a_class_are_read_too(given, tmp_path):
    draw = random.Random(1)
    texts = [f"{asking.line(draw, i % 2)} w{i % 40}" for i in range(200)]
    lines = [f"{text},{'ab'[i % 2] if i < 80 else ''}" for i, text in enumerate(texts)]
    (tmp_path / "train.csv").write_text("\n".join(["text,label", *lines]))
    table = str(tmp_path / "train.csv")
    for unlabelled in (table, str(tmp_path)):  # the folder's training split is that table
        asked = Asked(model=str(given / "roberta"), unlabelled=unlabelled, labelled=table)
        opened = begin(asked, None)
        assert "training split and its 120 rows without a class" in opened.corpus.notes[0]
        known, read = opened.labelled, [opened.corpus.train, opened.corpus.held]
        assert sum(map(len, read)) == 120 + len(known.train) < 200
        test = known.test()
        hidden = {bytes(np.asarray(x)) for x in test.take(range(len(test)))}
        seen = {bytes(np.asarray(x)) for rows in read for x in rows.take(range(len(rows)))}
        assert hidden and not seen & hidden


def test_labelled_images_inside_the_unlabelled_ones_are_refused(given, tmp_path):
    for name in "ab":
        asking.images(tmp_path / "all" / "labelled" / name, count=20, seed=ord(name))
    words = {"unlabelled": str(tmp_path / "all"), "labelled": str(tmp_path / "all" / "labelled")}
    with pytest.raises(ValueError, match=r"labelled lies in .*its test images would be trained on"):
        begin(Asked(model=str(given / "mae"), **words), None)


def test_out_is_no_place_that_is_read(given, tmp_path, monkeypatch):
    for name in ("photos/a", "photos/b", "splits/train", "splits/test"):
        asking.images(tmp_path / name, count=2, seed=1)
    monkeypatch.chdir(tmp_path)
    model = str(given / "mae")
    for unlabelled, out in (("photos", "photos/run"), ("photos", "photos"), ("photos", model)):
        with pytest.raises(ValueError, match="is read from: choose another folder"):
            check_out(Asked(model=model, unlabelled=unlabelled), Path(out))
    for unlabelled, out in (("digits", "digits"), ("splits", "splits/run"), ("photos", "run")):
        check_out(Asked(model=model, unlabelled=unlabelled), Path(out))


def test_a_batch_is_not_said_to_be_larger_than_the_labels(given):
    words = {"unlabelled": str(given / "texts.txt"), "labelled": str(given / "labelled")}
    asked = Asked(model=str(given / "roberta"), method="compare", labels=4, **words)
    assert used(asked, begin(asked, None))["tune_batch"] == 4


def test_files_of_others_stay(given, tmp_path):
    ours, theirs = tmp_path / "deep" / f".state.{'0f' * 8}.tmp", tmp_path / "deep" / ".notes.tmp"
    (tmp_path / "deep" / f".folder.{'0f' * 8}.tmp").mkdir(parents=True)
    for path in (ours, theirs):
        path.touch()
    begin(Asked(model=str(given / "roberta"), unlabelled=str(given / "texts.txt")), tmp_path)
    assert theirs.exists() and not ours.exists()


@pytest.mark.parametrize("when", ["between", "after the last step", "ignored", "elsewhere"])
def test_ctrl_c_is_heard_once_by_those_who_listen(when):
    def work():
        with Bar() as bar:
            bar("further", 0.5)
            os.kill(os.getpid(), signal.SIGINT)
            if when != "after the last step":
                bar("further", 0.6)

    usual = signal.getsignal(signal.SIGINT)
    signal.signal(
        signal.SIGINT, signal.SIG_IGN if when == "ignored" else signal.default_int_handler
    )
    try:
        if when == "ignored":
            work()
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
            return
        if when == "elsewhere":  # a thread leaves the signal to the main one
            with ThreadPoolExecutor(1) as thread:
                assert not thread.submit(lambda: Bar().__enter__().listens).result()
        else:
            with pytest.raises(KeyboardInterrupt):
                work()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, usual)


def test_ctrl_c_keeps_the_step_in_hand(adapt, given, tmp_path, monkeypatch, request):
    words = (*TEXT, "--labelled", "labelled", *TUNED, "--epochs", 3, "--out")
    adapt(*words, tmp_path / "alone")
    monkeypatch.setattr("moiety.adapt.flight.TOLD", 0.0)
    # A shell leaves it ignored for what runs in the background.
    usual = signal.signal(signal.SIGINT, signal.default_int_handler)
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, usual))
    for kind, at in ((stage.Stage, "pretraining/further"), (tuning.Tuning, "fine-tuning")):
        real = kind.advance

        def advance(self, real=real):
            real(self)
            if self.step == 2:
                os.kill(os.getpid(), signal.SIGINT)

        with monkeypatch.context() as patched:
            patched.setattr(kind, "advance", advance)
            said = adapt(*words, tmp_path / "out", code=130)
        assert "what was trained is kept" in said
        assert read_state(tmp_path / "out" / at / "latest.safetensors")["step"] == 2
    adapt(*words, tmp_path / "out")
    one, two = ((tmp_path / name / "result.json").read_bytes() for name in ("alone", "out"))
    assert one == two


def test_a_slash_at_the_end_is_no_other_folder():
    assert Asked(model="m/", unlabelled="u/") == Asked(model="m", unlabelled="u")
    assert Asked(model="/", unlabelled="./u").unlabelled == "./u"  # not the built-in set u


def test_what_was_chosen_of_the_data_is_said(adapt, given, tmp_path):
    rows = [f"w1,{' '.join(['w2'] * 40)},{'ab'[i % 2]}" for i in range(30)]
    for name in ("train", "test"):
        (tmp_path / f"{name}.csv").write_text("\n".join(["title,abstract,label", *rows]))
    words = ("--model", "roberta", *SHORT, "--dry-run", "--out", tmp_path / "out")
    words = (*words, "--unlabelled", tmp_path, "--labelled", tmp_path, "--text", "abstract")
    said = " ".join(adapt(*words).split())
    assert "train.csv alone; its column abstract; 30 of 30 texts fill all 23 tokens" in said
    assert said.count("fill all 23 tokens, or are cut") == 2  # the labelled ones, too


def test_texts_of_both_tables_may_have_columns_of_their_own(adapt, given, tmp_path):
    papers, cited = tmp_path / "papers.csv", tmp_path / "cited.csv"
    papers.write_text("\n".join(["title,abstract", *["w1,w2 w3 w4"] * 40]))
    rows = [f"w{i} w5,w6,{'ab'[i % 2]}" for i in range(40)]
    cited.write_text("\n".join(["sentence,source,label", *rows]))
    words = ("--model", "roberta", *SHORT, "--dry-run", "--out", tmp_path / "out")
    words = (*words, "--unlabelled", papers, "--text", "abstract", "--labelled")
    said = " ".join(adapt(*words, cited, "--labelled-text", "sentence").split())
    assert "its column abstract; 200 tokens in 40 rows" in said and "of 2 classes" in said
    said = adapt(*words, papers, "--labelled-text", "title", code=2)
    assert "--text names the column of one that is both" in " ".join(said.split())


def test_the_check_of_the_guide_holds(adapt, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = adapt(*TEXT, "--labelled", "labelled", *TUNED, "--out", "out/papers")
    assert "further pre-training: done in" in said
    guide = Path(__file__).parents[2] / "docs" / "adapt.md"
    (block,) = re.findall(r"^```py\n(.*?)^```", guide.read_text(), re.M | re.S)
    gaps = []
    exec(compile(block, guide.name, "exec"), {"print": gaps.append})
    assert len(gaps) == 2 and max(gaps) <= 1e-5


def test_an_upcycled_model_is_loaded_by_moiety(adapt, tmp_path):
    words = ("--model", "mixture", "--unlabelled", "texts.txt", *SHORT)
    adapt(*words, "--labelled", "labelled", *TUNED, "--out", tmp_path / "out")
    ran = subprocess.run(
        [sys.executable, "-c", WITH_US, str(tmp_path / "out")], capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr


def test_a_dry_run_writes_nothing_and_counts_what_a_run_takes(adapt, given, tmp_path):
    words = (*TEXT, "--rounds", 2, "--out", tmp_path / "out")
    planned = adapt(*words, "--dry-run")
    assert not (tmp_path / "out").exists()
    assert "Nothing was trained, and nothing written." in planned
    (size,) = re.findall(r"Cache: (.*) on the disk", planned)
    (total,) = re.findall(r"FLOPs in all: (\S+); on this CPU roughly [\d.]+ (?:s|min|h)", planned)
    said = adapt(*words)
    assert f"the teacher's representations take {size} in" in said
    assert f"and {total} FLOPs" in said
    plan = {"model": str(given / "roberta"), "unlabelled": str(given / "texts.txt"), "steps": 3}
    plan = Asked(**plan, batch=15, rounds=2)
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert costs(plan, begin(plan, None)).total == pytest.approx(result["flops"]["total"])


@pytest.mark.parametrize(
    "more",
    [(), ("--method", "further"), ("--rounds", 2), ("--labelled", "labelled", *TUNED)],
    ids=["plain", "further", "rounds", "labels"],
)
def test_files_never_take_more_than_a_dry_run_says(adapt, given, tmp_path, monkeypatch, more):
    config = transformers.RobertaConfig(**{**tiny.TEXT, "hidden_size": 96})
    transformers.RobertaForMaskedLM(config).save_pretrained(tmp_path / "wide")
    tiny.tokenizer().save_pretrained(tmp_path / "wide")
    words = ("--model", tmp_path / "wide", "--unlabelled", "texts.txt", *SHORT, *more)
    words = (*words, "--out", tmp_path / "out")
    (told,) = re.findall(r"at most ([\d.]+ [kM]B)", adapt(*words, "--dry-run"))
    real, seen = os.replace, [0]

    def replace(*paths):  # what is written lies beside what it replaces
        files = [file for file in (tmp_path / "out").rglob("*") if file.is_file()]
        seen.append(sum(f.stat().st_size for f in files if f.parent.name != "cache"))
        real(*paths)

    monkeypatch.setattr(os, "replace", replace)
    adapt(*words, "--save-every", 0)
    room = read_bytes(told.replace(" ", ""))
    assert 0.6 * room < max(seen) < 1.02 * room  # besides some small files


def test_a_dry_run_of_a_comparison_counts_all_fine_tunings(given):
    plan = Asked(
        model=str(given / "roberta"),
        unlabelled=str(given / "texts.txt"),
        labelled=str(given / "labelled"),
        method="compare",
        seeds=6,
        labels=10,
        epochs=4,
        tune_batch=5,
    )
    line = costs(plan, begin(plan, None)).stages[-1]
    assert (line.name, line.steps, line.times) == ("fine-tuning", 8, 18)


def test_without_a_cache_the_teacher_runs_at_every_step_and_that_is_said(adapt, tmp_path):
    one = adapt(*TEXT, "--cache-limit", "1KB", "--out", tmp_path / "out")
    assert "round 1: the teacher ran at every step: " in one
    assert "are more than the cache limit of 1 kB" in one
    planned = adapt(*TEXT, "--cache-limit", 0, "--dry-run", "--out", tmp_path / "other")
    assert "Cache: none; the teacher runs at every step: no cache is wanted" in planned


def test_a_run_that_is_complete_is_told_again(adapt, tmp_path):
    words = (*TEXT, "--method", "further", "--out", tmp_path / "out")
    first = adapt(*words)
    model = tmp_path / "out" / "adapted" / "model.safetensors"
    before = model.stat().st_mtime_ns
    again = adapt(*words)
    assert "is complete" in again and model.stat().st_mtime_ns == before
    assert first.split("On held-out")[1].split("Steps and checks")[0] in again


# -- fine-tuning, and what may change --------------------------------------------------------------


def test_fine_tuning_alone_is_that_of_what_was_adapted(adapt, given, tmp_path):
    words = ("--labelled", "labelled", *TUNED)
    adapt(*TEXT, *words, "--out", tmp_path / "both")
    alone = ("--model", tmp_path / "both" / "adapted", "--method", "fine-tune", *words)
    assert "fine-tuning" in adapt(*alone, "--dry-run", "--out", tmp_path / "alone")
    said = adapt(*alone, "--out", tmp_path / "alone")
    assert f"Saved for transformers: {tmp_path / 'alone' / 'classifier'}; all" in " ".join(
        said.split()
    )
    one, two = (json.loads((tmp_path / n / "result.json").read_text()) for n in ("both", "alone"))
    assert one["tuned"] == two["tuned"] and two["stages"] == {}
    weights = [tmp_path / name / "classifier" / "model.safetensors" for name in ("both", "alone")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    assert not (tmp_path / "alone" / "adapted").exists()
    told = load_file(tmp_path / "alone" / "check.safetensors")
    assert set(told) == {"input_ids", "attention_mask", "classifier"}
    assert "is complete" in adapt(*alone, "--out", tmp_path / "alone")
    for more, refusal in (
        (("--unlabelled", "texts.txt"), "--unlabelled does nothing with --method fine-tune"),
        (("--steps", 3), "--steps goes with pre-training, and --method fine-tune has none"),
        (("--match", "cls"), "--match goes with pre-training"),
    ):
        assert refusal in adapt(*alone, *more, "--out", tmp_path / "other", code=2)
    said = adapt(*alone, "--tune-lr", 1e-2, "--out", tmp_path / "alone", code=2)
    assert "give the same, or another folder" in said and "adapted" not in said.split(":")[-1]
    headless = ("--model", "headless", "--method", "fine-tune", *words)
    assert "warmed up" not in adapt(*headless, "--dry-run", "--out", tmp_path / "other")
    said = adapt("--model", "roberta", "--out", tmp_path / "other", code=2)
    assert "--unlabelled is needed, but for --method fine-tune" in said


def test_a_fine_tuning_that_failed_can_be_put_right_in_its_folder(adapt, tmp_path):
    words = (*TEXT, "--labelled", "labelled", *TUNED, "--out", tmp_path / "out")
    said = adapt(*words, "--tune-lr", 1e30, code=2)
    assert "lower the learning rate (1e+30), with --tune-lr; what was pre-trained is kept" in said
    assert (tmp_path / "out" / "adapted" / "config.json").exists()
    stages = tmp_path / "out" / "pretraining" / "round-1" / "final.safetensors"
    before = stages.stat().st_mtime_ns
    adapt(*words, "--tune-lr", 1e-3)
    assert stages.stat().st_mtime_ns == before
    adapt(*words[:-1], tmp_path / "alone", "--tune-lr", 1e-3)
    one, two = (json.loads((tmp_path / n / "result.json").read_text()) for n in ("out", "alone"))
    assert one == two
    with_states = " ".join(adapt(*words, "--tune-lr", 1e-2, code=2).split())  # its test was read
    for name in ("result.json", "fine-tuning/final.safetensors"):  # as if killed before them
        (tmp_path / "out" / name).rename(tmp_path / Path(name).name)
        assert with_states == " ".join(adapt(*words, "--tune-lr", 1e-2, code=2).split())
    (tmp_path / "result.json").rename(tmp_path / "out" / "result.json")
    for states in ("pretraining", "fine-tuning"):  # as we say that one may
        shutil.rmtree(tmp_path / "out" / states)
    said = " ".join(adapt(*words, "--tune-lr", 1e-2, code=2).split())
    assert said == with_states
    assert "was begun with tune_lr 0.001 (now 0.01): give the same, or another folder; to" in said
    assert f"in another way, --method fine-tune --model {tmp_path / 'out' / 'adapted'}" in said
    assert "fine-tune its model" not in adapt(*words, "--rounds", 2, "--tune-lr", 1e-2, code=2)


def test_a_comparison_may_get_more_seeds_and_another_margin(adapt, tmp_path):
    out = tmp_path / "out"
    words = (*TEXT, "--labelled", "labelled", *TUNED, "--method", "compare", "--out", out)
    adapt(*words)
    ended = {f: f.stat().st_mtime_ns for f in out.glob("*/**/final.safetensors")}
    said = " ".join(adapt(*words, "--seeds", 6, "--margin", 0.2).split())
    assert {f: f.stat().st_mtime_ns for f in ended} == ended and len(ended) == 2 + 15
    result = json.loads((out / "result.json").read_text())
    assert (result["looks"], result["judgement"]["seeds"], result["asked"]["margin"]) == (2, 6, 0.2)
    assert "This is look 2 at the same scored examples" in said
    assert "is complete" in adapt(*words, "--seeds", 6, "--margin", 0.2)
    (out / "result.json").unlink()  # as if it had been killed after the test was read
    (out / "compare.html").unlink()
    said = " ".join(adapt(*words, "--seeds", 6, "--margin", 0.2, "--tune-lr", 1e-2, code=2).split())
    assert f"--method fine-tune --model {out / 'ARM' / 'adapted'}" in said
    adapt(*words, "--seeds", 6, "--margin", 0.2)
    assert json.loads((out / "result.json").read_text()) == result
    assert "6 seeds" in (out / "compare.html").read_text()
    adapt(*words[:-1], tmp_path / "alone", "--seeds", 6, "--margin", 0.2)
    alone = json.loads((tmp_path / "alone" / "result.json").read_text())
    assert alone["judgement"] == result["judgement"] and alone["looks"] == 1


def test_what_is_in_both_splits_is_not_judged_on(adapt, given, tmp_path):
    texts = (given / "labelled" / "train.csv").read_text().splitlines()
    for name, rows in (("train", texts), ("test", [*texts[:4], "w1 w2 w3,cat", "w4 w5,dog"])):
        (tmp_path / f"{name}.csv").write_text("\n".join(rows))
    words = (*TEXT, "--labelled", tmp_path, *TUNED)
    said = " ".join(adapt(*words, "--method", "compare", "--out", tmp_path / "three").split())
    result = json.loads((tmp_path / "three" / "result.json").read_text())
    left_out = result["repeated"]  # of three, those that are not held out for validation
    assert 0 < left_out <= 3 and result["judgement"]["examples"] == 5 - left_out
    assert f"{left_out} scored examples were left out: they are also training examples." in said
    said = adapt(*words, "--out", tmp_path / "one")
    assert f"Classifier, test without {left_out} that are also trained on: accuracy" in said
    (tmp_path / "dev.csv").write_text("text,label\nw1 w2,cat\nw3 w4,dog")  # all else is trained on
    (tmp_path / "test.csv").write_text("\n".join(texts[:7]))
    assert "All test examples are also trained on" in adapt(*words, "--out", tmp_path / "two")
    said = " ".join(adapt(*words, "--method", "compare", "--out", tmp_path / "all").split())
    assert "all scored examples are also training examples" in said
    judged = json.loads((tmp_path / "all" / "result.json").read_text())["judgement"]
    assert judged["best"] is None and judged["examples"] == 6
    assert {each["word"] for each in judged["differences"]} == {"undecided"}


def test_a_model_is_not_overwritten_by_what_is_made_of_it(adapt, given, tmp_path):
    shutil.copytree(given / "roberta", tmp_path / "adapted")
    words = ("--model", tmp_path / "adapted", "--unlabelled", "texts.txt", *SHORT)
    said = adapt(*words, "--method", "further", "--out", tmp_path, code=2)
    assert "is where" in said and "is read from: choose another folder" in " ".join(said.split())
    (tmp_path / "link").symlink_to(tmp_path / "adapted")
    words = ("--model", tmp_path / "link", *words[2:], "--method", "further")
    assert "is read from" in " ".join(adapt(*words, "--out", tmp_path, code=2).split())
    adapt(*words, "--out", tmp_path.parent, "--dry-run")  # which would write another


def test_who_has_no_bar_gets_a_line_now_and_then(adapt, tmp_path, monkeypatch):
    monkeypatch.setattr("moiety.adapt.flight.TOLD", 0.0)
    monkeypatch.setattr("moiety.cli.adapt.telling.SAID", 0.0)
    said = adapt(*TEXT, "--method", "further", "--out", tmp_path / "out")
    assert re.search(r"further pre-training: 67%, about [\d.]+ s left", said)


def test_scoring_can_be_stopped_and_is_done_again(adapt, tmp_path, monkeypatch):
    words = (*TEXT, "--labelled", "labelled", *TUNED, "--out")
    adapt(*words, tmp_path / "alone")
    real = Bar.__call__

    def stop(self, name, share):
        real(self, name, share)
        if name == "scoring test":
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Bar, "__call__", stop)
        adapt(*words, tmp_path / "out", code=130)
    adapt(*words, tmp_path / "out")
    one, two = ((tmp_path / name / "result.json").read_bytes() for name in ("alone", "out"))
    assert one == two


class StopHereError(Exception):
    pass


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (("--rounds", 3), "rounds", 3),
        (("--match", "cls"), "match", "cls"),
        (("--mae-weight", 0.5), "mae_weight", 0.5),
        (("--distill-weight", 2), "distill_weight", 2.0),
        (("--distill-every", 2), "distill_every", 2),
        (("--model", "mixture", "--match-routing", 0.1), "match_routing", 0.1),
        (("--cache-limit", "2MB"), "cache_limit", 2_000_000),
        (("--cache-limit", "0"), "cache", False),
        (("--model", "headless", "--warm-steps", 7), "warm_steps", 7),
        (("--lora", 4), "lora", 4),
        (("--precision", "bfloat16"), "precision", "bfloat16"),
        (("--stop", "probe", "--labelled", "labelled"), "stop", "probe"),
        (("--stop", "probe", "--patience", 5, "--labelled", "labelled"), "patience", 5),
        (("--seed", 4), "seed", 4),
        (("--save-every", 1), "save_every", 1.0),
    ],
)
def test_every_option_reaches_the_training(adapt, monkeypatch, tmp_path, words, name, value):
    heard = {}

    def stop(*_, **given):
        heard.update(given)
        raise StopHereError

    monkeypatch.setattr(command, "self_distill", stop)
    with pytest.raises(StopHereError):
        adapt(*TEXT, *words, "--out", tmp_path / "out")
    assert heard[name] == value
    assert (heard["steps"], heard["batch"], heard["lr"], heard["checks"]) == (3, 15, 1e-3, 2)


def test_the_options_of_fine_tuning_reach_it(adapt, monkeypatch, tmp_path):
    heard = {}

    def stop(*_, **given):
        heard.update(given)
        raise StopHereError

    monkeypatch.setattr(command, "finetune", stop)
    words = ("--tune", "mars", "--epochs", 2, "--tune-batch", 3, "--tune-lr", 0.1)
    with pytest.raises(StopHereError):
        adapt(*TEXT, "--labelled", "labelled", *words, "--out", tmp_path / "out")
    wanted = {"method": "mars", "epochs": 2, "batch": 3, "lr": 0.1, "seed": 0}
    assert {name: heard[name] for name in wanted} == wanted


def test_sizes_are_read():
    sizes = {"10B": 10, "1.5kB": 1500, "2 MB": 2e6, "3gb": 3e9, "0": 0}
    assert {text: read_bytes(text) for text in sizes} == sizes
    with pytest.raises(ValueError, match="must be 0 or a size such as 500MB or 10GB, not '10'"):
        read_bytes("10")  # of what?


def test_a_comparison_ends_in_a_page_and_opens_the_test_split_last(adapt, monkeypatch, tmp_path):
    out, seen, real = tmp_path / "out", [], Labelled.test

    def opened(self):
        seen.append(len(list(out.glob("fine-tuning/*/*/final.safetensors"))))
        return real(self)

    drawn = {}

    def tuned(asked, encoder, train, seed, folder, **more):
        drawn.setdefault(folder.parent.name, []).append((seed, tuple(train.chosen.tolist())))
        return command.tuned_from(asked, encoder, train, seed, folder, **more)

    monkeypatch.setattr(Labelled, "test", opened)
    monkeypatch.setattr("moiety.adapt.comparing.tuned_from", tuned)
    words = (*TEXT, "--labelled", "labelled", *TUNED, "--method", "compare", "--labels", 8)
    said = adapt(*words, "--source", "texts.txt", "--out", out)
    assert seen == [15]  # once, after all fine-tunings
    assert drawn["fine-tune"] == drawn["further"] == drawn["self-distill"]
    assert len({labels for _, labels in drawn["further"]}) == 5
    result = json.loads((out / "result.json").read_text())
    assert {arm: len(found) for arm, found in result["scores"].items()} == {
        "fine-tune": 5,
        "further": 5,
        "self-distill": 5,
    }
    assert (result["split"], result["labels"], result["judgement"]["examples"]) == ("test", 8, 12)
    page = (out / "compare.html").read_text()
    assert "<script" not in page and "http://" not in page and "https://" not in page
    assert "undecided" in page.lower() and "undecided" in said
    assert "--labels 8" in page
    assert "may be deleted" in said
    arms = [
        (out / arm / "classifier" / "model.safetensors").read_bytes() for arm in result["scores"]
    ]
    assert len(set(arms)) == 3
    made = [out / arm / "adapted" / "model.safetensors" for arm in ("further", "self-distill")]
    assert made[0].read_bytes() != made[1].read_bytes()
    assert not (out / "fine-tune" / "adapted").exists()  # it is the model as it was
    (out / "compare.html").unlink()
    with pytest.raises(SystemExit):
        cli.main(["report", str(out)])
    assert (out / "compare.html").read_text() == page


def test_seeds_draw_their_labels_and_all_classes_are_there(given):
    plan = {"model": str(given / "roberta"), "unlabelled": str(given / "texts.txt")}
    opened = begin(Asked(**plan, labelled=str(given / "labelled")), None)
    parts = [command.draw(opened.labelled, 3, seed) for seed in range(6)]
    assert all(len(part) == 3 and len(part.labels.unique()) == 2 for part in parts)
    assert len({tuple(sorted(part.chosen.tolist())) for part in parts}) > 1
    assert command.draw(opened.labelled, None, 0) is opened.labelled.train
    assert torch.equal(command.draw(opened.labelled, 3, 1).labels, parts[1].labels)
