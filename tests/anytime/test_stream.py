"""A data set that is cut into mega-batches: every row once, decided by the seed alone."""

import pytest
import torch

from moiety.anytime import Examples, cut, problem_examples, row_keys, token_blocks
from moiety.data import Problem, Split, Target, load_problem


def numbered(rows):
    """Examples whose input is the number of the row."""
    return Examples(torch.arange(rows).float()[:, None], torch.arange(rows) % 3)


@pytest.mark.parametrize(("rows", "batches"), [(100, 1), (100, 10), (103, 10), (20, 10)])
def test_the_parts_hold_every_row_once_and_differ_by_one_at_most(rows, batches):
    stream = cut(numbered(rows), batches, seed=1)
    found = list(stream)
    assert [batch.number for batch in found] == list(range(1, batches + 1))
    assert stream.batches == stream.known() == batches and stream.classes == 3
    sizes = [batch.rows for batch in found]
    assert sizes == [stream.rows(number) for number in range(1, batches + 1)]
    assert set(sizes) <= {rows // batches, rows // batches + 1}
    x = torch.cat([torch.cat([batch.train.x, batch.validation.x]) for batch in found])
    y = torch.cat([torch.cat([batch.train.y, batch.validation.y]) for batch in found])
    assert sorted(x[:, 0].int().tolist()) == list(range(rows))
    assert torch.equal(x[:, 0].long() % 3, y)


def test_validation_is_a_tenth_of_each_part():
    assert [len(batch.validation) for batch in cut(numbered(600), 5)] == [12] * 5
    assert [len(batch.validation) for batch in cut(numbered(600), 5, validation=0.25)] == [30] * 5
    assert [len(batch.validation) for batch in cut(numbered(600), 5, validation=0)] == [0] * 5
    assert [len(batch.validation) for batch in cut(numbered(10), 5)] == [1] * 5


def test_the_seed_decides_and_nothing_else():
    def rows(seed, number=2):
        batch = cut(numbered(90), 3, seed=seed)[number]
        return batch.train.x[:, 0].tolist(), batch.validation.x[:, 0].tolist()

    torch.manual_seed(5)
    first = rows(0)
    torch.manual_seed(6)
    assert rows(0) == first != rows(1)


def test_the_permutation_is_pinned():
    """Journals and results of an older version stay valid: the same seed gives the same rows."""
    batch = cut(numbered(12), 3, seed=432)[1]
    found = batch.train.x[:, 0].int().tolist(), batch.validation.x[:, 0].int().tolist()
    assert found == ([7, 11, 10], [1])


@pytest.mark.parametrize("number", [0, 4, -1])
def test_a_number_that_has_not_arrived_is_refused(number):
    with pytest.raises(IndexError, match=f"mega-batch {number} is not there; 3 have arrived"):
        cut(numbered(30), 3)[number]


@pytest.mark.parametrize(("batches", "validation"), [(0, 0.1), (6, 0.1), (11, 0), (-1, 0)])
def test_more_parts_than_rows_are_refused(batches, validation):
    with pytest.raises(ValueError, match="10 examples can be cut into 1 to"):
        cut(numbered(10), batches, validation=validation)


@pytest.mark.parametrize("validation", [-0.1, 1, 2])
def test_a_validation_share_that_leaves_nothing_is_refused(validation):
    with pytest.raises(ValueError, match="validation must be from 0"):
        cut(numbered(10), 2, validation=validation)


def test_a_problem_is_cut_without_its_test_split():
    problem = load_problem("digits")
    stream = cut(problem, 7, seed=0)
    rows = len(problem.train) + len(problem.validation)
    assert sum(batch.rows for batch in stream) == rows and stream.classes == 10
    x = stream[1].train.x
    assert x.dtype == torch.float32 and x.shape[1:] == (1, 8, 8) and abs(x.mean()) < 0.2
    test = problem_examples(problem, problem.test)
    assert len(test) == len(problem.test)
    assert not row_keys(test) & set().union(*(row_keys(batch.train) for batch in stream))
    assert len(row_keys(stream[1].train) & row_keys(stream[1].train)) == len(stream[1].train)


def problem_of(kind, inputs, targets=None, **fields):
    split = Split(inputs, {"t": torch.tensor([0, 1, 0, 1])}, fields.pop("texts", []))
    targets = targets or [Target("t", "classes", ["no", "yes"])]
    return Problem("toy", kind, targets, split, split, split, **fields)


def test_a_table_becomes_numbers_and_one_hot_categories():
    inputs = {"numbers": torch.tensor([[0.5]] * 4), "categories": torch.tensor([[2, 0]] * 4)}
    problem = problem_of("table", inputs, cardinalities=[3, 2])
    x = cut(problem, 2)[1].train.x
    assert x.tolist() == [[0.5, 0, 0, 1, 1, 0]] * 3


def test_a_problem_that_no_stream_can_use_is_refused_at_once():
    with pytest.raises(ValueError, match="toy holds text; make tokens of it"):
        cut(problem_of("text", {}, texts=["a"] * 4), 2)
    with pytest.raises(ValueError, match=r"one target of classes, not t \(number\)"):
        cut(problem_of("table", {}, [Target("t", "number")]), 2)


def test_tokens_are_cut_into_blocks_with_the_token_after_each():
    examples = token_blocks(range(11), 4)
    assert examples.x.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert examples.y.tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    assert len(token_blocks(range(9), 4)) == 2 and len(token_blocks(range(8), 4)) == 1
    with pytest.raises(ValueError, match="4 tokens are too few"):
        token_blocks(range(4), 4)


def test_inputs_of_one_number_have_keys_too():
    one = Examples(torch.tensor([1.0, 2.0, 2.0]), torch.zeros(3))
    assert len(row_keys(one)) == 2 and row_keys(one.take([])) == set()


def test_examples_of_other_shapes_are_not_joined():
    one, two = numbered(3), numbered(2)
    assert Examples.join([one, two]).x[:, 0].tolist() == [0, 1, 2, 0, 1]
    assert one.bytes() == 3 * 4 + 3 * 8
    with pytest.raises(ValueError, match="one shape"):
        Examples.join([one, Examples(torch.zeros(2, 5), torch.zeros(2))])
    with pytest.raises(ValueError, match="3 inputs and 2 targets"):
        Examples(one.x, two.y)
