"""Training without identities: pseudo-labels from clusters of features, and losses on them."""
