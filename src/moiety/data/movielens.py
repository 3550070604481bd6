"""MovieLens as two tasks: was the film watched, and how was it rated (DSelect-k, section 4).

problem = movielens("ml-100k", seed=0)
problem.train.inputs["categories"]               # [N, 2]: user and film
problem.train.targets["watched"]                 # 0 or 1
problem.train.targets["rating"]                  # 1 to 5; NaN where it was not watched

Its terms forbid passing the data on, so they must be fetched by hand. Read are `u.data` of the
100K set, `ratings.dat` of the 1M set, and recbole's `ml-100k.inter` or `ml-1m.inter`.
"""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from ..tables import PACKED, open_packed
from .named import MissingData, roots
from .problem import Problem, Split, Target
from .splits import LEAST

if TYPE_CHECKING:
    import pandas

COLUMNS = ["user_id", "item_id", "rating", "timestamp"]
PAGE = "https://grouplens.org/datasets/movielens/"
SHARE = 0.1  # of validation and of test, as in the paper's 1.6 M, 200 k and 200 k
LIMIT = 2**28  # bytes of the file, unpacked


@dataclass(frozen=True)
class Edition:
    """One of the sets: where it is fetched and which of its files are read."""

    page: str
    archive: str
    files: tuple[str, ...]  # the first is that of the page


EDITIONS = {
    "ml-100k": Edition(PAGE + "100k/", "ml-100k.zip", ("u.data", "ml-100k.inter")),
    "ml-1m": Edition(PAGE + "1m/", "ml-1m.zip", ("ratings.dat", "ml-1m.inter")),
}


def movielens(
    name: str = "ml-100k",
    seed: int = 0,
    *,
    max_examples: int | None = None,
    data_dir: str | Path | None = None,
) -> Problem:
    """Load the ratings, and as many films again that their users did not rate.

    The paper has two million examples of one million ratings and does not say where the rest come
    from; ours are drawn uniformly from all pairs of user and film without a rating. Ratings are as
    they stand, not standardised, since eta weighs the two losses as they are. A user or film that
    train does not have gets the id 0.
    """
    if name not in EDITIONS:
        raise ValueError(f"there is no set {name!r} of MovieLens; use {' or '.join(EDITIONS)}")
    path = _find(name, data_dir)
    ratings = read_ratings(path)
    draw = np.random.default_rng(seed)
    users, user = np.unique(ratings["user_id"], return_inverse=True)
    films, film = np.unique(ratings["item_id"], return_inverse=True)
    pairs = user * len(films) + film
    pairs = np.concatenate([pairs, _unrated(pairs, len(users) * len(films), draw)])
    stars = np.full(len(pairs), np.nan, np.float32)
    stars[: len(ratings)] = ratings["rating"]
    count = len(pairs) if max_examples is None else min(max_examples, len(pairs))
    if count < LEAST:
        raise ValueError(f"{name}: {count} examples are too few to split; take at least {LEAST}")
    order = draw.permutation(len(pairs))[:count]
    ids = np.stack(np.divmod(pairs[order], len(films)), 1) + 1
    train, validation, test = _split(ids, stars[order])
    sizes = f"{len(train)} train, {len(validation)} validation, {len(test)} test"
    return Problem(
        name,
        "table",
        [Target("watched", "classes", ["no", "yes"]), Target("rating", "number")],
        train,
        validation,
        test,
        notes=[
            f"table: {count} examples ({sizes}), split by seed {seed}",
            f"ratings: {len(ratings)} of {len(users)} users and {len(films)} films ({path.name})",
            f"not watched: {len(pairs) - len(ratings)} pairs drawn from those without a rating",
        ],
        categories=["user", "film"],
        cardinalities=[len(users) + 1, len(films) + 1],
    )


def read_ratings(path: str | Path) -> pandas.DataFrame:
    """The columns user_id, item_id and rating of a file of MovieLens or recbole."""
    import pandas

    path = Path(path)
    with open_packed(path, limit=LIMIT) as stream:
        data = stream.read().replace(b"::", b"\t")  # as the 1M set separates
    head = data.split(b"\n", 1)[0].decode("utf-8", "replace").strip().split("\t")
    words = [word.partition(":")[0] for word in head]  # recbole: user_id:token
    titled = "user_id" in words
    names = words if titled else COLUMNS
    wrong = f"{path.name}: a line must be user, film, rating and time, apart by tabs"
    if len(head) != len(names) or not set(COLUMNS[:3]) <= set(names):
        raise ValueError(f"{wrong}; the first is {' '.join(head)[:80]!r}")
    try:
        frame = pandas.read_csv(
            io.BytesIO(data),
            sep="\t",
            names=names,
            skiprows=int(titled),
            usecols=COLUMNS[:3],
            dtype={"user_id": str, "item_id": str, "rating": np.float32},
        )
    except ValueError as error:
        raise ValueError(f"{wrong} ({str(error).splitlines()[0]})") from None
    if frame.isna().any(axis=None):
        raise ValueError(f"{wrong}; some lines lack one of them")
    if frame.empty or not frame["rating"].between(0.5, 5).all():
        raise ValueError(f"{path.name}: there must be ratings, all from 1 to 5; get it again")
    return frame.drop_duplicates(COLUMNS[:2], keep="last")  # a second rating is a changed mind


def _find(name: str, data_dir: str | Path | None) -> Path:
    edition = EDITIONS[name]
    for root in roots(data_dir):
        for file in edition.files:
            for path in (root / name / (file + packing) for packing in ("", *PACKED)):
                if path.is_file():
                    return path
    raise MissingData(
        f"{name} is not here, and its terms forbid passing it on; take {edition.files[0]} of "
        f"{edition.archive} from {edition.page} and put it into {roots(data_dir)[0] / name}"
    )


def _unrated(rated: np.ndarray, total: int, draw: np.random.Generator) -> np.ndarray:
    """As many pairs again that were not rated, none twice (all of them where they are fewer)."""
    free = np.ones(total, bool)
    free[rated] = False
    others = np.flatnonzero(free)
    return draw.choice(others, min(len(rated), len(others)), replace=False)


def _split(ids: np.ndarray, stars: np.ndarray) -> list[Split]:
    """Examples in their order as train, validation and test; 0 is what train does not have."""
    part = int(len(ids) * SHARE)
    ends = [len(ids) - 2 * part, len(ids) - part]
    train = ids[: ends[0]]
    for column in range(2):
        ids[~np.isin(ids[:, column], train[:, column]), column] = 0
    return [
        Split(
            {"numbers": torch.empty(len(part), 0), "categories": torch.from_numpy(part)},
            {
                "watched": torch.from_numpy((~np.isnan(rated)).astype(np.int64)),
                "rating": torch.from_numpy(rated),
            },
        )
        for part, rated in zip(np.split(ids, ends), np.split(stars, ends))
    ]
