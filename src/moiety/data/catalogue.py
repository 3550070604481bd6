"""The built-in sets: what they are, the folders they lie in, who reads them, where they come from.

A new set is a new entry of `NAMED`; its files with their checksums are in `published.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from . import formats
from .formats import Content, Lines, Pictures, Table
from .problem import Kind
from .published import (
    ADULT,
    ADULT_COLUMNS,
    CENSUS_CODES,
    CENSUS_COLUMNS,
    CIFAR,
    CIFAR_ARCHIVE,
    CIFAR_MOSAICS,
    FASHION,
    FASHION_CLASSES,
    KMNIST,
    KMNIST_CLASSES,
    MNIST,
    OMNIGLOT,
    TORCHVISION,
    TWEETEVAL,
    File,
    files_at,
)

DIGITS = tuple("0123456789")
BOTH = {"train": "train", "test": "t10k"}


@dataclass(frozen=True)
class Layout:
    """A way in which the files of a set lie in a data folder."""

    folders: tuple[str, ...]  # below the data folder; downloads go to the first
    files: tuple[File, ...]
    read: Callable[[Content], Pictures | Table | Lines]
    archive: File | None = None  # a .tar.gz that holds the files
    note: str = ""  # what to know of the data in this layout


@dataclass(frozen=True)
class Named:
    """A built-in set."""

    kind: Kind
    title: str
    size: str  # examples
    page: str
    layouts: tuple[Layout, ...]  # none: it comes with a package
    cited: str = ""  # where the checksums of the downloads were published
    read: Callable[[Content], Pictures | Table] | None = None
    labelled: bool = True  # no: texts to pre-train on, see `load_texts`


def _scibert(name: str, title: str, size: str, train: str, dev: str, test: str) -> Named:
    """A set of scientific texts as SciBERT's repository has it."""
    home = "https://raw.githubusercontent.com/allenai/scibert/"
    home += f"06793f77d7278898159ed50da30d173cdc8fdea9/data/text_classification/{name}/"
    sums = {"train": train, "dev": dev, "test": test}
    files = files_at(home, {f"{word}.jsonl": (f"{word}.txt", sum) for word, sum in sums.items()})
    return Named(
        "text",
        title,
        size,
        "https://github.com/allenai/scibert",
        (Layout((f"text-classification/{name}", name), files, formats.jsonl),),
        cited="the tree of commit 06793f7 of github.com/allenai/scibert",
    )


