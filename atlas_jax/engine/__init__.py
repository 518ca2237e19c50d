"""Continuous batching: requests come and go at any time, and the ones that run share each dispatch. See `api`."""
