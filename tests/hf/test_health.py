"""Routing health: every number by hand on a model whose choices are written down, then plants."""

import json
import lzma
import math
import os
import re
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

import moiety
from moiety.hf.examples import id_batches
from moiety.hf.findings import find
from moiety.hf.health import measure
from moiety.hf.tally import Tally, Vocabulary
from planted import KINDS, LAYER, PAD, WORDS, planted, texts, tokenizer

E = 4
# Token id -> scores of the four experts: the two largest are chosen.
SCORES = [
    [9.0, 8.0, 0.0, 0.0],  # 0, padding: experts 0 and 1
    [9.0, 0.0, 8.0, 0.0],  # 1: 0 and 2
    [0.0, 9.0, 8.0, 0.0],  # 2: 1 and 2
    [9.0, 8.0, 0.0, 0.0],  # 3: 0 and 1
]


class Planned(nn.Module):
    """A model whose only layer reads its choice off the token id."""

    def __init__(self, router="top-k", told=False, **options):
        super().__init__()
        self.embedding = nn.Embedding(len(SCORES), E)
        options = {"k": 2} | options if router == "top-k" else options
        self.moe = moiety.MoE(router, dim=E, hidden=4, experts=E, **options)
        self.told = told
        with torch.no_grad():
            self.embedding.weight.copy_(torch.tensor(SCORES))
            if router == "top-k":
                self.moe.router.weight.copy_(torch.eye(E))

    def forward(self, input_ids, attention_mask=None):
        mask = attention_mask if self.told else None
        return self.moe(self.embedding(input_ids), mask=mask)


def batch(*rows):
    """Rows of ids; 0 is padding."""
    ids = torch.tensor(rows)
    return {"input_ids": ids, "attention_mask": (ids > 0).long()}


BATCHES = [batch([1, 1, 2, 0], [3, 0, 0, 0]), batch([1, 2], [2, 2])]


def only(health):
    (layer,) = health.layers
    return layer


def test_load_by_hand():
    # Real tokens: 1 three times, 2 four times, 3 once. Slots: 0: 4, 1: 5, 2: 7, 3: none.
    layer = only(measure(Planned(), BATCHES))
    assert (layer.tokens, layer.slots, layer.experts) == (8, 16, E)
    assert layer.load == pytest.approx([4 / 16, 5 / 16, 7 / 16, 0])
    assert layer.dead == [3]
    assert layer.peak == pytest.approx(7 / 16 * E)
    entropy = -sum(p * math.log(p) for p in (4 / 16, 5 / 16, 7 / 16))
    assert layer.effective == pytest.approx(math.exp(entropy))
    assert layer.drop_rate == 0


def test_gate_entropy_by_hand():
    # Every token has the scores 9, 8, 0, 0 in some order, and padding is not counted.
    gate = torch.tensor([9.0, 8.0, 0.0, 0.0]).softmax(0)
    entropy = float(-(gate * gate.log()).sum())
    layer = only(measure(Planned(), BATCHES))
    assert layer.entropy == pytest.approx(entropy, rel=1e-5)
    assert layer.relative_entropy == pytest.approx(entropy / math.log(E), rel=1e-5)


def test_padding_by_hand():
    # Four padding tokens take 8 of 24 slots, four of them at each of the experts 0 and 1.
    pad = only(measure(Planned(), BATCHES)).padding
    assert pad.share == pytest.approx(8 / 24)
    assert pad.load == [0.5, 0.5, 0, 0]
    both = [8 / 24, 9 / 24, 7 / 24, 0]
    assert pad.effective == pytest.approx(math.exp(-sum(p * math.log(p) for p in both if p)))
    assert pad.peak == pytest.approx(9 / 24 * E)
    assert (pad.preferred, pad.to_preferred) == ([0, 1], 1)
    assert pad.real_there == pytest.approx(9 / 16)
    assert pad.shift == pytest.approx(7 / 16 - 7 / 24)
    assert pad.distance == pytest.approx(7 / 16)


def test_a_layer_that_knows_its_padding_gives_it_no_slot():
    told, untold = (only(measure(Planned(told=t), BATCHES)) for t in (True, False))
    assert told.padding.share == told.padding.shift == 0
    assert told.load == untold.load
    assert told.entropy == pytest.approx(untold.entropy)
    assert told.typical == untold.typical


def test_pairs_by_hand():
    # Pairs: 0-2 three times, 1-2 four times, 0-1 once. Row sums 4, 5, 7. Three experts leave no
    # freedom: quasi-independence fits every pair, so that each is exactly as often as by chance.
    layer = only(measure(Planned(), BATCHES))
    assert layer.together[0] == [None, 1.0, 1.0, None]
    assert layer.together[3] == [None] * E
    assert layer.pairs == []


