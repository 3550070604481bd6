"""Images are trained on as the saved model's own processor prepares them, or refused."""

import asking
import numpy as np
import pytest
import tiny
import torch
from PIL import Image
from torch.utils.data import TensorDataset
from transformers import CLIPImageProcessor, ViTImageProcessor

from moiety.adapt.corpus import read_corpus
from moiety.adapt.encoders import Encoder
from moiety.adapt.labelled import read_labelled
from moiety.data import load_problem
from moiety.hf.loading import load_image_processor


def viewer(side=12, channels=3, **more):
    return Encoder.load(tiny.vit_mae(image=side, channels=channels).eval(), **more)


def test_no_images_are_refused():
    none = torch.empty(0, 3, 12, 12, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"must be \[N, C, H, W\] with at least one"):
        read_corpus(TensorDataset(none), viewer())
    splits = {"train": TensorDataset(tiny.pictures(9), torch.arange(9) % 2)}
    splits["test"] = TensorDataset(none, torch.empty(0, dtype=torch.long))
    with pytest.raises(ValueError, match="test holds no example; give some, or leave it out"):
        read_labelled(splits, viewer())


@pytest.mark.parametrize(
    "processor",
    [ViTImageProcessor(size={"height": 12, "width": 12}),
     CLIPImageProcessor(size={"shortest_edge": 14}, crop_size={"height": 12, "width": 12})],
    ids=["plain", "cropping"],
)  # fmt: skip
def test_arrays_of_the_size_of_the_model_are_fitted_as_files_are(processor, tmp_path):
    pixels = drawn(6, 12, 12, 3)
    files = saved(tmp_path / "files", [Image.fromarray(each) for each in pixels])
    np.save(tmp_path / "all.npy", np.concatenate([pixels, pixels]))
    ways = [
        seen(viewer(processor=processor), path, fit=True) for path in (files, tmp_path / "all.npy")
    ]
    assert torch.equal(*ways)


def drawn(*shape, dtype=np.uint8, most=256, seed=0):
    return np.random.default_rng(seed).integers(0, most, shape).astype(dtype)


