"""Load script of the shipped configs: polygraph_eval calls both with the `load_*_args`."""

from lm_polygraph_asmi.host.loading import load_model, load_tokenizer

__all__ = ["load_model", "load_tokenizer"]
