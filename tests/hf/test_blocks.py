"""Feed-forward blocks are found by what they compute, in whatever way they are written."""

from __future__ import annotations

import pytest
import torch
import transformers as T
import zoo
from torch import nn
from torch.nn import functional as F

import moiety
from moiety.hf.blocks import activation_name, find_blocks, known_activations
from moiety.hf.place import Mixed
from moiety.hf.probe import make_probe
from moiety.hf.upcycle import receipt, upcycle

D, H = 16, 24


def found(model: nn.Module, probe: object = None) -> list:
    return find_blocks(model, make_probe(model, probe))


def same_function(a: str, b: str) -> bool:
    """Whether two names mean one function: transformers has several for GELU by tanh."""
    x = torch.linspace(-4, 4, 999)
    return torch.allclose(known_activations()[a](x), known_activations()[b](x), atol=1e-6)


class Layer(nn.Module):
    """A transformer layer whose forward writes the feed-forward out, in one of many ways."""

    def __init__(self, how: str, hidden: int = H) -> None:
        super().__init__()
        self.how, self.hidden = how, hidden
        self.attention = nn.MultiheadAttention(D, 4, batch_first=True)
        self.norm, self.act = nn.LayerNorm(D), nn.GELU()
        self.a = nn.Linear(D, 2 * hidden if "halves" in how else hidden)
        self.b = nn.Linear(D, hidden)
        self.c = nn.Linear(hidden, D)

    def forward(self, x):
        x = x + self.attention(x, x, x)[0]
        return x + self.c(self.between(self.norm(x)))

    def between(self, x):
        match self.how:
            case "module":
                return self.act(self.a(x))
            case "functional":
                return F.dropout(F.gelu(self.a(x)), 0.1, self.training)
            case "tanh":
                return F.gelu(self.a(x), approximate="tanh")
            case "in place":
                return F.silu(self.a(x), inplace=True)
            case "squared":
                return F.relu(self.a(x)) ** 2
            case "gated":
                return F.silu(self.a(x)) * self.b(x)
            case "gated second":
                return self.a(x) * F.gelu(self.b(x))
            case "halves":
                first, second = self.a(x).chunk(2, -1)
                return F.silu(first) * second
            case "halves sliced":
                h = self.a(x)
                return F.silu(h[..., : self.hidden]) * h[..., self.hidden :]


HOW = {  # activation, gated, dropout
    "module": ("gelu", False, 0.0),
    "functional": ("gelu", False, 0.1),
    "tanh": ("gelu_pytorch_tanh", False, 0.0),
    "in place": ("silu", False, 0.0),
    "squared": ("relu2", False, 0.0),
    "gated": ("silu", True, 0.0),
    "gated second": ("gelu", True, 0.0),
    "halves sliced": ("silu", True, 0.0),
    "halves": ("silu", True, 0.0),
}


