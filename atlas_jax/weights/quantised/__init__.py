"""Weights of four and eight bits: what checkpoints say about them, their layouts there, and rounding to them."""
