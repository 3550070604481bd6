"""The target sets of the adaptation studies: what a seed draws, and the test that opens once."""

import numpy as np
import pytest
import torch
from transformers import RobertaConfig, RobertaForMaskedLM

from moiety.adapt.encoders import Encoder
from moiety.data.load import load_problem
from moiety.data.named import find
from moiety.studies.adapt import targets
from moiety.studies.adapt.targets import TARGETS, load_target, resized, spread

SETS = {  # classes and measure
    "pneumoniamnist": (2, "accuracy"),
    "fashion-mnist": (10, "accuracy"),
    "usps": (10, "accuracy"),
    "acl-arc": (6, "macro_f1"),
    "scierc": (7, "macro_f1"),
    "chemprot": (13, "micro_f1"),
    "tweeteval-emotion": (4, "macro_f1"),
    "digits": (10, "accuracy"),
    "made up": (5, "macro_f1"),
    "omniglot": (47, "accuracy"),
}
# Ten times as many images as the others together.
LARGE = [pytest.param(name, marks=[pytest.mark.slow] * (name == "fashion-mnist")) for name in SETS]


def load(name, side=8):
    if name not in ("digits", "made up") and find(name) is None:
        pytest.skip(f"{name} is not here: set MOIETY_DATA to the folder of the data sets")
    return load_target(name, side)


def keys(examples):
    """Something to compare examples by."""
    if isinstance(examples.inputs, torch.Tensor):
        return [image.numpy().tobytes() for image in examples.inputs]
    return examples.inputs


def test_every_target_is_tried():
    assert SETS.keys() == TARGETS.keys()


@pytest.mark.parametrize("name", LARGE)
def test_a_seed_draws_labels_validation_and_what_is_unlabelled(name):
    target = load(name)
    classes, measure = SETS[name]
    assert (len(target.classes), target.measure) == (classes, measure)
    labelled, validation = target.labelled(3), target.validation(3)
    unlabelled, test = target.unlabelled(3), target.test()
    assert 0.94 * target.count <= len(labelled) == len(labelled.labels) <= target.count
    assert unlabelled.labels is None and len(unlabelled) >= len(labelled)
    left_out = len(target._read.pool) - len(validation) - len(unlabelled)
    assert 0 <= left_out < 0.06 * len(unlabelled)
    assert name == "made up" or not set(keys(validation)) & set(keys(unlabelled))
    assert name == "made up" or not set(keys(test)) & set(keys(unlabelled) + keys(validation))
    assert keys(unlabelled)[: len(labelled)] == keys(labelled)
    if target.kind == "image":
        assert labelled.inputs.shape[1:] == (3, 8, 8) and labelled.inputs.dtype == torch.uint8
        assert len(test.labels) == len(test)
    else:
        assert all(isinstance(text, str) and text for text in test.inputs)
    assert labelled.labels.max() < classes and validation.labels.max() < classes


def test_omniglot_gives_12_drawings_of_a_character_labels_and_3_to_validation():
    target = load("omniglot")
    assert {name.split("/")[0] for name in target.classes} == {"Japanese_(katakana)"}
    assert set(np.bincount(target.labelled(5).labels)) == {12}
    assert set(np.bincount(target.validation(5).labels)) == {3}
    test = target.test()
    assert set(np.bincount(test.labels)) == {5}
    whole = load_problem("omniglot")  # of which each keeps its name
    (every,) = whole.targets
    name = target.classes[30]
    theirs = whole.test.targets[every.name] == every.classes.index(name)
    drawn = resized(whole.test.inputs["images"][theirs], 1, 8)
    assert torch.equal(test.inputs[test.labels == 30][:, :1], drawn)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("acl-arc", (1520, 106, 139)),
        ("scierc", (3219, 455, 974)),
        ("tweeteval-emotion", (3257, 374, 1421)),
    ],
)
def test_sizes_are_the_published_ones_less_repeats(name, sizes):
    target = load(name)
    found = len(target.labelled(0)), len(target.validation(0)), len(target.test())
    assert 0.94 * sizes[0] <= found[0] <= sizes[0]
    assert found[1:] == sizes[1:]


