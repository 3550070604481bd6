"""The source models of the adaptation studies: made once, found again, resumed after a kill."""

import json
import multiprocessing
import shutil

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from moiety.adapt.encoders import Encoder
from moiety.studies.adapt import corpora, masked_models, sources
from moiety.studies.adapt.corpora import SPECIAL, corpus_of, learned, packed, wrapped
from moiety.studies.adapt.masked_models import build, hide, masked_loss
from moiety.studies.adapt.sources import place, settings_of, source
from moiety.train import seeded

KINDS = ["image", "text"]


@pytest.fixture(autouse=True)
def models(tmp_path, monkeypatch):
    """A folder of models of its own."""
    monkeypatch.setenv("MOIETY_MODELS", str(tmp_path / "models"))
    return tmp_path / "models"


@pytest.fixture(autouse=True)
def _forget():
    """No tokens of another folder."""
    corpora._texts.cache_clear()


def weights(found):
    return Encoder.load(found.path).model.state_dict()


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def built(kind, **changes):
    settings = settings_of(kind, "smoke", **changes)
    corpus = corpus_of(kind, settings)
    return build(kind, 0, settings, corpus), corpus, settings


# -- how a text model begins -----------------------------------------------------------------------


def near(scale="small", **changes):
    """A RoBERTa of a scale as it begins, and made-up rows of its length."""
    settings = settings_of("text", scale, data="made up", vocabulary=300, **changes)
    corpus = corpus_of("text", settings)
    return build("text", 0, settings, corpus).model.eval(), corpus


@pytest.mark.parametrize("scale", ["small", "full"])
def test_a_text_model_begins_by_looking_at_the_words_beside(scale):
    model, corpus = near(scale)
    model.set_attn_implementation("eager")
    ids = torch.randint(len(SPECIAL), 300, (4, corpus.train.shape[1]))
    with torch.no_grad():
        seen = model.base_model(input_ids=ids, output_attentions=True).attentions[0].mean(0)
    places = torch.arange(4, ids.shape[1] - 4)
    for head, offset in enumerate(masked_models.NEAR):
        there = seen[head, places, places + offset].mean()
        assert there > 0.4, (head, offset)
        far = ids.shape[1] - 16
        for distance in range(-far, far):  # and nowhere else
            line = seen[head].diagonal(distance)
            assert distance == offset or line.mean() < there / 4, (head, distance)


def test_what_it_sees_there_reaches_the_answer():
    model, corpus = near()
    ids = torch.randint(len(SPECIAL), 300, (8, corpus.train.shape[1]))
    other = ids.clone()
    other[:, 21] = other[:, 21].roll(1)
    with torch.no_grad():
        one, two = (model.base_model(input_ids=some)[0][:, 20] for some in (ids, other))
    assert ((one - two).norm(dim=1) / one.norm(dim=1)).median() > 0.02  # as usual 0.001


def test_it_begins_by_saying_how_common_words_are():
    model, corpus = near()
    common = torch.bincount(corpus.train.flatten().long(), minlength=300)
    bias = model.lm_head.bias.detach()
    assert model.lm_head.decoder.bias is model.lm_head.bias
    assert torch.logsumexp(bias, 0) == pytest.approx(0, abs=1e-5)
    seen = (common > 0) & (torch.arange(300) >= len(SPECIAL))
    assert (bias[seen] - (common[seen] + 0.5).log()).std() < 1e-5
    assert bias[~seen].max() < bias[seen].min()


def test_heads_without_pairs_are_refused():
    with pytest.raises(ValueError, match="4 heads of a width of 12 do not have pairs"):
        near(dim=12)


def test_places_of_words_are_told_apart_by_their_distance():
    table = near()[0].base_model.embeddings.position_embeddings.weight.detach()
    alike = table @ table.T
    assert table.square().mean().sqrt() == pytest.approx(0.02 * masked_models.LOUD, rel=0.01)
    assert torch.allclose(alike.diagonal(1), alike[0, 1].expand(len(table) - 1), atol=1e-5)
    assert alike[3, 3] > 5 * max(abs(alike[3, 4]), abs(alike[3, 6]))


