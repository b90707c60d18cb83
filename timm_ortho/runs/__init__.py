"""What a training run leaves in its folder, and what it was made with."""
