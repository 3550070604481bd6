"""Encoders of every family: from memory and from a folder, masked, unmasked and refused."""

import copy
import json
from contextlib import contextmanager

import numpy as np
import pytest
import tiny
import torch
import transformers as T
from torch.nn import functional as F

import moiety
from moiety.adapt.encoders import MASK, PLACES, Encoder, layer_of
from moiety.adapt.follow import held_loss
from moiety.adapt.images import ImageEncoder
from moiety.adapt.masks import token_mask
from moiety.adapt.objective import Objective
from moiety.adapt.rows import Rows, Tokens
from moiety.adapt.stage import FURTHER
from moiety.adapt.text import room
from moiety.train import seeded

EVERY = [*tiny.FAMILIES, "vit-mae"]


def made(family):
    if family == "vit-mae":
        return Encoder.load(tiny.vit_mae().eval())
    return Encoder.load(tiny.FAMILIES[family]().eval(), processor=tiny.tokenizer())


def rows_for(encoder, count=6):
    return tiny.texts(count) if encoder.kind == "text" else tiny.pictures(count)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


# -- every family ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", EVERY)
def test_loaded_from_a_folder_it_says_the_same(tmp_path, family):
    encoder = made(family)
    encoder.save(tmp_path / "model")
    again = Encoder.load(tmp_path / "model")
    assert (again.kind, again.made) == (encoder.kind, [])
    batch = encoder.batch(rows_for(encoder))
    other = again.batch(rows_for(encoder))
    assert batch.keys() == other.keys()
    assert all(torch.equal(batch[name], other[name]) for name in batch)
    mask = encoder.mask(batch, generator())
    assert torch.equal(again.mask(other, generator()), mask)
    torch.testing.assert_close(
        again.masked(other, mask).predictions, encoder.masked(batch, mask).predictions
    )
    assert again.weights_key() == encoder.weights_key()
    assert not (tmp_path / "model" / ".saving").exists()


@pytest.mark.parametrize("cut", [None, 9])
def test_a_tokenizer_is_saved_as_it_was(tmp_path, cut):
    encoder = made("roberta")
    backend = encoder.processor.backend_tokenizer
    if cut:
        backend.enable_truncation(cut)
    before = backend.to_str()
    encoder.tokenise(["w1 w2 w3"], 3)
    encoder.pieces(["w1"])
    encoder.frame()
    encoder.save(tmp_path)
    saved = json.loads((tmp_path / "tokenizer.json").read_text())
    assert saved["truncation"] == json.loads(before)["truncation"]


def test_what_a_tokenizer_saves_in_a_folder_of_its_own_is_saved(tmp_path):
    encoder = Encoder.load(tiny.FAMILIES["bert"](), processor=tiny.tokenizer())
    encoder.processor.chat_template = {"default": "{{x}}", "tool_use": "{{y}}"}
    for _ in range(2):  # also over what is there
        encoder.save(tmp_path)
        assert (tmp_path / "additional_chat_templates" / "tool_use.jinja").exists()
    assert not (tmp_path / ".saving").exists()
    assert Encoder.load(tmp_path).weights_key() == encoder.weights_key()


@pytest.mark.parametrize("family", EVERY)
def test_an_encoder_saved_alone_gets_a_head_by_its_seed(tmp_path, family):
    encoder = made(family)
    encoder.trunk.save_pretrained(tmp_path)
    words = {} if encoder.kind == "image" else {"processor": tiny.tokenizer()}
    first, same, other = (Encoder.load(tmp_path, seed=seed, **words) for seed in (0, 0, 1))
    rest = first.groups().rest
    assert first.made
    assert set(first.made) == set(rest)
    assert first.weights_key() == encoder.weights_key()
    assert all(torch.equal(rest[name], same.groups().rest[name]) for name in rest)
    assert any(not torch.equal(rest[name], other.groups().rest[name]) for name in rest)


