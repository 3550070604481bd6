"""`moiety audit`: a saved model and images end in a page; mistakes are one sentence."""

import json
import re

import numpy as np
import pytest
import torch
import transformers as T
from PIL import Image

import moiety as package
from moiety.cli.audit import read_eps
from moiety.cli.audit.pictures import prepare
from moiety.data import load_problem
from planted import save

SIZE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
FAST = ["--steps", 3, "--examples", 12]


def vit(folder, *, size=8, channels=1, classes=10, processor=None, names=None, experts=False):
    """Save a tiny ViT, dense or with experts, and return its folder."""
    config = T.ViTConfig(
        **SIZE, num_attention_heads=2, image_size=size, patch_size=4, num_channels=channels
    )
    config.id2label = dict(enumerate(names or [f"LABEL_{i}" for i in range(classes)]))
    config.label2id = {name: i for i, name in config.id2label.items()}
    torch.manual_seed(0)
    model = T.ViTForImageClassification(config)
    if experts:
        model = package.upcycle(model, experts=4, router="top-k", k=2)
        package.save(model, folder)
    else:
        model.save_pretrained(folder)
    if processor is not None:
        processor.save_pretrained(folder)
    return folder


@pytest.fixture
def photos(tmp_path):
    """A folder of colour images by class."""
    draw = np.random.default_rng(0)
    for split in ("train", "test"):
        for name, level in (("zebra", 60), ("ant", 180)):
            (tmp_path / "photos" / split / name).mkdir(parents=True)
            for i in range(6):
                pixels = (level + draw.integers(-50, 50, (10, 10, 3))).astype(np.uint8)
                Image.fromarray(pixels).save(tmp_path / "photos" / split / name / f"{i}.png")
    return tmp_path / "photos"


# -- sizes -----------------------------------------------------------------------------------------


def test_sizes_are_numbers_or_fractions_in_order():
    assert read_eps("8/255, 0,1/255,0.5,0.5", "linf") == [0, 1 / 255, 8 / 255, 0.5]


@pytest.mark.parametrize(
    "text", ["8/0", "", "a", "1/255,", "nan", "1/2/3", "8/", "1e999999999", "inf"]
)
def test_what_is_no_size_is_one_sentence(text):
    with pytest.raises(ValueError, match=r"--eps must be numbers such as 0\.03 or 8/255"):
        read_eps(text, "l2")


def test_a_negative_size_is_refused():
    with pytest.raises(ValueError, match="must not be negative, got -1/255"):
        read_eps("0,-1/255", "linf")


def test_sizes_that_attack_nothing_or_everything_are_refused():
    with pytest.raises(ValueError, match="at least one number above 0, got 0,0"):
        read_eps("0,0", "linf")
    with pytest.raises(ValueError, match=r"--eps 8 is more than a pixel can move.*8/255"):
        read_eps("1/255,8", "linf")
    assert read_eps("8", "l2") == [8]  # the length of all pixels may be more than one


# -- images ----------------------------------------------------------------------------------------


def test_without_a_processor_images_are_normalised_by_the_data(tmp_path):
    from moiety.hf.loading import load_any

    folder = str(vit(tmp_path / "m", size=16, channels=3))
    problem = load_problem("digits")
    given = prepare(load_any(folder), folder, problem, 20, 0)
    assert given.x.shape == (20, 3, 16, 16) and given.x.min() >= 0 and given.x.max() <= 1
    assert given.x.max() > 0.9  # bytes were brought to 0…1, and nothing else
    assert given.normalize == ([problem.mean[0]] * 3, [problem.std[0]] * 3)
    assert "mean and std of the training images (it has no image processor)" in given.says
    other = prepare(load_any(folder), folder, problem, 20, 1)
    assert not torch.equal(given.x, other.x)  # the seed draws the images


