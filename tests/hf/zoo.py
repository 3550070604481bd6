"""Tiny models by name. `THIRTEEN` the code must serve; `OTHERS` it was not written for."""

from __future__ import annotations

from collections.abc import Callable

import torch
import transformers as T
from torch import nn

SIZE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
}
TEXT = {"vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, **SIZE}
GROUPED = {**TEXT, "num_key_value_heads": 2, "max_position_embeddings": 64}
IMAGE = {"image_size": 16, "patch_size": 4, **SIZE}
SOUND = {
    "vocab_size": 99,
    **SIZE,
    "conv_dim": (16, 16),
    "conv_stride": (2, 2),
    "conv_kernel": (3, 3),
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 4,
}
BOTH = {
    "vocab_size": 99,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
T5 = {
    "vocab_size": 99,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
N_LAYER = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}


def _make(kind: str, config: str, **sizes: object) -> Callable[[], nn.Module]:
    """A model of this class; the config is made when it is called."""
    return lambda: getattr(T, kind)(getattr(T, config)(**sizes))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


THIRTEEN: dict[str, Callable[[], nn.Module]] = {
    "vit": _make("ViTForImageClassification", "ViTConfig", **IMAGE),
    "vit-mae": _make(
        "ViTMAEForPreTraining",
        "ViTMAEConfig",
        **IMAGE,
        decoder_hidden_size=24,
        decoder_num_hidden_layers=1,
        decoder_num_attention_heads=4,
        decoder_intermediate_size=40,
    ),
    "deit": _make("DeiTForImageClassification", "DeiTConfig", **IMAGE),
    "bert": _make("BertForMaskedLM", "BertConfig", **TEXT),
    "roberta": _make("RobertaForMaskedLM", "RobertaConfig", **TEXT),
    "distilbert": _make(
        "DistilBertForMaskedLM",
        "DistilBertConfig",
        vocab_size=99,
        dim=32,
        n_layers=2,
        n_heads=4,
        hidden_dim=48,
    ),
    "gpt2": _make("GPT2LMHeadModel", "GPT2Config", **N_LAYER),
    "opt": _make(
        "OPTForCausalLM",
        "OPTConfig",
        vocab_size=99,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=32,
        max_position_embeddings=64,
    ),
    "llama": _make("LlamaForCausalLM", "LlamaConfig", **GROUPED),
    "qwen3": _make("Qwen3ForCausalLM", "Qwen3Config", **GROUPED, head_dim=8),
    "gemma": _make("GemmaForCausalLM", "GemmaConfig", **GROUPED, head_dim=8),
    "t5": _make("T5ForConditionalGeneration", "T5Config", **T5),
    "encoder": encoder,
}
# Whose tokens see only earlier ones; of t5, half.
DECODERS = ("gpt2", "opt", "llama", "qwen3", "gemma", "t5")

OTHERS: dict[str, Callable[[], nn.Module]] = {
    "albert": _make("AlbertForMaskedLM", "AlbertConfig", **TEXT, embedding_size=16),
    "apertus": _make("ApertusForCausalLM", "ApertusConfig", **GROUPED),
    "arcee": _make("ArceeForCausalLM", "ArceeConfig", **GROUPED),
    "ast": _make("ASTForAudioClassification", "ASTConfig", **SIZE, max_length=32, num_mel_bins=16),
    "bart": _make("BartForConditionalGeneration", "BartConfig", **BOTH),
    "beit": _make("BeitForImageClassification", "BeitConfig", **IMAGE),
    "bert-generation": _make("BertGenerationDecoder", "BertGenerationConfig", **TEXT),
    "bigbird": _make("BigBirdForMaskedLM", "BigBirdConfig", **TEXT, attention_type="original_full"),
    "biogpt": _make("BioGptForCausalLM", "BioGptConfig", **TEXT),
    "blenderbot": _make("BlenderbotForConditionalGeneration", "BlenderbotConfig", **BOTH),
    "blip-vision": _make("BlipVisionModel", "BlipVisionConfig", **IMAGE),
    "bloom": _make(
        "BloomForCausalLM", "BloomConfig", vocab_size=99, hidden_size=32, n_layer=2, n_head=4
    ),
    "camembert": _make("CamembertForMaskedLM", "CamembertConfig", **TEXT),
    "canine": _make("CanineModel", "CanineConfig", **SIZE, num_hash_buckets=64),
    "clip": _make(
        "CLIPModel",
        "CLIPConfig",
        text_config={**TEXT, "max_position_embeddings": 20, "projection_dim": 16},
        vision_config={**IMAGE, "projection_dim": 16},
        projection_dim=16,
    ),
    "clip-vision": _make("CLIPVisionModel", "CLIPVisionConfig", **IMAGE),
    "codegen": _make("CodeGenForCausalLM", "CodeGenConfig", **N_LAYER, rotary_dim=4),
    "cohere": _make("CohereForCausalLM", "CohereConfig", **GROUPED),
    "convbert": _make("ConvBertForMaskedLM", "ConvBertConfig", **TEXT, embedding_size=32),
    "convnext": _make(
        "ConvNextForImageClassification",
        "ConvNextConfig",
        image_size=32,
        hidden_sizes=[16, 32],
        depths=[1, 1],
        num_stages=2,
    ),
    "convnextv2": _make(
        "ConvNextV2ForImageClassification",
        "ConvNextV2Config",
        image_size=32,
        hidden_sizes=[16, 32],
        depths=[1, 1],
        num_stages=2,
    ),
    "ctrl": _make("CTRLLMHeadModel", "CTRLConfig", **N_LAYER, dff=48),
    "data2vec-audio": _make("Data2VecAudioForCTC", "Data2VecAudioConfig", **SOUND),
    "data2vec-text": _make("Data2VecTextForMaskedLM", "Data2VecTextConfig", **TEXT),
    "data2vec-vision": _make(
        "Data2VecVisionForImageClassification", "Data2VecVisionConfig", **IMAGE
    ),
    "deberta": _make("DebertaForMaskedLM", "DebertaConfig", **TEXT),
    "deberta-v2": _make("DebertaV2ForMaskedLM", "DebertaV2Config", **TEXT),
    "diffllama": _make("DiffLlamaForCausalLM", "DiffLlamaConfig", **GROUPED),
    "dinov2": _make("Dinov2ForImageClassification", "Dinov2Config", **IMAGE),
    "dinov2-swiglu": _make(
        "Dinov2ForImageClassification", "Dinov2Config", **IMAGE, use_swiglu_ffn=True
    ),
    "dinov3": _make("DINOv3ViTModel", "DINOv3ViTConfig", **IMAGE),
    "dinov3-gated": _make("DINOv3ViTModel", "DINOv3ViTConfig", **IMAGE, use_gated_mlp=True),
    "doge": _make("DogeForCausalLM", "DogeConfig", **GROUPED),
    "electra": _make("ElectraForMaskedLM", "ElectraConfig", **TEXT, embedding_size=16),
    "ernie": _make("ErnieForMaskedLM", "ErnieConfig", **TEXT),
    "ernie4_5": _make("Ernie4_5ForCausalLM", "Ernie4_5Config", **GROUPED),
    "esm": _make(
        "EsmForMaskedLM", "EsmConfig", **{**TEXT, "mask_token_id": 3}, max_position_embeddings=64
    ),
    "eurobert": _make("EuroBertForMaskedLM", "EuroBertConfig", **GROUPED),
    "exaone4": _make("Exaone4ForCausalLM", "Exaone4Config", **GROUPED),
    "falcon": _make("FalconForCausalLM", "FalconConfig", **TEXT),
    "flaubert": _make(
        "FlaubertWithLMHeadModel",
        "FlaubertConfig",
        vocab_size=99,
        emb_dim=32,
        n_layers=2,
        n_heads=4,
    ),
    "fnet": _make("FNetForMaskedLM", "FNetConfig", **TEXT),
    "fsmt": _make(
        "FSMTForConditionalGeneration",
        "FSMTConfig",
        **{k: v for k, v in BOTH.items() if k != "vocab_size"},
        src_vocab_size=99,
        tgt_vocab_size=99,
        langs=["en", "de"],
    ),
    "funnel": _make(
        "FunnelForMaskedLM",
        "FunnelConfig",
        vocab_size=99,
        d_model=32,
        n_head=4,
        d_head=8,
        d_inner=48,
        block_sizes=[1, 1],
        num_decoder_layers=1,
    ),
    "gemma2": _make("Gemma2ForCausalLM", "Gemma2Config", **GROUPED, head_dim=8),
    "gemma3": _make("Gemma3ForCausalLM", "Gemma3TextConfig", **GROUPED, head_dim=8),
    "git": _make(
        "GitForCausalLM", "GitConfig", **TEXT, vision_config={**IMAGE}, max_position_embeddings=64
    ),
    "glm": _make("GlmForCausalLM", "GlmConfig", **GROUPED, head_dim=8),
    "glm4": _make("Glm4ForCausalLM", "Glm4Config", **GROUPED, head_dim=8),
    "gpt-bigcode": _make("GPTBigCodeForCausalLM", "GPTBigCodeConfig", **N_LAYER, n_inner=48),
    "gpt-neo": _make(
        "GPTNeoForCausalLM",
        "GPTNeoConfig",
        vocab_size=99,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        max_position_embeddings=64,
    ),
    "gpt-neox": _make("GPTNeoXForCausalLM", "GPTNeoXConfig", **TEXT),
    "gptj": _make("GPTJForCausalLM", "GPTJConfig", **N_LAYER, rotary_dim=4),
    "granite": _make("GraniteForCausalLM", "GraniteConfig", **GROUPED),
    "helium": _make("HeliumForCausalLM", "HeliumConfig", **GROUPED, head_dim=8),
    "hubert": _make("HubertForCTC", "HubertConfig", **SOUND),
    "hunyuan": _make("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Config", **GROUPED, head_dim=8),
    "ibert": _make("IBertForMaskedLM", "IBertConfig", **TEXT),
    "ijepa": _make("IJepaForImageClassification", "IJepaConfig", **IMAGE),
    "imagegpt": _make("ImageGPTForCausalImageModeling", "ImageGPTConfig", **N_LAYER),
    "layoutlm": _make("LayoutLMForMaskedLM", "LayoutLMConfig", **TEXT),
    "led": _make(
        "LEDForConditionalGeneration",
        "LEDConfig",
        **{k: v for k, v in BOTH.items() if k != "max_position_embeddings"},
        attention_window=8,
        max_encoder_position_embeddings=64,
        max_decoder_position_embeddings=64,
    ),
    "lilt": _make("LiltModel", "LiltConfig", **{**TEXT, "hidden_size": 48}),
    "longformer": _make("LongformerForMaskedLM", "LongformerConfig", **TEXT, attention_window=8),
    "longt5": _make(
        "LongT5ForConditionalGeneration", "LongT5Config", **T5, feed_forward_proj="gated-gelu"
    ),
    "luke": _make("LukeForMaskedLM", "LukeConfig", **TEXT, entity_vocab_size=10, entity_emb_size=8),
    "m2m100": _make("M2M100ForConditionalGeneration", "M2M100Config", **BOTH),
    "marian": _make("MarianMTModel", "MarianConfig", **BOTH),
    "markuplm": _make("MarkupLMModel", "MarkupLMConfig", **TEXT),
    "mbart": _make("MBartForConditionalGeneration", "MBartConfig", **BOTH),
    "megatron-bert": _make("MegatronBertForMaskedLM", "MegatronBertConfig", **TEXT),
    "ministral": _make("MinistralForCausalLM", "MinistralConfig", **GROUPED, head_dim=8),
    "mistral": _make("MistralForCausalLM", "MistralConfig", **GROUPED),
    "mobilebert": _make(
        "MobileBertForMaskedLM",
        "MobileBertConfig",
        **TEXT,
        embedding_size=16,
        intra_bottleneck_size=16,
        true_hidden_size=16,
    ),
    "modernbert": _make(
        "ModernBertForMaskedLM", "ModernBertConfig", **TEXT, cls_token_id=1, sep_token_id=2
    ),
    "moonshine": _make(
        "MoonshineForConditionalGeneration",
        "MoonshineConfig",
        vocab_size=99,
        hidden_size=32,
        intermediate_size=48,
        encoder_num_hidden_layers=1,
        decoder_num_hidden_layers=1,
        encoder_num_attention_heads=4,
        decoder_num_attention_heads=4,
        pad_token_id=0,
    ),
    "mpnet": _make("MPNetForMaskedLM", "MPNetConfig", **TEXT),
    "mpt": _make("MptForCausalLM", "MptConfig", vocab_size=99, d_model=32, n_heads=4, n_layers=2),
    "mra": _make("MraForMaskedLM", "MraConfig", **TEXT),
    "mt5": _make("MT5ForConditionalGeneration", "MT5Config", **T5),
    "mvp": _make("MvpForConditionalGeneration", "MvpConfig", **BOTH),
    "nemotron": _make("NemotronForCausalLM", "NemotronConfig", **GROUPED),
    "nystromformer": _make(
        "NystromformerForMaskedLM",
        "NystromformerConfig",
        **TEXT,
        segment_means_seq_len=16,
        num_landmarks=16,
    ),
    "olmo": _make("OlmoForCausalLM", "OlmoConfig", **GROUPED),
    "olmo2": _make("Olmo2ForCausalLM", "Olmo2Config", **GROUPED),
    "openai-gpt": _make("OpenAIGPTLMHeadModel", "OpenAIGPTConfig", **N_LAYER),
    "patchtst": _make(
        "PatchTSTForPretraining", "PatchTSTConfig", d_model=32, ffn_dim=48, num_hidden_layers=2
    ),
    "pegasus": _make("PegasusForConditionalGeneration", "PegasusConfig", **BOTH),
    "perceiver": _make(
        "PerceiverModel", "PerceiverConfig", num_latents=8, d_latents=32, d_model=32, num_blocks=1
    ),
    "persimmon": _make("PersimmonForCausalLM", "PersimmonConfig", **TEXT),
    "phi": _make("PhiForCausalLM", "PhiConfig", **TEXT),
    "phi3": _make("Phi3ForCausalLM", "Phi3Config", **TEXT),
    "plbart": _make("PLBartForConditionalGeneration", "PLBartConfig", **BOTH),
    "poolformer": _make(
        "PoolFormerForImageClassification",
        "PoolFormerConfig",
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 8, 16, 16],
    ),
    "prophetnet": _make(
        "ProphetNetForConditionalGeneration",
        "ProphetNetConfig",
        vocab_size=99,
        hidden_size=32,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_encoder_layers=1,
        num_decoder_layers=1,
        num_encoder_attention_heads=4,
        num_decoder_attention_heads=4,
        max_position_embeddings=64,
    ),
    "pvt": _make(
        "PvtForImageClassification",
        "PvtConfig",
        image_size=32,
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 1, 2, 2],
        mlp_ratios=[2, 2, 2, 2],
        sequence_reduction_ratios=[4, 2, 1, 1],
    ),
    "qwen2": _make("Qwen2ForCausalLM", "Qwen2Config", **GROUPED),
    "recurrent-gemma": _make(
        "RecurrentGemmaForCausalLM", "RecurrentGemmaConfig", **{**GROUPED, "num_hidden_layers": 3}
    ),
    "reformer": _make(
        "ReformerModel",
        "ReformerConfig",
        vocab_size=99,
        hidden_size=32,
        feed_forward_size=48,
        num_attention_heads=4,
        attention_head_size=8,
        attn_layers=["local", "local"],
        axial_pos_embds=False,
        is_decoder=False,
        local_attn_chunk_length=8,
        max_position_embeddings=64,
    ),
    "rembert": _make(
        "RemBertForMaskedLM",
        "RemBertConfig",
        **TEXT,
        input_embedding_size=16,
        output_embedding_size=16,
    ),
    "roberta-prelayernorm": _make(
        "RobertaPreLayerNormForMaskedLM", "RobertaPreLayerNormConfig", **TEXT
    ),
    "roc-bert": _make(
        "RoCBertForMaskedLM",
        "RoCBertConfig",
        **TEXT,
        pronunciation_vocab_size=20,
        shape_vocab_size=20,
    ),
    "roformer": _make("RoFormerForMaskedLM", "RoFormerConfig", **TEXT, embedding_size=32),
    "rwkv": _make(
        "RwkvForCausalLM",
        "RwkvConfig",
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=2,
        attention_hidden_size=32,
    ),
    "seed-oss": _make("SeedOssForCausalLM", "SeedOssConfig", **GROUPED, head_dim=8),
    "segformer": _make(
        "SegformerForImageClassification",
        "SegformerConfig",
        image_size=32,
        depths=[1, 1],
        num_encoder_blocks=2,
        hidden_sizes=[8, 16],
        num_attention_heads=[1, 2],
        sr_ratios=[2, 1],
        patch_sizes=[7, 3],
        strides=[4, 2],
        mlp_ratios=[2, 2],
    ),
    "sew": _make("SEWForCTC", "SEWConfig", **SOUND, squeeze_factor=1),
    "siglip": _make(
        "SiglipModel",
        "SiglipConfig",
        text_config={**TEXT, "max_position_embeddings": 20},
        vision_config={**IMAGE},
    ),
    "siglip-vision": _make("SiglipVisionModel", "SiglipVisionConfig", **IMAGE),
    "smollm3": _make("SmolLM3ForCausalLM", "SmolLM3Config", **GROUPED),
    "speech2text": _make(
        "Speech2TextForConditionalGeneration",
        "Speech2TextConfig",
        **{k: v for k, v in BOTH.items() if k != "max_position_embeddings"},
        conv_channels=16,
        input_feat_per_channel=16,
        max_source_positions=64,
        max_target_positions=64,
    ),
    "splinter": _make("SplinterModel", "SplinterConfig", **TEXT),
    "squeezebert": _make("SqueezeBertForMaskedLM", "SqueezeBertConfig", **TEXT, embedding_size=32),
    "stablelm": _make("StableLmForCausalLM", "StableLmConfig", **GROUPED),
    "starcoder2": _make("Starcoder2ForCausalLM", "Starcoder2Config", **GROUPED),
    "swin": _make(
        "SwinForImageClassification",
        "SwinConfig",
        image_size=16,
        patch_size=2,
        embed_dim=16,
        depths=[1, 1],
        num_heads=[2, 2],
        window_size=2,
    ),
    "swinv2": _make(
        "Swinv2ForImageClassification",
        "Swinv2Config",
        image_size=16,
        patch_size=2,
        embed_dim=16,
        depths=[1, 1],
        num_heads=[4, 4],
        window_size=2,
    ),
    "t5-gated": _make(
        "T5ForConditionalGeneration", "T5Config", **T5, feed_forward_proj="gated-gelu"
    ),
    "t5gemma": _make(
        "T5GemmaForConditionalGeneration",
        "T5GemmaConfig",
        encoder={**GROUPED, "head_dim": 8},
        decoder={**GROUPED, "head_dim": 8},
        vocab_size=99,
    ),
    "timesformer": _make(
        "TimesformerForVideoClassification", "TimesformerConfig", **IMAGE, num_frames=2
    ),
    "trocr": _make(
        "TrOCRForCausalLM",
        "TrOCRConfig",
        vocab_size=99,
        d_model=32,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=48,
        max_position_embeddings=64,
    ),
    "umt5": _make("UMT5ForConditionalGeneration", "UMT5Config", **T5),
    "unispeech": _make("UniSpeechForCTC", "UniSpeechConfig", **SOUND),
    "videomae": _make(
        "VideoMAEForVideoClassification", "VideoMAEConfig", **IMAGE, num_frames=4, tubelet_size=2
    ),
    "vilt": _make("ViltModel", "ViltConfig", **TEXT, image_size=16, patch_size=4),
    "visual-bert": _make("VisualBertModel", "VisualBertConfig", **TEXT, visual_embedding_dim=8),
    "vitdet": _make(
        "VitDetModel",
        "VitDetConfig",
        image_size=16,
        patch_size=4,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
    ),
    "vit-msn": _make("ViTMSNForImageClassification", "ViTMSNConfig", **IMAGE),
    "vivit": _make(
        "VivitForVideoClassification",
        "VivitConfig",
        **SIZE,
        image_size=16,
        num_frames=4,
        tubelet_size=[2, 4, 4],
    ),
    "wav2vec2": _make("Wav2Vec2ForCTC", "Wav2Vec2Config", **SOUND),
    "wav2vec2-bert": _make("Wav2Vec2BertForCTC", "Wav2Vec2BertConfig", vocab_size=99, **SIZE),
    "wav2vec2-conformer": _make("Wav2Vec2ConformerForCTC", "Wav2Vec2ConformerConfig", **SOUND),
    "wavlm": _make("WavLMForCTC", "WavLMConfig", **SOUND),
    "whisper": _make(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        **{k: v for k, v in BOTH.items() if k != "max_position_embeddings"},
        num_mel_bins=8,
        max_source_positions=10,
        max_target_positions=64,
    ),
    "xglm": _make(
        "XGLMForCausalLM",
        "XGLMConfig",
        vocab_size=99,
        d_model=32,
        ffn_dim=48,
        num_layers=2,
        attention_heads=4,
        max_position_embeddings=64,
    ),
    "xlm": _make(
        "XLMWithLMHeadModel", "XLMConfig", vocab_size=99, emb_dim=32, n_layers=2, n_heads=4
    ),
    "xlm-roberta-xl": _make("XLMRobertaXLForMaskedLM", "XLMRobertaXLConfig", **TEXT),
    "xlnet": _make(
        "XLNetLMHeadModel",
        "XLNetConfig",
        vocab_size=99,
        d_model=32,
        n_layer=2,
        n_head=4,
        d_inner=48,
    ),
    "xmod": _make("XmodForMaskedLM", "XmodConfig", **TEXT, default_language="en_XX"),
    "yolos": _make(
        "YolosForObjectDetection",
        "YolosConfig",
        **{**IMAGE, "image_size": [16, 16]},
        num_detection_tokens=4,
    ),
    "yoso": _make("YosoForMaskedLM", "YosoConfig", **TEXT),
}


def draw(model: nn.Module, seed: int = 0, std: float = 0.3) -> nn.Module:
    """Draw every weight and bias anew, so that none is zero and none is forgotten; eval mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) * std)
    return model.eval()


def make(name: str) -> nn.Module:
    return draw({**THIRTEEN, **OTHERS}[name]())
