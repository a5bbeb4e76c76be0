"""Meshes, and models on them."""
