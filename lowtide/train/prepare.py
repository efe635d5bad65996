"""What comes before training: every check, the small pipeline of the quickstart, and the cache."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from lowtide.train.cache import Cached, CachePlan, fill_cache, plan_cache
from lowtide.train.config import TrainConfig, TrainKeys
from lowtide.train.dataset import Example, bucket_of, read_folder, read_pixels
from lowtide.train.families import train_row
from lowtide.train.families.base import Encoders, TrainRow
from lowtide.train.loading import check_folder, fingerprint
from lowtide.train.memory import device_for_training
from lowtide.train.progress import Reporter

_SMALL_MULTIPLE = 16


@dataclass(frozen=True)
class Prepared:
    """What is there once the cache is filled. dtype: of the frozen model."""

    config: TrainConfig
    row: TrainRow
    cached: Cached
    device: torch.device
    dtype: torch.dtype


def prepare(config: TrainConfig, reporter: Reporter) -> Prepared:
    """Make the small pipeline and the cache, as far as they are missing.

    Raises ConfigError before anything is written: a bad picture or caption, a folder that is no pipeline. MachineError
    where the disk failed.
    """
    keys = config.keys
    row = train_row(keys.family)
    row.tokens_of(keys.tokenizer_max_length)
    examples = read_folder(keys.data)
    if keys.makes_pipeline and not keys.pipeline.is_dir():
        _make_small_pipeline(keys.pipeline, examples, keys.resolution, reporter)
    check_folder(keys.pipeline, row.pipeline_class)
    device = device_for_training()
    dtype = torch.bfloat16 if keys.mixed_precision == "bf16" else torch.float32
    plan = _plan(keys, row, examples)
    made = fill_cache(plan, keys.cache, _opener(keys, row, device, dtype), reporter.track)
    if not made:
        reporter.say(f"{len(examples)} pictures and their captions are in the cache already: {keys.cache}")
    return Prepared(config, row, plan.cached, device, dtype)


def _make_small_pipeline(folder: Path, examples: list[Example], resolution: int, reporter: Reporter) -> None:
    from lowtide.train.pipeline_quickstart import make_pipeline

    pictures = [
        read_pixels(example.picture, bucket_of(example.size, resolution, _SMALL_MULTIPLE)) for example in examples
    ]
    make_pipeline(folder, [example.caption for example in examples], pictures)
    reporter.say(f"made a small Flux pipeline with random weights: {folder}")


def _plan(keys: TrainKeys, row: TrainRow, examples: list[Example]) -> CachePlan:
    identity = {
        "family": row.key,
        "encoders": fingerprint(keys.pipeline, row.encoder_parts),
        "tokens": str(row.tokens_of(keys.tokenizer_max_length)),
        "mixed_precision": keys.mixed_precision,
    }
    prompt = keys.validation_prompt or examples[0].caption
    return plan_cache(keys.cache, examples, prompt, identity, keys.resolution, row.pixel_multiple(keys.pipeline))


def _opener(keys: TrainKeys, row: TrainRow, device: torch.device, dtype: torch.dtype) -> Callable[[], Encoders]:
    tokens = row.tokens_of(keys.tokenizer_max_length)
    return lambda: row.open_encoders(keys.pipeline, device, dtype, tokens)
