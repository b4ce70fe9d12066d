"""Training: batches and pools, clustering, mining, optimisers, checkpoints and the trainer."""
