"""Makes a small Flux pipeline of the real classes with random weights: something to train without a download."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel, T5Tokenizer

from lowtide.measure.build import import_class
from lowtide.train.files import new_folder

_LATENT_CHANNELS = 4
_TEXT_WIDTH = 64
_CLIP_TOKENS = 77
_MOST_TOKENS = 512


def make_pipeline(folder: Path, captions: Sequence[str], pictures: Sequence[Tensor], seed: int = 0) -> None:
    """Write a pipeline that ``FluxPipeline.from_pretrained`` loads: 4 double and 8 single blocks, 4.5 M weights.

    captions: the tokenizers learn their words from them. pictures: (1, 3, height, width) in −1 … 1; the random
    autoencoder's latents are normalised over them, as those of a trained one are.
    Raises MachineError where the disk failed; the global random state is left alone.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = _pipeline(captions, pictures)
    with new_folder(folder) as partial:
        pipeline.save_pretrained(partial)


def _pipeline(captions: Sequence[str], pictures: Sequence[Tensor]) -> Any:
    clip_tokenizer, t5_tokenizer = _clip_tokenizer(captions), _t5_tokenizer(captions)
    return import_class("diffusers.FluxPipeline")(
        scheduler=import_class("diffusers.FlowMatchEulerDiscreteScheduler")(use_dynamic_shifting=True, shift=3.0),
        vae=_autoencoder(pictures),
        text_encoder=_clip(clip_tokenizer),
        tokenizer=clip_tokenizer,
        text_encoder_2=_t5(t5_tokenizer),
        tokenizer_2=t5_tokenizer,
        transformer=_transformer(),
    )


def _clip_tokenizer(captions: Sequence[str]) -> CLIPTokenizer:
    """Byte pairs of the captions. Numbered anew, in order: training numbers them differently each time."""
    trained = CLIPTokenizer().train_new_from_iterator(captions, _MOST_TOKENS, show_progress=False)
    special = trained.all_special_tokens
    words = [*special, *sorted(trained.get_vocab().keys() - set(special))]
    merges: Any = [tuple(pair) for pair in _learned(trained)["merges"]]
    vocab = {word: number for number, word in enumerate(words)}
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=_CLIP_TOKENS)


def _t5_tokenizer(captions: Sequence[str]) -> T5Tokenizer:
    """Unigram pieces of the captions, numbered anew for the same reason."""
    trained = T5Tokenizer(extra_ids=0).train_new_from_iterator(captions, _MOST_TOKENS, show_progress=False)
    special = trained.all_special_tokens
    scores = {piece: round(score, 4) for piece, score in _learned(trained)["vocab"]}
    pieces = [(piece, 0.0) for piece in (trained.pad_token, trained.eos_token, trained.unk_token)]
    return T5Tokenizer(vocab=[*pieces, *sorted(item for item in scores.items() if item[0] not in special)], extra_ids=0)


def _learned(tokenizer: CLIPTokenizer | T5Tokenizer) -> dict[str, Any]:
    return json.loads(tokenizer.backend_tokenizer.to_str())["model"]


def _transformer() -> Any:
    return import_class("diffusers.FluxTransformer2DModel")(
        in_channels=4 * _LATENT_CHANNELS,
        num_layers=4,
        num_single_layers=8,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=_TEXT_WIDTH,
        pooled_projection_dim=_TEXT_WIDTH,
        guidance_embeds=True,
        axes_dims_rope=(8, 12, 12),
    )


def _autoencoder(pictures: Sequence[Tensor]) -> Any:
    """Eight pixels a latent, like Flux's own; ``shift_factor`` and ``scaling_factor`` make the latents unit normal."""
    vae = import_class("diffusers.AutoencoderKL")(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(16, 16, 32, 32),
        latent_channels=_LATENT_CHANNELS,
        norm_num_groups=8,
        use_quant_conv=False,
        use_post_quant_conv=False,
    ).eval()
    with torch.no_grad():
        latents = torch.cat([vae.encode(picture).latent_dist.mode().flatten() for picture in pictures])
    vae.register_to_config(shift_factor=latents.mean().item(), scaling_factor=1 / latents.std().item())
    return vae


def _clip(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=_TEXT_WIDTH,
            intermediate_size=2 * _TEXT_WIDTH,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=_CLIP_TOKENS,
            **_special_ids(tokenizer, "bos", "eos", "pad"),
        )
    ).eval()


def _t5(tokenizer: T5Tokenizer) -> T5EncoderModel:
    return T5EncoderModel(
        T5Config(
            vocab_size=len(tokenizer),
            d_model=_TEXT_WIDTH,
            d_kv=16,
            d_ff=2 * _TEXT_WIDTH,
            num_layers=2,
            num_heads=4,
            **_special_ids(tokenizer, "eos", "pad"),
        )
    ).eval()


def _special_ids(tokenizer: CLIPTokenizer | T5Tokenizer, *names: str) -> dict[str, Any]:
    return {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in names}
