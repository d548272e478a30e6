"""What the role workers are made of, above the engines and the trainer."""