@pytest.fixture
def no_memory_by_chance(monkeypatch):
    """What nobody writes is NaN."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("family", [*EVERY, "fnet", "nystromformer"])
def test_a_head_that_is_made_is_that_of_a_new_model(tmp_path, family, no_memory_by_chance):
    others = {
        "fnet": lambda: T.FNetForMaskedLM(T.FNetConfig(**tiny.TEXT)),
        "nystromformer": lambda: T.NystromformerForMaskedLM(T.NystromformerConfig(**tiny.TEXT)),
    }
    model = others[family]() if family in others else made(family).model
    model.base_model.save_pretrained(tmp_path)
    words = {} if family == "vit-mae" else {"processor": tiny.tokenizer()}
    found = Encoder.load(tmp_path, **words)
    assert found.made
    for name in found.made:  # NaN, where nothing was written
        assert found.model.get_parameter(name).isfinite().all(), name
    with seeded(0):
        new = type(model)(model.config)
    for name in set(found.made) - {"decoder.decoder_pos_embed"}:  # that is not drawn
        assert torch.equal(found.model.get_parameter(name), new.get_parameter(name)), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_model_in_half_precision_is_trained_in_float32(dtype):
    given = tiny.FAMILIES["bert"]().to(dtype)
    encoder = Encoder.load(given, processor=tiny.tokenizer())
    assert {p.dtype for p in encoder.model.parameters()} == {torch.float32}
    assert {p.dtype for p in given.parameters()} == {dtype}  # which is not ours to change
    whole = tiny.FAMILIES["bert"]()
    assert Encoder.load(whole, processor=tiny.tokenizer()).model is whole


@pytest.mark.parametrize("family", EVERY)
def test_only_the_trunk_hears_of_its_representation(family):
    encoder = made(family)
    encoder.represent(encoder.batch(rows_for(encoder))).features.square().sum().backward()
    groups = encoder.groups()
    assert all(p.grad is None for p in groups.rest.values())
    heard = [name for name, p in groups.trunk.items() if p.grad is not None]
    assert any("layer" in name for name in heard)
    assert not groups.trunk.keys() & groups.rest.keys()
    assert len(groups.trunk) + len(groups.rest) == len(list(encoder.model.parameters()))


@pytest.mark.parametrize("family", EVERY)
def test_the_masked_loss_reaches_all_that_can_be_trained(family):
    encoder = made(family)
    batch = encoder.batch(rows_for(encoder))
    encoder.masked(batch, encoder.mask(batch, generator())).loss.backward()
    deaf = [n for n, p in encoder.model.named_parameters() if p.requires_grad and p.grad is None]
    assert deaf == []


@pytest.mark.parametrize("family", list(tiny.FAMILIES))
def test_padding_changes_nothing(family):
    encoder = made(family)
    short, long = tiny.texts(1, 4, 4)[0], tiny.texts(1, 12, 12, seed=1)[0]
    alone, padded = encoder.batch([short]), encoder.batch([short, long])
    both = encoder.represent(padded)
    assert both.real.sum(1).tolist() == [6, 14]
    length = int(both.real[0].sum())
    torch.testing.assert_close(
        both.features[:1, :length], encoder.represent(alone).features, rtol=1e-4, atol=1e-5
    )
    assert torch.equal(both.cls, both.features[:, 0])
    assert not encoder.sees_padding


def test_a_model_that_sees_padding_is_found_out():
    config = T.FNetConfig(**{name: tiny.TEXT[name] for name in tiny.TEXT if "heads" not in name})
    encoder = Encoder.load(T.FNetForMaskedLM(config), processor=tiny.tokenizer())
    assert encoder.sees_padding
    assert encoder.model.training
    assert not made("vit-mae").sees_padding


@pytest.mark.parametrize("family", list(tiny.FAMILIES))
def test_texts_as_long_as_the_model_reads(family):
    encoder = made(family)
    batch = encoder.batch([[5] * encoder.longest])
    assert bool(encoder.represent(batch).features.isfinite().all())
    if family not in ("deberta-v2", "modernbert"):  # whose places are relative, and may be more
        with pytest.raises((IndexError, RuntimeError)):
            encoder.trunk(torch.full((1, encoder.longest + 1), 5))


@pytest.mark.parametrize("family", EVERY)
def test_distance_is_that_of_the_trunk(family):
    encoder = made(family)
    initial = copy.deepcopy(encoder.model.state_dict())
    assert encoder.distance(initial).total == 0.0
    name, moved = next((n, p) for n, p in encoder.groups().trunk.items() if "layer" in n)
    with torch.no_grad():
        moved += 2.0
        for parameter in encoder.groups().rest.values():
            parameter += 1.0
    found = encoder.distance(initial)
    assert found.total == pytest.approx(2.0 * moved.numel() ** 0.5, rel=1e-6)
    away = {layer: gap for layer, gap in found.layers.items() if gap}
    assert list(away.values()) == [found.total]
    assert layer_of(name.split(".", 1)[1]) in away


def test_layers_are_named_by_their_place_in_a_list():
    assert layer_of("encoder.layer.11.attention.self.query.weight") == "encoder.layer.11"
    assert layer_of("layers.0.mlp.Wi.weight") == "layers.0"
    assert layer_of("embeddings.word_embeddings.weight") == "embeddings"
    assert layer_of("layernorm.bias") == "layernorm"


def test_a_copy_has_weights_of_its_own():
    encoder = made("bert")
    other = encoder.copy()
    with torch.no_grad():
        next(other.trunk.parameters()).add_(1.0)
    assert other.weights_key() != encoder.weights_key()
    assert other.distance(encoder.model.state_dict()).total > 0
    assert other.processor is encoder.processor


@pytest.mark.parametrize("family", ["bert", "vit-mae"])
def test_an_upcycled_model_is_adapted_like_another(tmp_path, family):
    dense = made(family)
    words = {"experts": 4, "router": "top-k", "k": 2, "layers": "last:1"}
    model = moiety.upcycle(dense.model, balance={"switch": 1.0}, **words)
    encoder = Encoder.load(model.eval(), processor=dense.processor)
    batch = encoder.batch(rows_for(encoder))
    mask = encoder.mask(batch, generator())
    found = encoder.masked(batch, mask)
    torch.testing.assert_close(found.loss, dense.masked(batch, mask).loss)
    if family == "vit-mae":  # whose own loss holds that of the balance when it is trained
        own = model.train()(pixel_values=batch["pixel_values"], noise=mask).loss
        assert own.item() > found.loss.item() + 0.1
        torch.testing.assert_close(encoder.masked(batch, mask).loss, found.loss)
        model.eval()
    encoder.save(tmp_path)
    again = Encoder.load(tmp_path)
    assert again.made == []
    assert torch.equal(again.masked(batch, mask).predictions, found.predictions)


# -- text -----------------------------------------------------------------------------------------


def test_the_text_loss_is_the_mean_over_masked_places_of_each_text():
    encoder = made("roberta")
    batch = encoder.batch(tiny.texts(5))
    mask = encoder.mask(batch, generator(3))
    found = encoder.masked(batch, mask)
    logs = F.log_softmax(found.predictions, -1)
    each = []
    for text in range(5):
        places = [place for place in range(mask.shape[1]) if mask[text, place] >= 0]
        of = [-logs[text, place, batch["input_ids"][text, place]] for place in places]
        each.append(sum(of) / len(of))
    torch.testing.assert_close(found.loss, sum(each) / 5)
    assert torch.equal(found.where, mask >= 0)
    assert torch.equal(found.targets, batch["input_ids"])


def test_rows_of_ids_and_texts_make_the_same_batch():
    encoder = made("bert")
    texts = tiny.texts(4)
    ids = [np.array(row, dtype=np.int32) for row in encoder.tokenise(texts)]
    batch, same = encoder.batch(texts), encoder.batch(ids)
    assert all(torch.equal(batch[name], same[name]) for name in batch)
    assert batch["input_ids"].shape == batch["special_tokens_mask"].shape


def test_padding_that_is_no_special_token_is_not_masked():
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = None  # token 0 is a word then, and pads all the same
    encoder = Encoder.load(tiny.FAMILIES["bert"](), processor=tokenizer)
    batch = encoder.batch(["w1", " ".join(tiny.WORDS[:20])])
    assert 0 in encoder.words
    for seed in range(5):
        mask = encoder.mask(batch, generator(seed))
        assert (mask[0] >= 0).tolist() == [False, True, *[False] * 20]


def test_the_key_of_a_tokenizer_is_not_that_of_its_last_call():
    encoder = made("bert")
    key = encoder.tokenizer_key()
    encoder.tokenise(tiny.texts(), 5)
    assert encoder.tokenizer_key() == key
    other = Encoder.load(encoder.model, processor=tiny.tokenizer(tiny.WORDS[::-1]))
    assert other.tokenizer_key() != key


def test_roberta_keeps_two_places_for_itself():
    assert made("bert").longest == 24
    assert made("roberta").longest == 23  # padding is token 0
    other, tokenizer = T.RobertaConfig(**{**tiny.TEXT, "pad_token_id": 1}), tiny.tokenizer()
    tokenizer.pad_token = tiny.SPECIAL[1]
    encoder = Encoder.load(T.RobertaForMaskedLM(other), processor=tokenizer)
    assert encoder.longest == 22
    encoder.represent(encoder.batch([" ".join(tiny.WORDS)]))  # cut, not out of range
    with pytest.raises(ValueError, match="has 23 tokens, and the model reads at most 22"):
        encoder.batch([[5] * 23])


# -- hidden places alone --------------------------------------------------------------------------


def gradients(encoder):
    return {n: p.grad for n, p in encoder.model.named_parameters() if p.grad is not None}


@contextmanager
def predicted(encoder):
    """The shapes of what the head says, call by call."""
    shapes = []
    words = encoder.model.get_output_embeddings()
    hook = words.register_forward_hook(lambda _, __, made: shapes.append(made.shape[:-1].numel()))
    yield shapes
    hook.remove()


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_the_masked_loss_needs_the_hidden_places_alone(family):
    encoder = made(family)
    batch = encoder.batch(tiny.texts(6))
    mask = encoder.mask(batch, generator())
    wanted = encoder.masked(batch, mask)
    wanted.loss.backward()
    slopes = gradients(encoder)
    encoder.model.zero_grad()
    with predicted(encoder) as shapes:
        found = encoder.masked_loss(batch, mask)
    assert shapes == [int(wanted.where.sum())]
    found.backward()
    torch.testing.assert_close(found, wanted.loss)
    assert gradients(encoder).keys() == slopes.keys()
    for name, slope in gradients(encoder).items():
        torch.testing.assert_close(slope, slopes[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_a_rounded_batch_has_room_for_all_that_is_hidden(family):
    encoder = made(family)
    batch = encoder.batch(tiny.texts(40))
    mask = encoder.mask(batch, generator())
    rounded = encoder.rounded({**batch, MASK: mask}, length=20)
    shown, places = rounded.pop(MASK), rounded[PLACES]
    assert places.shape == (room(40, 20),) and len(places.unique()) == len(places) < 40 * 20
    hidden = (shown >= 0).flatten().nonzero().squeeze(1)
    assert torch.equal(places[: len(hidden)], hidden)
    with predicted(encoder) as shapes:
        found = encoder.masked_loss(rounded, shown)
    assert shapes == [room(40, 20)]
    torch.testing.assert_close(found, encoder.masked(batch, mask).loss)
    again = encoder.rounded({**rounded, MASK: shown}, length=22)  # places move with the length
    torch.testing.assert_close(
        encoder.masked_loss(again, again[MASK]), encoder.masked(batch, mask).loss
    )


@pytest.mark.parametrize(("rows", "length"), [(1, 3), (2, 12), (64, 8), (16, 64), (64, 64)])
def test_no_batch_hides_more_than_there_is_room_for(rows, length):
    ids = torch.ones(rows, length, dtype=torch.long)
    words, lots = torch.arange(5), generator()
    most = max(int((token_mask(ids, ids > 0, words, 4, lots) >= 0).sum()) for _ in range(300))
    assert most <= room(rows, length) <= rows * length
    assert rows * length < 1000 or room(rows, length) < 0.36 * rows * length


def test_training_and_checks_predict_hidden_places_alone():
    encoder = made("roberta")
    rows = encoder.tokenise(tiny.texts(6))
    batch = encoder.batch(rows)
    mask = encoder.mask(batch, generator())
    hidden = int((mask >= 0).sum())
    teacher = encoder.copy()
    with predicted(encoder) as shapes:
        FURTHER.backward(encoder, batch, mask)
        objective = Objective(match="hidden")
        objective.backward(encoder, batch, mask, objective.target(teacher, batch, mask))
        assert shapes == [hidden, hidden]
        with torch.no_grad():
            held_loss(encoder, Rows(Tokens.of(rows), None), seed=0)
        assert shapes[2] < mask.numel() / 2
        predicts = Objective(match="prediction")  # which compares what is said in its places
        predicts.backward(encoder, batch, mask, predicts.target(teacher, batch, mask))
        assert shapes[3:] == [mask.numel()]


@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_loading_leaves_everything_as_it_was(family):
    model = tiny.FAMILIES[family]().train()
    state = {name: t.clone() for name, t in model.state_dict().items()}
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    encoder = Encoder.load(model, processor=tiny.tokenizer())
    assert encoder.by_place and torch.equal(torch.random.get_rng_state(), before)
    assert all(part.training for part in encoder.model.modules())
    assert all(torch.equal(t, state[name]) for name, t in encoder.model.state_dict().items())
    assert not encoder.sees_padding and not encoder.trunk._forward_hooks
    assert all(part.training for part in encoder.model.modules())


def test_a_model_that_says_no_numbers_is_loaded_and_given_all():
    model = tiny.FAMILIES["bert"]()
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(torch.nan)
    assert not Encoder.load(model, processor=tiny.tokenizer()).by_place


def test_a_short_probe_does_not_change_how_a_model_attends():
    config = T.BigBirdConfig(block_size=2, num_random_blocks=1, **tiny.TEXT)
    encoder = Encoder.load(T.BigBirdForMaskedLM(config), processor=tiny.tokenizer())
    assert encoder.by_place and not encoder.sees_padding
    assert encoder.trunk.attention_type == "block_sparse"


class ReadsAll(T.BertForMaskedLM):
    """Its head adds the mean of all places to each."""

    def forward(self, **words):
        made = super().forward(**words)
        made.logits = made.logits + made.logits.mean(1, keepdim=True)
        return made


class WantsItsRows(T.BertForMaskedLM):
    """Its head asks for as many rows as texts."""

    def forward(self, **words):
        made = super().forward(**words)
        made.logits = made.logits.view(*words["input_ids"].shape, -1)
        return made


@pytest.mark.parametrize("kind", [ReadsAll, WantsItsRows])
def test_a_head_that_reads_more_than_its_place_is_given_all(kind):
    encoder = Encoder.load(kind(T.BertConfig(**tiny.TEXT)).eval(), processor=tiny.tokenizer())
    assert not encoder.by_place and made("bert").by_place
    batch = encoder.batch(tiny.texts(6))
    mask = encoder.mask(batch, generator())
    assert torch.equal(encoder.masked_loss(batch, mask), encoder.masked(batch, mask).loss)


# -- images ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("image", "patch", "channels"), [(8, 2, 1), (12, 4, 3), (32, 8, 3)])
def test_images_of_several_sizes(image, patch, channels):
    encoder = Encoder.load(tiny.vit_mae(image, patch, channels).eval())
    batch = encoder.batch(tiny.pictures(3, image, channels))
    mask = encoder.mask(batch, generator())
    found = encoder.masked(batch, mask)
    patches = (image // patch) ** 2
    assert found.where.sum(1).tolist() == [patches - int(patches * 0.25)] * 3
    theirs = encoder.model(pixel_values=batch["pixel_values"], noise=mask)
    torch.testing.assert_close(found.loss, theirs.loss)
    assert encoder.represent(batch).features.shape == (3, patches + 1, 16)


def test_normalised_pixels_are_the_models_own_targets():
    encoder = Encoder.load(tiny.vit_mae(norm_pix_loss=True).eval())
    batch = encoder.batch(tiny.pictures(3))
    mask = encoder.mask(batch, generator())
    theirs = encoder.model(pixel_values=batch["pixel_values"], noise=mask).loss
    torch.testing.assert_close(encoder.masked(batch, mask).loss, theirs)


def test_patches_are_seen_whole_and_in_their_order():
    encoder = Encoder.load(tiny.vit_mae().eval())
    batch, trunk = encoder.batch(tiny.pictures(3)), encoder.trunk
    found = encoder.represent(batch)
    # By hand: embed all patches, then the layers and the last norm.
    embeddings = trunk.embeddings
    x = embeddings.patch_embeddings(batch["pixel_values"]) + embeddings.position_embeddings[:, 1:]
    token = embeddings.cls_token + embeddings.position_embeddings[:, :1]
    x = torch.cat([token.expand(3, -1, -1), x], 1)
    for layer in next(m for m in trunk.modules() if isinstance(m, torch.nn.ModuleList)):
        x = layer(x)
        x = x[0] if isinstance(x, tuple) else x
    torch.testing.assert_close(found.features, trunk.layernorm(x))
    assert bool(found.real.all())
    assert torch.equal(found.features, encoder.represent(batch).features)  # no lot is drawn


def test_the_shared_config_is_never_changed():
    encoder = Encoder.load(tiny.vit_mae().eval())
    config, seen = encoder.model.config, []
    shared = encoder.trunk.embeddings.config
    hook = encoder.trunk.layernorm.register_forward_hook(lambda *_: seen.append(config.mask_ratio))
    encoder.represent(encoder.batch(tiny.pictures()))
    hook.remove()
    assert seen == [0.75]
    assert encoder.trunk.embeddings.config is shared is config
    with pytest.raises(RuntimeError):
        encoder.represent({"pixel_values": torch.zeros(2, 3, 12, 12, device="meta")})
    assert encoder.trunk.embeddings.config is shared


def tables(encoder):
    return encoder.model.vit.embeddings.position_embeddings, encoder.model.decoder.decoder_pos_embed


def test_position_tables_stay_fixed_and_are_no_zeros(tmp_path):
    encoder = Encoder.load(tiny.vit_mae())
    encoder.save(tmp_path / "all")
    encoder.trunk.save_pretrained(tmp_path / "alone")
    for folder in ("all", "alone"):
        for table, before in zip(tables(Encoder.load(tmp_path / folder)), tables(encoder)):
            assert not table.requires_grad
            assert torch.equal(table, before)
            assert len(table[0].unique(dim=0)) == 10  # every place is another


def test_uint8_images_become_what_the_processor_makes_of_them(tmp_path):
    mean, std = [0.4, 0.5, 0.6], [0.2, 0.3, 0.4]
    size = {"height": 12, "width": 12}
    processor = T.ViTImageProcessor(size=size, image_mean=mean, image_std=std)
    encoder = Encoder.load(tiny.vit_mae(), processor=processor)
    images = tiny.pictures(4)
    theirs = processor(list(images.permute(0, 2, 3, 1).numpy()), return_tensors="pt")
    ours = encoder.batch(images)["pixel_values"]
    torch.testing.assert_close(ours, torch.as_tensor(theirs["pixel_values"]))
    encoder.save(tmp_path)
    again = Encoder.load(tmp_path)
    assert torch.equal(again.batch(images.numpy())["pixel_values"], ours)
    assert again.input_key() == encoder.input_key() != Encoder.load(tiny.vit_mae()).input_key()


# -- what is refused ------------------------------------------------------------------------------


def gpt2():
    return T.GPT2LMHeadModel(T.GPT2Config(vocab_size=48, n_embd=16, n_layer=1, n_head=2))


def bart():
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    wide = {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
    return T.BartForConditionalGeneration(T.BartConfig(vocab_size=48, **sizes, **heads, **wide))


def causal_bert():
    return T.BertForMaskedLM(T.BertConfig(**tiny.TEXT, is_decoder=True))


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (gpt2, "no masked language model"),
        (bart, "is an encoder–decoder"),
        (causal_bert, "is a causal model"),
        (lambda: tiny.FAMILIES["bert"]().base_model, "has no masked head; give a BertForMaskedLM"),
        (lambda: torch.nn.Linear(2, 2), "Linear is no masked language model"),
    ],
)
def test_other_models_are_refused(tmp_path, make, wrong):
    model = make()
    with pytest.raises(ValueError, match=wrong):
        Encoder.load(model, processor=tiny.tokenizer())
    if hasattr(model, "save_pretrained") and "head" not in wrong:
        model.save_pretrained(tmp_path)
        with pytest.raises(ValueError, match=wrong):
            Encoder.load(tmp_path, processor=tiny.tokenizer())


@pytest.mark.parametrize(
    ("tokenizer", "wrong"),
    [
        (None, "brings no tokenizer"),
        (tiny.tokenizer(mask=False), "has no mask token"),
        (tiny.tokenizer([*tiny.WORDS, "more"]), "largest token id is 48, and the model embeds 48"),
    ],
)
def test_other_tokenizers_are_refused(tokenizer, wrong):
    with pytest.raises(ValueError, match=wrong):
        Encoder.load(tiny.FAMILIES["bert"](), processor=tokenizer)


def test_other_images_are_refused():
    encoder = Encoder.load(tiny.vit_mae())
    with pytest.raises(ValueError, match="are 8×8, and the model reads 12×12"):
        encoder.batch(tiny.pictures(image=8))
    with pytest.raises(ValueError, match="have 1 channels, and the model reads 3"):
        encoder.batch(tiny.pictures(channels=1))
    with pytest.raises(ValueError, match=r"must be \[N, C, H, W\]"):
        encoder.batch(tiny.pictures()[0])
    with pytest.raises(ValueError, match="keeps 9 of 9 patches"):
        Encoder.load(tiny.vit_mae(mask_ratio=0.0))
    for sizes in ({"patch_size": 5}, {"image_size": [12, 12]}):
        model = tiny.vit_mae()
        model.config.update(sizes)
        with pytest.raises(ValueError, match="cannot be cut into patches"):
            ImageEncoder(model, T.ViTImageProcessor())
    grey = T.ViTImageProcessor(image_mean=[0.5], image_std=[0.5])
    with pytest.raises(ValueError, match="normalises 1 channels"):
        Encoder.load(tiny.vit_mae(), processor=grey)


def test_a_damaged_folder_is_refused(tmp_path):
    encoder = made("bert")
    encoder.save(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(ValueError, match="cannot be loaded"):
        Encoder.load(tmp_path)
    with pytest.raises(ValueError, match="no folder"):
        Encoder.load(tmp_path / "nowhere")
