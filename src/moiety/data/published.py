"""Files of the built-in sets with their checksums, and who published them.

Checksums are md5 of the content, unpacked, so that a file is the same whoever packed it. A `url`
stands only where a checksum of what it gives was published; `cited` of the set says where.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class File:
    """A file of a set; it may lie there packed as .gz, .xz or .bz2."""

    name: str
    sums: tuple[str, ...] = ()  # md5 of the content: one of these
    url: str = ""
    packed: str = ""  # md5 of what the url gives, where that is packed


def _four(url: str, packed: tuple[str, ...], sums: tuple[str, ...]) -> tuple[File, ...]:
    """The files of a set like MNIST: images and labels of train, then of test."""
    names = [f"{split}-{what}" for split in ("train", "t10k") for what in ("images", "labels")]
    full = [name + ("-idx3-ubyte" if "images" in name else "-idx1-ubyte") for name in names]
    return tuple(
        File(name, (sum,) if sum else (), f"{url}{name}.gz", gz)
        for name, sum, gz in zip(full, sums, packed)
    )


def files_at(commit_url: str, files: dict[str, tuple[str, str]]) -> tuple[File, ...]:
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

OMNIGLOT = files_at(  # the small background sets, which share two alphabets
    "https://raw.githubusercontent.com/brendenlake/omniglot/"
    "057f034baf2ecb8530bc5710e5a23584d2a519cc/python/",
    {
        name: (name, sum)
        for name, sum in {
            "images_background_small1.zip": "e704a628b5459e08445c13499850abc4",
            "images_background_small2.zip": "b75a71a51d3b13f821f212756fe481fd",
        }.items()
    },
)

ADULT_COLUMNS = (
    "age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation",
    "relationship", "race", "sex", "capital-gain", "capital-loss", "hours-per-week",
    "native-country", "income",
)  # fmt: skip
# UCI's own, and the same rows without the blank last line and the comment on top of adult.test.
# The sha256 of UCI's, which have these md5, are in gomlx/gomlx, examples/adult/preprocessing.go.
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

TWEETEVAL = files_at(
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
