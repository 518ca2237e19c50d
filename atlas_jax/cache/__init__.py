"""What stays of a sequence when it has ended, so that the next one with the same beginning need not compute it again."""
