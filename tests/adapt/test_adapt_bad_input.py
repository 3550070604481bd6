"""What `moiety adapt` refuses: one sentence that says what to change, and no trace is left."""

import json
import shutil

import asking
import numpy as np
import pytest
import tiny
import torch
import transformers as T

from moiety.adapt.cache import Cache, Key
from moiety.adapt.text import check_tokenizer

SHORT = ("--steps", 2, "--batch", 4, "--checks", 1)


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Models and data that nobody changes."""
    folder = tmp_path_factory.mktemp("given")
    asking.roberta(folder / "roberta")
    asking.vit_mae(folder / "mae")
    asking.texts(folder / "texts.txt")
    asking.tables(folder / "labelled")
    asking.images(folder / "images")
    return folder


@pytest.fixture
def refused(given, tmp_path, capsys):
    """Run a command that is refused; return its only sentence."""

    def run(model="roberta", unlabelled="texts.txt", *more, out=None):
        words = ["--model", given / model, "--unlabelled", given / unlabelled, *SHORT, *more]
        code = asking.run(*words, "--out", out or tmp_path / "out")
        said = capsys.readouterr().err.strip().splitlines()
        assert code == 2, said
        assert said[-1].startswith("moiety: "), said
        return said[-1].removeprefix("moiety: ")

    return run


def gpt2(folder):
    config = T.GPT2Config(vocab_size=tiny.VOCABULARY, n_embd=16, n_layer=1, n_head=2)
    T.GPT2LMHeadModel(config).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)


def causal_roberta(folder):
    config = T.RobertaConfig(is_decoder=True, **tiny.TEXT)
    T.RobertaForCausalLM(config).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)


def t5(folder):
    config = T.T5Config(vocab_size=48, d_model=16, d_ff=16, d_kv=8, num_layers=1, num_heads=2)
    T.T5ForConditionalGeneration(config).save_pretrained(folder)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (gpt2, "is no masked language model and no ViT-MAE; adaptation takes masked encoders"),
        (causal_roberta, "is a causal model (is_decoder is set); adaptation takes masked"),
        (t5, "is an encoder–decoder; adaptation takes masked encoders"),
    ],
)
def test_a_model_that_is_no_masked_encoder(refused, tmp_path, make, said):
    make(tmp_path / "model")
    assert said in refused(tmp_path / "model")
    assert not list((tmp_path / "out").glob("*.json"))


def test_a_tokenizer_that_does_not_match_or_cannot_mask(refused, given, tmp_path):
    for name, tokenizer in {
        "larger": tiny.tokenizer([f"v{i}" for i in range(90)]),
        "smaller": tiny.tokenizer([f"v{i}" for i in range(9)]),
        "maskless": tiny.tokenizer(mask=False),
    }.items():
        shutil.copytree(given / "roberta", tmp_path / name)
        tokenizer.save_pretrained(tmp_path / name)
    said = refused(tmp_path / "larger")
    assert said == (
        "the tokenizer does not match: its largest token id is 94, and the model embeds 48 tokens; "
        "give the tokenizer that the model was trained with"
    )
    assert "largest token id is 13, and the model embeds 48" in refused(tmp_path / "smaller")
    assert "no mask token" in refused(tmp_path / "maskless")


def test_a_tokenizer_that_pads_with_what_the_model_takes_for_a_word(refused, given, tmp_path):
    shutil.copytree(given / "roberta", tmp_path / "other")
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = tiny.SPECIAL[1]
    tokenizer.save_pretrained(tmp_path / "other")
    said = refused(tmp_path / "other")
    assert "it pads with token 1, and the model takes 0 for padding" in said


@pytest.mark.parametrize("rows", [1000, 1120, 1200, 2100])
def test_a_few_embeddings_without_a_token_are_usual_and_many_another_vocabulary(rows, recwarn):
    tokenizer = tiny.tokenizer([f"v{i}" for i in range(1000 - len(tiny.SPECIAL))])
    model = T.BertForMaskedLM(T.BertConfig(**{**tiny.TEXT, "vocab_size": rows}))
    said = f"largest token id is 999, and the model embeds {rows}"
    if rows == 2100:
        with pytest.raises(ValueError, match=said):
            check_tokenizer(model, tokenizer)
        return
    check_tokenizer(model, tokenizer)
    # As IndoBERT has: odd, and its own.
    assert [said in str(one.message) for one in recwarn] == [True] * (rows == 1200)


def test_a_model_that_does_not_count_from_its_padding_may_be_padded_with_another_token():
    model = T.BertForMaskedLM(T.BertConfig(**tiny.TEXT))
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = tiny.SPECIAL[1]
    with pytest.warns(UserWarning, match="it pads with token 1, and the model takes 0 for padding"):
        check_tokenizer(model, tokenizer)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "texts.txt holds no text; a corpus needs at least two lines"),
        ("\n \n", "texts.txt holds no text; a corpus needs at least two lines"),
        ("w1 w2 w3\n", "texts.txt holds a single line; a corpus needs at least two lines"),
    ],
)
def test_a_corpus_without_lines_or_with_one(refused, tmp_path, text, said):
    (tmp_path / "texts.txt").write_text(text)
    assert refused("roberta", tmp_path / "texts.txt") == said


def test_images_that_the_model_does_not_read(refused, tmp_path, given):
    grey = asking.images(tmp_path / "grey", channels=1)
    large = asking.images(tmp_path / "large", size=16)
    assert "16×16" in refused("mae", large) and "12×12" in refused("mae", large)
    said = refused("mae", grey)
    assert "1 channel" in said and said.endswith("or give --fit")
    assert "images" in refused("roberta", given / "images" / "0.png")


def test_a_cache_of_another_teacher(refused, tmp_path):
    folder = tmp_path / "out" / "pretraining" / "round-1" / "cache"
    key = Key(teacher="another", input="", layer="", shape=(1, 1, 1))
    Cache.open(folder, key)
    said = refused("roberta", "texts.txt", "--batch", 44)
    assert said == (
        f"{folder} caches the representations of another teacher: delete it, or choose another "
        "folder"
    )
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--stop", "probe"), "--stop probe needs --labelled, whose training split it probes on"),
        (
            ("--method", "compare"),
            "--method compare needs --labelled, to fine-tune on and to score",
        ),
        (("--epochs", 3), "--epochs goes with --labelled"),
        (("--tune-lr", 1e-3), "--tune-lr goes with --labelled"),
        (("--seeds", 7), "--seeds goes with --method compare"),
        (("--patience", 2), "--patience goes with --stop probe"),
        (
            ("--cache-limit", "much"),
            "--cache-limit must be 0 or a size such as 500MB or 10GB, not 'much'",
        ),
        (
            ("--method", "further", "--rounds", 2),
            "--rounds goes with self-distillation, not with --method further",
        ),
        (
            ("--method", "further", "--cache-limit", "1GB"),
            "--cache-limit goes with self-distillation, not with --method further",
        ),
        (
            ("--distill-weight", 0, "--distill-every", 3),
            "--distill-every goes with a --distill-weight above 0",
        ),
        (("--mae-weight", "nan"), "--mae-weight must be a number, got nan"),
        (("--lr", -1), "--lr must be above 0, got -1"),
        (("--length", 99), "length must be from 3 to 23, got 99"),
        (("--text", "nocolumn"), "--text goes with a table, and there is none"),
        (("--labelled-text", "x"), "--labelled-text goes with --labelled"),
        (
            ("--match-routing", 0.1),
            "--match-routing goes with a model with experts; see moiety upcycle",
        ),
        (("--fit",), "--fit goes with images, and the model reads texts"),
        (("--data-dir", "nowhere"), "--data-dir goes with a built-in set, and there is none"),
        (
            ("--labelled", "scierc", "--labelled-text", "x"),
            "--labelled-text goes with a labelled table, and there is none",
        ),
        (("--labelled", "scierc", "--text", "x"), "--text goes with a table, and there is none"),
        (("--warm-steps", 9), "--warm-steps goes with a model that lacks its head or decoder"),
    ],
)
def test_options_that_would_do_nothing_or_make_no_sense(refused, more, said):
    assert refused("roberta", "texts.txt", *more) == said


def test_the_labelled_table_may_have_another_column_of_texts(refused, tmp_path):
    papers, cited = tmp_path / "papers.csv", tmp_path / "cited.csv"
    papers.write_text("\n".join(["abstract", *["w1 w2 w3"] * 40]))
    cited.write_text("\n".join(["body,label", *[f"w{i},{'ab'[i % 2]}" for i in range(40)]]))
    (tmp_path / "split").mkdir()
    cited.rename(tmp_path / "split" / "train.csv")
    words = ("--text", "abstract", "--labelled", tmp_path / "split")
    said = refused("roberta", papers, *words, out=tmp_path.with_name("out"))
    assert said == (
        "train.csv has no column 'abstract' of texts; it has body: give --labelled-text NAME"
    )


def test_images_by_class_have_no_column_to_predict(refused, tmp_path):
    for name in ("a", "b"):
        asking.images(tmp_path / "train" / name)
    words = ("--labelled", tmp_path, "--target", "breed")
    said = refused("mae", "images", *words, out=tmp_path.with_name("out"))
    assert said == "train holds images by class: it has no column 'breed'"


def test_options_of_texts_with_a_model_of_images(refused, tmp_path):
    said = refused("mae", "images", "--length", 9)
    assert said == "--length goes with texts, and the model reads images"
    for name in ("a", "b"):
        asking.images(tmp_path / "train" / name)
    asked = ("--labelled", tmp_path, "--labelled-text", "x")
    said = refused("mae", "images", *asked, out=tmp_path.with_name("out"))
    assert said == "--labelled-text goes with texts, and the model reads images"
    said = refused("mae", "images", "--text", "x")
    assert said == "--text goes with an .npz of images, and there is none"


def test_which_array_holds_the_images(refused, given, tmp_path, capsys):
    pixels = np.zeros((20, 12, 12, 3), np.uint8)
    np.savez(tmp_path / "two.npz", a=pixels, b=pixels)
    said = refused("mae", tmp_path / "two.npz")
    assert said == "two.npz: give --text NAME for one of a, b"
    said = refused("mae", tmp_path / "two.npz", "--text", "c")
    assert said == "two.npz has no array 'c'; it has a, b"
    np.savez(tmp_path / "wide.npz", x=pixels.astype(np.float32))
    said = refused("mae", tmp_path / "wide.npz")  # the only array is taken, whatever its name
    assert said == (
        "wide.npz: images must be uint8 [N, H, W, C] or, grey ones, [N, H, W], "
        "got float32 [20, 12, 12, 3]"
    )
    np.savez(tmp_path / "one.npz", x=pixels)
    for words in (("one.npz",), ("two.npz", "--text", "b")):
        words = (tmp_path / words[0], *words[1:], "--dry-run", "--out", tmp_path / "out")
        code = asking.run("--model", given / "mae", "--unlabelled", *words)
        assert code == 0, capsys.readouterr()


def test_what_a_comparison_needs(refused, given):
    asked = ("--method", "compare", "--labelled", given / "labelled")
    said = refused("roberta", "texts.txt", *asked, "--seeds", 4)
    assert said == "--seeds must be at least 5 to compare, got 4"
    said = refused("roberta", "texts.txt", *asked, "--labels", 99)
    assert said == "--labels must be from 2, one for each class, to 16, got 99"
    said = refused("roberta", "texts.txt", *asked, "--margin", 0)
    assert said == "--margin must be between 0 and 1, got 0"
    said = refused("roberta", "texts.txt", *asked, "--labels", 4, "--stop", "probe")
    assert said == (
        "--stop probe chooses by all training labels, and --labels says how many there are: "
        "choose one"
    )


def test_fine_tuning_is_refused_before_any_training(refused, given, tmp_path):
    said = refused("roberta", "texts.txt", "--labelled", given / "labelled", "--tune-lr", -1)
    assert said == "--tune-lr must be above 0, got -1"
    assert not (tmp_path / "out" / "pretraining" / "plan.json").exists()


def test_a_rate_that_is_too_high_wants_another_folder(refused):
    said = refused("roberta", "texts.txt", "--lr", 1e30)
    assert said.endswith("lower the learning rate (1e+30), in another --out")


def test_a_folder_that_is_read_from_is_not_written_to(refused, given):
    for out in (given / "roberta", given / "labelled"):
        before = sorted(out.iterdir())
        said = refused("roberta", "texts.txt", "--labelled", given / "labelled", out=out)
        assert said == f"--out {out} is where {out} is read from: choose another folder"
        assert sorted(out.iterdir()) == before


def test_arrays_with_channels_first_or_too_many(refused, tmp_path):
    np.save(tmp_path / "first.npy", np.zeros((20, 3, 12, 12), np.uint8))
    for fit in ((), ("--fit",)):
        said = refused("mae", tmp_path / "first.npy", *fit)
        assert said == "first.npy: images must be [N, H, W, C] or [N, H, W], not [20, 3, 12, 12]"
    np.save(tmp_path / "clear.npy", np.zeros((20, 12, 12, 4), np.uint8))
    said = refused("mae", tmp_path / "clear.npy", "--fit")
    assert said == "clear.npy: images have 4 channels, and 1 or 3 are read"


def test_images_for_a_model_of_texts(refused):
    assert refused("roberta", "images").endswith("holds images, and the model reads texts")


def test_another_command_in_the_same_folder(refused, given, tmp_path, capsys):
    words = ["--model", given / "roberta", "--unlabelled", given / "texts.txt", *SHORT]
    words += ["--method", "further", "--out", tmp_path / "out"]
    assert asking.run(*words) == 0
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*.json")}
    said = refused("roberta", "texts.txt", "--method", "further", "--lr", 0.1)
    assert said == (
        f"{tmp_path / 'out'} was begun with lr at its default (now 0.1): give the same, or "
        "another folder"
    )
    said = refused("mae", "texts.txt", "--method", "further")
    assert "was begun with model '" in said  # as it was named
    assert before == {path: path.read_bytes() for path in (tmp_path / "out").rglob("*.json")}


def test_examples_or_a_head_that_changed_while_it_was_dead(refused, given, tmp_path, monkeypatch):
    shutil.copytree(given / "roberta", tmp_path / "model")
    shutil.copy(given / "texts.txt", tmp_path / "texts.txt")

    def killed(*_, **__):
        raise KeyError("killed")

    with monkeypatch.context() as patched:
        patched.setattr("moiety.adapt.course.Course.further", killed)
        with pytest.raises(KeyError, match="killed"):
            refused(tmp_path / "model", tmp_path / "texts.txt")
    begun = f"{tmp_path / 'out' / 'pretraining'} was begun"
    asking.texts(tmp_path / "texts.txt", 50)
    said = refused(tmp_path / "model", tmp_path / "texts.txt")
    assert said == f"the examples have changed since {begun}: give the same, or another folder"
    model = T.RobertaForMaskedLM.from_pretrained(tmp_path / "model")
    torch.nn.init.normal_(model.lm_head.dense.weight)  # the encoder stays
    model.save_pretrained(tmp_path / "model")
    said = refused(tmp_path / "model", tmp_path / "texts.txt")
    assert said == f"{begun} with another model: give the same, or another folder"


def test_a_defect_of_the_test_split_is_put_right_at_the_end(refused, given, tmp_path, capsys):
    labelled = shutil.copytree(given / "labelled", tmp_path / "labelled")
    good = (labelled / "test.csv").read_text()
    (labelled / "test.csv").write_text(f"{good}w1 w2,cow\n")
    more = ("--labelled", labelled, "--epochs", 1)
    assert "test.csv has the class 'cow', which train lacks" in refused(
        "roberta", "texts.txt", *more
    )
    final = tmp_path / "out" / "pretraining" / "round-1" / "final.safetensors"
    before = final.stat().st_mtime_ns
    (labelled / "test.csv").write_text(good)
    words = ["--model", given / "roberta", "--unlabelled", given / "texts.txt", *SHORT, *more]
    assert asking.run(*words, "--out", tmp_path / "out") == 0, capsys.readouterr()
    assert final.stat().st_mtime_ns == before  # no pre-training is done twice


def test_a_refused_command_can_be_put_right_in_the_same_folder(refused, given, tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("")
    refused("roberta", tmp_path / "empty.txt")
    refused("roberta", "texts.txt", "--lr", -1)
    assert "with experts" in refused("roberta", "texts.txt", "--match-routing", 0.1)
    words = ["--model", given / "roberta", "--unlabelled", given / "texts.txt", *SHORT]
    assert asking.run(*words, "--out", tmp_path / "out") == 0, capsys.readouterr()
    assert json.loads((tmp_path / "out" / "plan.json").read_text())["steps"] == 2


def test_files_of_another_program_stay(refused, tmp_path):
    out = tmp_path / "out"
    for name in ("result.json", "plan.json"):
        out.mkdir()
        (out / name).write_text('{"a": 1}')
        assert refused(out=out) == f"{out / name} is not of `moiety adapt`: choose another --out"
        assert {file.name: file.read_text() for file in out.glob("*.json")} == {name: '{"a": 1}'}
        shutil.rmtree(out)
