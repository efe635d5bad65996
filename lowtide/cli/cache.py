"""``lowtide cache``: latents and text embeddings of a data set, without training."""

from lowtide.cli.output import show, working
from lowtide.cli.train import ConfigFile, Overrides, quiet_reporter
from lowtide.train.config import load_config
from lowtide.units import counted


def cache(config: ConfigFile, overrides: Overrides = None) -> None:
    """Encode the pictures and captions of a configuration once, as `lowtide train` does before its first step."""
    settings = load_config(config, overrides or ())
    with working():
        reporter = quiet_reporter()
        from lowtide.train.prepare import prepare

        prepared = prepare(settings, reporter)
    sides = [f"{width}×{height}" for width, height in dict.fromkeys(prepared.cached.buckets)]
    count = len(prepared.cached.buckets)
    are, sizes = "is" if count == 1 else "are", "size" if len(sides) == 1 else "sizes"
    show(f"{counted(count, 'picture')} {are} ready in {settings.keys.cache}, in the {sizes} {', '.join(sides)}.")