def test_a_processor_resizes_and_its_normalisation_is_left_to_the_model(tmp_path, photos):
    from moiety.hf.loading import load_any

    processor = T.ViTImageProcessor(
        size={"height": 8, "width": 8}, image_mean=[0.1, 0.2, 0.3], image_std=[0.5, 0.6, 0.7]
    )
    names = ["zebra", "ant"]
    folder = str(vit(tmp_path / "m", channels=3, names=names, processor=processor))
    problem = load_problem(photos)
    model = load_any(folder)
    given = prepare(model, folder, problem, 100, 0)
    assert given.normalize == ([0.1, 0.2, 0.3], [0.5, 0.6, 0.7])
    assert given.x.shape == (12, 3, 8, 8) and "ViTImageProcessor" in given.says
    # What the attacked model sees is what the processor gives.
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in given.normalize)
    rows = list(problem.test.inputs["images"].permute(0, 2, 3, 1).numpy())
    wanted = processor(rows, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close((given.x - mean) / std, wanted, atol=1e-5, rtol=0)
    # Classes go by name: the data count ant first, the model zebra.
    assert problem.targets[0].classes == ["ant", "zebra"] and "by name" in given.says
    assert torch.equal(given.y, 1 - problem.test.targets["class"])


def test_a_processor_that_keeps_bytes_is_refused(tmp_path, photos):
    from moiety.hf.loading import load_any

    processor = T.ViTImageProcessor(size={"height": 8, "width": 8}, do_rescale=False)
    folder = str(vit(tmp_path / "m", channels=3, classes=2, processor=processor))
    with pytest.raises(ValueError, match="does not bring bytes to 0…1"):
        prepare(load_any(folder), folder, load_problem(photos), 5, 0)


# -- the command -----------------------------------------------------------------------------------


def test_a_model_with_experts_gets_a_page(moiety, tmp_path):
    model, out = vit(tmp_path / "m", experts=True), tmp_path / "out"
    given = ["--model", model, "--data", "digits", "--eps", "0,8/255", "--attack", "apgd"]
    code, said, err = moiety("audit", *given, *FAST, "--out", out)
    assert code == 0, err
    assert "12 test images of" in said and "no image processor" in said
    assert "Per example: Each was attacked by itself: none can be fooled through another." in said
    assert re.search(r"apgd +\d+\.\d% +\d+\.\d%", said)
    result = json.loads((out / "audit.json").read_text())
    assert result["kind"] == "audit" and result["data"]["examples"] == 12
    assert result["eps"] == [0, 8 / 255] and len(result["routing"]) == 2
    page = (out / "audit.html").read_text()
    assert "Audit of m" in page and "Routing change" in page
    assert "--eps 0,8/255 --norm linf --seed 0 --examples 12" in result["command"]
    assert "--attack apgd --steps 3" in page


def test_a_dense_model_in_l2_by_two_attacks(moiety, tmp_path):
    model = vit(tmp_path / "m")
    given = ["--model", model, "--data", "digits", "--eps", "0.5", "--attack", "pgd,fgsm"]
    code, said, err = moiety("audit", *given, "--norm", "l2", *FAST, "--out", tmp_path / "p.html")
    assert code == 0, err
    result = json.loads((tmp_path / "p.json").read_text())
    assert result["routing"] is None and list(result["attacks"]) == ["pgd", "fgsm"]
    assert result["threat"]["norm"] == "l2" and "union" in said
    assert "Routing change" not in (tmp_path / "p.html").read_text()


def test_groups_are_a_batch_threat_model(moiety, tmp_path):
    model, out = vit(tmp_path / "m", experts=True), tmp_path / "out"
    given = ["--model", model, "--data", "digits", "--eps", "8/255", "--group", 4]
    code, said, err = moiety("audit", *given, *FAST, "--out", out)
    assert code == 0, err
    assert "Batch threat model: Groups of 4" in said
    assert json.loads((out / "audit.json").read_text())["threat"]["group"] == 4


def test_a_seed_repeats_itself(moiety, tmp_path):
    model, results = vit(tmp_path / "m", experts=True), []
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        given = ["--model", model, "--data", "digits", "--eps", "4/255", "--seed", seed]
        moiety("audit", *given, "--steps", 2, "--examples", 4, "--out", tmp_path / folder)
        result = json.loads((tmp_path / folder / "audit.json").read_text())
        results.append((result["clean"], result["attacks"]["apgd"]["loss"], result["routing"]))
    assert results[0] == results[1] != results[2]


def test_a_dry_run_writes_nothing(moiety, tmp_path):
    given = ["--model", vit(tmp_path / "m"), "--data", "digits", "--out", tmp_path / "out"]
    code, said, _ = moiety("audit", *given, "--dry-run")
    assert code == 0 and "apgd at ε = 0, 1/255, 2/255, 4/255, 8/255 in linf on cpu" in said
    assert not (tmp_path / "out").exists()
    _, said, _ = moiety("audit", *given, "--norm", "l2", "--dry-run")
    assert "at ε = 0, 0.25, 0.5, 1 in l2" in said  # 8/255 is nothing for the length of an image


def test_an_attack_that_is_named_twice_is_made_once(moiety, tmp_path):
    given = ["--model", vit(tmp_path / "m", experts=True), "--data", "digits", "--dry-run"]
    code, said, _ = moiety("audit", *given, "--attack", "pgd,pgd", "--attack", "apgd + overload")
    assert code == 0 and "Would run apgd, pgd, apgd + overload at" in said


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["--eps", "8/0"], "--eps must be numbers such as 0.03 or 8/255"),
        (["--eps", "0"], "--eps must hold at least one number above 0"),
        (["--attack", "pdg"], "no attack is named 'pdg'"),
        (["--attack", "apgd + overload"], "leave out the attack 'apgd + overload': "),
        (["--seed", str(2**63)], "seed must be a whole number from 0 to 2^63 - 1"),
        (["--seed", "-1"], "--seed"),
        (["--group", "13"], "groups of 13 need as many examples, and there are 12"),
        (["--norm", "l7"], "--norm must be linf or l2, not 'l7'"),
        (["--device", "nonsense"], "no device 'nonsense'"),
        (["--data", "nowhere"], "there is no file or folder nowhere"),
        (["--model", "./nowhere"], "there is no folder ./nowhere"),
        (["--examples", "0"], "--examples"),
    ],
)
def test_a_wrong_argument_is_one_sentence(moiety, tmp_path, changed, said):
    given = {"--model": vit(tmp_path / "m"), "--data": "digits", "--examples": "12"}
    given |= {"--steps": 2, "--out": tmp_path / "out"} | dict([changed])
    words = [word for pair in given.items() for word in pair]
    code, out, err = moiety("audit", *words, "--dry-run")  # which finds what a run would
    assert out == "" and not (tmp_path / "out").exists()  # before any work
    (line,) = [line for line in err.splitlines() if line.startswith("moiety:")]
    assert code == 2 and said in line and err.endswith(f"{line}\n")


