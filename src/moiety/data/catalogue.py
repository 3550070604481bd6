"""The built-in sets: their files with checksums, the folders they lie in, and where they come from.

A new set is a new entry of `NAMED`. Checksums are md5 of the content, unpacked, so that a file is
the same whoever packed it. A `url` stands only where a checksum of what it gives was published;
`cited` says where.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from . import formats
from .formats import Content, Pictures, Table
from .problem import Kind

DIGITS = tuple("0123456789")
BOTH = {"train": "train", "test": "t10k"}


@dataclass(frozen=True)
class File:
    """A file of a set; it may lie there packed as .gz, .xz or .bz2."""

    name: str
    sums: tuple[str, ...] = ()  # md5 of the content: one of these
    url: str = ""
    packed: str = ""  # md5 of what the url gives, where that is packed


@dataclass(frozen=True)
class Layout:
    """A way in which the files of a set lie in a data folder."""

    folders: tuple[str, ...]  # below the data folder; downloads go to the first
    files: tuple[File, ...]
    read: Callable[[Content], Pictures | Table]
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


def _four(url: str, packed: tuple[str, ...], sums: tuple[str, ...]) -> tuple[File, ...]:
    """The files of a set like MNIST: images and labels of train, then of test."""
    names = [f"{split}-{what}" for split in ("train", "t10k") for what in ("images", "labels")]
    full = [name + ("-idx3-ubyte" if "images" in name else "-idx1-ubyte") for name in names]
    return tuple(
        File(name, (sum,) if sum else (), f"{url}{name}.gz", gz)
        for name, sum, gz in zip(full, sums, packed)
    )


def _at(commit_url: str, files: dict[str, tuple[str, str]]) -> tuple[File, ...]:
    """Files of a GitHub repository at a commit, which is itself a checksum of its files.

    The md5 are of files whose git blob ids were found equal to those in the tree of the commit.
    """
    return tuple(File(name, (sum,), commit_url + path) for name, (path, sum) in files.items())


TORCHVISION = "torchvision/datasets/mnist.py, github.com/pytorch/vision"
MNIST = _four(
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    (
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "d53e105ee54ea40749a09fcbcd1e9432",
        "9fb629c4189551a2d022fa330f9573f3",
        "ec29112dd5afa0611ce80d1b7f02629c",
    ),
    (
        "6bbc9ace898e44ae57da46a324031adb",
        "a25bea736e30d166cdddb491f175f624",
        "2646ac647ad5339dbf082846283269ea",
        "27ae3e4e09519cfbb04c329615203637",
    ),
)
FASHION = _four(
    "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
    (
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79",
        "bb300cfdad3c16e7a12a480ee83cd310",
    ),
    (
        "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "9018921c3c673c538a1fc5bad174d6f9",
        "8181f5470baa50b63fa0f6fddb340f0a",
        "15d484375f8d13e6eb1aabb0c3f46965",
    ),
)
KMNIST = _four(
    "http://codh.rois.ac.jp/kmnist/dataset/kmnist/",
    (
        "bdb82020997e1d708af4cf47b453dcf7",
        "e144d726b3acfaa3e44228e80efcd344",
        "5c965bf0a639b31b8f53240b1b52f4d7",
        "7320c461ea6c1c855c0b718fb2a4b134",
    ),
    ("", "", "bf305b8cd328700fbc17f5acbc2856d2", "9f55f451c0988b028eccdf7d5cc265ab"),
)
FASHION_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag",
    "Ankle boot",
)  # fmt: skip
KMNIST_CLASSES = ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo")

CIFAR = tuple(
    File(name, (sum,))
    for name, sum in {
        "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
        "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
        "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
        "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
        "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
        "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
    }.items()
)
CIFAR_ARCHIVE = File(
    "cifar-10-binary.tar.gz",
    url="https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    packed="c32a1d4ab5d03f1284b67883e8d87530",
)
CIFAR_MOSAICS = {
    "labels.npz": "79457c5df018cb3bfbdabf7ec9ba56c1",
    "train_00000-09999.webp": "6b421e5a6a8526ab567243c7a6bc2947",
    "train_10000-19999.webp": "55f78b09e98e41e1942d2e5d8fe59c4b",
    "train_20000-29999.webp": "3b73af8ea5a73f409813a3bdf7f69231",
    "test_00000-09999.webp": "62b68d7974a6634a4e85e3dcdfea3b39",
}

ADULT_COLUMNS = (
    "age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation",
    "relationship", "race", "sex", "capital-gain", "capital-loss", "hours-per-week",
    "native-country", "income",
)  # fmt: skip
# UCI's own, and the same rows without the blank last line and the comment on top of adult.test.
# The sha256 of UCI's are published by GruAna/PreprocessData.jl, src/datasets/tabular/adult.jl.
UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/adult/"
ADULT = (
    File(
        "adult.data",
        ("5d7c39d7b8804f071cdd1f2a7c460872", "3b47a7aa751a9626f7123f62764797f4"),
        f"{UCI}adult.data",
    ),
    File(
        "adult.test",
        ("35238206dfdf7f1fe215bbb874adecdc", "72bfa60dbe60afce1e18b6f9890e025a"),
        f"{UCI}adult.test",
    ),
)
CENSUS_COLUMNS = (
    "age", "class_of_worker", "industry_code", "occupation_code", "education", "wage_per_hour",
    "enrolled", "marital_status", "major_industry", "major_occupation", "race", "hispanic_origin",
    "sex", "union_member", "unemployment_reason", "employment_status", "capital_gains",
    "capital_losses", "dividends", "tax_filer", "previous_region", "previous_state",
    "household_detail", "household_summary", "instance_weight", "migration_msa", "migration_region",
    "migration_within_region", "same_house_a_year_ago", "previous_sunbelt", "employer_size",
    "parents_present", "father_country", "mother_country", "own_country", "citizenship",
    "own_business", "veterans_questionnaire", "veterans_benefits", "weeks_worked", "year", "income",
)  # fmt: skip
CENSUS_CODES = ("industry_code", "occupation_code", "own_business", "veterans_benefits", "year")

TWEETEVAL = _at(
    "https://raw.githubusercontent.com/cardiffnlp/tweeteval/"
    "4fbd22cd78421f05b1ecdb4fc5725bc7a7bd8f66/datasets/emotion/",
    {
        name: (name, sum)
        for name, sum in {
            "mapping.txt": "ad6ed3c4231c0cdba80723d9f7b7454b",
            "train_text.txt": "6cca6bbabfea66b2e402dda919e8bf32",
            "train_labels.txt": "8406e9dbf25abb84ca4007f69b6b247e",
            "val_text.txt": "115ee2780e95569fa4dca67fd8374905",
            "val_labels.txt": "290168de8cce89d85eee399222b77548",
            "test_text.txt": "76df9b515b125a509845b5fab0cad4dc",
            "test_labels.txt": "6d92fb90f66bf81746f009d3567d23ff",
        }.items()
    },
)


def _scibert(name: str, title: str, size: str, train: str, dev: str, test: str) -> Named:
    """A set of scientific texts as SciBERT's repository has it."""
    home = "https://raw.githubusercontent.com/allenai/scibert/"
    home += f"06793f77d7278898159ed50da30d173cdc8fdea9/data/text_classification/{name}/"
    sums = {"train": train, "dev": dev, "test": test}
    files = _at(home, {f"{word}.jsonl": (f"{word}.txt", sum) for word, sum in sums.items()})
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
        cited="the set's own page; of the members, dldataset of github.com/c3sr",
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
        cited="GruAna/PreprocessData.jl on GitHub, as sha256",
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