def test_what_repeats_an_example_of_validation_is_left_out():
    texts = [f"word {i // 3} {'same' if i % 3 else 'Same'}  text" for i in range(90)]
    pool = targets.Examples(texts, torch.arange(90) % 2, ["a", "b"])
    read = targets._Read(pool, pool, targets._repeats(texts), 40, 20)
    target = targets.Target("any", "text", "accuracy", ["a", "b"], 40, read)
    held, rest = (set(e.inputs) for e in (target.validation(0), target.unlabelled(0)))
    words = [{text.split()[1] for text in part} for part in (held, rest)]
    assert not words[0] & words[1] and words[0] | words[1] == {str(i) for i in range(30)}
    assert len(target.validation(0)) == 20
    assert target.validation(0, 7).inputs == target.validation(0).inputs[:7]  # as many as labels


def test_a_seed_is_a_new_draw_and_the_same_draw_again():
    target = load("digits")
    assert keys(target.labelled(0)) == keys(load("digits").labelled(0))
    assert keys(target.labelled(0)) != keys(target.labelled(1))
    assert set(keys(target.validation(0))) != set(keys(target.validation(1)))


def test_fewer_labels_are_among_more_and_too_many_are_refused():
    target = load("digits")
    assert keys(target.labelled(0, 300))[:40] == keys(target.labelled(0, 40))
    assert len(set(target.labelled(0, 40).labels.tolist())) == 10
    most = len(target.unlabelled(0))
    assert len(target.labelled(0, most)) == most
    for count in (0, most + 1):
        with pytest.raises(ValueError, match=f"digits has 1 to {most} labels to give, not {count}"):
            target.labelled(0, count)


def test_the_test_opens_once_for_each_who_loads_the_set():
    first = load("digits")
    whole = first.test()
    with pytest.raises(ValueError, match="the test split of digits was read before"):
        first.test()
    assert keys(load("digits").test()) == keys(whole)


def test_every_stretch_has_its_share_of_every_class():
    labels = np.repeat([0, 1, 2], [600, 90, 10])
    for seed in range(5):
        order = spread(labels, seed)
        assert sorted(order) == list(range(700))
        for start in range(0, 700, 70):
            counts = np.bincount(labels[order[start : start + 70]], minlength=3)
            assert abs(counts - [60, 9, 1]).max() <= 2
    assert not np.array_equal(spread(labels, 0), spread(labels, 1))
    # One example alone is not always at the same place.
    alone = [int(np.flatnonzero(spread(np.array([0] * 50 + [1]), s) == 50)[0]) for s in range(20)]
    assert min(alone) < 15 and max(alone) > 35


def test_images_are_resized_and_grey_in_three_channels():
    target = load("usps", side=32)
    images = target.labelled(0, 10).inputs
    assert images.shape == (10, 3, 32, 32)
    assert torch.equal(images[:, 0], images[:, 2])
    assert images.float().std() > 30


def test_rows_are_what_an_encoder_takes():
    from moiety.studies.adapt.corpora import learned, wrapped

    tokenizer = wrapped(learned(targets.made_up_texts(), 300).to_str(), 16)
    config = RobertaConfig(
        vocab_size=len(tokenizer),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=18,
        pad_token_id=tokenizer.pad_token_id,
    )
    encoder = Encoder.load(RobertaForMaskedLM(config), processor=tokenizer)
    target = load("made up")
    rows = target.labelled(0, 7).rows(encoder)
    assert len(rows) == 7 and rows.classes == target.classes
    batch = encoder.batch(rows.take([0, 3]))
    said = tokenizer.batch_decode(batch["input_ids"], skip_special_tokens=True)
    assert said == [target.labelled(0).inputs[row] for row in (0, 3)]
    assert rows.labels[3] == target.labelled(0).labels[3]
    assert target.unlabelled(0).rows(encoder).labels is None


def test_a_set_that_is_not_there_is_named():
    with pytest.raises(ValueError, match="no target set 'mnist'; there are pneumoniamnist"):
        load_target("mnist")