def saved(folder, images):
    """Images in a folder; two of each, so that one can be held out."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, image in enumerate([*images, *images]):
        image.save(folder / f"{number}.png")
    return folder


def seen(encoder, folder, **words):
    """What a model is trained on, one of each image."""
    corpus = read_corpus(folder, encoder, **words)
    rows = [encoder.batch(part.take(range(len(part)))) for part in (corpus.train, corpus.held)]
    return torch.cat([row["pixel_values"] for row in rows]).unique(dim=0)


# -- what the saved processor does -----------------------------------------------------------------

TALL = Image.fromarray(drawn(30, 15, 3))
ALPHA = Image.fromarray(drawn(12, 12, 4, seed=1), "RGBA")
PALETTE = Image.fromarray(drawn(12, 12, 3, seed=2)).quantize(16)


@pytest.mark.parametrize("resample", [2, 3])
@pytest.mark.parametrize("image", [TALL, ALPHA, PALETTE], ids=["tall", "transparent", "palette"])
def test_a_fitted_image_is_what_the_saved_processor_makes_of_it(image, resample, tmp_path):
    given = ViTImageProcessor(size={"height": 12, "width": 12}, resample=resample)
    encoder = viewer(processor=given)
    found = seen(encoder, saved(tmp_path / "images", [image]), fit=True)
    encoder.save(tmp_path / "adapted")
    processor = load_image_processor(str(tmp_path / "adapted"))
    wanted = processor(images=image, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(found, wanted)


def test_arrays_are_fitted_as_files_are(tmp_path):
    pixels = drawn(4, 30, 15, 3)
    folder = saved(tmp_path / "images", [Image.fromarray(one) for one in pixels])
    encoder = viewer()
    wanted = seen(encoder, folder, fit=True)
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).repeat(2, 1, 1, 1)
    assert torch.equal(seen(encoder, TensorDataset(images), fit=True), wanted)
    np.save(tmp_path / "images.npy", np.concatenate([pixels, pixels]))
    assert torch.equal(seen(encoder, tmp_path / "images.npy", fit=True), wanted)


def test_colour_becomes_grey_and_grey_colour(tmp_path):
    colour, grey = Image.fromarray(drawn(12, 12, 3)), Image.fromarray(drawn(12, 12))
    found = seen(viewer(channels=1), saved(tmp_path / "colour", [colour]), fit=True)
    assert torch.equal(
        found, seen(viewer(channels=1), saved(tmp_path / "l", [colour.convert("L")]))
    )
    found = seen(viewer(), saved(tmp_path / "grey", [grey]), fit=True)
    assert torch.equal(found, seen(viewer(), saved(tmp_path / "rgb", [grey.convert("RGB")])))


def test_images_of_many_channels_are_read_as_they_are():
    images = torch.from_numpy(drawn(20, 5, 12, 12))
    encoder = viewer(channels=5)
    assert len(seen(encoder, TensorDataset(images))) == 20
    with pytest.raises(ValueError, match=r"only uint8 images .* of 1 or 3 channels can be fitted"):
        read_corpus(TensorDataset(images[:, :, :9]), encoder, fit=True)


def test_a_processor_of_another_size_is_refused():
    with pytest.raises(ValueError, match=r"makes images of 224×224, and the model reads 12×12"):
        viewer(processor=ViTImageProcessor())


# -- what nobody could prepare so ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("image", "said"),
    [
        (ALPHA, "0.png is of mode RGBA, and the model reads RGB; convert it, or say fit=True"),
        (PALETTE, "0.png is of mode P, and the model reads RGB; convert it, or say fit=True"),
        (TALL, "0.png: the images are 30×15, and the model reads 12×12; resize them, or say fit"),
    ],
    ids=["transparent", "palette", "tall"],
)
def test_other_images_are_refused_without_fit(image, said, tmp_path):
    with pytest.raises(ValueError, match=said):
        read_corpus(saved(tmp_path / "images", [image]), viewer())


@pytest.mark.parametrize("fit", [False, True])
def test_more_than_eight_bits_are_refused(fit, tmp_path):
    deep = Image.fromarray(drawn(12, 12, dtype=np.uint16, most=4096))
    with pytest.raises(ValueError, match=r"0\.png has pixels of more than 8 bits"):
        read_corpus(saved(tmp_path / "images", [deep]), viewer(channels=1), fit=fit)


def test_fractions_are_not_read_as_black(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        for number in range(8):
            image = Image.fromarray(np.full((8, 8), number / 8, np.float32))
            image.save(tmp_path / name / f"{number}.tiff")
    with pytest.raises(ValueError, match=r"0\.tiff holds fractions, whose range nobody knows"):
        load_problem(tmp_path)


# -- by class --------------------------------------------------------------------------------------


def by_class(folder, size, count=20):
    for place, name in enumerate("ab"):
        asking.images(folder / name, size=size, count=count, seed=place)
    return folder


def test_a_folder_by_class_is_read_at_the_size_of_the_model(tmp_path):
    """`load_problem` would bring images above 96 pixels to 64."""
    encoder = viewer(side=100)
    data = read_labelled(by_class(tmp_path / "photos", 100), encoder)
    files = {np.asarray(Image.open(f)).tobytes() for f in (tmp_path / "photos").rglob("*.png")}
    rows = data.train.take(range(len(data.train)))
    assert all(row.permute(1, 2, 0).contiguous().numpy().tobytes() in files for row in rows)
    large = by_class(tmp_path / "large", 128)
    with pytest.raises(ValueError, match=r"are 128×128, and the model reads 100×100.*fit=True"):
        read_labelled(large, encoder)
    fitted = read_labelled(large, encoder, fit=True).train
    wanted = seen(encoder, large, fit=True)
    found = encoder.batch(fitted.take(range(len(fitted))))["pixel_values"]
    assert all((wanted == one).flatten(1).all(1).any() for one in found)


def test_hidden_files_are_no_class_and_stray_ones_are_told(tmp_path):
    for split in ("train", "test"):
        by_class(tmp_path / split, 12)
        asking.images(tmp_path / split / ".ipynb_checkpoints", count=1)
        (tmp_path / split / "a" / "._1.png").write_bytes(b"what macOS leaves")
    data = read_labelled(tmp_path, viewer())
    assert data.classes == ["a", "b"] and len(data.test()) == 40
    (tmp_path / "train" / "a" / "1.png").rename(tmp_path / "train" / "logo.png")
    with pytest.raises(ValueError, match=r"^train/logo\.png is in no folder of a class; move it"):
        read_labelled(tmp_path, viewer())


def test_images_by_class_have_no_column_to_predict(tmp_path):
    by_class(tmp_path / "photos", 12)
    by_class(tmp_path / "splits" / "train", 12)
    for folder in ("photos", "splits"):
        with pytest.raises(ValueError, match="holds images by class: it has no column 'breed'"):
            read_labelled(tmp_path / folder, viewer(), targets="breed")
