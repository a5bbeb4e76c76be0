"""What every proof imports, for a process from which proofs are forked. Nothing is computed here: a process that has computed cannot be forked safely."""

import flax.nnx
import jax
import jax.numpy

import labkit.converters
import labkit.hf.preloaded
import labkit.parity.proof
import labkit.port.proof
import labkit.port.translate

__all__ = ["flax", "jax", "labkit"]