def test_random_pairs_are_as_often_as_chance_and_a_couple_is_not():
    def count(index):
        tally, tokens = Tally(8), len(index)
        r = moiety.Routing(index=index, weight=torch.ones(index.shape), experts=8, tokens=tokens)
        tally.add(r, torch.zeros(8, dtype=torch.long), None)
        return tally

    chosen = torch.rand(20_000, 8).argsort(1)[:, :2]
    lift = count(chosen).together()
    off = ~torch.eye(8, dtype=torch.bool)
    assert lift.diagonal().isnan().all()
    assert (lift[off] - 1).abs().max() < 0.15  # the plain product of loads would give 0.57
    assert count(chosen).top_pairs() == []
    chosen[:2000] = torch.tensor([6, 3])
    pair, *_ = count(chosen).top_pairs()
    assert pair.experts == [3, 6]
    assert pair.lift > 1.8
    assert pair.tokens >= 2000


def test_typical_tokens_by_hand():
    # Expert 1 gets 2 (forty times) and 3 (ten times) of eighty tokens.
    many = [batch([1, 2, 2, 3], [1, 2, 2, 0])] * 10
    typical = only(measure(Planned(), many)).typical
    assert [(t.id, t.count, round(t.lift, 4)) for t in typical[1]] == [
        (2, 40, round((40 / 50) / (40 / 70), 4)),
        (3, 10, round((10 / 50) / (10 / 70), 4)),
    ]
    assert {t.id for t in typical[2]} == {1, 2}
    assert typical[3] == []
    assert all(t.text is None for expert in typical for t in expert)


def test_rare_tokens_are_not_typical():
    typical = only(measure(Planned(), [batch([1, 2, 3, 3])] * 4)).typical
    assert {t.id for expert in typical for t in expert} == {3}


def test_batches_are_streamed():
    """However the examples are cut into batches, the counts are the same, and none is kept."""
    rows = [[1, 2, 3, 1], [2, 2, 1, 0], [3, 3, 0, 0], [1, 1, 1, 1]] * 6
    one = measure(Planned(), [batch(*rows)])
    many = measure(Planned(), (batch(row) for row in rows))
    assert one.examples == many.examples == 24
    a, b = only(one), only(many)
    assert (a.load, a.dead, a.padding, a.pairs, a.typical) == (
        b.load,
        b.dead,
        b.padding,
        b.pairs,
        b.typical,
    )


@pytest.mark.parametrize(("side", "row"), [("right", [1, 2, 9, 9]), ("left", [9, 9, 1, 2])])
def test_padding_goes_to_its_side(side, row):
    first, second = id_batches([[1, 2], [3, 4, 5, 6], [7]], 2, pad=9, side=side)
    assert first["input_ids"].tolist() == [row, [3, 4, 5, 6]]
    assert first["attention_mask"].tolist()[0] == [int(id != 9) for id in row]
    assert second["input_ids"].tolist() == [[7]]


def test_ids_get_rows_as_they_appear():
    vocabulary = Vocabulary()
    assert vocabulary.rows(torch.tensor([7, 3, 7])).tolist() == [1, 0, 1]
    assert vocabulary.rows(torch.tensor([100_000, 3])).tolist() == [2, 0]
    assert vocabulary.ids == [3, 7, 100_000]


@pytest.mark.parametrize(
    ("router", "options"),
    [("expert-choice", {}), ("dselect-k-static", {"k": 2}), ("switch", {}), ("hash", {"k": 2})],
)
def test_every_form_of_a_decision_is_counted(router, options):
    model = Planned(router, told=True, **options)
    layer = only(measure(model, BATCHES))
    with moiety.watch(model) as routes:
        for each in BATCHES:
            model.eval()(**each)
    (expected,) = routes.summary().values()
    assert layer.load == expected.load
    assert layer.slots == sum(int(n.sum()) for n in routes.load().values())
    assert layer.drop_rate == pytest.approx(expected.drop_rate)
    assert (layer.static, layer.by_expert) == (
        router == "dselect-k-static",
        router == "expert-choice",
    )
    assert (layer.together is None) == (router == "switch")


def test_a_layer_whose_tokens_are_not_the_ids_has_no_typical_ones():
    class Pooled(Planned):
        def forward(self, input_ids, attention_mask=None):
            return self.moe(self.embedding(input_ids).mean(1))

    assert only(measure(Pooled(), BATCHES)).typical is None


def test_images_have_load_and_no_typical_tokens(tmp_path):
    class Patches(nn.Module):
        def __init__(self):
            super().__init__()
            self.moe = moiety.MoE("top-k", dim=12, hidden=4, experts=E, k=2)

        def forward(self, pixel_values):
            patches = pixel_values.unfold(2, 2, 2).unfold(3, 2, 2)  # 2×2 pixels of 3 colours each
            return self.moe(patches.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2))

    model = Patches().to(torch.float64)  # images are brought to the model's dtype
    health = measure(model, [{"pixel_values": torch.rand(5, 3, 8, 8)}] * 2)
    layer = only(health)
    assert (health.examples, layer.tokens, layer.slots) == (10, 160, 320)
    assert layer.typical is None
    assert "What each expert reads" not in health.page(tmp_path / "a.html").read_text()


