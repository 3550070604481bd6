"""A head that is missing: made, warmed up alone, killed and gone on, and the same for all arms."""

import warnings

import pytest
import tiny
import torch
import transformers as T

from moiety.adapt.encoders import Encoder
from moiety.adapt.heads import only_made, warm_up
from moiety.adapt.loading import place_patches


class Given:
    """Examples in memory."""

    def __init__(self, examples):
        self.examples = examples

    def __len__(self):
        return len(self.examples)

    def take(self, rows):
        chosen = [int(row) for row in rows]
        return [self.examples[row] for row in chosen]


class Pictures(Given):
    def take(self, rows):
        return self.examples[rows]


def alone(tmp_path, family="bert"):
    """An encoder whose head was not saved, with examples."""
    torch.manual_seed(0)
    if family == "vit-mae":
        tiny.vit_mae().base_model.save_pretrained(tmp_path / "alone")
        return Encoder.load(tmp_path / "alone"), Pictures(tiny.pictures(24))
    tiny.FAMILIES[family]().base_model.save_pretrained(tmp_path / "alone")
    texts = ["w1 w2 w3 w1 w2 w3 w1 w2 w3"] * 24
    return Encoder.load(tmp_path / "alone", processor=tiny.tokenizer()), Given(texts)


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


@pytest.mark.parametrize("family", ["bert", "vit-mae"])
def test_only_what_was_made_is_trained(tmp_path, family):
    encoder, rows = alone(tmp_path, family)
    before = {name: t.clone() for name, t in encoder.model.state_dict().items()}
    wanted = {name: p.requires_grad for name, p in encoder.model.named_parameters()}
    key, made = encoder.weights_key(), set(encoder.made)
    trained = warm_up(encoder, rows, steps=40, batch=8, lr=0.01)
    assert encoder.made == []  # what is warm is not warmed again
    assert encoder.weights_key() == key
    assert encoder.distance(before).total == 0.0
    fixed = [name for name, needs in wanted.items() if not needs]
    moved = [n for n, p in encoder.groups().rest.items() if not torch.equal(p, before[n])]
    assert set(moved) == made - set(fixed)
    assert wanted == {name: p.requires_grad for name, p in encoder.model.named_parameters()}
    last = loss(encoder, rows)
    encoder.model.load_state_dict(before)
    assert last < loss(encoder, rows)
    assert not same(trained.state, before)


@torch.no_grad()
def loss(encoder, rows):
    encoder.model.eval()
    batch = encoder.batch(rows.take(torch.arange(24)))
    mask = encoder.mask(batch, torch.Generator().manual_seed(9))
    return float(encoder.masked(batch, mask).loss)


def test_it_goes_on_to_the_same_bits(tmp_path):
    straight, rows = alone(tmp_path)
    whole = warm_up(straight, rows, steps=12, batch=8, seed=3)
    killed, _ = alone(tmp_path)

    def kill(name, share):
        if share >= 1:
            raise KeyboardInterrupt

    folder = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        warm_up(killed, rows, steps=12, batch=8, seed=3, folder=folder, save_every=0, tick=kill)
    assert (folder / "latest.safetensors").exists()
    again, _ = alone(tmp_path)
    assert same(warm_up(again, rows, steps=12, batch=8, seed=3, folder=folder).state, whole.state)
    read, _ = alone(tmp_path)
    assert same(warm_up(read, rows, steps=12, batch=8, seed=3, folder=folder).state, whole.state)
    assert same(read.model.state_dict(), straight.model.state_dict())


def test_a_folder_is_of_one_encoder_and_one_recipe(tmp_path):
    encoder, rows = alone(tmp_path)
    warm_up(encoder, rows, steps=1, batch=8, folder=tmp_path / "out")
    encoder, _ = alone(tmp_path)
    with pytest.raises(ValueError, match="with other settings"):
        warm_up(encoder, rows, steps=2, batch=8, folder=tmp_path / "out")
    with torch.no_grad():
        next(encoder.trunk.parameters()).add_(1.0)
    with pytest.raises(ValueError, match="the warm-up of another encoder"):
        warm_up(encoder, rows, steps=1, batch=8, folder=tmp_path / "out")


@pytest.mark.parametrize("family", ["albert", "bert", "deberta-v2", "roberta"])
def test_a_new_head_is_saved_with_its_tied_bias(tmp_path, family):
    # transformers says that it found both names of the bias missing, and cannot tie them.
    encoder, rows = alone(tmp_path, family)
    warm_up(encoder, rows, steps=5, batch=8, lr=0.1)
    encoder.save(tmp_path / "whole")
    again = Encoder.load(tmp_path / "whole")
    assert again.made == []
    assert loss(again, rows) == loss(encoder, rows)


def test_its_seed_and_its_length_matter(tmp_path):
    states = []
    for words in ({"seed": 0, "steps": 2}, {"seed": 1, "steps": 2}, {"seed": 0, "steps": 3}):
        encoder, rows = alone(tmp_path)
        states.append(warm_up(encoder, rows, batch=8, **words).state)
    assert not same(states[0], states[1])
    assert not same(states[0], states[2])


def test_a_whole_model_needs_none():
    encoder = Encoder.load(tiny.FAMILIES["bert"](), processor=tiny.tokenizer())
    assert warm_up(encoder, Given(tiny.texts(4)), steps=2) is None


def test_freezing_ends_with_an_error(tmp_path):
    encoder, _ = alone(tmp_path)

    def fail():
        with only_made(encoder):
            assert not any(p.requires_grad for p in encoder.trunk.parameters())
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert all(p.requires_grad for p in encoder.model.parameters())


@pytest.mark.parametrize("loaded", [False, True])
def test_a_model_is_told_where_its_patches_are(tmp_path, loaded):
    model = T.ViTMAEForPreTraining(tiny.vit_mae().config)
    if loaded:
        model.save_pretrained(tmp_path)
        model = T.ViTMAEForPreTraining.from_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="reads its patches in no order"):
        Encoder.load(model)
    embeddings = model.vit.embeddings
    token, weight = embeddings.cls_token.clone(), embeddings.patch_embeddings.projection.weight
    before, mask = weight.clone(), model.decoder.mask_token.clone()
    place_patches(model)
    for table in (embeddings.position_embeddings, model.decoder.decoder_pos_embed):
        assert len(table[0].unique(dim=0)) == 10
        assert loaded or not table.requires_grad  # `from_pretrained` forgets that it is fixed
    assert torch.equal(embeddings.cls_token, token)
    assert torch.equal(weight, before) and torch.equal(model.decoder.mask_token, mask)
    model.save_pretrained(tmp_path)
    model = T.ViTMAEForPreTraining.from_pretrained(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Encoder.load(model)
