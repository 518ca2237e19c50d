"""Training: tiny-agent's corpus, tokenizer and recipe, and the multi-token drafter trained on a frozen target."""