def test_mode_and_gradients_are_left_alone():
    model = Planned()
    model.moe.experts.eval()
    measure(model, BATCHES)
    assert model.training and model.moe.training and not model.moe.experts.training
    assert all(p.grad is None for p in model.parameters())
    assert not model.moe._watchers


def test_progress_is_told_after_every_batch():
    seen = []
    measure(Planned(), BATCHES, progress=seen.append)
    assert seen == [1, 2]


def test_no_data_and_no_experts_are_refused():
    with pytest.raises(ValueError, match="no example"):
        measure(Planned(), [])
    with pytest.raises(ValueError, match="no MoE layer"):
        measure(nn.Linear(2, 2), BATCHES)


# -- findings -----------------------------------------------------------------------------------


def said(health):
    return [f"{finding.layer}: {finding.text}" for finding in health.findings]


def test_too_little_data_says_so():
    (kind,) = {f.kind for f in measure(Planned(told=True), BATCHES).findings}
    assert kind == "little"
    enough = measure(Planned(told=True), BATCHES * 10)
    assert said(enough) == ["moe: expert 3 got no token"]


def test_a_static_gate_leaves_experts_out_on_purpose():
    model = Planned("top-k-static", told=True, k=2)
    assert [f.kind for f in measure(model, BATCHES * 10).findings] == ["static"]


def test_the_worst_comes_first():
    health = measure(Planned(), BATCHES * 10)
    assert [f.kind for f in health.findings] == ["dead", "padding"]
    assert (
        "padding takes 33% of the slots and sends 100% of them to experts 0 and 1"
        in said(health)[1]
    )


def test_every_rule_has_its_threshold():
    from dataclasses import replace

    layer = only(measure(Planned(told=True), BATCHES * 10))
    well = replace(layer, dead=[], effective=3.0, peak=2.0, load=[0.3, 0.3, 0.3, 0.1])
    assert find([well]) == []
    shifted = replace(well.padding, distance=0.3, shift=0.05, preferred=[0])
    changes = {
        "dead": {"dead": [1]},
        "padding": {"padding": shifted},
        "collapse": {"effective": 1.99},
        "overload": {"peak": 4.0},
        "drops": {"drop_rate": 0.05},
    }
    for kind, change in changes.items():
        assert [f.kind for f in find([replace(well, **change)])] == [kind]
    almost = {"effective": 2.0, "peak": 3.99, "drop_rate": 0.049}
    for less in ({"shift": 0.049}, {"distance": 0.29}):
        assert find([replace(well, padding=replace(shifted, **less), **almost)]) == []
    few = {"padding": shifted, "effective": 1.99, "peak": 4.0, "slots": 79}  # below 20 an expert
    assert [f.kind for f in find([replace(well, **few)])] == ["little"]


def test_no_layer_hides_another():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.bad, self.good = Planned(told=True), Planned(told=True)
            nn.init.normal_(self.good.embedding.weight)  # no expert is left out

        def forward(self, **words):
            return self.bad(**words), self.good(**words)

    health = measure(Two(), BATCHES * 10)
    assert [layer.name for layer in health.layers] == ["bad.moe", "good.moe"]
    assert "bad.moe: expert 3 got no token" in said(health)


# -- pages --------------------------------------------------------------------------------------


def test_the_result_is_plain_and_the_page_is_written(tmp_path):
    health = measure(Planned(), BATCHES * 10)
    again = json.loads(json.dumps(health.as_dict(), allow_nan=False))
    assert again["layers"][0]["dead"] == [3]
    html = health.page(tmp_path / "new" / "page.html", title="A <b> model").read_text()
    assert "A &lt;b&gt; model" in html
    assert "<strong>moe</strong>: expert 3 got no token." in html
    assert "experts 0 and 1" in html
    well = measure(Planned(told=True), [batch([1, 2, 3])])
    assert (
        "too few to judge by (expert 3 got none)" in well.page(tmp_path / "page.html").read_text()
    )


# -- models of transformers ---------------------------------------------------------------------


def measured(model, lines):
    words = tokenizer()
    ids = [words(line)["input_ids"] for line in lines]
    return measure(model, id_batches(ids, 8, pad=PAD), tokenizer=words)


