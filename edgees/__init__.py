"""edgees: full-parameter evolution-strategies tuning of 4-bit language models, with forward passes only."""

__version__ = "0.1.0"
