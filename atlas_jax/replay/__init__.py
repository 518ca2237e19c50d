"""Replays transcripts through drafting policies, without a model: what lookup, MTP and both together would save."""