def test_a_table_has_no_pixels(moiety, tmp_path):
    rows = "\n".join(f"{i % 7},{i % 2}" for i in range(40))
    (tmp_path / "t.csv").write_text(f"a,label\n{rows}\n")
    code, _, err = moiety("audit", "--model", vit(tmp_path / "m"), "--data", tmp_path / "t.csv")
    assert code == 2 and "t.csv holds a table, and this command moves pixels" in err


def test_texts_have_no_pixels(moiety, tmp_path):
    rows = [json.dumps({"text": f"some words {i}", "label": "ab"[i % 2]}) for i in range(40)]
    (tmp_path / "t.jsonl").write_text("\n".join(rows))
    code, _, err = moiety("audit", "--model", vit(tmp_path / "m"), "--data", tmp_path / "t.jsonl")
    assert code == 2 and "holds texts, and this command moves pixels" in err
    assert "moiety.robust.audit" in err  # the way that there is


def test_a_model_of_texts_reads_no_images_whatever_the_data(moiety, tmp_path):
    model = save(tmp_path / "texts", "olmoe")
    code, _, err = moiety("audit", "--model", model, "--data", "nowhere")
    assert code == 2 and "reads no images (OlmoeForCausalLM)" in err
    assert "in the space of their embeddings" in err


def test_a_model_without_classes_is_refused(moiety, tmp_path):
    from moiety.hf.loading import load_any

    load_any(str(vit(tmp_path / "m"))).vit.save_pretrained(tmp_path / "bare")
    code, _, err = moiety("audit", "--model", tmp_path / "bare", "--data", "digits")
    assert code == 2 and "is a ViTModel, which gives no scores of classes" in err


def test_a_processor_of_another_size_than_the_model_is_told(moiety, tmp_path):
    processor = T.ViTImageProcessor(size={"height": 16, "width": 16})
    model = vit(tmp_path / "m", channels=3, processor=processor)
    code, _, err = moiety("audit", "--model", model, "--data", "digits")
    assert code == 2 and "m cannot read images of 3×16×16: " in err and "Traceback" not in err


def test_images_of_another_size_and_few_of_them_are_told(moiety, tmp_path, photos):
    model = vit(tmp_path / "m", channels=3, classes=2)
    code, said, err = moiety("audit", "--model", model, "--data", photos, "--dry-run")
    assert code == 0, err
    assert "12 test images of photos (all there are), 10×10 brought to 8×8" in said
    assert "classes in the order of the data (ant, zebra)." in said  # LABEL_0 is no name


def test_colour_is_not_made_grey_in_silence(moiety, tmp_path, photos):
    code, _, err = moiety("audit", "--model", vit(tmp_path / "m", classes=2), "--data", photos)
    assert code == 2 and "the model reads grey images, and the data are images in colour" in err


def test_other_classes_than_the_model_has_are_told(moiety, tmp_path, photos):
    model = vit(tmp_path / "m", channels=3, classes=5)
    code, _, err = moiety("audit", "--model", model, "--data", photos)
    assert code == 2 and "the model has 5 classes and the data have 2" in err
