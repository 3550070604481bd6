"""MovieLens from a small file in its format, and the real one where the user has it."""

import gzip
import os

import pytest
import torch

from moiety.data.movielens import movielens, read_ratings

HEAD = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
# 12 users and 10 films; user u rated film f where u + f is even: 60 of 120 pairs.
RATED = {(u, f): 1 + (u * f) % 5 for u in range(1, 13) for f in range(1, 11) if (u + f) % 2 == 0}


def lines(separator="\t"):
    rows = [separator.join(map(str, (u, f, r, 881250949))) for (u, f), r in RATED.items()]
    return "\n".join(rows) + "\n"


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.delenv("MOIETY_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("ml-100k", "ml-1m"):
        (tmp_path / name).mkdir()
    return tmp_path


def together(problem, name):
    return torch.cat([split.targets[name] for split in problem.splits.values()])


def test_ratings_and_as_many_unrated_pairs(home):
    (home / "ml-100k" / "ml-100k.inter").write_text(HEAD + lines())
    problem = movielens(data_dir=home)
    assert [len(split) for split in problem.splits.values()] == [96, 12, 12]
    assert problem.cardinalities == [13, 11]
    watched, rating = together(problem, "watched"), together(problem, "rating")
    assert (watched.dtype, int(watched.sum())) == (torch.int64, 60)
    assert torch.equal(rating.isnan(), watched == 0)  # no rating of what was not watched
    assert sorted(rating[watched == 1].tolist()) == sorted(map(float, RATED.values()))


def test_an_example_is_what_the_file_says(home):
    (home / "ml-100k" / "u.data").write_text(lines())
    problem = movielens(data_dir=home)
    pairs = torch.cat([split.inputs["categories"] for split in problem.splits.values()])
    assert problem.categories == ["user", "film"]
    # Ids follow the names as words: 1, 10, 11, 12, 2, …
    users, films = (sorted(map(str, range(1, n))) for n in (13, 11))
    seen = set()
    for (u, f), watched, rating in zip(
        pairs.tolist(), together(problem, "watched"), together(problem, "rating")
    ):
        pair = int(users[u - 1]), int(films[f - 1])
        assert (pair in RATED) == bool(watched)
        if watched:
            assert rating == RATED[pair]
        seen.add(pair)
    assert len(seen) == 120  # none twice: here the unrated ones are all there are


def test_every_format_gives_the_same(home):
    (home / "ml-100k" / "u.data").write_text(lines())
    (home / "ml-1m" / "ratings.dat").write_text(lines("::"))
    packed = home / "packed" / "ml-100k" / "ml-100k.inter.gz"
    packed.parent.mkdir(parents=True)
    packed.write_bytes(gzip.compress((HEAD + lines()).encode()))
    found = [
        movielens(data_dir=home),
        movielens("ml-1m", data_dir=home),
        movielens(data_dir=home / "packed"),
    ]
    for problem in found:
        assert torch.equal(problem.train.inputs["categories"], found[0].train.inputs["categories"])
        assert torch.equal(problem.test.targets["watched"], found[0].test.targets["watched"])


def test_the_seed_decides_and_fewer_may_be_taken(home):
    (home / "ml-100k" / "u.data").write_text(lines())
    one, again, other = (movielens(seed=seed, data_dir=home).train for seed in (1, 1, 2))
    assert torch.equal(one.inputs["categories"], again.inputs["categories"])
    assert not torch.equal(one.inputs["categories"], other.inputs["categories"])
    few = movielens(max_examples=40, data_dir=home)
    assert [len(split) for split in few.splits.values()] == [32, 4, 4]


def test_a_film_that_train_lacks_has_the_id_zero(home):
    alone = "".join(f"{u}\t{100 + u}\t3\t0\n" for u in range(1, 41))  # a film of its own for each
    (home / "ml-100k" / "u.data").write_text(alone)
    problem = movielens(data_dir=home)
    train, rest = problem.train.inputs["categories"], problem.test.inputs["categories"]
    assert (train > 0).all()
    assert (rest[:, 1] == 0).any()
    known = set(train[:, 1].tolist())
    assert set(rest[:, 1].tolist()) <= known | {0}


def test_a_set_that_is_not_here_says_page_file_and_folder(home):
    with pytest.raises(ValueError) as raised:
        movielens(data_dir=home)
    said = str(raised.value)
    assert "\n" not in said
    for part in ("grouplens.org/datasets/movielens/100k/", "u.data", "ml-100k.zip", "terms forbid"):
        assert part in said
    assert said.endswith(str(home / "ml-100k"))
    with pytest.raises(ValueError, match="no set 'ml-9m' of MovieLens; use ml-100k or ml-1m"):
        movielens("ml-9m")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "a line must be user, film, rating"),
        (HEAD, "there must be ratings"),
        ("1,2,3,4\n", "the first is '1,2,3,4'"),
        ("user_id:token\trating:float\n1\t2\n", "the first is 'user_id:token rating:float'"),
        ("1\t2\tgood\t4\n", "could not convert string to float"),
        ("1\t2\t3\t4\n1\t2\n", "some lines lack one of them"),
        ("1\t2\t9\t4\n", "all from 1 to 5"),
        ("1\t2\t3\t4\n2\t1\t3\t4\n", "4 examples are too few to split; take at least 10"),
    ],
)
def test_a_damaged_file_is_named(home, text, said):
    (home / "ml-100k" / "u.data").write_text(text)
    with pytest.raises(ValueError, match=said) as raised:
        movielens(data_dir=home)
    assert "\n" not in str(raised.value)


def test_a_second_rating_of_a_film_counts_alone(tmp_path):
    (tmp_path / "u.data").write_text("1\t2\t3\t0\n1\t3\t4\t0\n1\t2\t5\t9\n")
    frame = read_ratings(tmp_path / "u.data")
    assert sorted(zip(frame["item_id"], frame["rating"])) == [("2", 5.0), ("3", 4.0)]


def test_the_real_file_has_the_published_size():
    try:
        problem = movielens(data_dir=os.environ.get("MOIETY_DATA"))
    except ValueError as error:
        pytest.skip(str(error))
    assert [len(split) for split in problem.splits.values()] == [160_000, 20_000, 20_000]
    assert problem.cardinalities == [944, 1683]
    rating = together(problem, "rating")
    assert int(together(problem, "watched").sum()) == 100_000
    assert abs(rating.nanmean() - 3.52986) < 1e-4  # the mean of all published ratings
