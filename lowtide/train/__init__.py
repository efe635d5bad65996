"""The trainer: from a folder of captioned pictures to LoRA weights. The only place that loads pipelines."""