@pytest.mark.parametrize("hidden", [H, D], ids=["wide", "hidden = dim"])
@pytest.mark.parametrize("how", HOW)
def test_a_block_written_out_in_a_layer(how, hidden):
    model = zoo.draw(nn.Sequential(Layer(how, hidden), Layer(how, hidden)))
    x = torch.randn(2, 8, D)
    blocks = found(model, x)
    assert [b.outer for b in blocks] == ["0.c", "1.c"]
    activation, gated, dropout = HOW[how]
    for block in blocks:
        assert same_function(block.activation, activation)
        assert (block.gated, block.dropout) == (gated, dropout)
        assert (block.owner, block.dim, block.hidden) == (None, D, hidden)
    moe = upcycle(model, experts=3, k=2, probe=x)
    y = torch.randn(3, 5, D)
    assert torch.allclose(moe(y), model(y), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("how", ["functional", "tanh", "gated"])
def test_the_activation_is_told_apart_in_any_precision(how, dtype):
    model = zoo.draw(nn.Sequential(Layer(how))).to(dtype)
    (block,) = found(model, torch.randn(2, 8, D, dtype=dtype))
    assert same_function(block.activation, HOW[how][0])


class Owner(nn.Module):
    """A feed-forward module of its own, and a layer that calls it in one of many ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.up, self.down = nn.Linear(D, H), nn.Linear(H, D)
        self.norm, self.prelu, self.drop = nn.LayerNorm(H), nn.PReLU(), nn.Dropout(0.2)

    def forward(self, hidden_states, scale=None):
        h = self.up(hidden_states)
        if self.how == "inner norm":
            return self.down(self.norm(F.gelu(h)))
        if self.how == "prelu":
            return self.down(self.prelu(h))
        if self.how == "dropouts":
            return F.dropout(self.down(self.drop(F.gelu(h))), 0.3, self.training)
        y = self.down(F.gelu(h))
        if self.how == "tuple":
            return y, None
        return hidden_states + y if self.how == "residual" else y


class Around(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.ff = how, Owner(how)
        self.attention = nn.MultiheadAttention(D, 4, batch_first=True)

    def forward(self, x):
        x = x + self.attention(x, x, x)[0]
        match self.how:
            case "keyword":
                return self.ff(hidden_states=x)
            case "two arguments":
                return self.ff(x, torch.ones(1))
            case "two keywords":
                return self.ff(hidden_states=x, scale=None)
            case "tuple":
                return self.ff(x)[0]
            case "twice":
                return self.ff(self.ff(x))
        return self.ff(x)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("how", "owned"),
    [
        ("plain", True),
        ("keyword", True),
        ("twice", True),
        ("inner norm", True),
        ("prelu", True),
        ("dropouts", True),
        # Another module could not stand here: the maps inside are replaced.
        ("two arguments", False),
        ("two keywords", False),
        ("tuple", False),
        ("residual", False),
    ],
)
def test_a_block_that_is_a_module(how, owned, training):
    model = zoo.draw(nn.Sequential(Around(how), Around(how))).train(training)
    model[1].attention.eval()
    modes = [m.training for m in model.modules()]
    x = torch.randn(2, 8, D)
    moe = upcycle(model, experts=3, k=2, probe=x)
    assert receipt(moe).layers == (["0.ff", "1.ff"] if owned else ["0.ff.down", "1.ff.down"])
    assert [m.training for m in model.modules()] == modes
    assert not moe[1].attention.training
    assert all(m.training == training for m in moe.modules() if isinstance(m, Mixed))
    y = torch.randn(3, 5, D)
    assert torch.allclose(moe.eval()(y), model.eval()(y), atol=1e-5)


def test_what_fits_no_formula_is_found_as_a_module():
    for how in ("inner norm", "prelu"):
        model = zoo.draw(nn.Sequential(Around(how)))
        (block,) = found(model, torch.randn(2, 8, D))
        assert (block.owner, block.activation) == ("0.ff", None)
        with pytest.raises(ValueError, match=r"0.ff is not a plain feed-forward block.*low-rank"):
            upcycle(model, probe=torch.randn(2, 8, D), init="split", experts=4, k=2)
        low = upcycle(
            model, probe=torch.randn(2, 8, D), init="low-rank", router="switch", experts=4
        )
        assert receipt(low).gap == 0


class Scaled(nn.Module):
    """A block whose answer is scaled by what starts at one, and so does not show in numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(D, H), nn.Linear(H, D)
        self.scale = nn.Parameter(torch.ones(D))

    def forward(self, x):
        return self.scale * self.b(F.gelu(self.a(x)))


def test_what_else_a_module_learns_is_not_lost():
    x = torch.randn(2, 8, D)
    model = nn.Sequential(nn.LayerNorm(D), Scaled())
    moe = upcycle(model, experts=3, probe=x)
    with torch.no_grad():
        model[1].scale.mul_(2)
        moe[1].scale.mul_(2)
    assert torch.allclose(moe(x), model(x), atol=1e-5)


def test_dropouts_are_kept_inside_and_after():
    (block,) = found(nn.Sequential(Around("dropouts")), torch.randn(2, 8, D))
    assert (block.dropout, block.after) == (0.2, 0.3)


def test_one_block_shared_by_two_layers_stays_shared():
    first, second = Around("plain"), Around("plain")
    first.ff = second.ff
    model = zoo.draw(nn.Sequential(first, second))
    moe = upcycle(model, experts=3, probe=torch.randn(2, 8, D))
    assert receipt(moe).layers == ["0.ff"]
    assert moe[0].ff is moe[1].ff
    x = torch.randn(2, 5, D)
    assert torch.allclose(moe(x), model(x), atol=1e-5)


def test_a_plain_sequential_block_and_the_model_itself():
    block = nn.Sequential(nn.Linear(D, H), nn.GELU(), nn.Dropout(0.1), nn.Linear(H, D))
    inside = zoo.draw(nn.Sequential(nn.Linear(D, D), block))
    assert receipt(upcycle(inside, experts=3)).layers == ["1"]
    whole = zoo.draw(block)  # the model cannot be replaced, so its maps are
    assert receipt(upcycle(whole, experts=3)).layers == ["3"]


def test_two_maps_with_nothing_between_are_no_block():
    adapter = nn.Sequential(nn.Linear(D, 4), nn.Identity(), nn.Linear(4, D))
    with pytest.raises(ValueError, match="no feed-forward block was found in Sequential"):
        upcycle(adapter)


@pytest.mark.parametrize("name", ["bert", "llama", "opt", "vit"])
def test_attention_is_not_mistaken_where_hidden_equals_dim(name):
    config = zoo.THIRTEEN[name]().config
    for word in ("intermediate_size", "ffn_dim"):
        if hasattr(config, word):
            setattr(config, word, 32)
    model = zoo.draw(type(zoo.THIRTEEN[name]())(config))
    names = [b.outer for b in found(model)]
    assert len(names) == 2
    assert not any("attention" in n or "attn" in n for n in names)
    assert receipt(upcycle(model, experts=3)).gap <= 1e-5


def test_chunked_feed_forward():
    config = T.BertConfig(**zoo.TEXT, chunk_size_feed_forward=4)
    model = zoo.draw(T.BertForMaskedLM(config))
    assert len(found(model)) == 2
    assert receipt(upcycle(model, experts=3)).gap <= 1e-5


def test_recording_leaves_no_hook_and_keeps_the_users():
    model = zoo.make("bert")
    seen = []
    model.bert.register_forward_hook(lambda *_: seen.append(1))
    hooks = [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    moe = upcycle(model, experts=3)
    assert [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks
    seen.clear()
    moe(torch.tensor([[5, 6, 7]]))
    assert seen == [1]


def test_experts_of_native_moe_models_are_not_blocks():
    mixtral = T.MixtralForCausalLM(T.MixtralConfig(**zoo.GROUPED, num_local_experts=4))
    with pytest.raises(ValueError, match="no other feed-forward block: it has experts of its own"):
        upcycle(mixtral)
    switch = T.SwitchTransformersForConditionalGeneration(
        T.SwitchTransformersConfig(
            **zoo.T5,
            num_decoder_layers=2,
            num_sparse_encoder_layers=1,
            num_sparse_decoder_layers=1,
            num_experts=4,
        )
    )
    names = [b.name for b in found(switch)]
    assert names == ["encoder.block.0.layer.1.mlp", "decoder.block.0.layer.2.mlp"]
    qwen = T.Qwen2MoeForCausalLM(
        T.Qwen2MoeConfig(
            **zoo.GROUPED,
            num_experts=4,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=24,
            mlp_only_layers=[0],
        )
    )
    moe = upcycle(qwen, experts=3, k=2, layers="model.layers.0.mlp")
    assert receipt(moe).gap <= 1e-5


def test_what_is_inside_a_mixture_is_not_found_again():
    model = zoo.make("gpt2")
    for init in ("copy", "low-rank"):
        first = upcycle(model, experts=3, layers="first:1", init=init)
        assert [b.name for b in found(first)] == ["transformer.h.1.mlp"]
        both = upcycle(first, experts=2, router="top-k", layers="last:1", init="copy")
        assert receipt(both).layers == ["transformer.h.1.mlp"]
        assert receipt(both).gap <= 1e-5
        layers = [m for m in both.modules() if isinstance(m, moiety.MoE)]
        assert [layer.experts.experts for layer in layers] == [3, 2]
        # One listener for each layer, however often a model was upcycled.
        assert [len(layer._forward_pre_hooks) for layer in layers] == [1, 1]
        with pytest.raises(ValueError, match="no other feed-forward block: 2 blocks are mixtures"):
            upcycle(both)


def test_every_activation_of_transformers_is_named_as_what_it_computes():
    grid = torch.linspace(-6, 6, 1001)
    for name, act in known_activations().items():
        again = known_activations()[activation_name(act)]
        assert torch.equal(again(grid), act(grid)), name
    assert activation_name(nn.Identity()) is None
    assert activation_name(torch.sin) is None
