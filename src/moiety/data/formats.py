"""The file formats of the built-in sets.

A reader gets `content`, which gives the checked and unpacked bytes of a file by its name, and
returns `Pictures`, `Table` or, of texts without labels, `Lines`.
"""

from __future__ import annotations

import csv
import io
import json
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..tables import MISSING

if TYPE_CHECKING:
    import pandas

Content = Callable[[str], bytes]
CIFAR_CLASSES = (
    "airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck",
)  # fmt: skip


@dataclass
class Pictures:
    """Images uint8 [N, C, H, W] with the class id and the split of each."""

    images: np.ndarray
    ids: np.ndarray
    classes: Sequence[str]
    given: np.ndarray | None


@dataclass
class Table:
    """Rows with the split of each, the columns to predict, and the one of text.

    Columns that were `made` from others, to be predicted, are never inputs.
    """

    frame: pandas.DataFrame
    given: np.ndarray | None
    targets: Sequence[str]
    text: str | None = None
    made: Sequence[str] = ()


@dataclass
class Lines:
    """Texts without labels, to pre-train on."""

    texts: list[str]


def _join(parts: dict[str, tuple[np.ndarray, np.ndarray]], classes: Sequence[str]) -> Pictures:
    """One array of the images and ids of each split."""
    images = np.concatenate([images for images, _ in parts.values()])
    ids = np.concatenate([ids for _, ids in parts.values()]).astype(np.int64)
    if len(ids) and ids.max() >= len(classes):
        raise ValueError(f"a label is {ids.max()}, and there are {len(classes)} classes")
    given = np.repeat(list(parts), [len(ids) for _, ids in parts.values()])
    return Pictures(images, ids, classes, given if len(parts) > 1 else None)


def read_digits(_: Content) -> Pictures:
    """scikit-learn's digits: grey levels of 0 to 16, without a split."""
    from sklearn.datasets import load_digits

    images, ids = load_digits(return_X_y=True)
    pixels = np.round(images * (255 / 16)).astype(np.uint8).reshape(-1, 1, 8, 8)
    return Pictures(pixels, ids.astype(np.int64), tuple("0123456789"), None)


def idx(classes: Sequence[str], splits: dict[str, str]) -> Callable[[Content], Pictures]:
    """A reader of MNIST's format; `splits` maps a split to how its files begin."""

    def read(content: Content) -> Pictures:
        parts = {
            split: (
                _idx(content(f"{start}-images-idx3-ubyte"))[:, None],
                _idx(content(f"{start}-labels-idx1-ubyte")),
            )
            for split, start in splits.items()
        }
        return _join(parts, classes)

    return read


def _idx(data: bytes) -> np.ndarray:
    """An array of bytes: two zeros, 8 for uint8, the number of axes, then their lengths."""
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise ValueError("an idx file of uint8 begins with the bytes 0, 0, 8")
    shape = np.frombuffer(data, ">u4", data[3], 4).astype(int)
    start = 4 + 4 * data[3]
    if len(data) - start != shape.prod():
        raise ValueError(f"an idx file of shape {shape.tolist()} has {len(data) - start} values")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def npz(classes: Sequence[str], splits: dict[str, str], file: str) -> Callable[[Content], Pictures]:
    """A reader of `train_images`, `train_labels` and so on; `splits` maps a split to its word."""

    def read(content: Content) -> Pictures:
        arrays = np.load(io.BytesIO(content(file)), allow_pickle=False)
        parts = {
            split: (arrays[f"{word}_images"][:, None], arrays[f"{word}_labels"].reshape(-1))
            for split, word in splits.items()
        }
        return _join(parts, classes)

    return read


def read_cifar(content: Content) -> Pictures:
    """CIFAR-10's binary version: a byte of label, then 3072 of pixels, channel by channel."""

    def batches(names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        rows = np.concatenate(
            [np.frombuffer(content(n), np.uint8).reshape(-1, 3073) for n in names]
        )
        return rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0]

    train = [f"data_batch_{number}.bin" for number in range(1, 6)]
    return _join({"train": batches(train), "test": batches(["test_batch.bin"])}, CIFAR_CLASSES)


def cifar_mosaics(splits: dict[str, Sequence[str]]) -> Callable[[Content], Pictures]:
    """A reader of CIFAR-10 as lossless mosaics of 100×100 images, with labels.npz."""

    def read(content: Content) -> Pictures:
        labels = np.load(io.BytesIO(content("labels.npz")), allow_pickle=False)
        parts = {
            split: (np.concatenate([_mosaic(content(f)) for f in files]), labels[f"{split}_labels"])
            for split, files in splits.items()
        }
        return _join(parts, CIFAR_CLASSES)

    return read


def _mosaic(data: bytes) -> np.ndarray:
    from PIL import Image

    pixels = np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))
    tiles = pixels.reshape(100, 32, 100, 32, 3).transpose(0, 2, 4, 1, 3)
    return tiles.reshape(-1, 3, 32, 32)


