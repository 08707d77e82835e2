"""What a budget costs and saves, computed from a model's configuration alone."""