@pytest.mark.parametrize("kind", KINDS)
def test_a_healthy_model_has_no_finding(kind):
    health = measured(planted(kind), texts())
    assert [layer.name for layer in health.layers] == [LAYER[kind].format(i) for i in (0, 1)]
    assert health.findings == []
    for layer in health.layers:
        assert (layer.tokens, layer.slots, layer.padding.share) == (64 * 16, 2 * 64 * 16, 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_dead_expert_is_found_by_name(kind):
    health = measured(planted(kind, dead=5), texts())
    assert [f.text for f in health.findings if f.kind == "dead"] == ["expert 5 got no token"]
    assert health.findings[0].layer == LAYER[kind].format(1)


@pytest.mark.parametrize("kind", KINDS)
def test_a_planted_padding_bias_is_found_by_name(kind):
    health = measured(planted(kind, magnet=3), texts(ragged=True))
    found = {f.layer: f.text for f in health.findings if f.kind == "padding"}
    assert re.search(r"100% of them to experts .*\b3\b.*, which get", found[LAYER[kind].format(0)])
    layer = health.layers[0]
    assert layer.padding.load[3] == 0.5  # k = 2: every padding token goes there
    assert layer.padding.share > 0.3
    assert layer.padding.effective < layer.effective - 0.5
    # What padding does leaves the figures of real tokens alone.
    ids = [tokenizer()(line)["input_ids"] for line in texts(ragged=True)]
    single = measure(planted(kind, magnet=3), id_batches(ids, 1, pad=PAD)).layers[0]
    assert single.padding.share == 0
    assert single.load == pytest.approx(layer.load, abs=2e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_that_goes_where_text_goes_is_no_finding(kind):
    # As transformers initialises it, padding is a zero that takes after the text before it.
    health = measured(KINDS[kind](len(WORDS) + 2).eval(), texts(ragged=True))
    assert all(layer.padding.share > 0.3 for layer in health.layers)
    assert health.findings == []


def test_typical_tokens_are_written_by_the_tokenizer():
    health = measured(planted("olmoe"), texts())
    shown = [token for expert in health.layers[0].typical for token in expert]
    assert shown
    assert {token.text for token in shown} <= set(WORDS)


def test_the_space_that_sentencepiece_leaves_out_is_shown():
    class Pieces:
        def convert_ids_to_tokens(self, id):
            return {1: "▁cat", 2: "cat", 3: "▁"}[id]

        def decode(self, ids):
            return "".join(map(self.convert_ids_to_tokens, ids)).replace("▁", " ").removeprefix(" ")

    health = measure(Planned(), BATCHES * 10, tokenizer=Pieces())
    shown = {token.id: token.text for expert in only(health).typical for token in expert}
    assert shown == {1: " cat", 2: "cat", 3: " "}


def test_a_tokenizer_may_write_what_no_file_can_hold(tmp_path):
    class Odd:
        def decode(self, ids):
            return "\ud800"

        def convert_ids_to_tokens(self, id):
            return "x"

    health = measure(Planned(), BATCHES * 10, tokenizer=Odd())
    assert {token.text for expert in only(health).typical for token in expert} == {"?"}
    health.page(tmp_path / "page.html")


def test_both_stacks_of_an_encoder_decoder_run():
    config = SwitchTransformersConfig(
        vocab_size=len(WORDS) + 2,
        d_model=16,
        d_kv=8,
        d_ff=16,
        num_heads=2,
        num_layers=2,
        num_decoder_layers=2,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        num_experts=4,
        decoder_start_token_id=PAD,
    )
    health = measured(SwitchTransformersForConditionalGeneration(config), texts(8))
    by_stack = {layer.name.split(".")[0]: layer for layer in health.layers}
    assert set(by_stack) == {"encoder", "decoder"}
    assert by_stack["encoder"].tokens == 8 * 16
    assert by_stack["decoder"].tokens == 8 * 17  # its start token, then the input
    assert "The decoder got the encoder's input" in health.notes[0]


@pytest.mark.skipif("MOIETY_DATA" not in os.environ, reason="MOIETY_DATA names no data folder")
@pytest.mark.parametrize("kind", KINDS)
def test_plants_are_found_on_real_text(kind):
    path = Path(os.environ["MOIETY_DATA"]) / "text-lm" / "tinyshakespeare.txt.xz"
    if not path.exists():
        pytest.skip("tinyshakespeare.txt.xz is not in MOIETY_DATA")
    with lzma.open(path, "rt") as file:
        lines = [line.strip() for line in islice(file, 600) if line.strip()]
    common = [word for word, _ in Counter(" ".join(lines).split()).most_common(500)]
    model, words = planted(kind, dead=5, magnet=3, vocabulary=502), tokenizer(common)
    ids = [words(line)["input_ids"] for line in lines]
    health = measure(model, id_batches(ids, 16, pad=PAD), tokenizer=words)
    assert [f.text for f in health.findings if f.kind == "dead"] == ["expert 5 got no token"]
    first = health.layers[0].padding
    assert 3 in first.preferred
    assert first.to_preferred == 1