def omniglot(files: Sequence[str], drawn: int = 15) -> Callable[[Content], Pictures]:
    """A reader of Omniglot's archives, of which several may hold the same alphabet.

    Twenty people drew each character of an alphabet once: the drawings of the first `drawn` are
    the training split, those of the others, whose hands nobody has seen then, the test.
    """

    def read(content: Content) -> Pictures:
        images: dict[tuple[str, int], np.ndarray] = {}
        for file in files:
            with zipfile.ZipFile(io.BytesIO(content(file))) as archive:
                for member in archive.infolist():
                    if member.filename.endswith(".png"):
                        _, alphabet, character, name = member.filename.split("/")
                        place = f"{alphabet}/{character}", int(name[:-4].split("_")[1])
                        images[place] = _drawing(archive, member)
        places = sorted(images)
        classes = sorted({character for character, _ in places})
        ids = np.searchsorted(classes, [character for character, _ in places])
        given = np.where([drawer <= drawn for _, drawer in places], "train", "test")
        return Pictures(np.stack([images[place] for place in places]), ids, classes, given)

    return read


def _drawing(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    """One image of 105×105 pixels, uint8 [1, 105, 105], black on white."""
    from PIL import Image

    if member.file_size > 2**20:
        raise ValueError(f"{member.filename} is no drawing: it has {member.file_size} bytes")
    image = Image.open(io.BytesIO(archive.read(member)))
    if image.size != (105, 105):
        raise ValueError(f"{member.filename} is of {image.size} pixels; drawings are of 105×105")
    return np.asarray(image.convert("L"))[None]


def read_usps(content: Content) -> Pictures:
    """USPS as LIBSVM has it: "label 1:value … 256:value" with labels 1 to 10, values −1 to 1."""

    def one(name: str) -> tuple[np.ndarray, np.ndarray]:
        rows = [line.split() for line in content(name).decode("ascii").splitlines()]
        values = np.array([[float(v.split(":")[1]) for v in row[1:]] for row in rows])
        pixels = np.round((values + 1) * 127.5).astype(np.uint8).reshape(-1, 1, 16, 16)
        return pixels, np.array([int(float(row[0])) - 1 for row in rows])

    return _join({"train": one("usps"), "test": one("usps.t")}, tuple("0123456789"))


def uci(
    columns: Sequence[str],
    files: dict[str, str],
    targets: Sequence[str],
    *,
    married: str,
    codes: Sequence[str] = (),
    unused: Sequence[str] = (),
) -> Callable[[Content], Table]:
    """A reader of census files without header.

    `never_married`, the second target of the multi-task papers, is made from the column `married`;
    `codes` are numbers that mean categories.
    """

    def read(content: Content) -> Table:
        import pandas

        words: dict[str, Any] = {"names": list(columns), "skipinitialspace": True, "comment": "|"}
        words |= {"keep_default_na": False, "na_values": MISSING}
        frames = {
            split: pandas.read_csv(io.BytesIO(content(file)), **words)
            for split, file in files.items()
        }
        table = _stack(frames, targets)
        frame = table.frame.drop(columns=list(unused))
        frame = frame.astype(dict.fromkeys(codes, "category"))
        frame["income"] = frame["income"].str.removesuffix(".")  # as some of the files end it
        never = frame[married].str.lower().str.startswith("never")
        frame["never_married"] = never.map({True: "yes", False: "no"})
        return Table(frame, table.given, targets, made=["never_married"])

    return read


def tweeteval(content: Content) -> Table:
    """Lines of text beside lines of class ids, whose names are in mapping.txt."""
    import pandas

    names = dict(line.split("\t") for line in content("mapping.txt").decode().splitlines())
    frames = {}
    for split, word in {"train": "train", "validation": "val", "test": "test"}.items():
        texts = content(f"{word}_text.txt").decode().split("\n")
        labels = [names[id] for id in content(f"{word}_labels.txt").decode().split()]
        frames[split] = pandas.DataFrame({"text": texts[: len(labels)], "label": labels})
    return _stack(frames, ["label"], "text")


def lines(file: str) -> Callable[[Content], Lines]:
    """A reader of texts, one a line; empty lines are left out."""

    def read(content: Content) -> Lines:
        texts = (line.strip() for line in content(file).decode().split("\n"))
        return Lines([text for text in texts if text])

    return read


def jsonl(content: Content) -> Table:
    """train.jsonl, dev.jsonl and test.jsonl with text and label."""
    import pandas

    frames = {}
    for split, word in {"train": "train", "validation": "dev", "test": "test"}.items():
        rows = [json.loads(line) for line in content(f"{word}.jsonl").splitlines()]
        frames[split] = pandas.DataFrame(rows)[["text", "label"]]
    return _stack(frames, ["label"], "text")


def semeval(content: Content) -> Table:
    """Tweets with eleven emotions, any number of which may be there: eleven targets."""
    import pandas

    names = {"train": "train", "validation": "dev", "test": "test-gold"}
    frames = {
        split: pandas.read_csv(
            io.BytesIO(content(f"E-c-En-{word}.txt")), sep="\t", quoting=csv.QUOTE_NONE
        ).drop(columns="ID")
        for split, word in names.items()
    }
    return _stack(frames, [column for column in frames["train"] if column != "Tweet"], "Tweet")


def _stack(
    frames: dict[str, pandas.DataFrame], targets: Sequence[str], text: str | None = None
) -> Table:
    """One table of those of the splits."""
    import pandas

    given = np.repeat(list(frames), [len(frame) for frame in frames.values()])
    return Table(pandas.concat(frames.values(), ignore_index=True), given, targets, text)
