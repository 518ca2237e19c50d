"""Experiments on drafting: the same conversations played under several settings, and what differs."""
