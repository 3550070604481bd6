"""Upcycled models generate what the dense ones do, and padding takes no slot on the way."""

import pytest
import torch
import transformers as T
from tokenizers import Tokenizer, models, pre_tokenizers

from moiety import MoE, watch
from moiety.hf.upcycle import upcycle

SIZE = {
    "vocab_size": 48,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
NEW = 5
LENGTH = {
    "max_new_tokens": NEW,
    "min_new_tokens": NEW,
    "do_sample": False,
    "no_repeat_ngram_size": 1,
}


def gpt2():
    sizes = {"vocab_size": 48, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32}
    return T.GPT2LMHeadModel(T.GPT2Config(**sizes, **ENDS))


def llama():
    config = T.LlamaConfig(**SIZE, **ENDS, intermediate_size=24, num_key_value_heads=1)
    return T.LlamaForCausalLM(config)


def opt():
    config = T.OPTConfig(**SIZE, **ENDS, ffn_dim=24, word_embed_proj_dim=16)
    return T.OPTForCausalLM(config)


def t5():
    config = T.T5Config(vocab_size=48, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2,
                        decoder_start_token_id=0)  # fmt: skip
    return T.T5ForConditionalGeneration(config)


MODELS = {"gpt2": gpt2, "llama": llama, "opt": opt, "t5": t5}
IDS = torch.tensor([[5, 9, 13, 4, 21], [0, 0, 7, 3, 30], [0, 18, 6, 6, 11]])
MASK = IDS.ne(0).long()
REAL = int(MASK.sum())
HOW = {
    "greedy": {},
    "no cache": {"use_cache": False},
    "beams": {"num_beams": 3},
}


def dense_model(name):
    model = MODELS[name]().eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.normal_(std=0.4)  # far from a tie between two words
    return model


def sparse(name, **options):
    options = {"experts": 4, "router": "top-k", "k": 2, **options}
    if options["router"] == "hash":
        options.pop("k")
    return upcycle(dense_model(name), **options)


def write(model, **how):
    """Continue three texts, padded on the left; tiny models would say one word over and over."""
    return model.generate(input_ids=IDS, attention_mask=MASK, **LENGTH, **how)


@pytest.fixture
def seen(monkeypatch):
    """What every call of every MoE layer is told: tokens, mask, ids."""
    calls = []
    route = MoE.route

    def spy(self, x_TD, mask=None, ids=None, lead=()):
        calls.append((x_TD.shape[0], mask, ids))
        return route(self, x_TD, mask, ids, lead)

    monkeypatch.setattr(MoE, "route", spy)
    return calls


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", MODELS)
def test_an_upcycled_model_writes_what_the_dense_one_does(name, how):
    dense = dense_model(name)
    want = write(dense, **HOW[how])
    assert len(want[:, -NEW:].unique()) >= NEW
    assert torch.equal(write(upcycle(dense, experts=4, k=2), **HOW[how]), want)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.filterwarnings("ignore:padding cannot be read")
def test_also_with_a_static_cache(name):
    dense = dense_model(name)
    want = write(dense, cache_implementation="static")
    sparse = upcycle(dense, experts=4, k=2)
    assert torch.equal(write(sparse, cache_implementation="static"), want)
    assert torch.equal(write(sparse), want)


def test_a_static_cache_hides_the_padding_and_says_so():
    """`generate` then hands a 4-D mask to the model."""
    with pytest.warns(UserWarning, match="padding cannot be read"):
        write(sparse("llama"), cache_implementation="static")


@pytest.mark.parametrize("name", ["gpt2", "llama", "opt"])
@pytest.mark.parametrize("cached", [True, False])
def test_the_mask_reaches_every_step(name, cached, seen):
    model = sparse(name)
    seen.clear()
    write(model, use_cache=cached)
    per_step = [seen[i : i + 2] for i in range(0, len(seen), 2)]  # two layers
    assert len(per_step) == NEW
    for step, calls in enumerate(per_step):
        for tokens, mask, _ in calls:
            if cached and step:
                assert tokens == 3
                assert mask is None or mask.all()
            else:
                assert tokens == 3 * (5 + step)
                assert int(mask.sum()) == REAL + 3 * step


def test_the_encoder_of_t5_has_the_mask_and_its_decoder_none(seen):
    model = sparse("t5")
    seen.clear()
    write(model)
    encoder = [c for c in seen if c[0] == IDS.numel()]
    assert len(encoder) == 2
    assert all(int(mask.sum()) == REAL for _, mask, _ in encoder)
    decoder = [c for c in seen if c[0] == 3]
    assert len(decoder) == 2 * NEW
    assert all(mask is None or mask.all() for _, mask, _ in decoder)


@pytest.mark.parametrize("name", ["gpt2", "llama", "opt"])
def test_padding_takes_no_slot(name):
    model = sparse(name)
    with watch(model, keep="all") as routes:
        write(model)
    for layer in routes.layers:
        first, *rest = routes[layer]
        assert int(first.load().sum()) == 2 * REAL
        assert [int(r.load().sum()) for r in rest] == [2 * 3] * (NEW - 1)


@pytest.mark.parametrize("name", ["gpt2", "llama", "opt"])
def test_with_different_experts_padding_beside_a_row_changes_nothing(name):
    """After training experts differ; each row alone, unpadded, writes the same."""
    model = sparse(name)
    with torch.no_grad():
        for part, p in model.named_parameters():
            if ".experts." in part:
                p.add_(torch.randn_like(p), alpha=0.3)
    together = write(model)[:, -NEW:]
    for row, mask, want in zip(IDS, MASK, together, strict=True):
        ids = row[mask.bool()][None]
        alone = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **LENGTH)
        assert torch.equal(alone[0, -NEW:], want)


# -- token ids -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_router_by_token_gets_the_ids(name, seen):
    model = sparse(name, router="hash")
    seen.clear()
    out = write(model)
    assert all(ids is not None for _, _, ids in seen)
    first = [ids for tokens, _, ids in seen if tokens == IDS.numel()]
    assert first
    assert all(torch.equal(ids, IDS.flatten()) for ids in first)
    steps = [ids for tokens, _, ids in seen if tokens == 3][-2:]
    assert all(torch.equal(ids, out[:, -2]) for ids in steps)  # the last word is not read again

    seen.clear()
    model.train()(input_ids=IDS, attention_mask=MASK, labels=IDS).loss.backward()
    assert seen
    assert all(ids is not None and ids.numel() == tokens for tokens, _, ids in seen)


def test_and_writes_what_the_dense_one_does():
    dense = dense_model("llama")
    assert torch.equal(write(upcycle(dense, experts=4, router="hash")), write(dense))


# -- pipelines -------------------------------------------------------------------------------------


def tokenizer():
    words = {"[PAD]": 0, "[BOS]": 1, "[EOS]": 2, **{f"w{i}": i for i in range(3, 48)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="[EOS]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return T.PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="[PAD]", eos_token="[EOS]", padding_side="left"
    )


def test_a_pipeline_writes():
    dense = dense_model("llama")
    texts = ["w5 w9 w13 w4", "w7"]
    written = []
    for model in (dense, upcycle(dense, experts=4, k=2)):
        pipe = T.pipeline("text-generation", model=model, tokenizer=tokenizer(), device="cpu")
        outs = pipe(texts, batch_size=2, **LENGTH)
        written.append([out[0]["generated_text"] for out in outs])
    assert written[0] == written[1]
    assert all(len(text.split()) > 3 for text in written[1])
