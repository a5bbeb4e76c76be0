"""labkit: brings a Hugging Face causal LM up in JAX and proves that the port computes the same function."""

__version__ = "0.1.0"