def test_words_are_guessed_from_those_beside_them_much_sooner(monkeypatch):
    words = {"data": "made up", "train": None, "steps": 150, "batch": 32, "depth": 2, "dim": 64}
    words |= {"vocabulary": 300, "length": 16, "heads": 4}
    sooner = source("text", 0, "small", **words).loss
    monkeypatch.setattr(masked_models, "look_near", lambda model, ids: None)
    monkeypatch.setitem(sources.RECIPE, "text", -1)
    assert sooner < source("text", 0, "small", **words).loss - 0.3


# -- made once, and found ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_a_source_is_made_once_and_loads_with_its_processor(kind, models, monkeypatch):
    first = source(kind, 0, "smoke")
    monkeypatch.setattr(sources, "train", None)  # nothing trains again
    again = source(kind, 0, "smoke")
    assert again == first and again.curve[-1]["step"] == 8
    encoder = Encoder.load(first.path)
    assert (encoder.kind, encoder.made) == (kind, []) and encoder.processor is not None
    assert not (first.path / "state").exists() and first.path.parent == models
    about = json.loads((first.path / "source.json").read_text())
    assert about["settings"] == settings_of(kind, "smoke") and about["versions"]["torch"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_has_the_loss_that_is_told(kind):
    found = source(kind, 0, "smoke")
    _, corpus, settings = built(kind)
    encoder = Encoder.load(found.path)
    encoder.model.eval()
    loss = masked_loss(encoder, corpus.held, {**settings, "crop": 0})
    rows = torch.arange(len(corpus.held)).split(settings["batch"])
    with seeded(sources.CHECK), torch.no_grad():
        total = sum(float(loss(some)) * len(some) for some in rows)
    assert total / len(corpus.held) == pytest.approx(found.loss, rel=1e-6)


def test_what_training_depends_on_is_in_the_name(monkeypatch):
    base = settings_of("image", "smoke")
    names = [place("image", 0, base), place("image", 1, base)]
    others = {"data": "cifar10", "precision": "bfloat16"}
    for name, value in base.items():
        other = others.get(name) or value + 1
        names.append(place("image", 0, settings_of("image", "smoke", **{name: other})))
    monkeypatch.setattr(sources, "checksums", lambda data: ["others"])
    names.append(place("image", 0, base))
    monkeypatch.setitem(sources.RECIPE, "image", 99)
    names.append(place("image", 0, base))
    assert len(set(names)) == len(names)
    assert names[0].name.startswith("image-s0-")


def test_another_seed_is_another_model_of_the_same_words():
    one, other = source("text", 0, "smoke"), source("text", 1, "smoke")
    assert not same(weights(one), weights(other))
    words = [(found.path / "tokenizer.json").read_text() for found in (one, other)]
    assert words[0] == words[1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_training_goes_on_to_the_same_bits(kind, monkeypatch):
    monkeypatch.setattr(sources, "SAVE", 0.0)
    want = source(kind, 0, "smoke")
    curve, bits = want.curve, weights(want)
    shutil.rmtree(want.path)

    def die(share):
        if share == 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        source(kind, 0, "smoke", tick=die)
    assert (want.path / "state").exists() and not (want.path / "source.json").exists()
    began = []
    found = source(kind, 0, "smoke", tick=began.append)
    assert began[0] > 0.5 and same(weights(found), bits) and found.curve == curve


def _make(log):
    torch.set_num_threads(1)  # a forked process has none of its parent's, and would wait for them
    usual = sources.train

    def counted(*args, **words):
        with open(log, "a") as file:
            file.write("trained\n")
        return usual(*args, **words)

    sources.train = counted
    source("text", 0, "smoke", steps=40)


def test_of_two_processes_one_trains_and_the_other_waits(tmp_path):
    context, log = multiprocessing.get_context("fork"), tmp_path / "log"
    both = [context.Process(target=_make, args=(log,)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
    assert [process.exitcode for process in both] == [0, 0]
    assert log.read_text() == "trained\n"


@pytest.mark.parametrize("kind", KINDS)
def test_training_lowers_the_loss(kind):
    changes = {"steps": 80} if kind == "image" else {"steps": 80, "lr": 1e-2}
    short, longer = source(kind, 0, "smoke", steps=1), source(kind, 0, "smoke", **changes)
    assert longer.loss < 0.9 * short.loss


class Waits(TorchDispatchMode):
    """Refuses what a CUDA graph cannot hold, since the host would have to see a value."""

    NAMES = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select")

    def __torch_dispatch__(self, op, types, args=(), words=None):
        assert op.overloadpacket.__name__ not in self.NAMES, op
        if op.overloadpacket.__name__ == "index":
            assert not any(i is not None and i.dtype == torch.bool for i in args[1]), op
        return op(*args, **(words or {}))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_in_a_step_waits_for_the_host(kind):
    encoder, corpus, settings = built(kind)
    loss = masked_loss(encoder, corpus.train, settings)
    with Waits():
        loss(torch.arange(8)).backward()
        with pytest.raises(AssertionError):
            corpus.train[corpus.train > 3]
        with pytest.raises(AssertionError):
            corpus.train.sum().item()


# -- images --------------------------------------------------------------------------------------


def test_the_processor_normalises_what_is_trained_on():
    encoder, corpus, _ = built("image")
    pixels = encoder.batch(corpus.train)["pixel_values"]
    assert corpus.train.shape[1:] == (3, 8, 8)
    assert torch.allclose(pixels.mean((0, 2, 3)), torch.zeros(3), atol=1e-3)
    assert torch.allclose(pixels.std((0, 2, 3)), torch.ones(3), atol=1e-3)


def test_noise_is_drawn_anew_and_only_from_the_generator_of_the_loop():
    encoder, corpus, settings = built("image")
    loss = masked_loss(encoder, corpus.train, settings)
    rows = torch.arange(20)
    with seeded(0):
        first, second = loss(rows), loss(rows)
    with seeded(0):
        again = loss(rows)
    assert first == again != second


def test_the_loss_is_that_of_the_model_itself(monkeypatch):
    encoder, corpus, settings = built("image")
    noise = torch.rand(20, encoder.patches)
    monkeypatch.setattr(masked_models.torch, "rand", lambda *size, **words: noise)
    ours = masked_loss(encoder, corpus.train, settings)(torch.arange(20))
    pixels = encoder.batch(corpus.train[:20])["pixel_values"]
    assert torch.allclose(ours, encoder.model(pixel_values=pixels, noise=noise).loss)


def test_images_are_moved_where_that_is_asked():
    encoder, corpus, settings = built("image")
    rows, losses = torch.arange(20), []
    for crop in (0, 1):
        with seeded(0):
            losses.append(
                float(masked_loss(encoder, corpus.train, {**settings, "crop": crop})(rows).detach())
            )
    assert losses[0] != losses[1]


# -- texts ---------------------------------------------------------------------------------------


def test_tokens_are_whole_rows_of_all_texts_in_their_order():
    plain = learned(["one two three four", "five six"] * 3, 300)
    rows = packed(plain, ["one two three", "four five six one"], 6)
    first, last = SPECIAL.index("<s>"), SPECIAL.index("</s>")
    assert rows.shape[1] == 6
    assert (rows[:, 0] == first).all() and (rows[:, -1] == last).all()
    inside = rows[:, 1:-1].flatten().tolist()
    texts = [
        plain.encode(t, add_special_tokens=False).ids
        for t in ("one two three", "four five six one")
    ]
    want = [*texts[0], last, *texts[1], last]
    assert inside == want[: len(inside)] and len(want) - len(inside) < 4


def test_a_tokenizer_spells_every_text_and_says_it_again():
    tokenizer = wrapped(learned(corpora.made_up_texts(), 300).to_str(), 16)
    ids = tokenizer("Zürich, a film!")["input_ids"]
    assert ids[0] == 0 and ids[-1] == 2 and SPECIAL.index("<unk>") not in ids
    assert tokenizer.decode(ids, skip_special_tokens=True) == "Zürich, a film!"
    assert tokenizer.convert_ids_to_tokens(range(5)) == SPECIAL
    assert tokenizer.mask_token_id == 4 and tokenizer.model_max_length == 16


def test_held_out_texts_are_not_trained_on():
    corpus = corpus_of("text", settings_of("text", "smoke", length=12))
    texts = corpora.made_up_texts()
    said = corpus.processor.decode(corpus.held[0].tolist(), skip_special_tokens=True)
    assert said.startswith(texts[-corpora.LEAST])
    tokens = sum(
        len(corpus.processor(t, add_special_tokens=False)["input_ids"]) + 1
        for t in texts[: -corpora.LEAST]
    )
    assert len(corpus.train) == tokens // 10


def test_as_many_words_are_hidden_in_every_row_and_no_special_token():
    torch.manual_seed(0)
    ids = torch.randint(5, 50, (400, 128))
    ids[:, 0], ids[:, -1], ids[:, 60] = 0, 2, 2
    shown, places = hide(ids, 50)
    assert places.shape == (400, 38)  # 30 % of 126
    assert all(len(set(row)) == 38 for row in places.tolist())
    assert not torch.isin(places, torch.tensor([0, 60, 127])).any()
    untouched = torch.ones_like(ids, dtype=torch.bool).scatter(1, places, False)
    assert torch.equal(shown[untouched], ids[untouched])
    put, true = shown.gather(1, places), ids.gather(1, places)
    share = {"mask": (put == 4), "same": (put == true)}
    assert share["mask"].float().mean() == pytest.approx(0.8, abs=0.02)
    assert share["same"].float().mean() == pytest.approx(0.1 + 0.1 / 45, abs=0.02)
    assert put.min() >= 4 and put.max() < 50


def test_the_loss_of_what_is_hidden_is_that_of_the_whole_model(monkeypatch):
    encoder, corpus, settings = built("text")
    encoder.model.eval()
    ids = corpus.train[:9].long()
    shown, places = hide(ids, len(corpus.processor))
    monkeypatch.setattr(masked_models, "hide", lambda *_: (shown, places))
    ours = masked_loss(encoder, corpus.train, settings)(torch.arange(9))
    wanted = torch.full_like(ids, -100).scatter(1, places, ids.gather(1, places))
    logits = encoder.model(input_ids=shown, attention_mask=torch.ones_like(ids)).logits
    assert torch.allclose(ours, F.cross_entropy(logits.flatten(0, 1), wanted.flatten()))


# -- scales --------------------------------------------------------------------------------------


def test_the_full_scale_is_what_the_studies_are_planned_with():
    image, text = (settings_of(kind) for kind in KINDS)
    sizes = ("side", "patch", "depth", "dim", "decoder_depth", "decoder_dim")
    assert [image[w] for w in sizes] == [32, 4, 12, 192, 4, 128] and image["data"] == "cifar10"
    sizes = ("depth", "dim", "vocabulary", "length")
    assert [text[w] for w in sizes] == [6, 256, 8192, 128] and text["data"] == "imdb-text"
    assert sources.SEEDS >= 5


def test_what_is_not_a_setting_or_scale_is_named():
    with pytest.raises(ValueError, match="no setting 'width'; they have data, train"):
        settings_of("image", "smoke", width=3)
    with pytest.raises(ValueError, match="no sources huge for image; there are smoke, small, full"):
        settings_of("image", "huge")


def test_the_command_says_how_long_it_will_take_before_it_begins(models, capsys):
    sources.main("smoke", "cpu", "--project")
    said = capsys.readouterr().out
    assert f"{sources.SEEDS} × 8 steps ×" in said and "projected: " in said and str(models) in said
    assert [path.name[:6] for path in models.iterdir()] == ["tokens"]  # nothing was trained


def test_the_command_makes_all(models, capsys):
    for kind in KINDS:
        sources.make_all("smoke", "cpu", kind, seeds=2)
    assert capsys.readouterr().out.count("after 8 steps") == 4
    assert len(list(models.glob("*/source.json"))) == 4
