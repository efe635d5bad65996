"""``lowtide cache``: latents and text embeddings of a data set, without training."""

from lowtide.cli.output import show, working
from lowtide.cli.train import ConfigFile, Overrides, quiet_reporter
from lowtide.train.config import load_config


def cache(config: ConfigFile, overrides: Overrides = None) -> None:
    """Encode the pictures and captions of a configuration once, as `lowtide train` does before its first step."""
    settings = load_config(config, overrides or ())
    with working():
        reporter = quiet_reporter()
        from lowtide.train.prepare import prepare

        prepared = prepare(settings, reporter)
    sizes = ", ".join(f"{width}×{height}" for width, height in dict.fromkeys(prepared.cached.buckets))
    show(f"{len(prepared.cached.buckets)} pictures are ready in {settings.keys.cache}, in the sizes {sizes}.")