NAMED: dict[str, Named] = {
    "digits": Named(
        "image",
        "handwritten digits, 8×8",
        "1797",
        "https://scikit-learn.org/stable/datasets/toy_dataset.html",
        (),
        read=formats.read_digits,
    ),
    "mnist": Named(
        "image",
        "handwritten digits, 28×28",
        "60000 + 10000",
        "https://github.com/pytorch/vision/blob/main/torchvision/datasets/mnist.py",
        (Layout(("mnist", "MNIST/raw"), MNIST, formats.idx(DIGITS, BOTH)),),
        cited=TORCHVISION,
    ),
    "fashion-mnist": Named(
        "image",
        "pieces of clothing, 28×28",
        "60000 + 10000",
        "https://github.com/zalandoresearch/fashion-mnist",
        (
            Layout(
                ("fashion-mnist", "FashionMNIST/raw"), FASHION, formats.idx(FASHION_CLASSES, BOTH)
            ),
        ),
        cited=TORCHVISION,
    ),
    "kmnist": Named(
        "image",
        "cursive Japanese characters, 28×28",
        "60000 + 10000",
        "http://codh.rois.ac.jp/kmnist/",
        (
            Layout(("kmnist", "KMNIST/raw"), KMNIST, formats.idx(KMNIST_CLASSES, BOTH)),
            Layout(
                ("kmnist-test",),
                KMNIST[2:],
                formats.idx(KMNIST_CLASSES, {"test": "t10k"}),
                note="only the 10000 test images of kmnist are here, and they are split anew",
            ),
        ),
        cited=TORCHVISION,
    ),
    "usps": Named(
        "image",
        "handwritten digits, 16×16",
        "7291 + 2007",
        "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass.html#usps",
        (
            Layout(
                ("usps",),
                (File("usps.npz", ("9812a91ec69b8bea89435f3f4be06928",)),),
                formats.npz(DIGITS, {"train": "train", "test": "test"}, "usps.npz"),
            ),
            Layout(
                ("USPS", "usps"),
                (
                    File(
                        "usps",
                        url="https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass/usps.bz2",
                        packed="ec16c51db3855ca6c91edd34d0e9b197",
                    ),
                    File(
                        "usps.t",
                        url="https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/multiclass/usps.t.bz2",
                        packed="8ea070ee2aca1ac39742fdd1ef5ed118",
                    ),
                ),
                formats.read_usps,
            ),
        ),
        cited="torchvision/datasets/usps.py, github.com/pytorch/vision",
    ),
    "cifar10": Named(
        "image",
        "photographs, 32×32 in colour",
        "50000 + 10000",
        "https://www.cs.toronto.edu/~kriz/cifar.html",
        (
            Layout(("cifar-10-batches-bin",), CIFAR, formats.read_cifar, CIFAR_ARCHIVE),
            Layout(
                ("cifar10",),
                tuple(File(name, (sum,)) for name, sum in CIFAR_MOSAICS.items()),
                formats.cifar_mosaics(
                    {
                        part: [n for n in CIFAR_MOSAICS if n.startswith(part)]
                        for part in ("train", "test")
                    }
                ),
                note="only the first 30000 of cifar10's 50000 training images are here",
            ),
        ),
        cited="the set's own page; of its members, vision/cifar10.go of github.com/c3sr/dldataset",
    ),
    "pneumoniamnist": Named(
        "image",
        "chest X-rays, pneumonia or not, 28×28",
        "4708 + 524 + 624",
        "https://medmnist.com",
        (
            Layout(
                ("pneumoniamnist",),
                (
                    File(
                        "pneumoniamnist.npz",
                        ("28209eda62fecd6e6a2d98b1501bb15f",),
                        "https://zenodo.org/records/10519652/files/pneumoniamnist.npz",
                    ),
                ),
                formats.npz(
                    ("normal", "pneumonia"),
                    {"train": "train", "validation": "val", "test": "test"},
                    "pneumoniamnist.npz",
                ),
            ),
            Layout(
                ("pneumoniamnist",),
                (File("pneumoniamnist_28.npz", ("180ea72e067e50dd4da0120075544874",)),),
                formats.npz(
                    ("normal", "pneumonia"),
                    {"train": "train", "validation": "val", "test": "test"},
                    "pneumoniamnist_28.npz",
                ),
            ),
        ),
        cited="medmnist/info.py, github.com/MedMNIST/MedMNIST",
    ),
    "omniglot": Named(
        "image",
        "characters of 8 alphabets, each drawn by 20 people, 105×105",
        "3630 + 1210",
        "https://github.com/brendenlake/omniglot",
        (Layout(("omniglot",), OMNIGLOT, formats.omniglot([file.name for file in OMNIGLOT])),),
        cited="the tree of commit 057f034 of github.com/brendenlake/omniglot",
    ),
    "adult": Named(
        "table",
        "does a person earn more than 50K? (targets income, never_married)",
        "32561 + 16281",
        "https://archive.ics.uci.edu/dataset/2/adult",
        (
            Layout(
                ("adult",),
                ADULT,
                formats.uci(
                    ADULT_COLUMNS,
                    {"train": "adult.data", "test": "adult.test"},
                    ["income"],
                    married="marital-status",
                ),
            ),
        ),
        cited="examples/adult/preprocessing.go, github.com/gomlx/gomlx, as sha256",
    ),
    "census-income": Named(
        "table",
        "income and marriage from the census, two targets",
        "199523 + 99762",
        "https://archive.ics.uci.edu/dataset/117/census+income+kdd",
        (
            Layout(
                ("census-income-kdd", "census-income"),
                (
                    File("census-income.data", ("887f4dc410a99bc332bddbb0a4195b88",)),
                    File("census-income.test", ("b82952d217858365c8e597827e3e5468",)),
                ),
                formats.uci(
                    CENSUS_COLUMNS,
                    {"train": "census-income.data", "test": "census-income.test"},
                    ["income", "never_married"],
                    married="marital_status",
                    codes=CENSUS_CODES,
                    unused=("instance_weight",),  # says how many people a row stands for
                ),
            ),
        ),
    ),
    "imdb-text": Named(
        "text",
        "film reviews without labels, one a line: the first of train/unsup, to pre-train on",
        "40000",
        "https://ai.stanford.edu/~amaas/data/sentiment/",
        (
            Layout(
                ("imdb-text",),
                (File("unsup40k.txt", ("7516502c96dbd67439d3039e8e7c89e4",)),),
                formats.lines("unsup40k.txt"),
            ),
        ),
        labelled=False,
    ),
    "tweeteval-emotion": Named(
        "text",
        "tweets: anger, joy, optimism or sadness",
        "3257 + 374 + 1421",
        "https://github.com/cardiffnlp/tweeteval",
        (
            Layout(
                ("text-classification/tweeteval-emotion", "tweeteval-emotion"),
                TWEETEVAL,
                formats.tweeteval,
            ),
        ),
        cited="the tree of commit 4fbd22c of github.com/cardiffnlp/tweeteval",
    ),
    "semeval2018-emotions": Named(
        "text",
        "tweets with eleven emotions, as eleven targets",
        "6838 + 886 + 3259",
        "https://competitions.codalab.org/competitions/17751",
        (
            Layout(
                ("text-classification/semeval2018-E-c", "semeval2018-E-c"),
                (
                    File("E-c-En-train.txt", ("b231d4e3d53bb27c79e4b0338f5de3ab",)),
                    File("E-c-En-dev.txt", ("a4e358ec6f6bbfeebdae8b7777342258",)),
                    File("E-c-En-test-gold.txt", ("4da21a59e02db8ccd953e2209797ac2b",)),
                ),
                formats.semeval,
            ),
        ),
    ),
    "chemprot": _scibert(
        "chemprot",
        "how chemicals act on proteins, 13 relations",
        "4169 + 2427 + 3469",
        "2297a7d68a142f7cd327c16a1415fca7",
        "ee89c60be7eec1654f64b851cb281f44",
        "52b2ec3dd07e9712f7c050cb6e6c36ec",
    ),
    "acl-arc": _scibert(
        "citation_intent",
        "why a paper is cited, 6 intents",
        "1688 + 114 + 139",
        "72eade17770b3dd4cfe47624e7672f64",
        "cde2bf297d9e60c1b07b5b7e0e8462f3",
        "b1aaa0c5c9cce47fa53e4f18ff7e8d4c",
    ),
    "scicite": _scibert(
        "sci-cite",
        "why a paper is cited, 3 intents",
        "7320 + 916 + 1861",
        "b027000b82015338829695cd3d76b72f",
        "025b8ee5655f5e22c86c9297cd182fda",
        "a37711a91f749cbddb9620fe6f59d3d9",
    ),
    "scierc": _scibert(
        "sciie-relation-extraction",
        "relations in computer science abstracts, 7",
        "3219 + 455 + 974",
        "51fd0f6cb5df7b6ea3489c0c69b66c3b",
        "c8f42735e1cc987701212e5e9bbb2cd1",
        "809392ae5a42dcf384bf9b7e8234ed2d",
    ),
}
