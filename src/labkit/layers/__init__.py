"""What flax.nnx lacks for decoders: rope, attention, caches, mixtures, layer stacks, sharding. No model names, no Hugging Face."""
